"""The tensors that autograd saves for the backward of each op.

Found by running the op on tensors of the real shapes without memory under saved-tensor hooks, and matching the saved
tensors to operands and results by their memory; some ops' records say it, as attention's does, which must count as the
fast kernels run it.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from autopar.ops import family_of
from autopar.ops.family import Saves
from autopar.program import Op, Ref, TensorType
from autopar.trace import torch_internals, torch_recording
from autopar.trace.evaluation import run_op

__all__ = ["SavesMeter"]

_Types = tuple[TensorType, ...]


class SavesMeter:
    """Finds what autograd saves, once for each different call."""

    def __init__(self) -> None:
        self._mode = torch_internals.fake_mode(repeats=False)
        self._known: dict[object, Saves] = {}

    def saved(self, op: Op, operands: _Types, results: _Types, needs_gradient: tuple[bool, ...]) -> Saves:
        """The saved operands and results of `op`, and further bytes; `needs_gradient` is per operand."""
        if not any(needs_gradient):
            return (), 0
        saves = family_of(op.target).saves
        return saves(op, operands, results) if saves else self._measured(op, operands, needs_gradient)

    def saved_by_products(self, op: Op, operands: _Types, needs_gradient: tuple[bool, ...]) -> Saves:
        """The same of attention that no fast kernel runs; nothing of all else."""
        if not (family_of(op.target).runs_plain and any(needs_gradient)):
            return (), 0
        saves, extra = self._measured(op, operands, needs_gradient)
        # A kernel keeps its result; products don't.
        return ((), 0) if len(operands) in saves else (saves, extra)

    def _measured(self, op: Op, operands: _Types, needs_gradient: tuple[bool, ...]) -> Saves:
        key = (op.target, _literals(op), operands, needs_gradient)
        if key not in self._known:
            self._known[key] = self._measure(op, operands, needs_gradient)
        return self._known[key]

    def _measure(self, op: Op, operands: _Types, needs_gradient: tuple[bool, ...]) -> Saves:
        # Each mention of a value gets a tensor of its own: indices count mentions.
        tensors: dict[str, Tensor] = {}
        saved: list[Tensor] = []
        renamed = op.with_numbered_operands()
        # What runs as other ops, as attention and LSTMs, chooses them by the device; all else is the same on the meta
        # device, where tensors take a fifth of the time of fake ones.
        device = "cpu" if torch_recording.is_composite(op.target) else "meta"
        with self._mode if device == "cpu" else nullcontext(), torch.enable_grad():
            for name, kind, needs in zip(renamed.operands, operands, needs_gradient, strict=True):
                leaf = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device=device)
                # Not a leaf itself: in-place variants and views of leaves are refused.
                tensors[name] = leaf.requires_grad_().view_as(leaf) if needs and kind.is_floating else leaf
            try:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                    results = run_op(renamed, tensors)
            except Exception:  # noqa: BLE001  (an op that fake tensors can't run: count all it reads, and its results)
                return tuple(range(len(operands) + len(op.results))), 0
        tensor_results = [t for t in results if isinstance(t, Tensor)]
        return _match(saved, [*tensors.values()], tensor_results)


def _match(saved: list[Tensor], operands: list[Tensor], results: list[Tensor]) -> Saves:
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
