"""Where parameters and buffers are kept between steps: a DTensor per parameter, on the mesh of this device group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import ModelError, PlanMismatchError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.reshard_ops import apply_forward
from autopar.lower.compat import (
    local_part_of,
    make_dtensor,
    make_mesh,
    module_tables,
    native_functions,
    renamed_mesh,
    to_torch_placements,
)
from autopar.lower.parameters.host_storage import HostCopies
from autopar.lower.parameters.materialize import Draws
from autopar.lower.parameters.other_stages import empty_part, layout_of, note_holders
from autopar.lower.parameters.skeleton import canonical_names, copy_skeleton
from autopar.lower.run.stage_map import StageMap
from autopar.objects.tensor_versions import version_of
from autopar.placement import REPLICATE, Layout, refine_layout, refine_mesh, reshard
from autopar.plan import Plan
from autopar.program import Program

__all__ = ["ParameterStore", "Stored", "local_part", "make_store", "storage_layouts", "written_member"]


@dataclass(frozen=True)
class Stored:
    """One parameter between steps: its name in the module, its layout on the store's mesh, who holds it.

    `groups` are the device groups that hold it, ascending: several for a parameter that is tied across stages.
    `is_tied`: several layers read it.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    groups: tuple[int, ...] = (0,)
    is_tied: bool = False


