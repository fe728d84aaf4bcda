"""The tensors that autograd saves for the backward of each op, and the temporaries of ops that run as others.

Found by running the op on tensors of the real shapes without memory under saved-tensor hooks, and matching the saved
tensors to operands and results by their memory; some ops' records say it, as attention's does, which must count as the
fast kernels run it.  What kernels of torch allocate besides is in their records (`OpFamily.buffers`); of an op that
runs as other ones, or whose backward may, and of a custom function, it is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.ops import family_of
from autopar.ops.family import Saves
from autopar.program import Op, Ref, TensorType
from autopar.trace.annotations.temporaries import AllocationCount, Temporaries, backward_temporaries
from autopar.trace.compat import torch_internals, torch_recording
from autopar.trace.evaluation import run_op

__all__ = ["Kept", "SavesMeter"]

_Types = tuple[TensorType, ...]


class Kept(NamedTuple):
    """What autograd saves of a call: operands and results, by number, and other bytes; and the call's temporaries."""

    saves: tuple[int, ...] = ()
    extra_bytes: int = 0
    temporaries: Temporaries = Temporaries()


_NOTHING = Kept()


class SavesMeter:
    """Finds what autograd saves, once for each different call."""

    def __init__(self) -> None:
        self._mode = torch_internals.fake_mode(repeats=False)
        self._known: dict[object, Kept] = {}

    def saved(self, op: Op, operands: _Types, results: _Types, needs_gradient: tuple[bool, ...]) -> Kept:
        """Of `op`, on devices that have its fast kernel; `needs_gradient` is per operand."""
        if not any(needs_gradient):
            return _NOTHING
        said = family_of(op.target).saves
        saves = said(op, operands, results) if said else None
        return self._measured(op, operands, needs_gradient) if saves is None else Kept(*saves)

    def saved_by_products(self, op: Op, operands: _Types, needs_gradient: tuple[bool, ...]) -> Kept:
        """The same of attention that no fast kernel runs; nothing of all else."""
        if not (family_of(op.target).runs_plain and any(needs_gradient)):
            return _NOTHING
        kept = self._measured(op, operands, needs_gradient)
        # A kernel keeps its result; products don't.
        return _NOTHING if len(operands) in kept.saves else kept

    def _measured(self, op: Op, operands: _Types, needs_gradient: tuple[bool, ...]) -> Kept:
        key = (op.target, _literals(op), operands, needs_gradient)
        if key not in self._known:
            self._known[key] = self._measure(op, operands, needs_gradient)
        return self._known[key]

    def _measure(self, op: Op, operands: _Types, needs_gradient: tuple[bool, ...]) -> Kept:
        # Each mention of a value gets a tensor of its own: indices count mentions.
        tensors: dict[str, Tensor] = {}
        renamed = op.with_numbered_operands()
        # What runs as other ops, as attention and LSTMs, chooses them by the device; all else is the same on the meta
        # device, where tensors take a fifth of the time of fake ones.  Kernels of a custom function refuse fake ones.
        is_other = torch_recording.is_composite(op.target) or not op.target.startswith(_KNOWN)
        device = "cpu" if is_other else "meta"
        with self._mode if is_other else nullcontext(), torch.enable_grad():
            for name, kind, needs in zip(renamed.operands, operands, needs_gradient, strict=True):
                leaf = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device=device)
                # Not a leaf itself: in-place variants and views of leaves are refused.
                tensors[name] = leaf.requires_grad_().view_as(leaf) if needs and kind.is_floating else leaf
            family = family_of(op.target)
            try:
                return _run(renamed, tensors, counts=(is_other or family.may_run_others) and not family.counts_buffers)
            except Exception:  # noqa: BLE001  (an op that fake tensors can't run: count all it reads, and its results)
                return Kept(tuple(range(len(operands) + len(op.results))))


_KNOWN = ("aten.", "autopar.")
"""Ops whose kernels allocate what their records say."""


def _run(op: Op, tensors: Mapping[str, Tensor], *, counts: bool) -> Kept:
    """Run `op`; `counts`: also its backward, and count temporaries."""
    saved: list[Tensor] = []
    operands = [*tensors.values()]
    count = AllocationCount(operands)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with count.counting() if counts else nullcontext(), hooks:
        returned = run_op(op, tensors)
    results = [t for t in returned if isinstance(t, Tensor)]
    del returned
    saves, extra_bytes = _match(saved, operands, results)
    if not counts:
        return Kept(saves, extra_bytes)
    saved.clear()  # autograd alone has them, and gives them up as nodes have run
    forward = count.most - count.now
    try:
        backward = backward_temporaries(count, operands, results)
    except Exception:  # noqa: BLE001  (what a backward of fake tensors can't run is not counted)
        backward = 0
    return Kept(saves, extra_bytes, Temporaries(forward, backward))


def _match(saved: Iterable[Tensor], operands: Iterable[Tensor], results: Iterable[Tensor]) -> Saves:
    places: dict[int, int] = {}
    for index, tensor in enumerate([*operands, *results]):
        places.setdefault(torch_internals.storage_key(tensor), index)
    result: set[int] = set()
    extra: dict[int, int] = {}
    for tensor in saved:
        key = torch_internals.storage_key(tensor)
        if key in places:
            result.add(places[key])
        else:
            extra[key] = tensor.untyped_storage().nbytes()  # a view keeps all of it: halves of a chunk the whole
    return tuple(sorted(result)), sum(extra.values())


def _literals(op: Op) -> str:
    return repr(op.mapped_args(lambda arg: "#" if isinstance(arg, Ref) else arg))
