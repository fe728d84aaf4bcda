"""One step of one rank: does what the actions of its device group say (`autopar.step.actions`), one after the other.

There is no other order of things than this list, with and without pipeline stages, in one and in many microbatches: the
same list is what the simulation times and what memory is predicted from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.lower.communication.failures import naming_failures
from autopar.lower.compat import dtensor_like, edge_of, run_backward_from
from autopar.lower.kernels.random import RandomState
from autopar.lower.parameters.layer_parameters import StepParameters, add_gradient
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.run.boundary_exchange import BoundaryExchange
from autopar.lower.run.execution import Executor
from autopar.lower.run.layer_pass import LayerPass, StageValues
from autopar.program import Program
from autopar.schedule import Action
from autopar.step.actions import LayerAction, StepActions

__all__ = ["BACKWARD", "FORWARD", "Step", "trained_parameters"]

FORWARD = frozenset({"F", "SEND_F", "RECV_F"})
BACKWARD = frozenset({"B", "I", "W", "SEND_B", "RECV_B"})
_NO_ACTION = Action(-1, "", -1)  # before the first and behind the last


def trained_parameters(executor: Executor) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for runner in executor.runners.values():
        for name, parameter in zip(runner.parameters.names, runner.parameters.current(), strict=True):
            if parameter.requires_grad:
                found.setdefault(id(parameter), (name, parameter))
    return dict(found.values())


class Step:
    """The state of one step: parameters, and what every microbatch has in every stage of this rank.

    Attributes:
        found: per microbatch, the values that the caller or an update gets, as this rank has them.
        differentiable: those of them that a gradient can come for.
        differentiable_inputs: the program's inputs that require a gradient, by value name.
    """

    def __init__(self, executor: Executor, actions: StepActions, tensors: Sequence[Tensor], base_seed: int) -> None:
        """Nothing has run; `tensors` are the whole batch on every rank."""
        self.executor = executor
        self.actions = actions
        self.found: list[dict[str, Tensor]] = [{} for _ in range(executor.num_microbatches)]
        self.differentiable: set[str] = set()
        self._inputs = dict(zip(executor.executable.program.inputs, tensors, strict=True))
        self.differentiable_inputs = {name: x for name, x in self._inputs.items() if x.requires_grad}
        self._input_gradients: dict[str, Tensor] = {}
        self._base_seed = base_seed
        self._parameters = {index: self._of_layer(index) for index in executor.runners}
        self._values: dict[tuple[int, int], StageValues] = {}
        self._passes: dict[tuple[int, int], LayerPass] = {}
        self._returned: dict[tuple[str, int], tuple[Tensor, GradientEdge]] = {}
        self._boundaries = BoundaryExchange(executor)
        # Of what the caller differentiates, by name: set when it is known.
        self._given: Mapping[str, Tensor] = {}
        self._differentiated: Set[str] = frozenset()
        self._keeps_graph = self._has_kept_graph = False

    def _of_layer(self, index: int) -> StepParameters:
        runner, policy = self.executor.runners[index], self.actions.policies[index]
        adds_up = not (self.actions.is_single or policy.reduces_each)
        return StepParameters(runner.parameters, frees=policy.unshards_each, adds_up=adds_up)

    # --- the list

    def begin(self) -> None:
        """What comes before the first action."""
        with self.naming("the gathers of parameters before a step"):
            self._perform(self.actions.begin(self.executor.stages.group))

    def run(self, kinds: Collection[str]) -> None:
        """Run the actions of these kinds, in order."""
        for action in self.actions.listed[self.executor.stages.group]:
            if action.kind in kinds:
                with self.naming(action):
                    self._run(action)
        self._boundaries.wait()

    def run_backward(self, gradients: Mapping[str, Tensor], *, keep_graph: bool = False) -> None:
        """Run the backward actions.

        Args:
            gradients: of `found` values over all microbatches, of the loss for instance.
            keep_graph: they may come once more.
        """
        self.expect(gradients)
        self._keeps_graph = keep_graph
        self._has_kept_graph |= keep_graph
        self.run(BACKWARD)

    def expect(self, gradients: Mapping[str, Tensor]) -> None:
        """The gradients of returned values that backward actions begin with; every rank knows the same names."""
        self._given = gradients
        self._differentiated = _influences(self.executor.executable.program, gradients)

    def end(self) -> None:
        """What comes behind the last action."""
        with self.naming("the reduction of gradients at the end of the step"):
            self._perform(self.actions.end(self.executor.stages.group))
        if self.executor.stopwatch is not None:
            self.executor.stopwatch.optimizer()

    def results(self) -> dict[str, Tensor]:
        """`found`, joined over microbatches, what is whole from all device groups; it can be taken once."""
        executor = self.executor
        results = {name: self._inputs[name] for name in executor.kept if name in self._inputs}
        for name in tuple(self.found[0]):
            results[name] = executor.join_microbatches(name, [each.pop(name) for each in self.found])
        for name in executor.returned_whole:
            results[name] = executor.share_across_groups(name, results.get(name))
        return results

    def gradients(self) -> dict[str, Tensor]:
        """The step's gradient of each parameter of this rank as far as one came, as DTensors, and those of the
        program's inputs that require one; they can be taken once.

        What several device groups read is not summed over them yet.
        """
        trained = trained_parameters(self.executor)
        names = {id(parameter): name for name, parameter in trained.items()}
        found: dict[str, Tensor | None] = {}
        for parameters in self._parameters.values():
            for parameter, gradient in zip(parameters.layer.current(), parameters.gradients, strict=True):
                if id(parameter) in names:
                    name = names[id(parameter)]
                    found[name] = add_gradient(found.get(name), gradient)
            parameters.gradients = [None] * len(parameters.gradients)
        inputs, self._input_gradients = self._input_gradients, {}
        return inputs | {name: _like(trained[name], local) for name, local in found.items() if local is not None}

    def is_differentiated(self, value: str) -> bool:
        """Whether a gradient flows to this value in this step: all ranks know that alike."""
        return value in self._differentiated

    def naming(self, what: Action | str) -> AbstractContextManager[None]:
        """With stages, failures inside name the rank and `what` it did."""
        stages = self.executor.stages
        return naming_failures(stages.who, what) if stages.is_pipeline else nullcontext()

    def _run(self, action: Action) -> None:
        match action.kind:
            case "SEND_F":
                self._send_forward(action)
            case "RECV_F":
                self._boundaries.receive(action, self.executor.arriving[action.stage])
            case "SEND_B":
                self._send_backward(action)
            case "RECV_B":
                self._boundaries.receive(action, self._differentiated_of(action.stage + 1))
            case "F":
                self._begin_forward(action)
                self._perform(self.actions.of(action), action)
                self._end_forward(action)
            case "B" | "I":
                self._begin_backward(action)
                self._perform(self.actions.of(action), action)
                self._end_backward(action)
            case _:  # W
                self._perform(self.actions.of(action), action)
        if self.executor.stopwatch is not None:
            self.executor.stopwatch.pause()

    def _perform(self, actions: Iterable[LayerAction], action: Action = _NO_ACTION) -> None:
        for kind, layer in actions:
            parameters = self._parameters[layer]
            match kind:
                case "UNSHARD":
                    parameters.unshard()
                case "WAIT_UNSHARD":
                    parameters.copies()
                case "RESHARD":
                    self._reshard(layer)
                case "REDUCE":
                    parameters.start_reduce()
                case "WAIT_REDUCE":
                    parameters.finish_reduce()
                case "F":
                    self._forward(layer, action)
                case "B":
                    self._backward(layer, action)
                case "I":
                    self._backward_inputs(layer, action)
                case _:  # W
                    self._backward_weights(layer, action)

    # --- layers

    def _forward(self, layer: int, action: Action) -> None:
        executor = self.executor
        runner, values = executor.runners[layer], self._values[action.stage, action.microbatch]
        if executor.stopwatch is not None:
            executor.stopwatch.forward(layer, action.microbatch)
        random = (
            RandomState(self._base_seed, executor.communicator.device, action.microbatch)
            if executor.is_random
            else None
        )
        context = LayerContext(executor.communicator, action.microbatch, runner.first_op, random)
        layer_pass = LayerPass(runner, self._parameters[layer], values, context)
        if torch.is_grad_enabled():
            self._passes[layer, action.microbatch] = layer_pass
        for name in runner.dead:
            values.tensors.pop(name, None)

    def _backward(self, layer: int, action: Action) -> None:
        values = self._values[action.stage, action.microbatch]
        layer_pass = self._pass(layer, action, values)
        if layer_pass is not None:
            layer_pass.backward(values, keep_graph=self._keeps_graph, keep_rest=self._has_kept_graph)
            if layer_pass.is_over:
                del self._passes[layer, action.microbatch]

    def _backward_inputs(self, layer: int, action: Action) -> None:
        values = self._values[action.stage, action.microbatch]
        self._mark_backward(layer, action)
        self._passes[layer, action.microbatch].backward_inputs(values)

    def _backward_weights(self, layer: int, action: Action) -> None:
        self._mark_backward(layer, action)
        self._passes.pop((layer, action.microbatch)).backward_weights()

    def _pass(self, layer: int, action: Action, values: StageValues) -> LayerPass | None:
        """The forward whose backward is to run, None if no gradient came for it."""
        self._mark_backward(layer, action)
        key = layer, action.microbatch
        found = self._passes.get(key)
        if found is None or not found.needs(values.gradients):
            came = [
                name
                for name in self.executor.runners[layer].layer.outputs
                if values.gradients.pop(name, None) is not None
            ]
            if found is None and came:
                raise AutoparError(
                    "backward() has already run through this forward pass: call the model again before each "
                    "backward(), add the losses up and call it once, or pass retain_graph=True"
                )
            return None
        return found

    def _mark_backward(self, layer: int, action: Action) -> None:
        if self.executor.stopwatch is not None:
            self.executor.stopwatch.backward(layer, action.microbatch)

    def _reshard(self, layer: int) -> None:
        parameters = self._parameters[layer]
        # Leaves that a graph of this step still ends in collect gradients.
        if parameters.frees or not any((layer, number) in self._passes for number in range(len(self.found))):
            parameters.reshard()

    # --- stages

    def _begin_forward(self, action: Action) -> None:
        arrived = self._arrived(action)
        inputs = {name for name, x in self._inputs.items() if x.requires_grad}
        program = self.executor.executable.program
        differentiable = inputs | {name for name in arrived if program.values[name].requires_grad}
        self._values[action.stage, action.microbatch] = StageValues({**self._inputs, **arrived}, differentiable)

    def _arrived(self, action: Action) -> Mapping[str, Tensor]:
        """What crosses the cut before this stage: received, or from the stage before if this rank runs it, too."""
        stage, microbatch = action.stage, action.microbatch
        before = self._values.get((stage - 1, microbatch))
        if before is None:
            return self._boundaries.received(Action(stage, "RECV_F", microbatch))
        return {name: before.tensors.pop(name) for name in self.executor.arriving[stage]}

    def _end_forward(self, action: Action) -> None:
        executor, stages = self.executor, self.executor.stages
        values = self._values[action.stage, action.microbatch]
        own = {name: x for name, x in values.tensors.items() if stages.stage_of.get(name) == action.stage}
        executor.update_buffers_of_microbatch(own)
        found = self.found[action.microbatch]
        for name in executor.kept:
            if name in own:
                found[name] = self._return(name, action, values)
                if name in values.differentiable:
                    self.differentiable.add(name)
        leaving = executor.arriving[action.stage + 1] if action.stage + 1 < len(stages.ranges) else {}
        values.tensors = {name: values.tensors[name] for name in leaving}

    def _return(self, name: str, action: Action, values: StageValues) -> Tensor:
        """What is kept of an output: what every rank gets is made whole, and its gradient will come whole."""
        value = values.tensors[name]
        if name not in self.executor.returned_whole:
            return value
        if name not in values.differentiable or not torch.is_grad_enabled():
            return self.executor.make_whole(name, value).detach()
        leaf = value.detach().requires_grad_()
        whole = self.executor.make_whole(name, leaf)
        self._returned[name, action.microbatch] = leaf, edge_of(whole)
        return whole.detach()

    def _begin_backward(self, action: Action) -> None:
        """What comes from the next stage and from the caller."""
        stage, microbatch = action.stage, action.microbatch
        values = self._values[stage, microbatch]
        following = self._values.get((stage + 1, microbatch))
        if following is not None:
            for name in self.executor.arriving[stage + 1]:
                values.add_gradient(name, following.gradients.pop(name, None))
        for name, gradient in self._boundaries.received(Action(stage, "RECV_B", microbatch)).items():
            values.add_gradient(name, gradient)
        for name, gradient in self._given.items():
            if self.executor.stages.stage_of.get(name) == stage:
                values.add_gradient(name, self._gradient_of_returned(name, microbatch, gradient))

    def _gradient_of_returned(self, name: str, microbatch: int, gradient: Tensor) -> Tensor | None:
        """One microbatch's part of the gradient of a value that the caller got."""
        time = self.executor.lies[name].time
        if time.is_shard and self.executor.num_microbatches > 1:
            gradient = gradient.chunk(self.executor.num_microbatches, time.dim)[microbatch]
        if (name, microbatch) not in self._returned:
            return gradient
        leaf, edge = self._returned[name, microbatch]
        if not self._keeps_graph:
            del self._returned[name, microbatch]
        run_backward_from([edge], [gradient], keep_graph=True)
        found, leaf.grad = leaf.grad, None
        return found

    def _end_backward(self, action: Action) -> None:
        values = self._values[action.stage, action.microbatch]
        for name in self._inputs:
            if name in values.gradients:
                before = self._input_gradients.get(name)
                gradient = values.gradients.pop(name)
                self._input_gradients[name] = gradient if before is None else before + gradient

    # --- between stages

    def _send_forward(self, action: Action) -> None:
        tensors = self._values[action.stage, action.microbatch].tensors
        self._boundaries.send(action, [tensors.pop(name) for name in self.executor.arriving[action.stage + 1]])

    def _send_backward(self, action: Action) -> None:
        """Zeros where autograd finds none in spite of all, so that every rank sends what its peer awaits."""
        gradients = self._values[action.stage, action.microbatch].gradients
        found = {name: gradients.pop(name, None) for name in self._differentiated_of(action.stage)}
        self._boundaries.send(action, [self._boundaries.zeros(n) if x is None else x for n, x in found.items()])

    def _differentiated_of(self, stage: int) -> list[str]:
        """The values that cross the cut before this stage whose gradients come back."""
        return [name for name in self.executor.arriving[stage] if name in self._differentiated]


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    return dtensor_like(local, parameter) if isinstance(parameter, DTensor) else local


def _influences(program: Program, results: Iterable[str]) -> Set[str]:
    """The values, parameters among them, from which a gradient of `results` flows to what is trained."""
    found = {name for name in results if name and program.values[name].requires_grad}
    for layer in reversed(program.layers):
        for op in reversed(layer.ops):
            if not found.isdisjoint(op.results):
                found.update(name for name in op.operands if program.values[name].requires_grad)
    return found
