"""What the backward of an op allocates besides gradients is no more than its record says.

Only ops whose formula is the same whether it is watched or not: under a dispatch mode torch replaces what it
would write in place elsewhere (scatters of selected elements, running sums) by copies.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.lower.compat import DispatchMode, leaves_of, storage_key
from autopar.ops import family_of, pointwise
from tests.ops.harness import Sample, as_op, call, sample, tensor_type
from tests.ops.samples import all_samples

SCALARS = 64  # bytes of what is no tensor of the operands' size: a mean, a count
REDUCTIONS = (
    "aten.logsumexp", "aten.var", "aten.std", "aten.amax", "aten.amin", "aten.linalg_vector_norm", "aten.norm",
    "aten.cumsum", "aten.logcumsumexp", "aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss",
    "aten.binary_cross_entropy.", "aten.roll", "aten.prod", "aten.cumprod", "aten.nansum",
)  # fmt: skip


class _Allocations(DispatchMode):
    """`most` bytes of tensors that ops made and that were there at the same time."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {storage_key(x): weakref.ref(x.untyped_storage()) for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in leaves_of(result):
            if isinstance(x, Tensor):
                self._add(x)
        return result

    def _add(self, x: Tensor) -> None:
        storage, known = x.untyped_storage(), self._known.get(storage_key(x))
        if known is None or known() is None:
            num_bytes = storage.nbytes()
            self._known[storage_key(x)] = weakref.ref(storage, lambda _: self._free(num_bytes))
            self.now += num_bytes
            self.most = max(self.most, self.now)

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def said_and_allocated(sample: Sample, fixed: tuple[int, ...]) -> tuple[float, int] | None:
    """Bytes; None if nothing in it has a gradient."""
    op, tensors = as_op(sample)
    operands = [x.clone().requires_grad_(x.is_floating_point() and i not in fixed) for i, x in enumerate(tensors)]
    results = [x for x in call(sample, operands) if x.requires_grad]
    trains = [x.requires_grad for x in operands]
    if not results:
        return None
    types = tuple(map(tensor_type, operands)), tuple(map(tensor_type, results))
    said = family_of(op.target).buffers(op, *types, trains, False).backward
    gradients = [torch.randn_like(x) for x in results]
    with _Allocations([*operands, *results, *gradients]) as allocations:
        trained = [x for x in operands if x.requires_grad]
        untyped: Any = torch.autograd  # whose annotation leaves out that a gradient may be None
        made = untyped.grad(results, trained, gradients, retain_graph=True, allow_unused=True)
    return said, allocations.most - _num_bytes([x for x in made if x is not None], gradients)


def _num_bytes(made: list[Tensor], passed: list[Tensor]) -> int:
    """Of all that is not passed on, each once."""
    sizes = {storage_key(x): x.untyped_storage().nbytes() for x in made}
    return sum(size for key, size in sizes.items() if key not in set(map(storage_key, passed)))


def _samples() -> list[Sample]:
    elementwise = {name for family in pointwise.FAMILIES for name in family.rules}
    return [s for s in all_samples() if s.target in elementwise or s.target.startswith(REDUCTIONS)]


@pytest.mark.parametrize("fixed", [(), (0,), (1,)], ids=["all", "not the first", "not the second"])
def test_no_backward_allocates_more_than_its_record_says(fixed: tuple[int, ...]) -> None:
    short: list[str] = []
    checked = 0
    for each in _samples():
        found = said_and_allocated(each, (*each.fixed, *fixed))
        if found is not None:
            checked += 1
            said, allocated = found
            largest = max(x.nbytes for x in as_op(each)[1])
            if allocated > said + largest / 2 + SCALARS:  # masks are an eighth of a float64
                short.append(f"{each.target}: {allocated} bytes, {said:.0f} said, {largest} of the largest operand")
    assert checked > 40
    assert not short, "\n".join(short)


@pytest.mark.parametrize(
    ("target", "count"),
    [("square", 2), ("pow.Tensor_Scalar", 2), ("sin", 1), ("rsqrt", 2), ("exp", 0), ("div.Scalar", 0)],
)
def test_common_ops_are_counted_exactly(target: str, count: int) -> None:
    x = torch.rand(64, 32, dtype=torch.float64) + 0.1
    arguments = {"pow.Tensor_Scalar": (3.0,), "div.Scalar": (3.0,)}.get(target, ())
    assert said_and_allocated(sample(target, x, *arguments), ()) == (count * x.nbytes, count * x.nbytes)
