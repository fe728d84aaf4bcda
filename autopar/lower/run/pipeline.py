"""One step of a pipeline on this rank: what its stages compute, what crosses the cuts, what comes out.

A value crosses a cut as it lies behind the layer that put it out: this rank sends its local part to the rank with the
same place in the next stage's group, and gets the gradient of that part back.  A value that skips stages is handed on
by each.  The order of everything is the plan's schedule (`schedules.run_schedule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from autopar.errors import AutoparError
from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.failures import naming_failures
from autopar.lower.compat import call_function, edge_of, local_part_of, run_backward_from
from autopar.lower.program.split_backward import SplitBackward
from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Lies
from autopar.lower.run.microbatch import join_microbatches
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.lower.run.schedules import StageWork, backward_actions, forward_actions, run_schedule
from autopar.lower.run.step import StepGradients, release_later, spread_overflow, trained_parameters
from autopar.program import Program
from autopar.schedule import Action, ScheduleActions

__all__ = ["run_pipeline"]


def run_pipeline(executor: Executor, tensors: Sequence[Tensor], base_seed: int) -> dict[str, Tensor]:
    """Run one step; every rank calls it with the whole batch.

    With a loss in the program, under grad mode, the backward passes run here as well, and the loss carries their
    gradients.  Without one all outputs are differentiable, and their backward runs the other half of the schedule.

    Returns:
        The loss, or without one all outputs, whole and on every rank; of other outputs and of updates the local parts,
        on the group of the stage that computes them.
    """
    program, plan = executor.executable.program, executor.executable.plan
    actions = schedule_actions(plan.schedule, plan.num_groups, len(plan.stages), plan.num_microbatches)
    # Decided by what all ranks know: this one may have nothing to train.
    is_trained = program.values[program.loss].requires_grad if program.loss else _any_requires_grad(executor)
    if not (torch.is_grad_enabled() and is_trained):
        step = _PipelineStep(executor, tensors, base_seed, None)
        with torch.no_grad():
            step.run(forward_actions(actions))
        found = step.results(_returned(executor))
        step.close()
        return found
    gradients = StepGradients(executor, split=_split_layers(executor, actions))
    with naming_failures(executor.stages.who, "the gathers of parameters before a step"):
        gradients.open_layers_for_step()
    step = _PipelineStep(executor, tensors, base_seed, gradients)
    if not program.loss:
        return _run_under_autograd(step, actions)
    with torch.enable_grad():
        step.run(actions)
    found = step.results(_returned(executor))
    parameters = trained_parameters(executor)
    released = step.gradients_of(list(parameters))
    # A scale of 1 can't be told from no scaler; whoever computes in float16 has one.
    is_half = any(value.type.dtype == "float16" for value in program.values.values())
    found[program.loss] = release_later(
        found[program.loss], released, list(parameters.values()), step.spread_overflow, is_scaled=is_half
    )
    step.close()
    return found


def _any_requires_grad(executor: Executor) -> bool:
    program = executor.executable.program
    return any(program.values[name].requires_grad for name in program.outputs)


def _returned(executor: Executor) -> tuple[str, ...]:
    """The outputs that every rank gets."""
    program = executor.executable.program
    return (program.loss,) if program.loss else tuple(dict.fromkeys(program.outputs))


def _influences(program: Program, results: Iterable[str]) -> Set[str]:
    """The values, parameters among them, from which a gradient of `results` flows to what is trained."""
    found = {name for name in results if name and program.values[name].requires_grad}
    for layer in reversed(program.layers):
        for op in reversed(layer.ops):
            if not found.isdisjoint(op.results):
                found.update(name for name in op.operands if program.values[name].requires_grad)
    return found


def _split_layers(executor: Executor, actions: ScheduleActions) -> frozenset[int]:
    """The layers of this rank whose backward runs in two parts.

    A stage with a layer that is run again as a whole, or that gathers its parameters anew, would do that for either
    part: there the first part does everything.
    """
    stages = executor.stages
    if not any(action.kind == "I" for action in actions[stages.group]):
        return frozenset()
    found: set[int] = set()
    for stage in stages.own_stages:
        strategies = [executor.runners[index].strategy for index in stages.ranges[stage]]
        if all(strategy.splits_backward for strategy in strategies):
            found.update(stages.ranges[stage])
    return frozenset(found)


@dataclass
class _Passing:
    """One microbatch in one stage, from its forward to the end of its backward.

    Args:
        arrived: what came from the stage before, as leaves.
        outputs: what the next stage gets, outside autograd.
        roots: where the gradients of what the next stage, or the caller, gets enter the graph.
        gradients: of `arrived`, when backward has them.
        split: the second part of the backward, if it is still to be run.
    """

    arrived: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    roots: dict[str, GradientEdge] = field(default_factory=dict[str, GradientEdge])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    split: SplitBackward | None = None


class _PipelineStep:
    """One step: its stages on this rank, and what they leave."""

    def __init__(
        self, executor: Executor, tensors: Sequence[Tensor], base_seed: int, gradients: StepGradients | None
    ) -> None:
        self.executor = executor
        self.tensors = tensors
        self.base_seed = base_seed
        self.gradients = gradients
        self.works = {stage: _StageWork(self, stage) for stage in executor.stages.own_stages}
        # Per microbatch, by name: what the caller gets.
        self.found: list[dict[str, Tensor]] = [{} for _ in range(executor.num_microbatches)]
        self.sent: list[tuple[Action, Handle]] = []
        # Gradients of whole outputs of the whole batch, where the loss is not in the program.
        self.output_gradients: Mapping[str, Tensor] = {}
        # The values that get a gradient in this step; every rank knows them alike.
        self.differentiated = _influences(executor.executable.program, [executor.executable.program.loss])

    def run(self, actions: ScheduleActions) -> None:
        """Run this rank's part of `actions`."""
        stages = self.executor.stages
        run_schedule(actions, stages.group, self.works, rank=stages.rank)
        for action, handle in self.sent:
            with naming_failures(stages.who, action):
                handle.wait()
        self.sent.clear()

    def results(self, everywhere: Sequence[str]) -> dict[str, Tensor]:
        """What the stages of this rank put out, joined over microbatches; and those of `everywhere` from all ranks."""
        executor = self.executor
        inputs = zip(executor.executable.program.inputs, self.tensors, strict=True)
        found = {name: x for name, x in inputs if name in executor.kept and name not in executor.stages.stage_of}
        for name in tuple(self.found[0]):
            parts = [each.pop(name) for each in self.found]
            found[name] = join_microbatches(executor, name, parts, are_whole=name in everywhere)
        for name in everywhere:
            found[name] = self.executor.share_across_groups(name, found.get(name))
        return found

    def gradients_of(self, names: Sequence[str]) -> list[Any]:
        """The step's gradient of each of these (untied) parameters of this rank, summed over groups that share it."""
        executor = self.executor
        assert self.gradients is not None
        trained = trained_parameters(executor)
        who = executor.stages.who
        with naming_failures(who, "the reduction of gradients at the end of the step"):
            found = dict(zip(trained, self.gradients.gradients(trained), strict=True))
        program = executor.executable.program
        differentiated = {program.parameters[x] for x in self.differentiated if x in program.parameters}
        for name in sorted(differentiated & found.keys()):
            groups = executor.store.stored[name].groups
            if len(groups) > 1:
                own = found[name]
                local = local_part_of(trained[name] if own is None else own)
                local = torch.zeros_like(local) if own is None else local
                with naming_failures(who, f"the exchange of the gradients of {name!r}"):
                    found[name] = executor.store.wrap(name, self._sum_over_groups(local, groups))
        return [found[name] for name in names]

    def close(self) -> None:
        """Let go of all that the step held.  Its stages and itself refer to each other, so that nobody else would until
        Python looks for cycles, and the next step would find the outputs and gradients of this one in memory.
        """
        self.works.clear()
        self.found.clear()
        self.gradients = None

    def spread_overflow(self, gradients: Sequence[Tensor | None]) -> None:
        """See `step.spread_overflow`."""
        talk, stages = self.executor.communicator, self.executor.stages
        with naming_failures(stages.who, "the search for overflows in all stages"):
            spread_overflow(gradients, lambda flag: talk.all_reduce(flag.to(talk.device), stages.axis, "max"))

    def _sum_over_groups(self, x: Tensor, groups: Sequence[int]) -> Tensor:
        """The sum of the tensors that these groups have here, in their order: the same bits on each.

        Of each pair the lower one sends first: NCCL runs the messages of a pair in one order, both directions together.
        """
        talk, stages = self.executor.communicator, self.executor.stages
        sent: list[Handle] = []
        came: dict[int, Handle] = {}
        for other in groups:
            if stages.group < other:
                sent.append(talk.start_send(x, stages.axis, other))
            if stages.group != other:
                came[other] = talk.start_receive(tuple(x.shape), x.dtype, stages.axis, other)
            if stages.group > other:
                sent.append(talk.start_send(x, stages.axis, other))
        terms = [x if group == stages.group else came[group].wait() for group in groups]
        for handle in sent:
            handle.wait()
        total = terms[0].clone()
        for term in terms[1:]:
            total.add_(term)
        return total


