"""A program's outputs in the layouts in which devices and microbatches hold them, and as callers get them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.reshard_ops import reshard_tensor
from autopar.lower.compat import can_part, stride_as_parts, to_parted_placements, to_torch_placements
from autopar.lower.parameters.store import ParameterStore
from autopar.lower.run.lowering import Executable, ValueLayout
from autopar.lower.run.stage_map import StageMap
from autopar.placement import REPLICATE, Layout, refine_layout, refine_mesh, sharded_axes
from autopar.step.layer.data_split import output_rows

__all__ = ["OutputLayouts"]


class OutputLayouts:
    """What becomes of this rank's parts of a program's outputs.

    Attributes:
        whole: the caller wants all outputs of the next call whole, on every rank.
        cut: those of the next call that are longer than what the caller gets.
    """

    def __init__(
        self,
        executable: Executable,
        store: ParameterStore,
        communicator: Communicator,
        stages: StageMap,
        value_layouts: Mapping[str, ValueLayout],
        num_microbatches: int,
    ) -> None:
        """`value_layouts`: of all values between layers, as `Lowering` gives them."""
        self.executable = executable
        self.whole = False
        self.cut = frozenset[str]()
        self._store = store
        self._communicator = communicator
        self._stages = stages
        self._layouts = value_layouts
        self._num_microbatches = num_microbatches

    @cached_property
    def rows(self) -> Mapping[str, int]:
        """The outputs that hold the rows of the batch -> the dim along which they do."""
        return output_rows(self.executable.program)

    @cached_property
    def returned_whole(self) -> tuple[str, ...]:
        """The outputs that a step gives whole, to every rank, in an order that all ranks share.

        Without a loss in a pipeline these are all outputs: the caller differentiates them.
        """
        program = self.executable.program
        if self._stages.is_pipeline and not program.loss:
            return tuple(dict.fromkeys(program.outputs))
        is_whole = self._stages.is_pipeline or self._num_microbatches > 1
        return tuple(dict.fromkeys((*program.loss_terms, *program.tail_reads))) if is_whole else ()

    def join_microbatches(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The microbatches' parts of an output as one: terms add up, slices are laid side by side.

        The parts have the layout that the program puts them out in, those of `returned_whole` are whole.
        """
        if len(parts) == 1:
            return parts[0]
        time = self._layouts[name].time
        if time.kind == "P":
            return torch.stack(list(parts)).sum(0)
        if not time.is_shard:
            return parts[-1]
        # The slices of devices and microbatches interleave, so what is to be plain is gathered along that dim first.
        if name not in self.returned_whole and not self.stays_cut(name):
            parts = [self._gather_along(name, part, time.dim) for part in parts]
        return torch.cat(list(parts), time.dim)

    def make(self, name: str, value: Tensor) -> Tensor:
        """What the caller gets for an output of the whole batch: plain if whole, else a DTensor of its layout.

        Without a loss in the program all outputs are whole.
        """
        own = self._joined_layout(name)
        if not sharded_axes(own.layout, own.mesh) or not self.stays_cut(name):
            return reshard_tensor(value, own.move_to((REPLICATE,) * len(own.mesh), own.mesh), self._communicator)
        layout = tuple(p if p.is_shard else REPLICATE for p in own.layout)
        value = reshard_tensor(value, own.move_to(layout, own.mesh), self._communicator)
        fine = refine_layout(layout, own.mesh, self._store.mesh)
        shape = torch.Size(self.executable.program.type_of(name).shape)
        is_parted = self._num_microbatches > 1 and own.time.is_shard
        made = DTensor.from_local(
            value,
            self._store.device_mesh,
            to_parted_placements(fine, self._store.mesh, own.time.dim, self._num_microbatches)
            if is_parted
            else to_torch_placements(fine),
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return stride_as_parts(made) if is_parted else made

    def join_devices(self, name: str, value: Tensor) -> Tensor:
        """The whole tensor on every rank of the group, of an output that `is_apart`."""
        own = self._joined_layout(name)
        whole = reshard_tensor(value, own.move_to((REPLICATE,) * len(own.mesh), own.mesh), self._communicator)
        dim = own.time.dim
        if self._num_microbatches == 1 or not own.time.is_shard or not self.stays_cut(name):
            return whole
        # Each device had its slices of all microbatches side by side.
        cuts = math.prod(size for p, size in zip(own.layout, own.mesh, strict=True) if p.is_shard and p.dim == dim)
        shape = whole.shape
        parts = whole.reshape(*shape[:dim], cuts, self._num_microbatches, -1, *shape[dim + 1 :])
        return parts.transpose(dim, dim + 1).reshape(shape)

    def is_apart(self, name: str) -> bool:
        """Whether gathering an output on every rank needs communication."""
        own = self._layouts[name]
        is_cut = any(p != REPLICATE and size > 1 for p, size in zip(own.layout, own.mesh, strict=True))
        return is_cut or (self._stages.is_pipeline and name in self._stages.stage_of)

    def stays_cut(self, name: str) -> bool:
        """Whether the caller gets an output as the devices hold it, for whoever wants it to gather it."""
        program = self.executable.program
        if self.whole or not program.loss or name == program.loss or name in self.cut:
            return False
        return self._is_on_store_mesh(self._layouts[name].mesh) and self._can_be_cut(self._layouts[name])

    def _can_be_cut(self, own: ValueLayout) -> bool:
        """Whether a DTensor can say how microbatches of such a value join."""
        if self._num_microbatches == 1 or not own.time.is_shard:
            return True
        fine = refine_layout(own.layout, own.mesh, self._store.mesh)
        return can_part(fine, self._store.mesh, own.time.dim)

    def _joined_layout(self, name: str) -> ValueLayout:
        """How an output is laid out when its microbatches have been joined."""
        own = self._layouts[name]
        if self._num_microbatches == 1 or not own.time.is_shard or self.stays_cut(name):
            return own
        return replace(own, layout=_whole_along(own.layout, own.time.dim))  # it was gathered along that dim

    def _is_on_store_mesh(self, mesh: tuple[int, ...]) -> bool:
        return refine_mesh(self._store.mesh, mesh) == self._store.mesh

    def _gather_along(self, name: str, value: Tensor, dim: int) -> Tensor:
        """`value` made whole along `dim` only."""
        own = self._layouts[name]
        return reshard_tensor(value, own.move_to(_whole_along(own.layout, dim), own.mesh), self._communicator)


def _whole_along(layout: Layout, dim: int) -> Layout:
    return tuple(REPLICATE if p.is_shard and p.dim == dim else p for p in layout)
