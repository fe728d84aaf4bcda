"""One step of one rank: runs the actions of its device group (`autopar.step.simulation.actions`) in order.

There is no other order of things than this list, with and without pipeline stages, in one and in many microbatches: the
same list is what the simulation times and what memory is predicted from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, PlanMismatchError
from autopar.lower.communication.failures import naming_failures
from autopar.lower.compat import dtensor_like, local_part_of
from autopar.lower.kernels.random import RandomState
from autopar.lower.parameters.layer_parameters import StepParameters
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.offloading import OffloadedTensors
from autopar.lower.run.execution import Executor
from autopar.lower.run.layer_pass import LayerPass
from autopar.lower.run.step_values import StageValues, StepValues
from autopar.program import Program
from autopar.schedules.action_lists import Action
from autopar.step.simulation.actions import LayerAction, StepActions

__all__ = ["BACKWARD", "FORWARD", "StepRunner", "trained_elsewhere", "trained_parameters"]

FORWARD = frozenset({"F", "SEND_F", "RECV_F"})
BACKWARD = frozenset({"B", "I", "W", "SEND_B", "RECV_B"})
_NO_ACTION = Action(-1, "", -1)  # before the first and behind the last


def trained_parameters(executor: Executor) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, each once.

    Raises:
        PlanMismatchError: one of them was frozen when stages were planned, so that no gradient is sent to it.
    """
    trained: dict[int, tuple[str, nn.Parameter]] = {}
    for runner in executor.runners.values():
        for name, parameter in zip(runner.parameters.names, runner.parameters.current(), strict=True):
            if parameter.requires_grad:
                trained.setdefault(id(parameter), (name, parameter))
    for name, parameter in _held_in_common(executor):  # in calls of other forms other groups may read it
        if parameter.requires_grad:
            trained.setdefault(id(parameter), (name, parameter))
    named = dict(trained.values())
    if executor.stages.is_pipeline:
        _check_trained(executor.executable.program, named.keys() | trained_elsewhere(executor).keys())
    return named


def _held_in_common(executor: Executor) -> list[tuple[str, Any]]:
    """The parameters that this rank's device group and others hold: all of these get the sum of their gradients."""
    stages, store = executor.stages, executor.store
    if not stages.is_pipeline:
        return []
    names = dict.fromkeys(store.first_name.get(name, name) for name in store.stored)
    groups = {name: store.stored[name].groups for name in names if name in store.stored}
    common = [name for name, each in groups.items() if len(each) > 1 and stages.group in each]
    return [(name, table[last]) for name in common for table, last in [store.slot(name)]]


def trained_elsewhere(executor: Executor) -> dict[str, Tensor]:
    """The parameters of other pipeline stages that get gradients there; those of this rank have no elements."""
    stages, store = executor.stages, executor.store
    if not stages.is_pipeline:
        return {}
    return store.trained_elsewhere([store.first_name.get(name, name) for name in stages.holders], stages.group)


def _check_trained(program: Program, trained: Set[str]) -> None:
    thawed = sorted(trained & set(program.frozen)) if program.training else []
    if thawed:
        raise PlanMismatchError(
            f"parameter {thawed[0]!r} requires a gradient, but was frozen when the model was parallelized, and the "
            "pipeline stages of this plan send no gradients to it. Freeze it after parallelize instead of before "
            "(requires_grad_() may then be called at any time), or plan with the constraint 'pipeline=1'"
        )


