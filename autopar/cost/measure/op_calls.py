"""Which calls of which ops are measured, in which sizes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
        target: as a trace names it.
        run: does it, on `inputs`.
        inputs: its tensors.
        saves: as `Op.saves`.
        kwargs: as `Op.kwargs`, where `count_work` looks at them.
        is_view: as `Op.is_view`.
    """

    target: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    saves: tuple[int, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    is_view: bool = False


_Make = Callable[[torch.device], Call]
"""Allocates the operands on a device, so that only what is being measured takes memory."""

_WIDTH = 512
# Per kind of device, a few and more: rows of a matrix of `_WIDTH` columns, widths of ops that work row by row.
_ROWS = {
    "cpu": ((2, 128, 1024), (2, 16, 64, 256, 1024, 4096, 16384)),
    "cuda": ((128, 4096, 32768), (16, 128, 1024, 8192, 65536)),
}
_WIDTHS = {"cpu": ((32, 512), (32, 128, 512, 2048)), "cuda": ((512, 8192), (128, 1024, 8192))}
# Rows, then inner dims and columns of products.
_PRODUCT_ROWS = {"cpu": ((8, 128, 1024), (4, 32, 256, 2048)), "cuda": ((512, 8192), (128, 1024, 8192, 32768))}
_PRODUCT_WIDTHS = {"cpu": ((32, 512), (32, 128, 512, 2048)), "cuda": ((1024, 8192), (512, 2048, 8192))}
_MOST_FLOPS = {"cpu": (6e8, 5e9), "cuda": (2e12, 2e13)}
"""A larger product takes longer than there is time; its price grows in proportion."""
# Matrices of a batch: their number, and the size of each.
_BATCHES = {
    "cpu": (((16, 8), (16, 64)), ((16, 8), (16, 32), (16, 128))),
    "cuda": (((64, 64), (64, 512)), ((64, 64), (64, 512), (64, 2048))),
}
# Lengths, and for each of them numbers of heads over all samples; sizes of a head.
_ATTENTIONS: dict[str, tuple[dict[int, tuple[int, ...]], ...]] = {
    "cpu": (
        {4: (16, 512), 16: (16, 512), 256: (2, 16)},
        {4: (16, 512), 16: (16, 512), 64: (8, 128), 256: (4, 16), 1024: (1, 4)},
    ),
    "cuda": ({512: (8, 256), 4096: (4, 32)}, {512: (8, 256), 2048: (4, 64), 8192: (2, 32)}),
}
_HEADS = {"cpu": ((4, 64), (4, 64)), "cuda": ((64, 128), (64, 128))}
# Batch, channels, side.
_CONVOLUTIONS = {
    "cpu": (((2, 8, 8), (4, 32, 16)), ((2, 8, 8), (4, 16, 16), (4, 32, 16), (4, 64, 32))),
    "cuda": (((8, 64, 64), (8, 256, 64)), ((8, 16, 64), (8, 64, 64), (8, 256, 64))),
}


def make_calls(device: torch.device, dtypes: tuple[str, ...], *, is_dense: bool) -> dict[str, list[_Make]]:
    """The name of each pair of curves, ``NAME/forward`` and ``NAME/backward``, with the calls that give its points."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    dense = int(is_dense)
    sweeps: dict[str, list[_Make]] = {}
    for dtype in dtypes:
        for name, makes in _products(kind, dense, dtype):
            sweeps[name] = makes
        sweeps[f"batched/{dtype}"] = [partial(_batched, dtype, shape) for shape in _BATCHES[kind][dense]]
        sweeps[f"convolution/{dtype}"] = [partial(_convolution, dtype, shape) for shape in _CONVOLUTIONS[kind][dense]]
        hows = ("causal", "full") if kind == "cuda" else ("causal", "full", "plain")
        for how, head, (length, counts) in itertools.product(
            hows, _HEADS[kind][dense], _ATTENTIONS[kind][dense].items()
        ):
            sweeps[f"attention/{dtype}/{how}/{head}/{length}"] = [
                partial(_attention, dtype, (1, count, length, head), how) for count in counts
            ]
    for target, make in _BY_ELEMENTS.items():
        name = "elementwise" if target == "aten.mul.Tensor" else f"op/{packet_name(target)}"
        sweeps[name] = [partial(make, target, rows, dtypes[0]) for rows in _ROWS[kind][dense]]
    for target in _WITH_NUMBER:
        rows = _ROWS[kind][dense]
        sweeps[f"op/{packet_name(target)}/number"] = [partial(_with_number, target, each, dtypes[0]) for each in rows]
    for target, make in _BY_ROW.items():
        for width in _WIDTHS[kind][dense]:
            rows = [max(1, count * _WIDTH // width) for count in _ROWS[kind][dense]]
            sweeps[f"op/{packet_name(target)}/{width}"] = [partial(make, target, n, width, dtypes[0]) for n in rows]
    for target in _VIEWS:
        sweeps["view" if target == "aten.transpose.int" else f"op/{packet_name(target)}"] = [partial(_view, target)]
    return sweeps


def aten(target: str) -> Callable[..., Any]:
    """The function that a lowered program calls for this target."""
    return functools.reduce(getattr, target.split("."), torch.ops)


def _then(function: Callable[..., Any], *more: Any) -> Callable[..., Tensor]:
    """`function` with these arguments after its tensors."""

    def run(*inputs: Tensor) -> Tensor:
        return function(*inputs, *more)

    return run


def _products(kind: str, dense: int, dtype: str) -> Iterator[tuple[str, list[_Make]]]:
    widths, most = _PRODUCT_WIDTHS[kind][dense], _MOST_FLOPS[kind][dense]
    for inner in widths:
        for columns in widths:
            shapes = [(rows, inner, columns) for rows in _PRODUCT_ROWS[kind][dense]]
            fitting = [shape for shape in shapes if 2 * math.prod(shape) <= most] or shapes[:1]
            yield f"matmul/{dtype}/{inner}x{columns}", [partial(_product, dtype, shape) for shape in fitting]


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
    return Call("aten.conv2d.default", _then(convolve, None, [1, 1], [1, 1]), (x, weight), (0, 1))


def _attention(dtype: str, shape: tuple[int, ...], how: str, device: torch.device) -> Call:
    """``plain`` is what CPUs run where the mask takes a gradient."""
    target = "aten.scaled_dot_product_attention.default"
    attend = aten(target)
    inputs = tuple(_random(shape, dtype, device) for _ in range(3))
    if how == "plain":
        mask = _random((*shape[:-1], shape[-2]), dtype, device)
        return Call(target, lambda *tensors: attend(*tensors), (*inputs, mask), (0, 1, 2, 3))
    is_causal = how == "causal"
    kwargs = (("is_causal", is_causal),)
    return Call(target, _then(attend, None, 0.0, is_causal), inputs, (0, 1, 2, 3), kwargs)


def _random(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=getattr(torch, dtype), device=device)


_VIEWS: dict[str, tuple[Any, ...]] = {
    "aten.transpose.int": (0, 1),
    "aten.reshape.default": ([16, -1],),
    "aten.permute.default": ([1, 0],),
    "aten.unsqueeze.default": (1,),
    "aten.squeeze.dim": (0,),
    "aten.t.default": (),
}
"""What they are called with after their operand."""


def _view(target: str, device: torch.device) -> Call:
    view, more = aten(target), _VIEWS[target]
    return Call(target, _then(view, *more), (torch.randn(8, _WIDTH, device=device),), is_view=True)


def _dropout(x: Tensor) -> Tensor:
    """Draws a mask from a generator of its own, as every draw of a plan does, and scales what is kept."""
    keep = torch.empty_like(x, dtype=torch.bool).bernoulli_(0.9, generator=torch.Generator(x.device).manual_seed(0))
    return x * keep.to(x.dtype).mul_(1 / 0.9)


# Target: what it is called with after its operand, and what autograd saves (0: the operand, 1: the result).
_UNARY: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "aten.gelu.default": ((), (0,)),
    "aten.silu.default": ((), (0,)),
    "aten.relu.default": ((), (1,)),
    "aten.tanh.default": ((), (1,)),
    "aten.exp.default": ((), (1,)),
    "aten.rsqrt.default": ((), (1,)),
    "aten.pow.Tensor_Scalar": ((2,), (0,)),
    "aten.clone.default": ((), ()),
    "aten.neg.default": ((), ()),
    "aten._to_copy.default": ((), ()),
    "aten.clamp_min.default": ((0.0,), (0,)),
    "aten.pad.default": (([0, 1],), ()),
}
_BINARY: dict[str, tuple[int, ...]] = {"aten.mul.Tensor": (0, 1), "aten.add.Tensor": (), "aten.div.Tensor": (0, 1)}


def _on_one(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    more, saves = _UNARY[target]
    run = aten(target)
    return Call(target, _then(run, *more), (_random((rows, _WIDTH), dtype, device),), saves)


def _on_two(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    inputs = tuple(_random((rows, _WIDTH), dtype, device) for _ in range(2))
    return Call(target, aten(target), inputs, _BINARY[target])


def _joined(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    join = aten(target)
    inputs = tuple(_random((rows, _WIDTH), dtype, device) for _ in range(2))

    def run(x: Tensor, y: Tensor) -> Tensor:
        return join([x, y], -1)

    return Call(target, run, inputs)


def _dropped(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    return Call(target, _dropout, (_random((rows, _WIDTH), dtype, device),))


def _with_number(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    run = aten(target)
    return Call(target, _then(run, 3.0), (_random((rows, _WIDTH), dtype, device),))


def _where(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    choose = aten(target)
    condition = torch.ones(rows, _WIDTH, dtype=torch.bool, device=device)
    return Call(target, _then(choose, 0.0), (condition, _random((rows, _WIDTH), dtype, device)), (0,))


def _filled(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    fill = aten(target)
    mask = torch.ones(rows, _WIDTH, dtype=torch.bool, device=device)
    return Call(target, _then(fill, 0.0), (_random((rows, _WIDTH), dtype, device), mask), (1,))


def _chosen(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    choose = aten(target)
    inputs = (_random((rows, _WIDTH), dtype, device), torch.randint(rows, (rows,), device=device))

    def run(x: Tensor, ids: Tensor) -> Tensor:
        return choose(x, [ids])

    return Call(target, run, inputs, (1,))


def _normalised(target: str, rows: int, width: int, dtype: str, device: torch.device) -> Call:
    norm = aten(target)
    inputs = tuple(_random(shape, dtype, device) for shape in ((rows, width), (width,), (width,)))

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return norm(x, [width], weight, bias, 1e-5)

    return Call(target, run, inputs, (0, 1))


def _softmax(target: str, rows: int, width: int, dtype: str, device: torch.device) -> Call:
    run = aten(target)
    return Call(target, _then(run, -1), (_random((rows, width), dtype, device),), (1,))


def _summed(target: str, rows: int, width: int, dtype: str, device: torch.device) -> Call:
    run = aten(target)
    return Call(target, _then(run, [-1], True), (_random((rows, width), dtype, device),))


def _grouped(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    norm = aten(target)
    inputs = tuple(_random(shape, dtype, device) for shape in ((rows, 8, _WIDTH // 8), (8,), (8,)))

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return norm(x, 4, weight, bias)

    return Call(target, run, inputs, (0, 1))


def _embedded(target: str, rows: int, width: int, dtype: str, device: torch.device) -> Call:
    look_up = aten(target)
    inputs = (_random((rows, width), dtype, device), torch.randint(rows, (rows,), device=device))
    return Call(target, look_up, inputs, (1,))


def _sliced(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    cut = aten(target)
    return Call(target, _then(cut, -1, 0, _WIDTH // 2), (_random((rows, _WIDTH), dtype, device),), is_view=True)


def _compared(target: str, rows: int, width: int, dtype: str, device: torch.device) -> Call:
    def compare(logits: Tensor, target: Tensor) -> Tensor:
        flat = torch.movedim(logits, 1, -1).reshape(-1, width)
        return torch.nn.functional.cross_entropy(flat, target.reshape(-1), reduction="sum")

    ids = torch.randint(width, (rows,), device=device)
    return Call(target, compare, (_random((rows, width), dtype, device), ids), (0, 1))


def _counted(target: str, rows: int, dtype: str, device: torch.device) -> Call:
    def run(ids: Tensor) -> Tensor:
        return (ids != -100).sum(dtype=torch.float32)

    return Call(target, run, (_ids(rows, device),))


def _ids(rows: int, device: torch.device) -> Tensor:
    return torch.randint(_WIDTH, (rows,), device=device)


_WITH_NUMBER = ("aten.mul.Tensor", "aten.add.Tensor", "aten.div.Tensor")
_BY_ELEMENTS: dict[str, Callable[[str, int, str, torch.device], Call]] = {
    **dict.fromkeys(_BINARY, _on_two),
    **dict.fromkeys(_UNARY, _on_one),
    "aten.cat.default": _joined,
    "aten.slice.Tensor": _sliced,
    "aten.where.ScalarOther": _where,
    "aten.masked_fill.Scalar": _filled,
    "aten.index.Tensor": _chosen,
    "autopar.dropout": _dropped,
    "aten.group_norm.default": _grouped,
    "autopar.cross_entropy_denominator": _counted,
}
_BY_ROW: dict[str, Callable[[str, int, int, str, torch.device], Call]] = {
    "aten.layer_norm.default": _normalised,
    "aten.softmax.int": _softmax,
    "aten.sum.dim_IntList": _summed,
    "aten.embedding.default": _embedded,
    "autopar.cross_entropy": _compared,
}
