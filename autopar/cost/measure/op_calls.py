"""The calls of ops that are measured, and their sizes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.ops import packet_name

__all__ = ["Call", "make_calls"]


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Args:
        target: the op's name in traces.
        run: the function that runs it on `inputs`.
        inputs: its tensors.
        saves: as `Op.saves`.
        kwargs: those of `Op.kwargs` that `count_work` reads.
        is_view: as `Op.is_view`.
    """

    target: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    saves: tuple[int, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    is_view: bool = False


_Make = Callable[[torch.device], Call]
"""Allocates the operands of a call on a device, so that only the calls being measured occupy memory."""

_WIDTH = 512  # columns: rows are long enough to be read at full speed, and short enough for many numbers of rows
# For each kind of device a quick and a dense sweep: rows of a matrix of `_WIDTH` columns, widths of ops that work row
# by row.
_ROWS = {
    "cpu": ((2, 128, 1024), (2, 16, 64, 256, 1024, 4096, 16384)),
    "accelerator": ((128, 8192, 262144), (16, 128, 1024, 8192, 65536, 262144)),
}
_WIDTHS = {"cpu": ((32, 512), (32, 128, 512, 2048)), "accelerator": ((512, 8192), (128, 1024, 8192))}
# Rows, then inner dims and columns of products.
_PRODUCT_ROWS = {"cpu": ((8, 128, 1024), (4, 32, 256, 2048)), "accelerator": ((512, 8192), (128, 1024, 8192, 32768))}
_PRODUCT_WIDTHS = {"cpu": ((32, 512), (32, 128, 512, 2048)), "accelerator": ((1024, 8192), (512, 2048, 8192))}
_MAX_FLOPS = {"cpu": (6e8, 5e9), "accelerator": (2e12, 2e13)}
"""Larger products would take longer than the budget allows; their prices grow in proportion."""
# Batches of square matrices: their number, and the size of each.
_BATCHES = {
    "cpu": (((16, 8), (16, 64)), ((16, 8), (16, 32), (16, 128))),
    "accelerator": (((64, 64), (64, 512)), ((64, 64), (64, 512), (64, 2048))),
}
# Length -> numbers of heads over all samples; then head sizes.  Above the largest length, seconds are proportional to
# pairs: on a CPU, rows of 4,096 were priced at 1.7 times their measured time with 256 as the largest length, and at 1.4
# times with 1,024.
_ATTENTIONS: dict[str, tuple[dict[int, tuple[int, ...]], ...]] = {
    "cpu": (
        {4: (16, 512), 16: (16, 512), 256: (2, 16), 1024: (1,)},
        {4: (16, 512), 16: (16, 512), 64: (8, 128), 256: (4, 16), 1024: (1, 4), 4096: (1,)},
    ),
    "accelerator": ({512: (8, 256), 4096: (4, 32)}, {512: (8, 256), 2048: (4, 64), 8192: (2, 32)}),
}
_HEADS = {"cpu": ((4, 64), (4, 64)), "accelerator": ((64, 128), (64, 128))}
# Batch, channels, side.
_CONVOLUTIONS = {
    "cpu": (((2, 8, 8), (4, 32, 16)), ((2, 8, 8), (4, 16, 16), (4, 32, 16), (4, 64, 32))),
    "accelerator": (((8, 64, 64), (8, 256, 64)), ((8, 16, 64), (8, 64, 64), (8, 256, 64))),
}


def make_calls(device: torch.device, dtypes: tuple[str, ...], *, is_dense: bool) -> dict[str, list[_Make]]:
    """The calls to measure, by the name of the curves ``NAME/forward`` and ``NAME/backward`` whose points they give."""
    kind = "cpu" if device.type == "cpu" else "accelerator"
    dense = int(is_dense)
    sweeps: dict[str, list[_Make]] = {}
    for dtype in dtypes:
        for name, makes in _products(kind, dense, dtype):
            sweeps[name] = makes
        sweeps[f"batched/{dtype}"] = [partial(_batched, dtype, shape) for shape in _BATCHES[kind][dense]]
        sweeps[f"convolution/{dtype}"] = [partial(_convolution, dtype, shape) for shape in _CONVOLUTIONS[kind][dense]]
        hows = ("causal", "full") if kind == "accelerator" else ("causal", "full", "plain")
        for how, head, (length, counts) in itertools.product(
            hows, _HEADS[kind][dense], _ATTENTIONS[kind][dense].items()
        ):
            sweeps[f"attention/{dtype}/{how}/{head}/{length}"] = [
                partial(_attention, dtype, (1, count, length, head), how) for count in counts
            ]
    rows, widths, dtype = _ROWS[kind][dense], _WIDTHS[kind][dense], dtypes[0]
    for target, recipe in _BY_ELEMENTS.items():
        name = "elementwise" if target == "aten.mul.Tensor" else f"op/{packet_name(target)}"
        sweeps[name] = [partial(recipe.make, target, count, _WIDTH, dtype) for count in rows]
    for target in _WITH_NUMBER:
        recipe = _Recipe((3.0,))
        name = f"op/{packet_name(target)}/number"
        sweeps[name] = [partial(recipe.make, target, count, _WIDTH, dtype) for count in rows]
    for (target, recipe), width in itertools.product(_BY_ROW.items(), widths):
        counts = [max(1, count * _WIDTH // width) for count in rows]
        name = f"op/{packet_name(target)}/{width}"
        sweeps[name] = [partial(recipe.make, target, count, width, dtype) for count in counts]
    for target, recipe in _VIEWS.items():
        name = "view" if target == "aten.transpose.int" else f"op/{packet_name(target)}"
        sweeps[name] = [partial(replace(recipe, is_view=True).make, target, 8, _WIDTH, "float32")]
    return sweeps


def aten(target: str) -> Callable[..., Any]:
    """The function of torch that a lowered program calls for this target."""
    return functools.reduce(getattr, target.split("."), torch.ops)


def _with_arguments(function: Callable[..., Any], *arguments: Any) -> Callable[..., Tensor]:
    """`function` with these arguments after its tensors."""

    def run(*inputs: Tensor) -> Tensor:
        return function(*inputs, *arguments)

    return run


def _products(kind: str, dense: int, dtype: str) -> Iterator[tuple[str, list[_Make]]]:
    widths, max_flops = _PRODUCT_WIDTHS[kind][dense], _MAX_FLOPS[kind][dense]
    for inner in widths:
        for columns in widths:
            shapes = [(rows, inner, columns) for rows in _PRODUCT_ROWS[kind][dense]]
            small = [shape for shape in shapes if 2 * math.prod(shape) <= max_flops] or shapes[:1]
            yield f"matmul/{dtype}/{inner}x{columns}", [partial(_product, dtype, shape) for shape in small]


def _product(dtype: str, shape: tuple[int, ...], device: torch.device) -> Call:
    rows, inner, columns = shape
    x, weight = _random((rows, inner), dtype, device), _random((columns, inner), dtype, device)
    return Call("aten.linear.default", aten("aten.linear.default"), (x, weight), (0, 1))


def _batched(dtype: str, shape: tuple[int, ...], device: torch.device) -> Call:
    count, side = shape
    pair = tuple(_random((count, side, side), dtype, device) for _ in range(2))
    return Call("aten.bmm.default", aten("aten.matmul.default"), pair, (0, 1))


def _convolution(dtype: str, shape: tuple[int, ...], device: torch.device) -> Call:
    batch, channels, side = shape
    x, weight = (
        _random((batch, channels, side, side), dtype, device),
        _random((channels, channels, 3, 3), dtype, device),
    )
    convolve = aten("aten.conv2d.default")
    return Call("aten.conv2d.default", _with_arguments(convolve, None, [1, 1], [1, 1]), (x, weight), (0, 1))


def _attention(dtype: str, shape: tuple[int, ...], how: str, device: torch.device) -> Call:
    """A call of attention; ``plain`` has a mask that needs a gradient, for which CPUs run plain products."""
    target = "aten.scaled_dot_product_attention.default"
    attend = aten(target)
    inputs = tuple(_random(shape, dtype, device) for _ in range(3))
    if how == "plain":
        mask = _random((*shape[:-1], shape[-2]), dtype, device)
        return Call(target, lambda *tensors: attend(*tensors), (*inputs, mask), (0, 1, 2, 3))
    is_causal = how == "causal"
    kwargs = (("is_causal", is_causal),)
    return Call(target, _with_arguments(attend, None, 0.0, is_causal), inputs, (0, 1, 2, 3), kwargs)


def _random(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=getattr(torch, dtype), device=device)


def _dropout(x: Tensor) -> Tensor:
    """Dropout with a generator of its own, as each random op of a plan has one."""
    keep = torch.empty_like(x, dtype=torch.bool).bernoulli_(0.9, generator=torch.Generator(x.device).manual_seed(0))
    return x * keep.to(x.dtype).mul_(1 / 0.9)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    flat = torch.movedim(logits, 1, -1).reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(flat, target.reshape(-1), reduction="sum")


def _cat(x: Tensor, y: Tensor) -> Tensor:
    return aten("aten.cat.default")([x, y], -1)


def _index(x: Tensor, ids: Tensor) -> Tensor:
    return aten("aten.index.Tensor")(x, [ids])


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return aten("aten.layer_norm.default")(x, [x.shape[-1]], weight, bias, 1e-5)


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return aten("aten.group_norm.default")(x, 4, weight, bias)


def _count_classes(ids: Tensor) -> Tensor:
    return (ids != -100).sum(dtype=torch.float32)


# The inputs of ops, given rows, width, dtype and device.


def _one(rows: int, width: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    return (_random((rows, width), dtype, device),)


def _two(rows: int, width: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(_random((rows, width), dtype, device) for _ in range(2))


def _and_mask(rows: int, width: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    return _random((rows, width), dtype, device), torch.ones(rows, width, dtype=torch.bool, device=device)


def _mask_first(rows: int, width: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    return _and_mask(rows, width, dtype, device)[::-1]


def _and_rows(rows: int, width: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    return _random((rows, width), dtype, device), torch.randint(rows, (rows,), device=device)


def _classes(rows: int, width: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.randint(width, (rows,), device=device),)


def _and_classes(rows: int, width: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    return _random((rows, width), dtype, device), *_classes(rows, width, dtype, device)


def _for_layer_norm(rows: int, width: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(_random(shape, dtype, device) for shape in ((rows, width), (width,), (width,)))


def _for_group_norm(rows: int, width: int, dtype: str, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(_random(shape, dtype, device) for shape in ((rows, 8, width // 8), (8,), (8,)))


@dataclass(frozen=True)
class _Recipe:
    """How to call an op on one or more matrices.

    Args:
        arguments: arguments after its tensors.
        saves: what autograd saves, as `Op.saves` (0: the first operand, ...; after the operands the result).
        inputs: creates its tensors, given rows, width, dtype and device.
        run: the function to call, if it isn't the op itself.
        is_view: as `Op.is_view`.
    """

    arguments: tuple[Any, ...] = ()
    saves: tuple[int, ...] = ()
    inputs: Callable[[int, int, str, torch.device], tuple[Tensor, ...]] = _one
    run: Callable[..., Tensor] | None = None
    is_view: bool = False

    def make(self, target: str, rows: int, width: int, dtype: str, device: torch.device) -> Call:
        run = self.run or _with_arguments(aten(target), *self.arguments)
        return Call(target, run, self.inputs(rows, width, dtype, device), self.saves, is_view=self.is_view)


_VIEWS = {
    "aten.transpose.int": _Recipe((0, 1)),
    "aten.reshape.default": _Recipe(([16, -1],)),
    "aten.permute.default": _Recipe(([1, 0],)),
    "aten.unsqueeze.default": _Recipe((1,)),
    "aten.squeeze.dim": _Recipe((0,)),
    "aten.t.default": _Recipe(),
}
_WITH_NUMBER = ("aten.mul.Tensor", "aten.add.Tensor", "aten.div.Tensor")
_BY_ELEMENTS = {
    "aten.mul.Tensor": _Recipe((), (0, 1), _two),
    "aten.add.Tensor": _Recipe((), (), _two),
    "aten.div.Tensor": _Recipe((), (0, 1), _two),
    "aten.gelu.default": _Recipe((), (0,)),
    "aten.silu.default": _Recipe((), (0,)),
    "aten.relu.default": _Recipe((), (1,)),
    "aten.tanh.default": _Recipe((), (1,)),
    "aten.exp.default": _Recipe((), (1,)),
    "aten.rsqrt.default": _Recipe((), (1,)),
    "aten.pow.Tensor_Scalar": _Recipe((2,), (0,)),
    "aten.clone.default": _Recipe(),
    "aten.neg.default": _Recipe(),
    "aten._to_copy.default": _Recipe(),
    "aten.clamp_min.default": _Recipe((0.0,), (0,)),
    "aten.pad.default": _Recipe(([0, 1],)),
    "aten.cat.default": _Recipe((), (), _two, _cat),
    "aten.slice.Tensor": _Recipe((-1, 0, _WIDTH // 2), is_view=True),
    "aten.where.ScalarOther": _Recipe((0.0,), (0,), _mask_first),
    "aten.masked_fill.Scalar": _Recipe((0.0,), (1,), _and_mask),
    "aten.index.Tensor": _Recipe((), (1,), _and_rows, _index),
    "autopar.dropout": _Recipe(run=_dropout),
    "aten.group_norm.default": _Recipe((), (0, 1), _for_group_norm, _group_norm),
    "autopar.cross_entropy_denominator": _Recipe((), (), _classes, _count_classes),
}
_BY_ROW = {
    "aten.layer_norm.default": _Recipe((), (0, 1), _for_layer_norm, _layer_norm),
    "aten.softmax.int": _Recipe((-1,), (1,)),
    "aten.sum.dim_IntList": _Recipe(([-1], True)),
    "aten.embedding.default": _Recipe((), (1,), _and_rows),
    "autopar.cross_entropy": _Recipe((), (0, 1), _and_classes, _cross_entropy),
}
