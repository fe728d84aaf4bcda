"""How a layer gets its compute copies of stored parameters, and how their gradients come back.

`LayerParameters` knows for one layer the moves from storage (`store`) to the copy layouts; `StepParameters` is one
step's use of them: it unshards, reshards and reduces when the step's actions say so (`simulation.actions`), and adds
up the gradients of microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.buckets import BucketHandle, start_gather_bucket, start_reduce_bucket
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.moves import COLLECTIVE_KINDS
from autopar.lower.compat import local_part_of
from autopar.lower.parameters.store import ParameterStore
from autopar.placement import Layout, Step, refine_layout, refine_mesh, reshard

__all__ = ["LayerParameters", "Reduction", "StepParameters"]


class LayerParameters:
    """How one layer's parameters get from storage to their copy layouts.

    `positions` are theirs among the layer's state.

    Attributes:
        keeps: whether the next steps take the copies of the first one, until somebody sets `kept` to None: while no
            parameter changes.
        kept: those copies.
    """

    keeps: bool = False
    kept: list[Tensor] | None = None

    def __init__(
        self,
        store: ParameterStore,
        names: Sequence[str],
        positions: Sequence[int],
        copies: Sequence[Layout],
        dtypes: Sequence[torch.dtype],
        mesh: tuple[int, ...],
        communicator: Communicator,
        layer: str = "",
    ) -> None:
        """`copies` are on `mesh`; `dtypes` are what the layer computes in; `layer` is its name."""
        self.layer = layer
        tied = [store.stored[name].is_tied for name in names]
        self._apart = frozenset(i for i, is_tied in enumerate(tied) if any(tied) and not is_tied)
        fine = refine_mesh(store.mesh, mesh)
        self.store = store
        self.names = tuple(names)
        self.positions = tuple(positions)
        self.dtypes = tuple(dtypes)
        self.gradient_dtypes = tuple(store.gradient_dtype or store.stored[name].dtype for name in names)
        self.communicator = communicator
        self.steps: tuple[tuple[Step, ...], ...] = tuple(
            reshard(
                refine_layout(store.stored[name].layout, store.mesh, fine),
                refine_layout(copy, mesh, fine),
                fine,
            )
            for name, copy in zip(names, copies, strict=True)
        )
        # Whether a collective makes the gradient of the stored part.
        self.is_reduced = tuple(
            any(step.backward in COLLECTIVE_KINDS and step.axis.size > 1 for step in steps) for steps in self.steps
        )
        self.moves_forward = any(step.forward != "none" for steps in self.steps for step in steps)
        self.moves_backward = any(step.backward != "none" for steps in self.steps for step in steps)
        self._slots = [store.slot(name) for name in self.names]
        self._checked: list[nn.Parameter | None] = []

    def current(self) -> list[nn.Parameter]:
        """The parameters as they are registered now.

        Raises:
            ModelError: one was replaced by a tensor that is not laid out as it is.
        """
        parameters = [table.get(name) for table, name in self._slots]
        if self.store.has_parts and not _are_same(parameters, self._checked):
            for name, parameter in zip(self.names, parameters, strict=True):
                if parameter is not None:
                    self.store.check(name, parameter)
            self._checked = parameters
        return [parameter for parameter in parameters if parameter is not None]

    def start_gather(self, parameters: Sequence[Tensor]) -> BucketHandle | None:
        """Set the gathers off; None if nothing has to move.  Casts come first, so that less travels between devices;
        what is stored in the host's memory is copied to the device before that.
        """
        host = self.store.host
        if host is not None:
            with host.on_stream():
                parts = self._cast(host.bring([local_part_of(p) for p in parameters]))
                return start_gather_bucket(parts, self.steps, self.communicator, self.layer)
        if not self.moves_forward:
            return None
        return start_gather_bucket(self._cast(parameters), self.steps, self.communicator, self.layer)

    def finish_gather(self, parameters: Sequence[Tensor], handle: BucketHandle | None) -> list[Tensor]:
        """The compute copies."""
        if self.store.host is not None:
            self.store.host.join()
        return self._cast(parameters) if handle is None else handle.wait()

    def start_reduce(self, gradients: Sequence[Tensor | None]) -> Reduction:
        """Set off: gradients of the copies -> gradients of the stored parts; what collectives reduce is cast first."""
        if not self.moves_backward:
            return Reduction(gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        handle = start_reduce_bucket(
            [g for g in gradients if g is not None],
            [self.steps[i] for i in present],
            self.communicator,
            self.layer,
            [self.gradient_dtypes[i] for i in present],
        )
        return Reduction([None] * len(gradients), present, handle, self._apart)

    def _cast(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [local_part_of(p).to(dtype) for p, dtype in zip(parameters, self.dtypes, strict=True)]


def _are_same(xs: Sequence[object], ys: Sequence[object]) -> bool:
    return len(xs) == len(ys) and all(x is y for x, y in zip(xs, ys, strict=True))


@dataclass(frozen=True)
class Reduction:
    """Gradients on their way to where parameters are stored; those of `present` come by `handle`.

    Those that are `apart` don't stay in the buffer in which they came: a tied parameter's gradient in it is
    given up when it has been added to another layer's, and its place must not be held by them.
    """

    gradients: Sequence[Tensor | None]
    present: Sequence[int] = ()
    handle: BucketHandle | None = None
    apart: frozenset[int] = frozenset()

    def wait(self) -> list[Tensor | None]:
        """The gradients of the stored parts, in the parameters' order."""
        reduced = list(self.gradients)
        if self.handle is not None:
            for index, gradient in zip(self.present, self.handle.wait(), strict=True):
                reduced[index] = gradient.clone() if index in self.apart else gradient
        return reduced


