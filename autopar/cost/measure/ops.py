"""Measures ops on one device: forward and backward seconds over the work that `count_work` counts.

Each probe is an op, as a trace would write it, beside a function that runs it.  The amount of work comes from
the same `count_work` that prices ops later, so that a measured op of the same size gets its measured time.
What a call of autograd costs by itself is subtracted: a step pays it once, not once an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from autopar.cost.measure.timing import Sample, sample
from autopar.cost.work import Work, count_work, packet_name
from autopar.program import Op, Ref, TensorType

__all__ = ["Measurement", "measure_ops"]

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
_ADAM_BYTES = 28
"""AdamW in float32 reads parameter, gradient and two moments, and writes all but the gradient."""


@dataclass(frozen=True)
class Measurement:
    """`amount` of work took `taken`; `key` names the curve of the profile."""

    key: str
    amount: float
    taken: Sample


@dataclass(frozen=True)
class _Probe:
    key: str
    target: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    saves: tuple[int, ...]
    kwargs: tuple[tuple[str, bool], ...] = ()


def measure_ops(device: torch.device, dtypes: tuple[str, ...], budget_s: float) -> Iterator[Measurement]:
    """Measure every probe; the keys and amounts are the same on every rank.

    Args:
        device: where to run.
        dtypes: of matrix products and attention; other ops are measured in the first one.
        budget_s: seconds to spend in all, about; each probe runs a few times even if that takes longer.
    """
    probes = [
        *_product_probes(device, dtypes),
        *_attention_probes(device, dtypes),
        *_other_probes(device, dtypes[0]),
    ]
    slice_s = budget_s / (2 * len(probes) + 8)
    base_s = _autograd_s(device, slice_s)
    for probe in probes:
        yield from _measure_probe(probe, device, slice_s, base_s)
    yield from _measure_views(device, slice_s, base_s)
    yield from _measure_optimizer(device, slice_s)


def _measure_probe(probe: _Probe, device: torch.device, slice_s: float, base_s: float) -> Iterator[Measurement]:
    leaves = tuple(x.requires_grad_() for x in probe.inputs if x.is_floating_point())
    result = probe.run(*probe.inputs)
    work = _work_of(probe, result)
    with torch.no_grad():
        taken = sample(lambda: probe.run(*probe.inputs), device, slice_s)
    is_counted = work.kind in ("matmul", "attention")
    yield Measurement(f"{probe.key}/forward", work.flops if is_counted else work.num_bytes, taken)
    if work.backward_num_bytes:
        gradient = torch.ones_like(result)

        def backward() -> object:
            return torch.autograd.grad(result, leaves, gradient, retain_graph=True)

        amount = work.backward_flops if is_counted else work.backward_num_bytes
        taken = sample(backward, device, slice_s)
        yield Measurement(f"{probe.key}/backward", amount, _less(taken, base_s))


def _less(taken: Sample, base_s: float) -> Sample:
    return Sample(max(taken.seconds - base_s, _LEAST_S), taken.spread)


def _autograd_s(device: torch.device, slice_s: float) -> float:
    """Seconds of a call of autograd that has nothing to do."""
    x = torch.ones(1, device=device).requires_grad_()
    gradient = torch.ones_like(x)
    return sample(lambda: torch.autograd.grad(x, x, gradient), device, slice_s).seconds


def _work_of(probe: _Probe, result: Tensor) -> Work:
    refs = tuple(Ref(str(index)) for index in range(len(probe.inputs)))
    op = Op("probe", probe.target, refs, probe.kwargs, ("result",), saves=probe.saves)
    return count_work(op, tuple(map(_type_of, probe.inputs)), (_type_of(result),))


def _type_of(x: Tensor) -> TensorType:
    return TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def _sizes(table: dict[str, tuple[tuple[int, ...], ...]], device: torch.device) -> tuple[tuple[int, ...], ...]:
    return table["cuda" if device.type == "cuda" else "cpu"]


def _product_probes(device: torch.device, dtypes: tuple[str, ...]) -> Iterator[_Probe]:
    for dtype in dtypes:
        for rows, inner, columns in _sizes(_PRODUCTS, device):
            x = _random((rows, inner), dtype, device)
            weight = _random((columns, inner), dtype, device)
            yield _Probe(f"matmul/{dtype}", "aten.linear.default", F.linear, (x, weight), (0, 1))


def _attention_probes(device: torch.device, dtypes: tuple[str, ...]) -> Iterator[_Probe]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    target, kwargs = "aten.scaled_dot_product_attention.default", (("is_causal", True),)
    for dtype in dtypes:
        for shape in _sizes(_ATTENTIONS, device):
            inputs = tuple(_random(shape, dtype, device) for _ in range(3))
            yield _Probe(f"attention/{dtype}", target, attend, inputs, (0, 1, 2, 3), kwargs)


def _random(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=getattr(torch, dtype), device=device)


# Target, function of one tensor, and what autograd saves (0: the operand, 1: the result).
_UNARY: tuple[tuple[str, Callable[[Tensor], Tensor], tuple[int, ...]], ...] = (
    ("aten.gelu.default", F.gelu, (0,)),
    ("aten.silu.default", F.silu, (0,)),
    ("aten.relu.default", F.relu, (1,)),
    ("aten.tanh.default", torch.tanh, (1,)),
    ("aten.softmax.int", lambda x: torch.softmax(x, -1), (1,)),
    ("aten.pow.Tensor_Scalar", lambda x: x**2, (0,)),
    ("aten.sum.dim_IntList", lambda x: x.sum(-1), ()),
    ("aten.clone.default", torch.clone, ()),
    ("aten.neg.default", torch.neg, ()),
    ("autopar.dropout", lambda x: F.dropout(x, 0.1), ()),
)


def _other_probes(device: torch.device, dtype: str) -> Iterator[_Probe]:
    for rows in _ROWS["cuda" if device.type == "cuda" else "cpu"]:
        yield from _row_probes(rows, device, dtype)


def _row_probes(rows: int, device: torch.device, dtype: str) -> Iterator[_Probe]:
    def random(*shape: int) -> Tensor:
        return _random(shape, dtype, device)

    x = random(rows, _WIDTH)
    ids = torch.randint(_WIDTH, (rows,), device=device)
    yield _Probe("elementwise", "aten.mul.Tensor", torch.mul, (x, random(rows, _WIDTH)), (0, 1))
    yield _named("aten.add.Tensor", torch.add, (x, random(rows, _WIDTH)), ())
    yield _named("aten.cat.default", _join, (x, random(rows, _WIDTH)), ())
    for target, run, saves in _UNARY:
        yield _named(target, run, (random(rows, _WIDTH),), saves)
    yield _named("aten.layer_norm.default", _layer_norm, (x, random(_WIDTH), random(_WIDTH)), (0, 1))
    yield _named("aten.embedding.default", _embed, (random(_WIDTH, _WIDTH), ids), (1,))
    yield _named("autopar.cross_entropy", _cross_entropy, (x, ids), (0, 1))


def _named(target: str, run: Callable[..., Tensor], inputs: tuple[Tensor, ...], saves: tuple[int, ...]) -> _Probe:
    return _Probe(f"op/{packet_name(target)}", target, run, inputs, saves)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (_WIDTH,), weight, bias)


def _join(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), -1)


def _embed(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="sum")


def _measure_views(device: torch.device, slice_s: float, base_s: float) -> Iterator[Measurement]:
    x = torch.randn((8, _WIDTH), device=device).requires_grad_()
    result = x.transpose(0, 1)
    gradient = torch.ones_like(result)
    with torch.no_grad():
        taken = sample(lambda: x.transpose(0, 1), device, slice_s)
    yield Measurement("view/forward", 1.0, taken)

    def backward() -> object:
        return torch.autograd.grad(result, x, gradient, retain_graph=True)

    yield Measurement("view/backward", 1.0, _less(sample(backward, device, slice_s), base_s))


def _measure_optimizer(device: torch.device, slice_s: float) -> Iterator[Measurement]:
    for num_elements in (2**14, 2**20):
        parameters = [torch.randn(num_elements // 8, device=device).requires_grad_() for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-9, foreach=True)
        step = cast(Callable[[], object], optimizer.step)  # pyright: ignore[reportUnknownMemberType]
        amount = float(num_elements * _ADAM_BYTES)
        yield Measurement("optimizer", amount, sample(step, device, slice_s))