@dataclass(frozen=True)
class ParameterStore:
    """All parameters and buffers of a model on this rank, by their (untied) name.

    `mesh` is the common refinement of all of the plan's meshes; `device_mesh` is the same with torch's eyes, over the
    ranks of this device group, and `parameter_mesh` the one that parameters are on: with pipeline stages another one of
    the same ranks, as all ranks read parameters, and not what else is on the group's mesh.  `stored` has the parameters
    of all groups; those of other groups have no elements in `module` (`other_stages`).  `first_name` leads from each
    name of a tied parameter to its first.  Buffers are whole on every rank.
    `gradient_dtype` is that of sums and reductions of gradients, None: each parameter's; `host` copies parameters that
    are stored in the host's memory, None: they are on the device.  `has_parts`: every parameter is a DTensor of its
    layout; elsewhere they are plain tensors, used as they are: the caller's own (`torch.compile`), or a group's.
    """

    mesh: tuple[int, ...]
    device_mesh: DeviceMesh
    parameter_mesh: DeviceMesh
    module: nn.Module
    stored: Mapping[str, Stored]
    first_name: Mapping[str, str]
    gradient_dtype: torch.dtype | None = None
    host: HostCopies | None = None
    has_parts: bool = False

    def slot(self, name: str) -> tuple[dict[str, nn.Parameter | None], str]:
        """Where the parameter is registered: to look it up each step without walking the module's tree."""
        path, _, last = name.rpartition(".")
        return module_tables(self.module.get_submodule(path)).parameters, last

    def versions(self) -> list[int | None]:
        """How often each parameter has been written to; on each rank all, as that of another stage may be read.

        An optimizer that writes to a DTensor counts at that, and what writes to its local part counts there.
        """
        parts = [part for table, last in self._slots if (part := table[last]) is not None]
        with native_functions():  # an attribute of a DTensor is looked up in Python otherwise, 50 times as slowly
            return [version_of(x) for part in parts for x in (part, local_part_of(part))]

    @cached_property
    def _slots(self) -> list[tuple[dict[str, nn.Parameter | None], str]]:
        return [self.slot(name) for name in self.stored]

    def buffer(self, name: str) -> Tensor:
        """The buffer as it is registered now, or the parameter that a forward writes to as to a buffer."""
        return written_member(self.module, name)

    def is_whole(self, name: str, num_groups: int) -> bool:
        """Whether every rank, of so many groups, has all of this parameter or buffer."""
        stored = self.stored.get(self.first_name.get(name, name))
        return stored is None or (set(stored.layout) <= {REPLICATE} and len(stored.groups) == num_groups)

    def wrap(self, name: str, local: Tensor) -> DTensor:
        """The DTensor laid out as parameter `name` whose part on this rank is `local`."""
        stored = self.stored[name]
        return make_dtensor(local, self.parameter_mesh, stored.layout, stored.shape, stored.stride)

    def on_device_mesh(self, x: DTensor) -> DTensor:
        """`x`, laid out as a parameter, in the same memory but on `device_mesh`: apart from other stages."""
        layout, shape = layout_of(x), tuple(x.shape)
        return make_dtensor(local_part_of(x), self.device_mesh, layout, shape, x.stride())

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise ModelError unless `tensor` can take the place of parameter `name`."""
        stored = self.stored[name]
        untyped: Any = tensor
        if (
            isinstance(tensor, DTensor)
            and tuple(tensor.shape) == stored.shape
            and tuple(untyped.placements) == to_torch_placements(stored.layout)
        ):
            return
        raise ModelError(
            f"the parameter {name!r} of a parallelized model was replaced by a tensor of shape {list(tensor.shape)} "
            "that is not shared out over the devices as it was. Give the parameter other values in place of another "
            "parameter: with torch.no_grad(): p.copy_(values), or p.data = values"
        )

    def trained_elsewhere(self, names: Iterable[str], group: int) -> dict[str, Tensor]:
        """Those of these parameters that get gradients, on stages of other groups only; here they have no elements.

        `torch.func.functional_call` puts tensors in their places that are no `nn.Parameter`.
        """
        others = (name for name in names if name in self.stored and group not in self.stored[name].groups)
        named = {name: table[last] for name in others for table, last in [self.slot(name)]}
        return {name: tensor for name, tensor in named.items() if tensor is not None and tensor.requires_grad}

    def home(self, local: Tensor) -> Tensor:
        """A part of a parameter, which is on the device, where parameters are stored."""
        return local if self.host is None else self.host.home(local)


def written_member(module: nn.Module, name: str) -> Tensor:
    """What a forward writes to on every rank: a buffer, or all of a frozen parameter that is whole on every rank."""
    path, _, last = name.rpartition(".")
    tables = module_tables(module.get_submodule(path))
    buffer = tables.buffers.get(last)
    if buffer is not None:
        return buffer
    parameter = tables.parameters[last]
    assert parameter is not None
    return local_part_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()


def storage_layouts(program: Program, plan: Plan, mesh: tuple[int, ...]) -> dict[str, Layout]:
    """Parameter name -> its storage layout, written for `mesh`, a refinement of the plan's meshes.

    Parameters that no layer reads are whole.
    """
    layouts: dict[str, Layout] = {}
    for layer, planned in zip(program.layers, plan.layers, strict=True):
        strategy = plan.strategies[planned.strategy]
        for value, layout in zip(layer.state, strategy.storage, strict=True):
            if program.values[value].role == "parameter":
                layouts.setdefault(program.parameters[value], refine_layout(layout, strategy.mesh, mesh))
    for name, layout in plan.shared_storage:
        layouts[name] = refine_layout(layout, plan.shared_mesh, mesh)
    return layouts


def local_part(whole: Tensor, layout: Layout, mesh: tuple[int, ...], communicator: Communicator) -> Tensor:
    """A fresh copy of this rank's part of a tensor that every rank holds whole."""
    steps = reshard((REPLICATE,) * len(mesh), layout, mesh)
    part = apply_forward(whole, steps, communicator)
    return part.clone(memory_format=torch.preserve_format) if part.data_ptr() == whole.data_ptr() else part


