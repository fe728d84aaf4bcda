"""How a layer gets its compute copies of stored parameters, and how their gradients come back.

`LayerParameters` knows for one layer the moves from storage (`store`) to the copy layouts; `Gathering` is one use of a
layer's parameters: it gathers them, frees them (ZeRO-3) and gathers them anew, and reduces their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.lower.buckets import BucketHandle, start_gather_bucket, start_reduce_bucket
from autopar.lower.communicator import Communicator
from autopar.lower.compat import call_function, dtensor_like, local_part_of
from autopar.lower.store import ParameterStore
from autopar.placement import Layout, Step, refine_layout, refine_mesh, reshard

__all__ = ["Gathering", "LayerParameters", "gather_parameters"]


class LayerParameters:
    """How one layer's parameters get from storage to their copy layouts.

    `positions` are theirs among the layer's held values.
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
    ) -> None:
        """`copies` are on `mesh`; `dtypes` are what the layer computes in."""
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
        self._slots = [store.slot(name) for name in self.names]

    def current(self) -> list[nn.Parameter]:
        """The parameters as they are registered now."""
        found = [table[name] for table, name in self._slots]
        return [parameter for parameter in found if parameter is not None]

    def start_gather(self, parameters: Sequence[Tensor]) -> BucketHandle | None:
        """Set the gathers off; None if nothing has to move.  Casts come first, so that less travels."""
        if not self.moves_forward:
            return None
        return start_gather_bucket(self._cast(parameters), self.steps, self.communicator)

    def finish_gather(self, parameters: Sequence[Tensor], handle: BucketHandle | None) -> list[Tensor]:
        """The compute copies."""
        return self._cast(parameters) if handle is None else handle.wait()

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the copies -> gradients of the stored parts, in the dtype that they have."""
        if not self.moves_backward:
            return list(gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        reduced = start_reduce_bucket(
            [g for g in gradients if g is not None], [self.steps[i] for i in present], self.communicator
        ).wait()
        found: list[Tensor | None] = [None] * len(gradients)
        for index, gradient in zip(present, reduced, strict=True):
            found[index] = gradient
        return found

    def _cast(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [local_part_of(p).to(dtype) for p, dtype in zip(parameters, self.dtypes, strict=True)]


class Gathering:
    """One use of a layer's parameters: gathered when asked for, and if `is_freed` again after `free`."""

    def __init__(
        self,
        layer: LayerParameters,
        parameters: Sequence[Tensor],
        *,
        is_freed: bool = False,
        prefetch: bool = False,
    ) -> None:
        """`parameters` are the stored DTensors, or plain tensors of the same local parts."""
        self.layer = layer
        self.parameters = parameters
        self.is_freed = is_freed
        self._handle = layer.start_gather(parameters) if prefetch else None
        self._values: list[Tensor] | None = None

    def values(self) -> list[Tensor]:
        """The compute copies, outside autograd."""
        if self._values is None:
            handle = self._handle or self.layer.start_gather(self.parameters)
            self._handle = None
            self._values = self.layer.finish_gather(self.parameters, handle)
        return self._values

    def free(self) -> None:
        """Forget the copies, if they are to be freed; the next `values` gathers them anew."""
        if self.is_freed:
            self._values = None

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the copies -> gradients of the parameters as they were given, DTensor for DTensor."""
        found: list[Tensor | None] = []
        for index, local in enumerate(self.layer.reduce(gradients)):
            parameter = self.parameters[index]
            if local is not None:
                local = local.to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    local = dtensor_like(local, parameter)
            found.append(local)
        return found


def gather_parameters(gathering: Gathering) -> tuple[Tensor, ...]:
    """The compute copies, differentiable: backward reduces their gradients and gives up the copies."""
    if not gathering.parameters:
        return ()
    return call_function(_Gather, gathering, *gathering.parameters)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.gathering = gathering
        ctx.set_materialize_grads(False)
        copies = tuple(value.detach() for value in gathering.values())
        frozen = [c for c, p in zip(copies, parameters, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return copies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        gathering: Gathering = ctx.gathering
        gathering.free()
        return None, *gathering.reduce(gradients)
