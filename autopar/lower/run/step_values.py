"""The values of each microbatch in the stages of this rank: inputs, outputs, and their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autopar.lower.autograd import edge_of, run_backward_from
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.run.boundary_exchange import BoundaryExchange
from autopar.lower.run.execution import Executor
from autopar.program import Program
from autopar.schedules.action_lists import Action

__all__ = ["StageValues", "StepValues", "influences"]


@dataclass
class StageValues:
    """What one microbatch has in one stage.

    Args:
        tensors: value name -> this device's part, outside autograd, until its last reader.
        differentiable: the values that a gradient can flow to.
        gradients: value name -> the gradient of that part, as far as its readers have added to it.
    """

    tensors: dict[str, Tensor]
    differentiable: set[str]
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add_gradient(self, name: str, gradient: Tensor | None) -> None:
        """One reader's term; the tensor stays as it is."""
        if gradient is not None:
            _add(self.gradients, name, gradient)


class StepValues:
    """The values of one step; without stages those of the one stage that all layers make.

    Attributes:
        outputs: per microbatch, the values that the caller or an update gets, as this rank has them.
        differentiable: those of them that a gradient can come for.
        differentiable_inputs: the program's inputs that require a gradient, by value name.
        input_gradients: theirs, as far as backward has come.
        differentiated: with stages, the values that a gradient flows to in this step, the same on all ranks.
    """

    def __init__(self, executor: Executor, inputs: Sequence[Sequence[Tensor]]) -> None:
        """Nothing has run.

        `inputs` has the program's inputs for each microbatch: the whole batch, of which programs take their slices, or
        those of the microbatch alone if the program has a single one.  Every rank has them.
        """
        self.outputs: list[dict[str, Tensor]] = [{} for _ in inputs]
        self.differentiable: set[str] = set()
        self._inputs_of = [dict(zip(executor.executable.program.inputs, own, strict=True)) for own in inputs]
        self._inputs = self._inputs_of[0]
        self.differentiable_inputs = {name: x for name, x in self._inputs.items() if x.requires_grad}
        self.input_gradients: dict[str, Tensor] = {}
        self.differentiated: Set[str] = frozenset()
        self._executor = executor
        self._stages: dict[tuple[int, int], StageValues] = {}
        self._returned: dict[tuple[str, int], tuple[Tensor, GradientEdge]] = {}
        self._boundaries = BoundaryExchange(executor)
        self._given: dict[str, Tensor] = {}
        self._weights: Sequence[float] = ()
        self._num_taken = Counter[str]()
        self._keeps_graph = False

    @property
    def batch(self) -> tuple[Tensor, ...]:
        """The caller's tensors."""
        return tuple({id(x): x for own in self._inputs_of for x in own.values()}.values())

    def __getitem__(self, action: Action) -> StageValues:
        """What the action's microbatch has in its stage."""
        return self._stages[action.stage, action.microbatch]

    def expect(self, gradients: dict[str, Tensor], *, keep_graph: bool = False, weights: Sequence[float] = ()) -> None:
        """Backward begins with these gradients of returned values, over all microbatches; every rank knows the same
        names.  They are taken out of the dict as they are used up.  With `keep_graph` they may come once more.

        `weights` has a factor for each microbatch; ``()``: all are 1.
        """
        self._given = gradients
        self._weights = weights
        self._num_taken.clear()
        self._keeps_graph = keep_graph
        if self._executor.stages.is_pipeline:
            self.differentiated = influences(self._executor.executable.program, gradients)

    def results(self) -> dict[str, Tensor]:
        """`outputs`, joined over microbatches, those that are whole from all device groups; they can be read once."""
        executor = self._executor
        results = {name: _whole(self._inputs[name]) for name in executor.kept if name in self._inputs}
        for name in tuple(self.outputs[0]):
            results[name] = executor.outputs.join_microbatches(name, [each.pop(name) for each in self.outputs])
        for name in executor.outputs.returned_whole:
            results[name] = executor.share_across_groups(name, results.get(name))
        return results

    def wait_for_sends(self) -> None:
        """When the last action has run."""
        self._boundaries.wait()

    def begin_forward(self, action: Action) -> None:
        """What a stage's forward begins with: the whole batch, and what crosses the cut before it."""
        arrived = self._arrived(action)
        values = self._executor.executable.program.values
        differentiable = {name for name in arrived if values[name].requires_grad} | self.differentiable_inputs.keys()
        own = self._inputs_of[action.microbatch]
        self._stages[action.stage, action.microbatch] = StageValues({**own, **arrived}, differentiable)

    def _arrived(self, action: Action) -> Mapping[str, Tensor]:
        """What crosses the cut before this stage: received, or from the stage before if this rank runs it, too."""
        stage, microbatch = action.stage, action.microbatch
        before = self._stages.get((stage - 1, microbatch))
        if before is None:
            return self._boundaries.received(Action(stage, "RECV_F", microbatch))
        return {name: before.tensors.pop(name) for name in self._executor.boundary_values[stage]}

    def end_forward(self, action: Action) -> None:
        """Keep what the caller, an update or the next stage gets."""
        executor, stages = self._executor, self._executor.stages
        values = self[action]
        own = {name: x for name, x in values.tensors.items() if stages.stage_of.get(name) == action.stage}
        executor.update_buffers_of_microbatch(own)
        results = self.outputs[action.microbatch]
        for name in executor.kept:
            if name in own:
                results[name] = self._return(name, action, values)
                if name in values.differentiable:
                    self.differentiable.add(name)
        leaving = executor.boundary_values[action.stage + 1] if action.stage + 1 < len(stages.ranges) else {}
        values.tensors = {name: values.tensors[name] for name in leaving}

    def _return(self, name: str, action: Action, values: StageValues) -> Tensor:
        """What is kept of an output: what every rank gets is made whole, and its gradient will come whole."""
        value = values.tensors[name]
        if name not in self._executor.outputs.returned_whole:
            return value
        if name not in values.differentiable or not torch.is_grad_enabled():
            return self._executor.make_whole(name, value).detach()
        leaf = value.detach().requires_grad_()
        whole = self._executor.make_whole(name, leaf)
        self._returned[name, action.microbatch] = leaf, edge_of(whole)
        return whole.detach()

    def begin_backward(self, action: Action) -> None:
        """What a stage's backward begins with: gradients from the next stage and from the caller."""
        stage, microbatch = action.stage, action.microbatch
        values = self[action]
        following = self._stages.get((stage + 1, microbatch))
        if following is not None:
            for name in self._executor.boundary_values[stage + 1]:
                values.add_gradient(name, following.gradients.pop(name, None))
        for name, gradient in self._boundaries.received(Action(stage, "RECV_B", microbatch)).items():
            values.add_gradient(name, gradient)
        for name in [name for name in self._given if self._executor.stages.stage_of.get(name) == stage]:
            self._num_taken[name] += 1
            is_last = self._num_taken[name] == len(self.outputs)
            gradient = self._given.pop(name) if is_last else self._given[name]
            gradient = gradient * self._weights[microbatch] if self._weights else gradient
            values.add_gradient(name, self._gradient_of_returned(name, microbatch, gradient))

    def _gradient_of_returned(self, name: str, microbatch: int, gradient: Tensor) -> Tensor | None:
        """One microbatch's part of the gradient of a value that the caller got."""
        time = self._executor.value_layouts[name].time
        if time.is_shard and self._executor.num_microbatches > 1:
            gradient = gradient.chunk(self._executor.num_microbatches, time.dim)[microbatch]
        if (name, microbatch) not in self._returned:
            return gradient
        leaf, edge = self._returned[name, microbatch]
        if not self._keeps_graph:
            del self._returned[name, microbatch]
        run_backward_from([edge], [gradient], keep_graph=True)
        kept, leaf.grad = leaf.grad, None
        return kept

    def end_backward(self, action: Action) -> None:
        """Add up the gradients of the whole batch."""
        values = self[action]
        for name in self._inputs:
            if name in values.gradients:
                _add(self.input_gradients, name, values.gradients.pop(name))

    def receive(self, action: Action) -> None:
        """RECV_F or RECV_B."""
        is_forward = action.kind == "RECV_F"
        names = (
            self._executor.boundary_values[action.stage] if is_forward else self._differentiated_of(action.stage + 1)
        )
        self._boundaries.receive(action, names)

    def send_forward(self, action: Action) -> None:
        """SEND_F."""
        tensors = self[action].tensors
        self._boundaries.send(action, [tensors.pop(name) for name in self._executor.boundary_values[action.stage + 1]])

    def send_backward(self, action: Action) -> None:
        """SEND_B: zeros where autograd finds none in spite of all, so that every rank sends what its peer awaits."""
        gradients = self[action].gradients
        outgoing = {name: gradients.pop(name, None) for name in self._differentiated_of(action.stage)}
        self._boundaries.send(action, [self._boundaries.zeros(n) if x is None else x for n, x in outgoing.items()])

    def _differentiated_of(self, stage: int) -> list[str]:
        """The values that cross the cut before this stage whose gradients come back."""
        return [name for name in self._executor.boundary_values[stage] if name in self.differentiated]


def _whole(x: Tensor) -> Tensor:
    return x.whole() if isinstance(x, LateTensor) else x


def _add(gradients: dict[str, Tensor], name: str, term: Tensor) -> None:
    gradients[name] = gradients[name] + term if name in gradients else term


def influences(program: Program, results: Iterable[str]) -> Set[str]:
    """The values, parameters among them, from which a gradient of `results` flows to what is trained."""
    names = {name for name in results if name and program.values[name].requires_grad}
    for layer in reversed(program.layers):
        for op in reversed(layer.ops):
            if not names.isdisjoint(op.results):
                names.update(name for name in op.operands if program.values[name].requires_grad)
    return names