def make_store(
    target: nn.Module,
    module: nn.Module,
    draws: Draws | None,
    stages: StageMap,
    communicator: Communicator,
    mesh: DeviceMesh,
) -> ParameterStore:
    """Fill `target` with this rank's parts of the parameters of `module`, under the same names.

    The values of what is on the meta device come from `draws`, one whole parameter after the other.

    Raises:
        PlanMismatchError: the program reads something that `module` does not have.
    """
    program, plan = stages.program, stages.plan
    sizes = refine_mesh(plan.shared_mesh, *(strategy.mesh for strategy in plan.strategies))
    device_mesh = _group_mesh(mesh, sizes, stages, communicator)
    # Simulated ranks share torch's cache of results' meshes, which goes by equality.
    name = f"parameters_on_{communicator.rank}"
    parameter_mesh = renamed_mesh(device_mesh, name) if stages.is_pipeline else device_mesh
    stored = _stored(module, stages, storage_layouts(program, plan, sizes), sizes)

    host = HostCopies(communicator.device) if plan.decisions.host_storage else None
    written = {program.parameters[buffer] for buffer in program.updates}
    drawn_parameters: dict[str, nn.Parameter] = {}
    drawn_buffers: dict[int, Tensor] = {}

    def keep(name: str, requires_grad: bool, whole: Tensor) -> nn.Parameter:
        entry = stored[name]
        is_here = stages.group in entry.groups
        part = local_part(whole, entry.layout, sizes, communicator) if is_here else empty_part(whole)
        part = part.contiguous() if host is None or name in written else host.home(part.contiguous())
        dtensor = make_dtensor(part, parameter_mesh, entry.layout, entry.shape, entry.stride)
        parameter = nn.Parameter(dtensor, requires_grad=requires_grad)
        note_holders(parameter, entry.groups)
        return parameter

    def keep_drawn(name: str, whole: Tensor) -> None:
        if name in stored:
            drawn_parameters[name] = keep(name, module.get_parameter(name).requires_grad, whole)
        else:
            drawn_buffers[id(module.get_buffer(name))] = whole.clone()

    def make_parameter(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name in drawn_parameters:
            return drawn_parameters[name]
        return keep(name, parameter.requires_grad, parameter.detach().to(communicator.device))

    def make_buffer(buffer: Tensor) -> Tensor:
        drawn = drawn_buffers.get(id(buffer))
        return buffer.detach().to(communicator.device, copy=True) if drawn is None else drawn

    if draws is not None:
        draws.play(communicator.device, keep_drawn)
    copy_skeleton(module, target, make_parameter, make_buffer)
    dtype = getattr(torch, plan.decisions.gradients) if plan.decisions.gradients else None
    return ParameterStore(
        sizes, device_mesh, parameter_mesh, target, stored, canonical_names(module), dtype, host, has_parts=True
    )


def _stored(
    module: nn.Module, stages: StageMap, layouts: Mapping[str, Layout], sizes: tuple[int, ...]
) -> dict[str, Stored]:
    """Every parameter of `module` by name; one that no layer reads is whole, on all groups: a call may have any stage
    read it, as those of heads of other tasks.  So is one that a forward writes to.
    """
    program = stages.program
    first_name = canonical_names(module)
    unknown = sorted(set(program.parameters.values()) - first_name.keys() - {n for n, _ in module.named_buffers()})
    if unknown:
        raise PlanMismatchError(f"the program reads {unknown[:3]}, which {type(module).__name__} does not have")
    layout_of = {first_name[name]: layout for name, layout in layouts.items()}
    groups_of = {first_name[name]: stages.holders[name] for name in stages.holders.keys() & layouts.keys()}
    whole: Layout = (REPLICATE,) * len(sizes)
    readers = Counter(program.parameters.get(name, "") for layer in program.layers for name in layer.state)
    tied = {first_name[name] for name, count in readers.items() if count > 1 and name in first_name}
    stored: dict[str, Stored] = {}
    for name, first in first_name.items():
        parameter = module.get_parameter(name)
        shape = tuple(parameter.shape)
        stored[name] = Stored(
            name, layout_of.get(first, whole), shape, _row_major(parameter), parameter.dtype,
            groups_of.get(first, tuple(range(stages.plan.num_groups))), first in tied,
        )  # fmt: skip
    return stored


def _row_major(parameter: Tensor) -> tuple[int, ...]:
    return torch.empty(parameter.shape, device="meta").stride()


def _group_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], stages: StageMap, communicator: Communicator) -> DeviceMesh:
    """The mesh of these sizes over the ranks of this device group."""
    if tuple(mesh.shape) == sizes and not stages.is_pipeline:
        return mesh
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    own = [ranks[rank] for rank in stages.group_ranks]
    if isinstance(communicator, ProcessGroupCommunicator):
        return make_mesh(sizes, own, mesh.device_type)
    return make_mesh(sizes, own, mesh.device_type, rank=communicator.rank)