class _StageWork(StageWork):
    """What the actions of one stage do; see `schedules.StageWork`."""

    def __init__(self, step: _PipelineStep, stage: int) -> None:
        self._step = step
        self._executor = step.executor
        self._stage = stage
        stages = step.executor.stages
        self._arriving = step.executor.arriving[stage]
        is_last = stage == len(stages.ranges) - 1
        self._leaving: dict[str, Lies] = {} if is_last else step.executor.arriving[stage + 1]
        self._passing: dict[int, _Passing] = {}
        self._waiting: dict[tuple[int, str], dict[str, Handle]] = {}
        layers = stages.ranges[stage]
        gradients = step.gradients
        self._splits = gradients is not None and gradients.is_split(layers)

    # --- forward

    def receive_forward(self, microbatch: int) -> None:
        """Start receiving what crosses the cut before this stage."""
        self._waiting[microbatch, "F"] = self._start_receiving(self._arriving, self._stage - 1)

    def take_forward(self, microbatch: int, previous: StageWork) -> None:
        """Take it from the stage before, which runs on this rank, too."""
        assert isinstance(previous, _StageWork)
        self._waiting[microbatch, "F"] = previous.hand_over_outputs(microbatch)

    def hand_over_outputs(self, microbatch: int) -> dict[str, Handle]:
        """What `send_forward` would send."""
        passing = self._passing[microbatch]
        ready, passing.outputs = passing.outputs, {}
        return {name: _ready(value) for name, value in ready.items()}

    def forward(self, microbatch: int) -> None:
        """Run the stage's layers."""
        executor, step = self._executor, self._step
        stages = executor.stages
        handles = self._waiting.pop((microbatch, "F"), {})
        passing = _Passing({name: self._leaf(name, handle.wait()) for name, handle in handles.items()})
        values: dict[str, Tensor] = dict(zip(executor.executable.program.inputs, step.tensors, strict=True))
        values |= passing.arrived
        open_layer = step.gradients.open_layer if step.gradients else None
        executor.run_layers(stages.ranges[self._stage], values, step.base_seed, microbatch, open_layer)
        for name in self._leaving:
            passing.outputs[name] = values[name].detach()
            self._add_root(passing, name, values[name])
        executor.update_buffers_of_microbatch(
            {n: x for n, x in values.items() if stages.stage_of.get(n) == self._stage}
        )
        for name in executor.kept:
            if stages.stage_of.get(name) == self._stage:
                step.found[microbatch][name] = self._finish(passing, name, values[name])
        self._passing[microbatch] = passing

    def _leaf(self, name: str, value: Tensor) -> Tensor:
        program = self._executor.executable.program
        has_gradient = self._step.gradients is not None and program.values[name].requires_grad
        return value.detach().requires_grad_() if has_gradient else value

    def _finish(self, passing: _Passing, name: str, value: Tensor) -> Tensor:
        """What is kept of an output, and if a gradient may come for it, where it enters."""
        program = self._executor.executable.program
        if name == program.loss or (not program.loss and name in program.outputs):
            whole = self._executor.make_whole(name, value)
            self._add_root(passing, f"returned {name}", whole)
            # Without a loss the caller differentiates: other outputs are whole as well.
            return whole.detach()
        return value.detach()

    def _add_root(self, passing: _Passing, name: str, value: Tensor) -> None:
        if self._step.gradients is not None and value.requires_grad:
            passing.roots[name] = edge_of(value)

    def send_forward(self, microbatch: int) -> None:
        """Send what crosses the cut behind this stage."""
        passing = self._passing[microbatch]
        self._send(passing.outputs, self._stage + 1, Action(self._stage, "SEND_F", microbatch))
        passing.outputs = {}

    # --- backward

    def receive_backward(self, microbatch: int) -> None:
        """Start receiving the gradients of what this stage sent."""
        wanted = {name: lies for name, lies in self._leaving.items() if name in self._step.differentiated}
        self._waiting[microbatch, "B"] = self._start_receiving(wanted, self._stage + 1)

    def take_backward(self, microbatch: int, following: StageWork) -> None:
        """Take them from the next stage, which runs on this rank, too."""
        assert isinstance(following, _StageWork)
        self._waiting[microbatch, "B"] = following.hand_over_gradients(microbatch)

    def hand_over_gradients(self, microbatch: int) -> dict[str, Handle]:
        """What `send_backward` would send."""
        passing = self._passing[microbatch]
        ready, passing.gradients = passing.gradients, {}
        return {name: _ready(gradient) for name, gradient in ready.items()}

    def backward(self, microbatch: int) -> None:
        """The whole backward."""
        passing, roots, gradients = self._begin_backward(microbatch)
        if self._splits:
            split = SplitBackward(roots, gradients, self._differentiable(passing), self._leaves())
            self._keep_gradients(passing, split.inputs())
            split.parameters()
        else:
            if roots:
                run_backward_from(roots, gradients)
            self._keep_gradients(passing, [leaf.grad for leaf in self._differentiable(passing)])
        self._finish_backward(microbatch)

    def backward_inputs(self, microbatch: int) -> None:
        """The part of the backward that the stage before waits for."""
        if not self._splits:
            self.backward(microbatch)
            return
        passing, roots, gradients = self._begin_backward(microbatch)
        passing.split = SplitBackward(roots, gradients, self._differentiable(passing), self._leaves())
        self._keep_gradients(passing, passing.split.inputs())

    def backward_weights(self, microbatch: int) -> None:
        """The rest of it."""
        split = self._passing[microbatch].split
        if split is not None:
            split.parameters()
            self._passing[microbatch].split = None
            self._finish_backward(microbatch)

    def send_backward(self, microbatch: int) -> None:
        """Send the gradients of what came from the stage before."""
        passing = self._passing[microbatch]
        self._send(passing.gradients, self._stage - 1, Action(self._stage, "SEND_B", microbatch))
        passing.gradients = {}

    def _begin_backward(self, microbatch: int) -> tuple[_Passing, list[GradientEdge], list[Tensor]]:
        passing = self._passing[microbatch]
        came = {name: handle.wait() for name, handle in self._waiting.pop((microbatch, "B"), {}).items()}
        came |= {f"returned {name}": g for name, g in self._gradients_from_caller(microbatch).items()}
        pairs = [(edge, came[name]) for name, edge in passing.roots.items() if name in came]
        passing.roots = {}
        return passing, [edge for edge, _ in pairs], [gradient for _, gradient in pairs]

    def _gradients_from_caller(self, microbatch: int) -> dict[str, Tensor]:
        program = self._executor.executable.program
        if program.loss:
            loss = self._step.found[microbatch].get(program.loss)
            return {} if loss is None else {program.loss: torch.ones_like(loss)}
        found: dict[str, Tensor] = {}
        for name, gradient in self._step.output_gradients.items():
            time = self._executor.lies[name].time
            if time.is_shard:
                gradient = gradient.chunk(self._executor.num_microbatches, time.dim)[microbatch]
            found[name] = gradient
        return found

    def _differentiable(self, passing: _Passing) -> list[Tensor]:
        return [x for x in passing.arrived.values() if x.requires_grad]

    def _leaves(self) -> list[Tensor]:
        assert self._step.gradients is not None
        found = [self._step.gradients.leaves(index) for index in self._executor.stages.ranges[self._stage]]
        return [leaf for leaves in found for leaf in leaves]

    def _keep_gradients(self, passing: _Passing, gradients: Sequence[Tensor | None]) -> None:
        """Zeros where autograd finds none in spite of all, so that every rank sends what its peer awaits."""
        leaves = {name: x for name, x in passing.arrived.items() if x.requires_grad}
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            if name in self._step.differentiated:
                passing.gradients[name] = torch.zeros_like(leaf) if gradient is None else gradient
        passing.arrived = {}

    def _finish_backward(self, microbatch: int) -> None:
        assert self._step.gradients is not None
        self._step.gradients.finish_microbatch(self._executor.stages.ranges[self._stage])

    # --- sending and receiving

    def _send(self, tensors: Mapping[str, Tensor], stage: int, action: Action) -> None:
        stages, step = self._executor.stages, self._step
        step.sent = [
            (before, handle) for before, handle in step.sent if not handle.is_done()
        ]  # they hold what was sent
        for tensor in tensors.values():
            handle = self._executor.communicator.start_send(tensor, stages.axis, stages.groups[stage])
            step.sent.append((action, handle))

    def _start_receiving(self, wanted: Mapping[str, Lies], stage: int) -> dict[str, Handle]:
        executor = self._executor
        program, axis = executor.executable.program, executor.stages.axis
        found: dict[str, Handle] = {}
        for name, lies in wanted.items():
            shape = lies.local_shape(program.type_of(name).shape, executor.num_microbatches)
            dtype: torch.dtype = getattr(torch, program.type_of(name).dtype)
            source = executor.stages.groups[stage]
            found[name] = executor.communicator.start_receive(shape, dtype, axis, source)
        return found


