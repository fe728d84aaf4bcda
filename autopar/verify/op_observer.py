"""What every op of a parallel run gives on every rank, and the gradient that comes back to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from autopar.api import ExampleInputs
from autopar.lower import ParallelModule
from autopar.lower.autograd import on_gradient, run_backward
from autopar.placement import REPLICATE, Layout
from autopar.plan import Decisions, LayerStrategy, Plan, PlannedLayer
from autopar.program import Layer, Program
from autopar.trace import Traced
from autopar.verify.rehearsal import loss_of, run_ranks

__all__ = ["Observed", "observe", "single_device_plan"]


@dataclass
class Observed:
    """What one rank computed: value name -> local result, and local gradient."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


class _Observer(fx.Interpreter):
    """Runs a layer program node by node and keeps what the layer's ops give."""

    def __init__(self, module: fx.GraphModule, names: Mapping[str, str], seen: Observed) -> None:
        super().__init__(module)
        self._names = names
        self._seen = seen

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        name = self._names.get(n.meta.get("value", ""))
        if name is not None and isinstance(result, Tensor):
            self._seen.values[name] = result.detach().clone()
            if result.requires_grad:
                on_gradient(result, lambda gradient: self._keep(name, gradient))
        return result

    def _keep(self, name: str, gradient: Tensor) -> None:
        # A backward in two parts may come by again with a part of it.
        self._seen.gradients.setdefault(name, gradient.detach().clone())


def observe(model: nn.Module, traced: Traced, plan: Plan, inputs: ExampleInputs) -> list[Observed]:
    """One forward and backward by `plan`, which has one microbatch and no recomputation; per rank what it computed."""

    def action(parallel: ParallelModule) -> Observed:
        seen = Observed({}, {})
        _watch(parallel, traced.program, seen)
        loss = loss_of(parallel(**inputs) if isinstance(inputs, Mapping) else parallel(*inputs))
        run_backward(loss)
        return seen

    return run_ranks(model, traced, plan, action)


def _watch(parallel: ParallelModule, program: Program, seen: Observed) -> None:
    """Make every layer program of `parallel` run through an observer; layers that share one run in order."""
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
            mine = itertools.chain.from_iterable(op.results for op in layer.ops)
            theirs = itertools.chain.from_iterable(op.results for op in first.ops)
            names = dict(zip(theirs, mine, strict=True))
            return _Observer(module, names, seen).run(*args)

        module.forward = run  # type: ignore[method-assign]


def single_device_plan(program: Program) -> Plan:
    """Every op whole on one device."""
    whole: Layout = (REPLICATE,)
    strategies = tuple(
        LayerStrategy(
            mesh=(1,), assignments=(("-",),) * len(layer.ops), time=(), inputs=(whole,) * len(layer.inputs),
            outputs=(whole,) * len(layer.outputs), copies=(), storage=(whole,) * len(layer.state),
        )
        for layer in program.kinds
    )  # fmt: skip
    layers = tuple(PlannedLayer(layer.name, layer.kind, layer.kind) for layer in program.layers)
    return Plan(Decisions(program.fingerprint, 1, 1, layers, strategies, shared_mesh=(1,), shared_storage=()))
