"""Records the result of every op of a parallel run on every rank, and its gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from autopar.api import ExampleInputs
from autopar.lower import ParallelModule
from autopar.lower.autograd import on_gradient, run_backward
from autopar.plan import Decisions, Plan, PlannedLayer
from autopar.program import Layer, Program
from autopar.step.local_layer import whole_strategy
from autopar.trace import Traced
from autopar.verify.rehearsal import loss_of, run_ranks

__all__ = ["Observed", "observe", "single_device_plan"]


@dataclass
class Observed:
    """The local results and local gradients of one rank, by the names of values."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


class _Observer(fx.Interpreter):
    """Runs a layer program node by node and records the results of the layer's ops."""

    def __init__(self, module: fx.GraphModule, names: Mapping[str, str], observed: Observed) -> None:
        super().__init__(module)
        self._names = names
        self._observed = observed

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        name = self._names.get(n.meta.get("value", ""))
        if name is not None and isinstance(result, Tensor):
            self._observed.values[name] = result.detach().clone()
            if result.requires_grad:
                on_gradient(result, lambda gradient: self._record_gradient(name, gradient))
        return result

    def _record_gradient(self, name: str, gradient: Tensor) -> None:
        # A split backward may run the hook twice; the first gradient is the whole one.
        self._observed.gradients.setdefault(name, gradient.detach().clone())


def observe(model: nn.Module, traced: Traced, plan: Plan, inputs: ExampleInputs) -> list[Observed]:
    """Run one forward and backward of `plan`, and return what each rank computed.

    `plan` must have one microbatch and no recomputation.
    """

    def action(parallel: ParallelModule) -> Observed:
        observed = Observed({}, {})
        _observe_layers(parallel, observed)
        loss = loss_of(parallel(**inputs) if isinstance(inputs, Mapping) else parallel(*inputs))
        run_backward(loss)
        return observed

    return run_ranks(model, traced, plan, action)


def _observe_layers(parallel: ParallelModule, observed: Observed) -> None:
    """Make all layer programs of `parallel` run in observers; layers that share a program run in order."""
    layers: dict[int, Iterator[Layer]] = {}
    users: dict[int, list[Layer]] = {}
    for runner in parallel.layer_runners:
        users.setdefault(id(runner.program.module), []).append(runner.layer)
    for runner in parallel.layer_runners:
        module = runner.program.module
        if id(module) in layers:
            continue
        layers[id(module)] = iter(users[id(module)])
        first = runner.program.layer

        def run(*args: Any, module: fx.GraphModule = module, first: Layer = first) -> Any:
            layer = next(layers[id(module)])
            names_in_layer = itertools.chain.from_iterable(op.results for op in layer.ops)
            names_in_program = itertools.chain.from_iterable(op.results for op in first.ops)
            names = dict(zip(names_in_program, names_in_layer, strict=True))
            return _Observer(module, names, observed).run(*args)

        module.forward = run  # type: ignore[method-assign]


def single_device_plan(program: Program) -> Plan:
    """The plan that runs every op whole on one device."""
    strategies = tuple(map(whole_strategy, program.kinds))
    layers = tuple(PlannedLayer(layer.name, layer.kind, layer.kind) for layer in program.layers)
    return Plan(Decisions(program.fingerprint, 1, 1, layers, strategies, shared_mesh=(1,), shared_storage=()))
