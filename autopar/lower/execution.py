"""Run a plan's layers in order on this rank: what moves between them, what they hold, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import InputShapeError, PlanMismatchError
from autopar.lower.communicator import Communicator
from autopar.lower.compat import compile_program, run_twice, to_parted_placements, to_torch_placements
from autopar.lower.layer_ops import LayerContext, draw, redistribute, run_kernel
from autopar.lower.layer_program import LayerProgram, layer_program
from autopar.lower.parameters import Gathering, LayerParameters, ParameterStore, gather_parameters
from autopar.lower.random import RandomState
from autopar.lower.recompute import KeepingProgram, run_keeping_less
from autopar.lower.reshard_ops import apply_forward, reshard_tensor
from autopar.placement import REPLICATE, Layout, Placement, Step, refine_layout, refine_mesh, reshard
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program

__all__ = ["Executable", "Executor", "LayerRunner", "LayerUse", "check_plan"]


class Executable(NamedTuple):
    """A traced program with its plan and what binds it to a Python call.

    Args:
        program: what to run.
        plan: how.
        constants: value name -> whole tensor.
        flatten_inputs: ``(args, kwargs)`` of a call -> its tensors, in the order of `Program.inputs`.
        unflatten_outputs: values of `Program.outputs` -> what the model returns.
    """

    program: Program
    plan: Plan
    constants: Mapping[str, Tensor]
    flatten_inputs: Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Tensor]]
    unflatten_outputs: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class _Lies:
    """Where a value lies between layers: layout, mesh, placement in time."""

    layout: Layout
    mesh: tuple[int, ...]
    time: Placement

    def move_to(self, layout: Layout, mesh: tuple[int, ...]) -> tuple[Step, ...]:
        """The steps to another layout on another mesh, on the refinement of both."""
        fine = refine_mesh(self.mesh, mesh)
        return reshard(refine_layout(self.layout, self.mesh, fine), refine_layout(layout, mesh, fine), fine)


@dataclass(frozen=True)
class LayerUse:
    """Where one run of a layer takes its parameters from: a gathering, or copies that are there already."""

    gathering: Gathering | None = None
    fixed: Sequence[Tensor] = ()

    def copies(self) -> Sequence[Tensor]:
        """The compute copies, differentiable."""
        return self.fixed if self.gathering is None else gather_parameters(self.gathering)


@dataclass(frozen=True)
class LayerRunner:
    """Everything fixed about one layer.

    Args:
        layer: itself.
        strategy: how it runs.
        program: its lowered program, shared by its kind.
        keeping: the variant for selective recomputation.
        parameters: how it gets them.
        buffers: position among held values, name, dtype, moves to the copy layout.
        constants: position among held values, local part.
        moves: per input, the value's name and the moves from where it lies.
        dead: values that no later layer reads.
        first_op: number of its first op in the program.
    """

    layer: Layer
    strategy: LayerStrategy
    program: LayerProgram
    keeping: KeepingProgram | None
    parameters: LayerParameters
    buffers: tuple[tuple[int, str, torch.dtype, tuple[Step, ...]], ...]
    constants: tuple[tuple[int, Tensor], ...]
    moves: tuple[tuple[str, tuple[Step, ...]], ...]
    dead: tuple[str, ...]
    first_op: int

    def run(self, use: LayerUse, inputs: Sequence[Tensor], context: LayerContext) -> Sequence[Tensor]:
        """The layer's outputs, remembering for backward what the strategy says."""
        recompute = self.strategy.recompute if torch.is_grad_enabled() else "none"
        freed = use.gathering if use.gathering is not None and use.gathering.is_freed else None
        if recompute == "full":
            return self._run_again_in_backward(use, inputs, context)
        held = self._held(use.copies(), context.communicator)
        if torch.is_grad_enabled() and (freed or recompute == "selective"):
            keeping = self.keeping if recompute == "selective" else None
            return run_keeping_less(self.program, keeping, inputs, held, context, freed)
        return self.program.module(*inputs, *held, context)

    def _run_again_in_backward(
        self, use: LayerUse, inputs: Sequence[Tensor], context: LayerContext
    ) -> Sequence[Tensor]:
        freed = use.gathering if use.gathering is not None and use.gathering.is_freed else None
        kept = None if freed else self._held(use.copies(), context.communicator)

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            held = self._held(use.copies(), context.communicator) if kept is None else kept
            outputs = self.program.module(*inputs, *held, context)
            if freed:
                freed.free()
            return outputs

        # Random ops draw from seeds of their own.  Stopping early would leave out collectives that were
        # priced.
        return run_twice(run, inputs)

    def _held(self, copies: Sequence[Tensor], communicator: Communicator) -> list[Tensor]:
        held: list[Any] = [None] * len(self.layer.held)
        for position, copy in zip(self.parameters.positions, copies, strict=True):
            held[position] = copy
        for position, tensor in self.constants:
            held[position] = tensor
        for position, name, dtype, steps in self.buffers:
            # a copy: forward may update the buffer before backward has read it
            buffer = self.parameters.store.buffer(name).to(dtype, copy=True)
            held[position] = apply_forward(buffer, steps, communicator)
        return held


