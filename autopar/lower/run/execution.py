"""A plan's layers bound to this rank: their parameters and buffers, and their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.failures import naming_failures
from autopar.lower.communication.reshard_ops import reshard_tensor
from autopar.lower.observe.stopwatch import Stopwatch
from autopar.lower.parameters.store import ParameterStore
from autopar.lower.program.compiled import compile_program
from autopar.lower.program.layer_program import LayerProgram
from autopar.lower.run.carried_tensor import CarriedTensor
from autopar.lower.run.lowering import Executable, Lowering, ValueLayout
from autopar.lower.run.microbatch_updates import updates_per_microbatch
from autopar.lower.run.output_layouts import OutputLayouts
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.lower.run.stage_map import StageMap
from autopar.ops import family_of
from autopar.placement import REPLICATE
from autopar.schedules import RowsSchedule, rows_schedule
from autopar.step.plan_check import check_same_program
from autopar.step.simulation.actions import StepActions, step_actions
from autopar.step.training import TrainingSpec

__all__ = ["Executor"]


class Executor:
    """One executable, lowered for this rank."""

    def __init__(
        self,
        executable: Executable,
        store: ParameterStore,
        communicator: Communicator,
        compile_layers: bool = False,
        ranks_of_stage: int | None = None,
    ) -> None:
        """Lower every kind and strategy once.

        `ranks_of_stage`: how many ranks have each stage (without stages: all layers), of which a group of neighboring
        ones, as many as the plan's `group_size`, runs it; None: all run it.  A group begins at a multiple of its size,
        so that its axes are those of all ranks.

        Raises:
            PlanMismatchError: the plan does not fit the program or the number of devices.
        """
        self.executable = executable
        self.store = store
        self.communicator = communicator
        program, plan = executable.program, executable.plan
        world, apart = communicator.world_size, ranks_of_stage or plan.group_size
        check_same_program(plan, program, world if ranks_of_stage is None else world // apart * plan.group_size)
        self.num_microbatches = plan.num_microbatches if program.loss or plan.stages else 1
        self.updates_each: Mapping[str, str] = (
            updates_per_microbatch(program, plan) if self.num_microbatches > 1 else {}
        )
        self.is_random = any(op.is_random for layer in program.layers for op in layer.ops)
        self.stopwatch: Stopwatch | None = None  # while a step is measured
        # In an order that all ranks share: what is made whole is so one value after the other.
        late = {name for op in program.tail for name in op.results}
        kept = dict.fromkeys((*program.outputs, *program.updates.values(), *program.tail_reads))
        self.kept = tuple(name for name in kept if name not in late)
        stage, place = divmod(communicator.rank, apart)
        self.stages = StageMap(program, plan, stage * plan.group_size + place % plan.group_size, apart)
        lowering = Lowering(executable, store, communicator, self.num_microbatches, self.stages, compile_layers)
        self.runners = lowering.lower_layers(frozenset(self.kept))
        for runner in self.runners.values():
            runner.parameters.keeps = executable.keeps_copies
        self.value_layouts = lowering.value_layouts
        self.boundary_values = lowering.boundary_values
        self.outputs = OutputLayouts(
            executable, store, communicator, self.stages, self.value_layouts, self.num_microbatches
        )
        self.hoisted = lowering.hoisted
        self.tail = lowering.lower_tail()
        self.begin_step = lowering.hoisted.begin_step
        if self.stages.is_pipeline:
            communicator.prepare([self.stages.axis])
        communicator.prepare(sorted({axis for runner in self.runners.values() for axis in runner.axes}))
        if compile_layers:
            for lowered in self.programs:
                lowered.module.forward = compile_program(lowered, communicator)

    @property
    def programs(self) -> tuple[LayerProgram, ...]:
        """The distinct lowered programs, in order of first use."""
        return tuple({id(runner.program): runner.program for runner in self.runners.values()}.values())

    @cached_property
    def inputs_on_host(self) -> frozenset[str]:
        """The inputs that all their readers read on the host."""
        program = self.executable.program
        readers: dict[str, list[bool]] = {name: [] for name in program.inputs}
        for op in chain(program.tail, *(each.ops for each in (*program.layers, *program.late))):
            for place, name in enumerate(op.operands):
                if name in readers:
                    readers[name].append(place in family_of(op.target).host_operands)
        return frozenset(name for name, found in readers.items() if found and all(found))

    def place_inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors of a call, those on the host copied to this rank's device if ops read them there."""
        device = self.communicator.device
        if all(x.device.type == device.type for x in tensors):
            return tensors
        named = zip(self.executable.program.inputs, tensors, strict=True)
        return [x.to(device) if x.device.type == "cpu" and name not in self.inputs_on_host else x for name, x in named]

    @cached_property
    def training_actions(self) -> StepActions:
        """What the device groups do in a step with gradients."""
        return self._actions(is_training=True)

    @cached_property
    def forward_actions(self) -> StepActions:
        """What they do in one without."""
        return self._actions(is_training=False)

    def _actions(self, *, is_training: bool) -> StepActions:
        program, decisions = self.executable.program, self.executable.plan.decisions
        decisions = replace(decisions, num_microbatches=self.num_microbatches)
        return step_actions(program, decisions, TrainingSpec(is_training=is_training), schedule_actions)

    def row_schedule(self, rows: int) -> RowsSchedule:
        """How the stages of a program of one row run so many rows."""
        decisions = self.executable.plan.decisions
        return rows_schedule(decisions.num_groups, len(decisions.stages), rows)

    def row_actions(self, rows: int) -> StepActions:
        """What device groups do in a step of so many rows, and of those that fill up a round."""
        program, decisions = self.executable.program, self.executable.plan.decisions
        schedule, microbatches = self.row_schedule(rows)
        decisions = replace(decisions, num_microbatches=microbatches, schedule=schedule)
        return step_actions(program, decisions, TrainingSpec(), schedule_actions)

    @torch.no_grad()
    def update_buffers_of_microbatch(self, values: Mapping[str, Tensor]) -> None:
        """Give the buffers that every microbatch updates their new values, those of them that are in `values`."""
        for buffer, new in self.updates_each.items():
            if new in values:
                self.store.buffer(buffer).copy_(self.make_whole(new, values[new].detach()))

    @torch.no_grad()
    def update_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Give the buffers that a whole step updates their new values, on the ranks of all stages."""
        for buffer, new in self.executable.program.updates.items():
            own = values.get(new)
            if self.tail is not None and new in self.tail.results:
                whole = values[new].detach()
            else:
                whole = self.share_across_groups(new, None if own is None else self.make_whole(new, own.detach()))
            self.store.buffer(self.executable.program.parameters[buffer]).copy_(whole)

    def with_tail(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A step's values and what the tail makes of them."""
        if self.tail is None:
            return dict(values)
        is_whole = self.outputs.returned_whole
        sums = {n: values[n] if n in is_whole else self.make_whole(n, values[n]) for n in self.tail_reads}
        return {**values, **self.tail.run(sums)}

    @property
    def tail_reads(self) -> tuple[str, ...]:
        """What the tail reads of layers."""
        return self.executable.program.tail_reads

    def forget_copies(self) -> None:
        """Parameters may change now."""
        for runner in self.runners.values():
            runner.parameters.kept = None

    @torch.no_grad()
    def take_parts(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """A call's tensors with this rank's part in place of each that goes from call to call."""
        names = self.executable.program.inputs
        carried = self.executable.program.carried
        return [self._part(n, x) if n in carried else x for n, x in zip(names, tensors, strict=True)]

    def _part(self, name: str, x: Tensor) -> Tensor:
        own = self.value_layouts[name]
        whole = ValueLayout((REPLICATE,), (self.executable.plan.group_size,), REPLICATE)
        part, layout = (x.part, x.value_layout) if isinstance(x, CarriedTensor) else (x, whole)
        return reshard_tensor(part, layout.move_to(own.layout, own.mesh), self.communicator)

    def make_whole(self, name: str, value: Tensor) -> Tensor:
        """The whole tensor on every rank, of one microbatch."""
        own = self.value_layouts[name]
        steps = own.move_to((REPLICATE,) * len(own.mesh), own.mesh)
        return reshard_tensor(value, steps, self.communicator)

    def share_across_groups(self, name: str, value: Tensor | None) -> Tensor:
        """A value that the group of its stage has whole, on every rank; others pass None."""
        if not self.stages.is_pipeline or name not in self.stages.stage_of:
            assert value is not None
            return value
        tensor_type = self.executable.program.type_of(name)
        owner = self.stages.group_of(name)
        if owner != self.stages.group:
            dtype: torch.dtype = getattr(torch, tensor_type.dtype)
            value = torch.empty(tensor_type.shape, dtype=dtype, device=self.communicator.device)
        assert value is not None
        with naming_failures(self.stages.who, f"the broadcast of {name!r} from device group {owner}"):
            return self.communicator.broadcast(value, self.stages.axis, owner)
