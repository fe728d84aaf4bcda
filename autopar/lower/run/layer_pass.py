"""One microbatch through one layer: forward, and when the step's actions come to it, backward.

Each pass is an autograd graph of its own, from what the layer reads to what it puts out; between layers values and
gradients are handed on by name (`StageValues`).  So what runs when is decided by the actions of the step and not by
autograd.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autopar.lower.autograd import backward_token, edge_of, enter_graph, run_backward_from
from autopar.lower.communication.reshard_ops import reshard_tensor
from autopar.lower.parameters.layer_parameters import StepParameters
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.offloading import OffloadedTensors
from autopar.lower.program.split_backward import SplitBackward
from autopar.lower.run.layer_runner import LayerRunner
from autopar.lower.run.step_values import StageValues

__all__ = ["LayerPass"]


class LayerPass:
    """See the module.  Made by its forward."""

    def __init__(
        self,
        runner: LayerRunner,
        parameters: StepParameters,
        values: StageValues,
        context: LayerContext,
        offloaded: OffloadedTensors | None = None,
    ) -> None:
        """Run the layer on its inputs in `values`, and store its outputs there; `offloaded` collects saved tensors."""
        self._runner = runner
        self._offloaded = offloaded
        self._parameters = parameters
        self._leaves: dict[str, Tensor] = {}  # where the gradients of what it reads arrive
        self._roots: dict[str, GradientEdge] = {}
        self._split: SplitBackward | None = None
        read = {name: self._read(values, name) for name in dict.fromkeys(name for name, _ in runner.moves)}
        inputs = [reshard_tensor(read[name], steps, context.communicator) for name, steps in runner.moves]
        del read
        self._forget_parts(runner)
        outputs = runner.run(parameters, inputs, context, offloaded)
        named = dict(zip(runner.layer.outputs, outputs, strict=True))
        for name, output in named.items():
            values.tensors[name] = output.detach()
            if output.requires_grad:
                self._roots[name] = edge_of(output)
                values.differentiable.add(name)
        # Gradients that come in through `_source` are freed as they are used; those given to roots only at the end.
        self._incoming: list[Tensor] = []
        self._all_roots = tuple(self._roots)
        if self._all_roots:
            take = partial(_taken, self._incoming)
            self._source = edge_of(backward_token(take, *(named[name] for name in self._all_roots)))

    def _read(self, values: StageValues, name: str) -> Tensor:
        x = values.tensors[name]
        if name not in values.differentiable or not torch.is_grad_enabled():
            return x
        if x.is_contiguous():  # backward keeps it only if some op saves it
            self._leaves[name] = _without_data(x).requires_grad_()
            return enter_graph(x, self._leaves[name])
        # Autograd lays a leaf's gradient out as the leaf is, which takes its strides, and so its memory.
        self._leaves[name] = x.detach().requires_grad_()
        return self._leaves[name]

    def _forget_parts(self, runner: LayerRunner) -> None:
        """Keep no value of which the layer reads only copies: backward asks for its shape, not for its data."""
        for name, leaf in self._leaves.items():
            if name in runner.only_copied:
                _forget_data(leaf)

    def offload(self) -> None:
        """Start to copy to the host what the forward saved."""
        if self._offloaded is not None:
            self._offloaded.offload()

    def wait_offload(self) -> None:
        """Wait for that; what was saved, and what the layer read, is not kept on the device then."""
        if self._offloaded is not None:
            self._offloaded.wait_offload()
            for leaf in self._leaves.values():
                _forget_data(leaf)

    def fetch(self) -> None:
        """Start to copy it back."""
        if self._offloaded is not None:
            self._offloaded.fetch()

    def wait_fetch(self) -> None:
        """Wait for that."""
        if self._offloaded is not None:
            self._offloaded.wait_fetch()

    def needs(self, names: Collection[str]) -> bool:
        """Whether a gradient for one of these values runs through this pass."""
        return not self._roots.keys().isdisjoint(names)

    def backward(self, values: StageValues, *, keep_graph: bool = False, keep_rest: bool = False) -> None:
        """From the gradients of what it put out, those of what it read and of its parameters.

        Args:
            values: where they are.
            keep_graph: the same gradients may come once more.
            keep_rest: those that did not come now may come later.
        """
        if self._roots and all(name in self._roots and name in values.gradients for name in self._all_roots):
            self._incoming += [values.gradients.pop(name) for name in self._all_roots]
            self._roots = self._roots if keep_graph else {}
            run_backward_from([self._source], [torch.zeros((), device="cpu")], keep_graph=keep_graph)
        else:
            roots, gradients = self._begin(values, keep_graph=keep_graph, keep_rest=keep_rest)
            run_backward_from(roots, gradients, keep_graph=keep_graph)
        self._finish(values, [leaf.grad for leaf in self._leaves.values()])
        self._parameters.end_backward()

    def backward_inputs(self, values: StageValues) -> None:
        """The part of the backward that the layers before wait for."""
        roots, gradients = self._begin(values)
        trained = [leaf for leaf in self._parameters.leaves() if leaf.requires_grad]
        self._split = SplitBackward(roots, gradients, list(self._leaves.values()), trained)
        self._finish(values, self._split.inputs())

    def backward_weights(self) -> None:
        """The rest of it: the gradients of parameters."""
        assert self._split is not None
        self._split.parameters()
        self._split = None
        self._parameters.end_backward()

    @property
    def is_over(self) -> bool:
        """Whether no gradient may come any more."""
        return not self._roots

    def _begin(
        self, values: StageValues, *, keep_graph: bool = False, keep_rest: bool = False
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        own = {name: values.gradients.pop(name) for name in self._runner.layer.outputs if name in values.gradients}
        roots = [self._roots[name] for name in own if name in self._roots]
        gradients = [gradient for name, gradient in own.items() if name in self._roots]
        if not keep_graph:
            self._roots = {n: edge for n, edge in self._roots.items() if keep_rest and n not in own}
        return roots, gradients

    def _finish(self, values: StageValues, gradients: list[Tensor | None]) -> None:
        for (name, leaf), gradient in zip(self._leaves.items(), gradients, strict=True):
            leaf.grad = None
            values.add_gradient(name, gradient)


def _forget_data(leaf: Tensor) -> None:
    leaf.data = _without_data(leaf)


def _without_data(x: Tensor) -> Tensor:
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)


def _taken(gradients: list[Tensor]) -> list[Tensor]:
    """What the list held: it is empty now, so that nobody else holds them."""
    taken = list(gradients)
    gradients.clear()
    return taken
