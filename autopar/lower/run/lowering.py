"""Bind every layer of a plan to this rank: programs by kind, and for the layers that this rank runs their runners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from autopar.errors import InputShapeError, PlanMismatchError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.reshard_ops import apply_forward
from autopar.lower.parameters.layer_parameters import LayerParameters
from autopar.lower.parameters.store import ParameterStore
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.layer_program import LayerProgram, layer_program
from autopar.lower.program.recompute import KeepingProgram, keeping_program
from autopar.lower.run.attributes import Settings
from autopar.lower.run.hoisted import HoistedValues
from autopar.lower.run.layer_runner import LayerRunner
from autopar.lower.run.stage_map import StageMap
from autopar.lower.run.tail import Tail
from autopar.objects.buffer_questions import BufferQuestion
from autopar.objects.outside_tensors import OutsideTensor
from autopar.placement import REPLICATE, Layout, Placement, Step, local_shape, refine_layout, refine_mesh, reshard
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program

__all__ = ["Cuts", "Executable", "Lowering", "ValueLayout"]


Cuts = Mapping[str, Mapping[int, int]]
"""Outputs by name -> dim -> length of what the caller gets of it."""


def no_cuts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cuts:
    """Outputs as they are."""
    return {}


class OutputForm(Protocol):
    """What becomes of the values of `Program.outputs`."""

    def __call__(self, entries: Sequence[Any], /) -> Any:
        """What the model returns."""
        ...

    def assign(self, root: nn.Module, entries: Sequence[Any], /) -> None:
        """Set the attributes of `root` and its submodules that the model's forward sets."""
        ...