class Executor:
    """One executable, lowered for this rank."""

    def __init__(
        self,
        executable: Executable,
        store: ParameterStore,
        communicator: Communicator,
        compile_layers: bool = False,
    ) -> None:
        """Lower every kind and strategy once.

        Raises:
            PlanMismatchError: the plan does not fit the program or the number of devices.
        """
        self.executable = executable
        self.store = store
        self.communicator = communicator
        program, plan = executable.program, executable.plan
        check_plan(program, plan, communicator.world_size)
        self.num_microbatches = plan.num_microbatches if program.loss else 1
        self.is_random = any(op.is_random for layer in program.layers for op in layer.ops)
        self.kept = set(program.outputs) | set(program.updates.values())
        builder = _Lowering(executable, store, communicator, self.num_microbatches)
        self.runners = builder.lower_layers(self.kept)
        self.lies = builder.lies
        communicator.prepare(sorted({axis for runner in self.runners for axis in _axes(runner)}))
        if compile_layers:
            for lowered in self.programs:
                lowered.module.forward = compile_program(lowered.module, (redistribute, run_kernel, draw))

    @property
    def programs(self) -> tuple[LayerProgram, ...]:
        """The distinct lowered programs, in order of first use."""
        return tuple({id(runner.program): runner.program for runner in self.runners}.values())

    def check_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Raise InputShapeError unless `tensors` are what the program was traced for."""
        program = self.executable.program
        if len(tensors) != len(program.inputs):
            raise InputShapeError(f"the plan was made for {len(program.inputs)} input tensors, got {len(tensors)}")
        for name, tensor in zip(program.inputs, tensors, strict=True):
            wanted = program.type_of(name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if tuple(tensor.shape) != wanted.shape or dtype != wanted.dtype:
                raise InputShapeError(
                    f"input {name!r} is {list(tensor.shape)} {dtype}, but the plan was made for "
                    f"{list(wanted.shape)} {wanted.dtype}. Pass the whole batch on every "
                    "rank, or plan again for these inputs"
                )

    def open_layer(self, index: int) -> LayerUse:
        """The usual way to a layer's parameters: gather from the DTensors, starting now."""
        runner = self.runners[index]
        gathering = Gathering(
            runner.parameters, runner.parameters.current(), is_freed=runner.strategy.zero == 3, prefetch=True
        )
        return LayerUse(gathering)

    def run(
        self,
        tensors: Sequence[Tensor],
        base_seed: int = 0,
        microbatch: int = 0,
        open_layer: Callable[[int], LayerUse] | None = None,
    ) -> dict[str, Tensor]:
        """Run one microbatch; returns the local parts of outputs and updates, as they lie (`lies`).

        The next layer's parameters are on their way while a layer computes.
        """
        open_layer = open_layer or self.open_layer
        values: dict[str, Tensor] = dict(zip(self.executable.program.inputs, tensors, strict=True))
        random = RandomState(base_seed, self.communicator.device, microbatch) if self.is_random else None
        use = open_layer(0) if self.runners else None
        for index, runner in enumerate(self.runners):
            assert use is not None
            following = open_layer(index + 1) if index + 1 < len(self.runners) else None
            inputs = [reshard_tensor(values[name], steps, self.communicator) for name, steps in runner.moves]
            context = LayerContext(self.communicator, microbatch, runner.first_op, random)
            outputs = runner.run(use, inputs, context)
            values |= zip(runner.layer.outputs, outputs, strict=True)
            for name in runner.dead:
                values.pop(name, None)
            use = following
        return {name: values[name] for name in self.kept}

    def make_whole(self, name: str, value: Tensor) -> Tensor:
        """The whole tensor on every rank, of one microbatch."""
        lies = self.lies[name]
        steps = lies.move_to((REPLICATE,) * len(lies.mesh), lies.mesh)
        return reshard_tensor(value, steps, self.communicator)

    def gather_along(self, name: str, value: Tensor, dim: int) -> Tensor:
        """`value` made whole along `dim` only."""
        lies = self.lies[name]
        return reshard_tensor(value, lies.move_to(_whole_along(lies.layout, dim), lies.mesh), self.communicator)

    def make_output(self, name: str, value: Tensor) -> Tensor:
        """What the caller gets for an output of the whole batch: plain if whole, else a DTensor of its layout.

        Without a loss in the program all outputs are whole.
        """
        lies = self._lies_joined(name)
        is_cut = any(p.is_shard and size > 1 for p, size in zip(lies.layout, lies.mesh, strict=True))
        if not is_cut or not self.stays_cut(name):
            return reshard_tensor(value, lies.move_to((REPLICATE,) * len(lies.mesh), lies.mesh), self.communicator)
        layout = tuple(p if p.is_shard else REPLICATE for p in lies.layout)
        value = reshard_tensor(value, lies.move_to(layout, lies.mesh), self.communicator)
        fine = refine_layout(layout, lies.mesh, self.store.mesh)
        shape = torch.Size(self.executable.program.type_of(name).shape)
        is_parted = self.num_microbatches > 1 and lies.time.is_shard
        return DTensor.from_local(
            value,
            self.store.device_mesh,
            to_parted_placements(fine, self.store.mesh, lies.time.dim, self.num_microbatches)
            if is_parted
            else to_torch_placements(fine),
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def stays_cut(self, name: str) -> bool:
        """Whether the caller gets an output as the devices hold it, for whoever wants it to gather it."""
        program = self.executable.program
        return bool(program.loss) and name != program.loss and self._is_on_store_mesh(self.lies[name].mesh)

    def _lies_joined(self, name: str) -> _Lies:
        """Where an output lies when its microbatches have been joined."""
        lies = self.lies[name]
        if self.num_microbatches == 1 or not lies.time.is_shard or self.stays_cut(name):
            return lies
        return replace(lies, layout=_whole_along(lies.layout, lies.time.dim))  # it was gathered along that dim

    def _is_on_store_mesh(self, mesh: tuple[int, ...]) -> bool:
        return refine_mesh(self.store.mesh, mesh) == self.store.mesh


def _whole_along(layout: Layout, dim: int) -> Layout:
    return tuple(REPLICATE if p.is_shard and p.dim == dim else p for p in layout)


def check_plan(program: Program, plan: Plan, world_size: int) -> None:
    """Raise PlanMismatchError unless `plan` is for this program on this many devices."""
    if plan.world_size != world_size:
        raise PlanMismatchError(f"the plan is for {plan.world_size} devices, but there are {world_size}")
    if plan.fingerprint != program.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for program {plan.fingerprint}, this is {program.fingerprint}: plan "
            "again for this model and these input shapes"
        )
    names = [layer.name for layer in program.layers]
    if names != [planned.name for planned in plan.layers]:
        raise PlanMismatchError(f"the plan has layers {[p.name for p in plan.layers]}, the program {names}")