class StepRunner:
    """The state of one step: parameters, and what every microbatch has in every stage of this rank.

    Attributes:
        executor: of the layers that it runs.
        actions: what it does.
        values: what goes through the layers.
        trained: the parameters that get gradients, by name.
        trained_elsewhere: those of other stages.
        has_kept_graph: whether a backward ran that another one may follow.
    """

    def __init__(
        self, executor: Executor, actions: StepActions, inputs: Sequence[Sequence[Tensor]], base_seed: int
    ) -> None:
        """Nothing has run; `inputs` are as in `StepValues`."""
        self.executor = executor
        self.actions = actions
        self.values = StepValues(executor, inputs)
        self._base_seed = base_seed
        self._parameters = {index: self._of_layer(index) for index in executor.runners}
        self._passes: dict[tuple[int, int], LayerPass] = {}
        self.trained = trained_parameters(executor)
        self.trained_elsewhere = trained_elsewhere(executor)
        self._names = {id(parameter): name for name, parameter in self.trained.items()}
        self._gradients: dict[str, Tensor] = {}  # local parts
        self._reductions = dict.fromkeys(executor.runners, 0)  # since gradients were taken
        self._sent: set[str] = set()  # those that are in the host's memory, or on their way
        self._keeps_graph = False
        self.has_kept_graph = False

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
        self.values.wait_for_sends()

    def run_backward(self, gradients: dict[str, Tensor], *, keep_graph: bool = False) -> None:
        """Run the backward actions with these gradients of what the caller got; see `StepValues.expect`."""
        self.values.expect(gradients, keep_graph=keep_graph)
        self._keeps_graph = keep_graph
        self.has_kept_graph |= keep_graph
        self.run(BACKWARD)

    def end(self) -> None:
        """What comes behind the last action."""
        with self.naming("the reduction of gradients at the end of the step"):
            self._perform(self.actions.end(self.executor.stages.group))
        if self.executor.stopwatch is not None:
            self.executor.stopwatch.optimizer()

    def gradients(self) -> dict[str, Tensor]:
        """The step's gradient of each parameter of this rank as far as one came, as DTensors, and those of the
        program's inputs that require one; they can be taken once, and `stored_gradients` gives them to the caller.

        What several device groups read is not summed over them yet.
        """
        inputs, self.values.input_gradients = self.values.input_gradients, {}
        gradients, self._gradients = self._gradients, {}
        self._reductions = dict.fromkeys(self._reductions, 0)
        return inputs | {name: _like(self.trained[name], local) for name, local in gradients.items()}

    def stored_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """These gradients where parameters are stored: those that are not yet there are copied, and all waited for."""
        host = self.executor.store.host
        if host is None:
            return gradients
        left = [name for name in gradients if name in self.trained and name not in self._sent]
        copies = host.send([local_part_of(gradients[name]) for name in left])
        host.finish()
        self._sent.clear()
        return gradients | {name: _like(self.trained[name], x) for name, x in zip(left, copies, strict=True)}

    def _send_gradients(self, layer: int) -> None:
        """Start to copy a layer's final gradients to the host, if parameters are stored there."""
        policy, store = self.actions.policies[layer], self.executor.store
        self._reductions[layer] += 1
        if store.host is None or self._reductions[layer] < (
            self.actions.num_microbatches if policy.reduces_each else 1
        ):
            return
        names = self.executor.runners[layer].parameters.names
        final = [name for name in names if name in self._gradients and not store.stored[name].is_tied]
        self._gradients |= zip(final, store.host.send([self._gradients[name] for name in final]), strict=True)
        self._sent.update(final)

    def _add_gradients(self, layer: int) -> None:
        """What a layer's reduction gives, to what other layers and microbatches have given."""
        parameters = self._parameters[layer]
        for parameter, term in zip(parameters.stored, parameters.finish_reduce(), strict=True):
            name = self._names.get(id(parameter))
            if name is not None and term is not None:
                total = self._gradients.get(name)
                self._gradients[name] = term if total is None else total.add_(term)
        self._send_gradients(layer)

    def naming(self, what: Action | str) -> AbstractContextManager[None]:
        """With stages, failures inside name the rank and `what` it did."""
        stages = self.executor.stages
        return naming_failures(stages.who, what) if stages.is_pipeline else nullcontext()

    def _run(self, action: Action) -> None:
        match action.kind:
            case "RECV_F" | "RECV_B":
                self.values.receive(action)
            case "SEND_F":
                self.values.send_forward(action)
            case "SEND_B":
                self.values.send_backward(action)
            case "F":
                self.values.begin_forward(action)
                self._perform(self.actions.of(action), action)
                self.values.end_forward(action)
            case "B" | "I":
                self.values.begin_backward(action)
                self._perform(self.actions.of(action), action)
                self.values.end_backward(action)
            case _:  # W
                self._perform(self.actions.of(action), action)
        if self.executor.stopwatch is not None:
            self.executor.stopwatch.pause()

    def _perform(self, actions: Iterable[LayerAction], action: Action = _NO_ACTION) -> None:
        for kind, layer, microbatch in actions:
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
                    self._add_gradients(layer)
                case "OFFLOAD" | "WAIT_OFFLOAD" | "FETCH" | "WAIT_FETCH":
                    self._copy(kind, layer, action.microbatch if microbatch < 0 else microbatch)
                case _:
                    self._compute(kind, layer, action)

    def _compute(self, kind: str, layer: int, action: Action) -> None:
        match kind:
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
        runner, values = executor.runners[layer], self.values[action]
        if executor.stopwatch is not None:
            executor.stopwatch.forward(layer, action.microbatch)
        random = (
            RandomState(self._base_seed, executor.communicator.device, action.microbatch)
            if executor.is_random
            else None
        )
        context = LayerContext(executor.communicator, action.microbatch, runner.first_op, random)
        offloads = torch.is_grad_enabled() and self.actions.policies[layer].offloads
        offloaded = OffloadedTensors(executor.communicator.device, self.values.batch) if offloads else None
        layer_pass = LayerPass(runner, self._parameters[layer], values, context, offloaded)
        if torch.is_grad_enabled():
            self._passes[layer, action.microbatch] = layer_pass
        for name in runner.dead:
            values.tensors.pop(name, None)

    def _backward(self, layer: int, action: Action) -> None:
        values = self.values[action]
        layer_pass = self._pass(layer, action, values)
        if layer_pass is not None:
            layer_pass.backward(values, keep_graph=self._keeps_graph, keep_rest=self.has_kept_graph)
            if layer_pass.is_over:
                del self._passes[layer, action.microbatch]

    def _backward_inputs(self, layer: int, action: Action) -> None:
        values = self.values[action]
        self._mark_backward(layer, action)
        self._passes[layer, action.microbatch].backward_inputs(values)

    def _backward_weights(self, layer: int, action: Action) -> None:
        self._mark_backward(layer, action)
        self._passes.pop((layer, action.microbatch)).backward_weights()

    def _copy(self, kind: str, layer: int, microbatch: int) -> None:
        """Between the device and the host, what the layer saved; nothing where no backward can come."""
        layer_pass = self._passes.get((layer, microbatch))
        if layer_pass is None:
            return
        match kind:
            case "OFFLOAD":
                layer_pass.offload()
            case "WAIT_OFFLOAD":
                layer_pass.wait_offload()
            case "FETCH":
                layer_pass.fetch()
            case _:
                layer_pass.wait_fetch()

    def _pass(self, layer: int, action: Action, values: StageValues) -> LayerPass | None:
        """The forward whose backward is to run, None if no gradient came for it."""
        self._mark_backward(layer, action)
        key = layer, action.microbatch
        layer_pass = self._passes.get(key)
        if layer_pass is None or not layer_pass.needs(values.gradients):
            came = [
                name
                for name in self.executor.runners[layer].layer.outputs
                if values.gradients.pop(name, None) is not None
            ]
            if layer_pass is None and came:
                raise AutoparError(
                    "backward() has already run through this forward pass: call the model again before each "
                    "backward(), add the losses up and call it once, or pass retain_graph=True"
                )
            return None
        return layer_pass

    def _mark_backward(self, layer: int, action: Action) -> None:
        if self.executor.stopwatch is not None:
            self.executor.stopwatch.backward(layer, action.microbatch)

    def _reshard(self, layer: int) -> None:
        parameters = self._parameters[layer]
        # Leaves that a graph of this step still ends in collect gradients.
        if parameters.frees or not any(
            (layer, number) in self._passes for number in range(self.actions.num_microbatches)
        ):
            parameters.reshard()


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    return dtensor_like(local, parameter) if isinstance(parameter, DTensor) else local
