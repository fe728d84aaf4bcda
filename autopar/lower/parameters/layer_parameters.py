"""How a layer gets its compute copies of stored parameters, and how their gradients come back.

`LayerParameters` knows for one layer the moves from storage (`store`) to the copy layouts; `Gathering` is one use of a
layer's parameters: it gathers them, frees them (ZeRO-3) and gathers them anew, and reduces their gradients.

What moves does so beside compute: forward, a layer's parameters are gathered while the layer before computes, and so
backward while the layer behind does; its gradients are reduced while the layer before computes its backward.  One layer
is on its way at a time, so memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.lower.communication.buckets import BucketHandle, start_gather_bucket, start_reduce_bucket
from autopar.lower.communication.communicator import Communicator
from autopar.lower.compat import call_function, dtensor_like, local_part_of
from autopar.lower.parameters.store import ParameterStore
from autopar.placement import Layout, Step, refine_layout, refine_mesh, reshard

__all__ = ["Gathering", "LayerParameters", "Reduction", "enter_parameters", "gather_parameters"]


class LayerParameters:
    """How one layer's parameters get from storage to their copy layouts.

    `positions` are theirs among the layer's held values.  `is_gathered_anew` says whether a backward has asked for
    copies that were freed; not every layer's does (it may have kept nothing that needs them).
    """

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
        self.communicator = communicator
        self.steps: tuple[tuple[Step, ...], ...] = tuple(
            reshard(
                refine_layout(store.stored[name].layout, store.mesh, fine),
                refine_layout(copy, mesh, fine),
                fine,
            )
            for name, copy in zip(names, copies, strict=True)
        )
        self.moves_forward = any(step.forward != "none" for steps in self.steps for step in steps)
        self.moves_backward = any(step.backward != "none" for steps in self.steps for step in steps)
        self.is_gathered_anew = False
        self._slots = [store.slot(name) for name in self.names]

    def current(self) -> list[nn.Parameter]:
        """The parameters as they are registered now."""
        found = [table[name] for table, name in self._slots]
        return [parameter for parameter in found if parameter is not None]

    def start_gather(self, parameters: Sequence[Tensor]) -> BucketHandle | None:
        """Set the gathers off; None if nothing has to move.  Casts come first, so that less travels."""
        if not self.moves_forward:
            return None
        return start_gather_bucket(self._cast(parameters), self.steps, self.communicator, self.layer)

    def finish_gather(self, parameters: Sequence[Tensor], handle: BucketHandle | None) -> list[Tensor]:
        """The compute copies."""
        return self._cast(parameters) if handle is None else handle.wait()

    def start_reduce(self, gradients: Sequence[Tensor | None]) -> Reduction:
        """Set off: gradients of the copies -> gradients of the stored parts, in the dtype that they have."""
        if not self.moves_backward:
            return Reduction(gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        handle = start_reduce_bucket(
            [g for g in gradients if g is not None],
            [self.steps[i] for i in present],
            self.communicator,
            self.layer,
        )
        return Reduction([None] * len(gradients), present, handle, self._apart)

    def _cast(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [local_part_of(p).to(dtype) for p, dtype in zip(parameters, self.dtypes, strict=True)]


@dataclass(frozen=True)
class Reduction:
    """Gradients on their way to where parameters are stored; those of `present` come by `handle`.

    Those that are `apart` don't stay in the buffer in which they came: a tied parameter's gradient beside them is
    given up when it has been added to another layer's, and its place must not be held by them.
    """

    gradients: Sequence[Tensor | None]
    present: Sequence[int] = ()
    handle: BucketHandle | None = None
    apart: frozenset[int] = frozenset()

    def wait(self) -> list[Tensor | None]:
        """The gradients of the stored parts, in the parameters' order."""
        found = list(self.gradients)
        if self.handle is not None:
            for index, gradient in zip(self.present, self.handle.wait(), strict=True):
                found[index] = gradient.clone() if index in self.apart else gradient
        return found