def _ready(x: Tensor) -> Handle:
    return Handle(lambda: x)


# --- without a loss in the program


def _run_under_autograd(step: _PipelineStep, actions: ScheduleActions) -> dict[str, Tensor]:
    """The forward half now; the backward half when the caller's loss asks for it."""
    executor = step.executor
    names = [n for n in _returned(executor) if executor.executable.program.values[n].requires_grad]
    with torch.enable_grad():
        step.run(forward_actions(actions))
    found = step.results(_returned(executor))
    later = _BackwardHalf(step, names, backward_actions(actions))
    anchor = torch.zeros((), device=executor.communicator.device, requires_grad=True)
    outputs = [found[name] for name in names]
    parameters = trained_parameters(executor)
    later.parameters = list(parameters)
    made = call_function(_Outputs, later, len(names), anchor, *outputs, *parameters.values())
    return found | dict(zip(names, made, strict=True))


@dataclass
class _BackwardHalf:
    """The backward actions of a step whose loss is the caller's; run once."""

    step: _PipelineStep
    names: Sequence[str]
    actions: ScheduleActions
    parameters: Sequence[str] = ()
    has_run: bool = False

    def run(self, gradients: Sequence[Tensor | None]) -> list[Any]:
        """The gradients of the parameters when these are those of the outputs."""
        if self.has_run:
            raise AutoparError(
                "backward() has already run through the stages of this forward pass: call the model again before each "
                "backward(), or add the losses up and call it once"
            )
        self.has_run = True
        given = zip(self.names, gradients, strict=True)
        self.step.output_gradients = {name: g for name, g in given if g is not None}
        program = self.step.executor.executable.program
        self.step.differentiated = _influences(program, self.step.output_gradients)
        self.step.run(self.actions)
        found = self.step.gradients_of(self.parameters)
        self.step.spread_overflow(found)  # whether they are scaled can't be seen here
        self.step.close()
        return found


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, later: _BackwardHalf, count: int, anchor: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        ctx.later = later
        ctx.count = count
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in rest[:count])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        return None, None, None, *(None,) * ctx.count, *ctx.later.run(gradients)
