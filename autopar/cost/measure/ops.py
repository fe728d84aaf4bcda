"""Measures ops on one device: forward and backward seconds over the work that `count_work` counts.

Each call is an op, as a trace would write it, beside a function that runs it.  The amount of work comes from
the same `count_work` that prices ops later, so that a measured op of the same size gets its measured time.
What a call of autograd costs by itself is subtracted: a step pays it once, not once an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from autopar.cost.measure.probe import Measurement, Probe
from autopar.cost.measure.timing import Sample, sample
from autopar.cost.work import Work, count_work, packet_name
from autopar.program import Op, Ref, TensorType

__all__ = ["op_probes"]

_WIDTH = 512
_ROWS = {"cpu": (2, 128, 2048), "cuda": (128, 4096, 32768)}
_PRODUCTS = {
    "cpu": ((64, 64, 64), (128, 256, 256), (256, 512, 512), (512, 1024, 1024)),
    "cuda": ((256, 256, 256), (1024, 1024, 1024), (4096, 2048, 4096), (8192, 8192, 8192)),
}
_ATTENTIONS = {
    "cpu": ((1, 2, 32, 32), (1, 4, 128, 64), (2, 4, 256, 64)),
    "cuda": ((1, 8, 512, 128), (1, 16, 2048, 128), (1, 32, 8192, 128)),
}
_LEAST_S = 1e-7
_BASE_S = 0.02
_ADAM_BYTES = 28
"""AdamW in float32 reads parameter, gradient and two moments, and writes all but the gradient."""


@dataclass(frozen=True)
class _Call:
    target: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    saves: tuple[int, ...]
    kwargs: tuple[tuple[str, bool], ...] = ()


_Make = Callable[[torch.device], _Call]
"""Allocates the operands on a device, so that only what is being measured takes memory."""


def op_probes(device: torch.device, dtypes: tuple[str, ...], *, is_dense: bool = False) -> tuple[Probe, ...]:
    """What to measure of ops: matrix products and attention first, then what moves bytes.

    Args:
        device: where to run.
        dtypes: of matrix products and attention; other ops are measured in the first one.
        is_dense: sweep many shapes, instead of the few that a plan can wait for.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    sweeps: dict[str, list[_Make]] = {}
    for dtype in dtypes:
        sweeps[f"matmul/{dtype}"] = [partial(_product, dtype, shape) for shape in _PRODUCTS[kind]]
        sweeps[f"attention/{dtype}"] = [partial(_attention, dtype, shape) for shape in _ATTENTIONS[kind]]
    for target, make in _ROW_CALLS.items():
        name = "elementwise" if target == "aten.mul.Tensor" else f"op/{packet_name(target)}"
        sweeps[name] = [partial(make, target, rows, dtypes[0]) for rows in _ROWS[kind]]
    ops = (_sweep(name, makes, device) for name, makes in sweeps.items())
    views = Probe(("view/forward", "view/backward"), 1, partial(_measure_views, device), 2.0, is_own_time=True)
    optimizer = Probe(("optimizer",), 2, partial(_measure_optimizer, device), 2.0, is_own_time=True)
    return (*ops, views, optimizer)


def _sweep(name: str, makes: list[_Make], device: torch.device) -> Probe:
    has_backward = name.removeprefix("op/") not in _WITHOUT_BACKWARD
    keys = (f"{name}/forward", f"{name}/backward") if has_backward else (f"{name}/forward",)

    def measure(budget_s: float) -> Iterator[Measurement]:
        slice_s = budget_s / (len(keys) * len(makes))
        base_s = _autograd_s(device, min(slice_s, _BASE_S))
        for make in makes:
            yield from _measure_call(name, make(device), device, slice_s, base_s)

    return Probe(keys, len(makes), measure, float(len(keys) * len(makes)), is_own_time=True)


def _measure_call(name: str, call: _Call, device: torch.device, slice_s: float, base_s: float) -> Iterator[Measurement]:
    leaves = tuple(x.requires_grad_() for x in call.inputs if x.is_floating_point())
    result = call.run(*call.inputs)
    work = _work_of(call, result)
    with torch.no_grad():
        taken = sample(lambda: call.run(*call.inputs), device, slice_s)
    is_counted = work.kind in ("matmul", "attention")
    yield Measurement(f"{name}/forward", work.flops if is_counted else work.num_bytes, taken)
    if work.backward_num_bytes:
        gradient = torch.ones_like(result)

        def backward() -> object:
            return torch.autograd.grad(result, leaves, gradient, retain_graph=True)

        amount = work.backward_flops if is_counted else work.backward_num_bytes
        taken = sample(backward, device, slice_s)
        yield Measurement(f"{name}/backward", amount, _less(taken, base_s))


def _less(taken: Sample, base_s: float) -> Sample:
    return Sample(max(taken.seconds - base_s, _LEAST_S), taken.spread)


def _autograd_s(device: torch.device, slice_s: float) -> float:
    """Seconds of a call of autograd that has nothing to do."""
    x = torch.ones(1, device=device).requires_grad_()
    gradient = torch.ones_like(x)
    return sample(lambda: torch.autograd.grad(x, x, gradient), device, slice_s).seconds