class Executable(NamedTuple):
    """A traced program with its plan and what binds it to a Python call.

    Args:
        program: what to run.
        plan: how.
        constants: value name -> whole tensor.
        flatten_inputs: ``(args, kwargs)`` of a call -> its tensors, in the order of `Program.inputs`.
        unflatten_outputs: values of `Program.outputs` -> what the model returns, and the attributes that it sets.
        keeps_copies: parameters don't change between calls, until `Executor.forget_copies`, and there is room to keep
            them gathered.
        cuts: ``(args, kwargs)`` of a call that `flatten_inputs` pads -> the outputs that are longer than the caller's:
            dim -> length.
        form: name, shape and dtype of each tensor of those calls; ``""``: they are the program's inputs.
        settings: the attributes that it was traced with and that differ from those of the first program.
        read_values: inputs of which `flatten_inputs` takes one value each only.
        computed_values: what follows from inputs, and of which it takes one value each only: what it is, and the value.
        questions: what forward asks of buffers, with the answers that the program was traced with.
        outside: what forward reads that is not the model's, as it was then.
    """

    program: Program
    plan: Plan
    constants: Mapping[str, Tensor]
    flatten_inputs: Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Tensor]]
    unflatten_outputs: OutputForm
    keeps_copies: bool = False
    cuts: Callable[[Sequence[Any], Mapping[str, Any]], Cuts] = no_cuts
    form: str = ""
    settings: Settings = ()
    read_values: frozenset[str] = frozenset()
    computed_values: tuple[tuple[str, str], ...] = ()
    questions: tuple[BufferQuestion, ...] = ()
    outside: tuple[OutsideTensor, ...] = ()

    def read_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
        """The tensors of a call, in the order of `Program.inputs`.

        Raises:
            InputShapeError: it is not of the form that the program was traced for.  With stages that includes which
                inputs require a gradient: one crosses a cut only if all ranks expect it.
        """
        tensors = self.flatten_inputs(args, kwargs)
        program = self.program
        if len(tensors) != len(program.inputs):
            raise InputShapeError(f"the plan was made for {len(program.inputs)} input tensors, got {len(tensors)}")
        for name, tensor in zip(program.inputs, tensors, strict=True):
            expected = program.type_of(name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if tuple(tensor.shape) != expected.shape or dtype != expected.dtype:
                raise InputShapeError(
                    f"input {name!r} is {list(tensor.shape)} {dtype}, but the plan was made for "
                    f"{list(expected.shape)} {expected.dtype}. Pass the whole batch on every "
                    "rank, or plan again for these inputs"
                )
            if self.plan.stages and tensor.requires_grad and not program.values[name].requires_grad:
                raise InputShapeError(
                    f"input {name!r} requires a gradient, which the example input did not: the pipeline stages of this "
                    "plan send none back for it. Call requires_grad_() on the example input, and plan again"
                )
        return tensors


@dataclass(frozen=True)
class ValueLayout:
    """How a value is laid out between layers: layout, mesh, placement in time."""

    layout: Layout
    mesh: tuple[int, ...]
    time: Placement

    def move_to(self, layout: Layout, mesh: tuple[int, ...]) -> tuple[Step, ...]:
        """The steps to another layout on another mesh, on the refinement of both."""
        fine = refine_mesh(self.mesh, mesh)
        return reshard(refine_layout(self.layout, self.mesh, fine), refine_layout(layout, mesh, fine), fine)

    def local_shape(self, shape: tuple[int, ...], num_microbatches: int) -> tuple[int, ...]:
        """What a device holds of a value of this global shape, in one microbatch."""
        if self.time.is_shard and num_microbatches > 1:
            dim = self.time.dim
            shape = (*shape[:dim], shape[dim] // num_microbatches, *shape[dim + 1 :])
        return local_shape(shape, self.layout, self.mesh)


class Lowering:
    """The state of lowering an executable's layers: how values are laid out, which programs exist."""

    def __init__(
        self,
        executable: Executable,
        store: ParameterStore,
        communicator: Communicator,
        num_microbatches: int,
        stages: StageMap,
        compile_layers: bool = False,
    ) -> None:
        """No layer is lowered yet.

        `value_layouts` then says how values are laid out, `boundary_values` per stage what comes to it.
        """
        self.stages = stages
        self.compile_layers = compile_layers
        self.executable = executable
        self.program = executable.program
        self.plan = executable.plan
        self.store = store
        self.communicator = communicator
        self.num_microbatches = num_microbatches
        whole = ValueLayout((REPLICATE,), (self.plan.group_size,), REPLICATE)
        self.value_layouts: dict[str, ValueLayout] = dict.fromkeys(self.program.inputs, whole)
        self.unplaced = set(self.program.inputs) & self.program.carried
        self.boundary_values: list[dict[str, ValueLayout]] = []
        self.programs: dict[tuple[int, int, tuple[Placement, ...]], tuple[LayerProgram, KeepingProgram | None]] = {}
        self.parts: dict[tuple[str, tuple[Step, ...]], Tensor] = {}
        tail = (name for op in self.program.tail for name in op.operands)
        read = dict.fromkeys(
            (*(name for index in stages.own_layers for name in self.program.layers[index].state), *tail)
        )
        self.hoisted = HoistedValues(self.program, executable.constants, store, LayerContext(communicator), read)

    def lower_layers(self, kept: frozenset[str]) -> dict[int, LayerRunner]:
        """The runners of this rank's layers, by index.

        `kept` are the values that must not be let go of.
        """
        starts = {layers.start: stage for stage, layers in enumerate(self.stages.ranges)}
        last_reader = {name: i for i, layer in enumerate(self.program.layers) for name in layer.inputs}
        runners: dict[int, LayerRunner] = {}
        first_op = 0
        for index, layer in enumerate(self.program.layers):
            produced = (*layer.inputs, *layer.outputs)
            dead = tuple(name for name in produced if last_reader.get(name, -1) <= index and name not in kept)
            if index in starts:
                self.boundary_values.append(
                    {name: self.value_layouts[name] for name in self.stages.crossing[starts[index]]}
                )
            self._place_carried(index, layer)
            bind = self._lower_layer(index, layer, dead, first_op)
            if index in self.stages.own_layers:
                runners[index] = bind()
            first_op += len(layer.ops)
        missing = sorted(kept - self.value_layouts.keys())
        if missing:
            raise PlanMismatchError(f"no layer puts out {missing}, which the model returns or keeps")
        return runners

    def lower_tail(self) -> Tail | None:
        """What runs behind all layers, if there is anything."""
        if not self.program.tail:
            return None
        return Tail(self.program, self.store, LayerContext(self.communicator), lambda name: self._constant(name, ()))

    def _place_carried(self, index: int, layer: Layer) -> None:
        """Inputs that go from call to call have the layout in which the first layer that reads them needs them."""
        strategy = self.plan.strategies[self.plan.layers[index].strategy]
        for name, layout in zip(layer.inputs, strategy.inputs, strict=True):
            if name in self.unplaced:
                self.unplaced.remove(name)
                self.value_layouts[name] = ValueLayout(layout, strategy.mesh, REPLICATE)

    def _lower_layer(self, index: int, layer: Layer, dead: tuple[str, ...], first_op: int) -> Callable[[], LayerRunner]:
        """Note how the layer's outputs are laid out; how to bind it to this rank, if this rank runs it."""
        number = self.plan.layers[index].strategy
        strategy = self.plan.strategies[number]
        arrivals = tuple(self.value_layouts[name].time for name in layer.inputs)
        moves = tuple(
            (name, self.value_layouts[name].move_to(layout, strategy.mesh))
            for name, layout in zip(layer.inputs, strategy.inputs, strict=True)
        )
        lowered, keeping = self._program(layer.kind, number, strategy, arrivals)
        for name, layout, time in zip(layer.outputs, strategy.outputs, lowered.local.output_times, strict=True):
            self.value_layouts[name] = ValueLayout(layout, strategy.mesh, time)
        return lambda: self._bind(layer, strategy, lowered, keeping, moves, dead, first_op)

    def _bind(
        self,
        layer: Layer,
        strategy: LayerStrategy,
        lowered: LayerProgram,
        keeping: KeepingProgram | None,
        moves: tuple[tuple[str, tuple[Step, ...]], ...],
        dead: tuple[str, ...],
        first_op: int,
    ) -> LayerRunner:
        state = list(zip(range(len(layer.state)), layer.state, lowered.local.state_layouts, strict=True))
        roles = self.program.values
        return LayerRunner(
            layer, strategy, lowered, keeping,
            self._parameters([h for h in state if roles[h[1]].role == "parameter"], strategy.mesh, layer.name),
            tuple(
                (position, self.program.parameters[name], self._dtype(name),
                 self._from_whole(layout, strategy.mesh))
                for position, name, layout in state if roles[name].role == "buffer"
            ),
            tuple(
                (position, self._constant(name, self._from_whole(layout, strategy.mesh)))
                for position, name, layout in state if roles[name].role == "constant"
            ),
            moves, dead, first_op,
        )  # fmt: skip

    def _program(
        self, kind: int, number: int, strategy: LayerStrategy, arrivals: tuple[Placement, ...]
    ) -> tuple[LayerProgram, KeepingProgram | None]:
        key = (kind, number, arrivals)
        if key not in self.programs:
            # Simulated ranks share programs: emitting and compiling them is a quarter of a short run.
            shared = (id(self.program), kind, strategy, self.num_microbatches, arrivals)
            make = partial(self._make_program, kind, strategy, arrivals)
            lowered, keeping, _ = self.communicator.made_once(shared, make)
            self.programs[key] = lowered, keeping
        return self.programs[key]

    def _make_program(
        self, kind: int, strategy: LayerStrategy, arrivals: tuple[Placement, ...]
    ) -> tuple[LayerProgram, KeepingProgram | None, Program]:
        """A layer program with its variants, and what its identity stands for in the key, which must not be reused."""
        first = next(layer for layer in self.program.layers if layer.kind == kind)
        lowered = layer_program(
            self.program, first, strategy, self.num_microbatches, arrivals, str(self.communicator.device)
        )
        return lowered, keeping_program(lowered, compiled=self.compile_layers), self.program

    def _parameters(self, entries: list[tuple[int, str, Layout]], mesh: tuple[int, ...], layer: str) -> LayerParameters:
        names = [self.program.parameters[name] for _, name, _ in entries]
        return LayerParameters(
            self.store, names, [position for position, _, _ in entries], [layout for _, _, layout in entries],
            [self._dtype(name) for _, name, _ in entries], mesh, self.communicator, layer,
        )  # fmt: skip

    def _dtype(self, value: str) -> torch.dtype:
        """What a value is computed in; it may be stored in another dtype (mixed precision)."""
        return getattr(torch, self.program.type_of(value).dtype)

    def _from_whole(self, layout: Layout, mesh: tuple[int, ...]) -> tuple[Step, ...]:
        return reshard((REPLICATE,) * len(mesh), layout, mesh)

    def _constant(self, name: str, steps: tuple[Step, ...]) -> Callable[[], Tensor]:
        if name not in self.executable.constants:
            return partial(self.hoisted.part, name, steps)
        key = (name, steps)
        if key not in self.parts:
            whole = self.executable.constants[name].detach().to(self.communicator.device)
            self.parts[key] = apply_forward(whole, steps, self.communicator)
        return partial(self.parts.__getitem__, key)