def _axes(runner: LayerRunner) -> set[Any]:
    """Every axis on which something of this layer may communicate."""
    steps = [step for steps in runner.parameters.steps for step in steps]
    steps += [step for _, moved in runner.moves for step in moved]
    found = {step.axis for step in steps}
    for node in runner.program.module.graph.nodes:
        found |= node.meta.get("axes", frozenset())
    return {axis for axis in found if axis.size > 1}


class _Lowering:
    """The state of lowering an executable's layers: where values lie, which programs exist."""

    def __init__(
        self,
        executable: Executable,
        store: ParameterStore,
        communicator: Communicator,
        num_microbatches: int,
    ) -> None:
        self.executable = executable
        self.program = executable.program
        self.plan = executable.plan
        self.store = store
        self.communicator = communicator
        self.num_microbatches = num_microbatches
        whole = _Lies((REPLICATE,), (communicator.world_size,), REPLICATE)
        self.lies: dict[str, _Lies] = dict.fromkeys(self.program.inputs, whole)
        self.programs: dict[tuple[int, int, tuple[Placement, ...]], tuple[LayerProgram, KeepingProgram | None]] = {}
        self.parts: dict[tuple[str, tuple[Step, ...]], Tensor] = {}

    def lower_layers(self, kept: set[str]) -> list[LayerRunner]:
        last_reader = {name: i for i, layer in enumerate(self.program.layers) for name in layer.inputs}
        runners: list[LayerRunner] = []
        first_op = 0
        for index, layer in enumerate(self.program.layers):
            produced = (*layer.inputs, *layer.outputs)
            dead = tuple(name for name in produced if last_reader.get(name, -1) <= index and name not in kept)
            runners.append(self._lower_layer(index, layer, dead, first_op))
            first_op += len(layer.ops)
        missing = sorted(kept - self.lies.keys())
        if missing:
            raise PlanMismatchError(f"no layer puts out {missing}, which the model returns or keeps")
        return runners

    def _lower_layer(self, index: int, layer: Layer, dead: tuple[str, ...], first_op: int) -> LayerRunner:
        number = self.plan.layers[index].strategy
        strategy = self.plan.strategies[number]
        arrivals = tuple(self.lies[name].time for name in layer.inputs)
        moves = tuple(
            (name, self.lies[name].move_to(layout, strategy.mesh))
            for name, layout in zip(layer.inputs, strategy.inputs, strict=True)
        )
        lowered, keeping = self._program(layer.kind, number, strategy, arrivals)
        for name, layout, time in zip(layer.outputs, strategy.outputs, lowered.output_times, strict=True):
            self.lies[name] = _Lies(layout, strategy.mesh, time)
        held = list(zip(range(len(layer.held)), layer.held, lowered.held_layouts, strict=True))
        roles = self.program.values
        return LayerRunner(
            layer, strategy, lowered, keeping,
            self._parameters([h for h in held if roles[h[1]].role == "parameter"], strategy.mesh),
            tuple(
                (position, self.program.parameters[name], self._dtype(name),
                 self._from_whole(layout, strategy.mesh))
                for position, name, layout in held if roles[name].role == "buffer"
            ),
            tuple(
                (position, self._constant(name, self._from_whole(layout, strategy.mesh)))
                for position, name, layout in held if roles[name].role == "constant"
            ),
            moves, dead, first_op,
        )  # fmt: skip

    def _program(
        self, kind: int, number: int, strategy: LayerStrategy, arrivals: tuple[Placement, ...]
    ) -> tuple[LayerProgram, KeepingProgram | None]:
        key = (kind, number, arrivals)
        if key not in self.programs:
            first = next(layer for layer in self.program.layers if layer.kind == kind)
            lowered = layer_program(
                self.program, first, strategy, self.num_microbatches, arrivals, str(self.communicator.device)
            )
            keeping = KeepingProgram(lowered) if strategy.recompute == "selective" else None
            self.programs[key] = lowered, keeping
        return self.programs[key]

    def _parameters(self, held: list[tuple[int, str, Layout]], mesh: tuple[int, ...]) -> LayerParameters:
        names = [self.program.parameters[name] for _, name, _ in held]
        return LayerParameters(
            self.store, names, [position for position, _, _ in held], [layout for _, _, layout in held],
            [self._dtype(name) for _, name, _ in held], mesh, self.communicator,
        )  # fmt: skip

    def _dtype(self, value: str) -> torch.dtype:
        """What a value is computed in; it may be stored in another dtype (mixed precision)."""
        return getattr(torch, self.program.type_of(value).dtype)

    def _from_whole(self, layout: Layout, mesh: tuple[int, ...]) -> tuple[Step, ...]:
        return reshard((REPLICATE,) * len(mesh), layout, mesh)

    def _constant(self, name: str, steps: tuple[Step, ...]) -> Tensor:
        key = (name, steps)
        if key not in self.parts:
            whole = self.executable.constants[name].detach().to(self.communicator.device)
            self.parts[key] = apply_forward(whole, steps, self.communicator)
        return self.parts[key]