def _work_of(call: _Call, result: Tensor) -> Work:
    refs = tuple(Ref(str(index)) for index in range(len(call.inputs)))
    op = Op("call", call.target, refs, call.kwargs, ("result",), saves=call.saves)
    return count_work(op, tuple(map(_type_of, call.inputs)), (_type_of(result),))


def _type_of(x: Tensor) -> TensorType:
    return TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def _product(dtype: str, shape: tuple[int, ...], device: torch.device) -> _Call:
    rows, inner, columns = shape
    x, weight = _random((rows, inner), dtype, device), _random((columns, inner), dtype, device)
    return _Call("aten.linear.default", F.linear, (x, weight), (0, 1))


def _attention(dtype: str, shape: tuple[int, ...], device: torch.device) -> _Call:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    inputs = tuple(_random(shape, dtype, device) for _ in range(3))
    target, kwargs = "aten.scaled_dot_product_attention.default", (("is_causal", True),)
    return _Call(target, attend, inputs, (0, 1, 2, 3), kwargs)


def _random(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=getattr(torch, dtype), device=device)


# Target: function of one tensor, and what autograd saves (0: the operand, 1: the result).
_UNARY: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "aten.gelu.default": (F.gelu, (0,)),
    "aten.silu.default": (F.silu, (0,)),
    "aten.relu.default": (F.relu, (1,)),
    "aten.tanh.default": (torch.tanh, (1,)),
    "aten.softmax.int": (lambda x: torch.softmax(x, -1), (1,)),
    "aten.pow.Tensor_Scalar": (lambda x: x**2, (0,)),
    "aten.sum.dim_IntList": (lambda x: x.sum(-1), ()),
    "aten.clone.default": (torch.clone, ()),
    "aten.neg.default": (torch.neg, ()),
    "autopar.dropout": (lambda x: F.dropout(x, 0.1), ()),
}
_BINARY: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "aten.mul.Tensor": (torch.mul, (0, 1)),
    "aten.add.Tensor": (torch.add, ()),
    "aten.cat.default": (lambda x, y: torch.cat((x, y), -1), ()),
}


def _on_one(target: str, rows: int, dtype: str, device: torch.device) -> _Call:
    run, saves = _UNARY[target]
    return _Call(target, run, (_random((rows, _WIDTH), dtype, device),), saves)


def _on_two(target: str, rows: int, dtype: str, device: torch.device) -> _Call:
    run, saves = _BINARY[target]
    return _Call(target, run, tuple(_random((rows, _WIDTH), dtype, device) for _ in range(2)), saves)


def _normalised(target: str, rows: int, dtype: str, device: torch.device) -> _Call:
    inputs = tuple(_random(shape, dtype, device) for shape in ((rows, _WIDTH), (_WIDTH,), (_WIDTH,)))
    return _Call(target, _layer_norm, inputs, (0, 1))


def _embedded(target: str, rows: int, dtype: str, device: torch.device) -> _Call:
    return _Call(target, _embed, (_random((_WIDTH, _WIDTH), dtype, device), _ids(rows, device)), (1,))


def _compared(target: str, rows: int, dtype: str, device: torch.device) -> _Call:
    return _Call(target, _cross_entropy, (_random((rows, _WIDTH), dtype, device), _ids(rows, device)), (0, 1))


def _ids(rows: int, device: torch.device) -> Tensor:
    return torch.randint(_WIDTH, (rows,), device=device)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (_WIDTH,), weight, bias)


def _embed(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="sum")


_ROW_CALLS: dict[str, Callable[[str, int, str, torch.device], _Call]] = {
    **dict.fromkeys(_BINARY, _on_two),
    **dict.fromkeys(_UNARY, _on_one),
    "aten.layer_norm.default": _normalised,
    "aten.embedding.default": _embedded,
    "autopar.cross_entropy": _compared,
}
_WITHOUT_BACKWARD = ("aten.add",)


def _measure_views(device: torch.device, budget_s: float) -> Iterator[Measurement]:
    slice_s = budget_s / 2
    base_s = _autograd_s(device, min(slice_s, _BASE_S))
    x = torch.randn((8, _WIDTH), device=device).requires_grad_()
    result = x.transpose(0, 1)
    gradient = torch.ones_like(result)
    with torch.no_grad():
        taken = sample(lambda: x.transpose(0, 1), device, slice_s)
    yield Measurement("view/forward", 1.0, taken)

    def backward() -> object:
        return torch.autograd.grad(result, x, gradient, retain_graph=True)

    yield Measurement("view/backward", 1.0, _less(sample(backward, device, slice_s), base_s))


def _measure_optimizer(device: torch.device, budget_s: float) -> Iterator[Measurement]:
    slice_s = budget_s / 2
    for num_elements in (2**14, 2**20):
        parameters = [torch.randn(num_elements // 8, device=device).requires_grad_() for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-9, foreach=True)
        step = cast(Callable[[], object], optimizer.step)  # pyright: ignore[reportUnknownMemberType]
        amount = float(num_elements * _ADAM_BYTES)
        yield Measurement("optimizer", amount, sample(step, device, slice_s))