class StepParameters:
    """One layer's parameters in one step: the compute copies while they are unsharded, and their gradients.

    Attributes:
        layer: how they move.
        stored: the parameters that were registered when the step began; its backward reads them again, whatever
            is registered then (``torch.func.functional_call``).
        frees: whether the copies are freed between forward and backward.
    """

    def __init__(self, layer: LayerParameters, *, frees: bool, adds_up: bool) -> None:
        """They are sharded.

        Args:
            layer: how they move.
            frees: whether the copies are freed between forward and backward (ZeRO-3): autograd must not hold them.
            adds_up: whether several backwards add up before one reduction; that is done in the dtype of the latter.
        """
        self.layer = layer
        self.stored = layer.current()
        self.frees = frees
        self._adds_up = adds_up
        self._handle: BucketHandle | None = None
        self._is_under_way = False
        self._copies: list[Tensor] | None = None
        self._leaves: list[Tensor] | None = None
        self._terms: list[Tensor | None] | None = None  # of copies that are no leaves
        self._sums: list[Tensor | None] | None = None  # of earlier backwards, in `gradient_dtypes`
        self._reduction: Reduction | None = None

    def unshard(self) -> None:
        """Start to gather the compute copies, unless they are there or under way."""
        if self._copies is None and self.layer.kept is None and not self._is_under_way:
            self._handle = self.layer.start_gather(self.stored)
            self._is_under_way = True

    def copies(self) -> list[Tensor]:
        """The compute copies, outside autograd; waits for them.  What was not unsharded is so now."""
        if self._copies is None and self.layer.kept is not None:
            self._copies = self.layer.kept
        if self._copies is None:
            self.unshard()
            self._copies = self.layer.finish_gather(self.stored, self._handle)
            self._handle, self._is_under_way = None, False
            self.layer.kept = self._copies if self.layer.keeps else None
        return self._copies

    def reshard(self) -> None:
        """Free the copies; their gradients stay until they are reduced."""
        if self._leaves is not None:
            self._terms = self._take_terms()
        self._copies = self._leaves = self._handle = None
        self._is_under_way = False

    def differentiable(self) -> Sequence[Tensor]:
        """The compute copies for a forward under autograd, whose backward leaves their gradients here."""
        if not torch.is_grad_enabled():
            return self.copies()
        if self.frees:
            anchor = torch.zeros((), requires_grad=True, device="cpu")
            return call_function(_ComputeCopies, self, anchor) if self.layer.names else ()
        return self.leaves()

    def leaves(self) -> list[Tensor]:
        """The copies as leaves of autograd's graph, which all microbatches share."""
        if self._leaves is None:
            pairs = zip(self.copies(), self.stored, strict=True)
            self._leaves = [copy.detach().requires_grad_(p.requires_grad) for copy, p in pairs]
        return self._leaves

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """The gradients of copies that are no leaves."""
        # What no collective makes anew may be a tensor that autograd gives to others as well.
        owned = [g if m or g is None else g.clone() for g, m in zip(gradients, self.layer.is_reduced, strict=True)]
        self._terms = owned if self._terms is None else _add_all(self._terms, owned)

    def end_backward(self) -> None:
        """One backward is through: what was computed in another dtype than is reduced is added up in the latter."""
        dtypes = self.layer.gradient_dtypes
        if not self._adds_up or self._leaves is None:
            return
        if any(leaf.dtype != dtype for leaf, dtype in zip(self._leaves, dtypes, strict=True)):
            terms = self._take_terms()
            sums: list[Tensor | None] = self._sums or [None] * len(terms)
            for index, dtype in enumerate(dtypes):  # one after the other, to hold few twice
                term, terms[index] = terms[index], None
                sums[index : index + 1] = _add_all(sums[index : index + 1], [None if term is None else term.to(dtype)])
            self._sums = sums

    def start_reduce(self) -> None:
        """Start to reduce what backwards have left since the last reduction."""
        terms = self._take_terms()
        if self._sums is not None:
            terms, self._sums = _add_all(self._sums, terms), None
        self._reduction = self.layer.start_reduce(terms)

    def finish_reduce(self) -> list[Tensor | None]:
        """Wait for that: the gradients of the stored parts, in the parameters' order and dtypes."""
        assert self._reduction is not None
        terms, self._reduction = self._reduction.wait(), None
        for index, parameter in enumerate(self.stored):
            term = terms[index]
            # One after the other, to hold few twice; in the parameter's order, which fused optimizers take for granted.
            terms[index] = None if term is None else term.to(parameter.dtype).contiguous()
        return terms

    def _take_terms(self) -> list[Tensor | None]:
        if self._leaves is not None:
            terms: list[Tensor | None] = [leaf.grad for leaf in self._leaves]
            for leaf in self._leaves:
                leaf.grad = None
            return terms
        terms, self._terms = self._terms or [None] * len(self.layer.names), None
        return terms


def _add_all(totals: Sequence[Tensor | None], terms: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Their sums, in the place of `totals`; None counts as nothing."""
    pairs = zip(totals, terms, strict=True)
    return [
        (total if term is None else term) if total is None or term is None else total.add_(term)
        for total, term in pairs
    ]


class _ComputeCopies(torch.autograd.Function):
    """Compute copies that autograd doesn't hold."""

    @staticmethod
    def forward(ctx: Any, parameters: StepParameters, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        copies = tuple(copy.detach() for copy in parameters.copies())
        stored = parameters.stored
        ctx.mark_non_differentiable(*(c for c, p in zip(copies, stored, strict=True) if not p.requires_grad))
        return copies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        ctx.parameters.take(gradients)
        return None, None