class Gathering:
    """One use of a layer's parameters: gathered when asked for, and if `is_freed` again after `free`.

    Attributes:
        before: the gathering that backward will ask for after this one; it is started when this one has come.
    """

    def __init__(
        self,
        layer: LayerParameters,
        parameters: Sequence[Tensor],
        *,
        is_freed: bool = False,
        is_shared: bool = False,
        prefetch: bool = False,
        values: Sequence[Tensor] | None = None,
        add: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]] | None = None,
    ) -> None:
        """`parameters` are the stored DTensors, or plain tensors of the same local parts.

        `is_shared`: microbatches use the same copies, so the backward of one keeps them for the others.  `values` are
        the copies if they are there already; `add` adds to their gradients what is to be reduced with them.
        """
        self.layer = layer
        self.parameters = parameters
        self.is_freed = is_freed
        self._is_shared = is_shared
        self.before: Gathering | None = None
        self._add = add
        self._values: list[Tensor] | None = None if values is None else list(values)
        self._was_freed = False
        self._handle = layer.start_gather(parameters) if prefetch else None
        self._reduction: Reduction | None = None

    def values(self) -> list[Tensor]:
        """The compute copies, outside autograd."""
        if self._values is None:
            handle = self._handle or self.layer.start_gather(self.parameters)
            self._handle = None
            self.layer.is_gathered_anew |= self._was_freed
            self._values = self.layer.finish_gather(self.parameters, handle)
            if self.before is not None:
                self.before.prefetch()
        return self._values

    def prefetch(self) -> None:
        """Set the gathers off, if the copies are neither there nor on their way."""
        if self._values is None and self._handle is None:
            self._handle = self.layer.start_gather(self.parameters)

    def free(self) -> None:
        """Forget the copies, if they are to be freed; the next `values` gathers them anew."""
        if self.is_freed:
            self._values = None
            self._was_freed = True

    def let_go(self) -> None:
        """Backward is through: forget the copies, which a caller who keeps the loss would keep otherwise."""
        self.free()
        if not self._is_shared:
            self._values = None

    def start_reduce(self, gradients: Sequence[Tensor | None]) -> None:
        """Gradients of the copies set off; `finish_reduce` gives what becomes of them."""
        self._reduction = self.layer.start_reduce(gradients if self._add is None else self._add(gradients))

    def finish_reduce(self) -> list[Tensor | None]:
        """Gradients of the parameters as they were given, DTensor for DTensor."""
        assert self._reduction is not None
        reduction, self._reduction = self._reduction, None
        found: list[Tensor | None] = []
        for parameter, local in zip(self.parameters, reduction.wait(), strict=True):
            if local is not None:
                local = local.to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    local = dtensor_like(local, parameter)
            found.append(local)
        return found


def enter_parameters(gathering: Gathering) -> Sequence[Tensor]:
    """The local parts of the parameters, differentiable: backward waits here for the reductions of their gradients.

    Autograd runs what is ready in the order of making, the latest first.  So gradients are waited for after the
    backward of everything that is made after this call: entered before the layer before runs, a layer reduces its
    gradients while that one computes its backward.
    """
    if not gathering.parameters:
        return ()
    return call_function(_Enter, gathering, *gathering.parameters)


def gather_parameters(gathering: Gathering, entered: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The compute copies of parameters that were `entered`, differentiable: backward sets the reductions of their
    gradients off and gives up the copies.
    """
    if not entered:
        return ()
    return call_function(_Gather, gathering, *entered)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.gathering = gathering
        ctx.set_materialize_grads(False)
        return _copies(ctx, map(local_part_of, parameters), parameters)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        return None, *ctx.gathering.finish_reduce()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *entered: Tensor) -> tuple[Tensor, ...]:
        ctx.gathering = gathering
        ctx.set_materialize_grads(False)
        return _copies(ctx, (value.detach() for value in gathering.values()), entered)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        gathering: Gathering = ctx.gathering
        gathering.let_go()
        gathering.start_reduce(gradients)
        # What autograd hands on is not looked at: tensors of the right form that are there anyway.
        return None, *(
            None if gradient is None else local_part_of(parameter)
            for gradient, parameter in zip(gradients, gathering.parameters, strict=True)
        )


def _copies(ctx: Any, made: Iterable[Tensor], parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a function, differentiable where `parameters` are."""
    copies = tuple(made)
    ctx.mark_non_differentiable(*(c for c, p in zip(copies, parameters, strict=True) if not p.requires_grad))
    return copies
