"""Records the result of every op of a parallel run on every rank, and its gradient."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from autopar.lower import ParallelModule
from autopar.lower.autograd import on_gradient, run_backward
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.layer_program import LayerProgram
from autopar.plan import Decisions, Plan, PlannedLayer
from autopar.planning.call_traces import ExampleInputs
from autopar.program import Layer, Program
from autopar.step.layer.local_layer import whole_strategy
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

    def _record_gradient(self, name: str, gradient: Tensor | None) -> None:
        # A split backward may run the hook twice; the first gradient is the whole one.  None: no gradient came here.
        if gradient is not None:
            self._observed.gradients.setdefault(name, gradient.detach().clone())


def observe(model: nn.Module, traced: Traced, plan: Plan, inputs: ExampleInputs) -> list[Observed]:
    """Run one forward and backward of `plan`, and return what each rank computed.

    `plan` must have one microbatch and no recomputation.
    """

    ranks = [Observed({}, {}) for _ in range(plan.world_size)]
    starts = itertools.accumulate((len(layer.ops) for layer in traced.program.layers), initial=0)
    layers = dict(zip(starts, traced.program.layers, strict=False))

    def action(parallel: ParallelModule) -> None:
        for runner in parallel.layer_runners:
            _observe(runner.program, layers, ranks)
        loss = loss_of(parallel(**inputs) if isinstance(inputs, Mapping) else parallel(*inputs))
        run_backward(loss)

    run_ranks(model, traced, plan, action)
    return ranks


def _observe(program: LayerProgram, layers: Mapping[int, Layer], ranks: Sequence[Observed]) -> None:
    """Make a layer program, which layers and simulated ranks may share, run in an observer for whoever calls it."""
    first = tuple(itertools.chain.from_iterable(op.results for op in program.layer.ops))

    def run(*args: Any) -> Any:
        context: LayerContext = args[-1]
        results = itertools.chain.from_iterable(op.results for op in layers[context.first_op].ops)
        names = dict(zip(first, results, strict=True))
        return _Observer(program.module, names, ranks[context.communicator.rank]).run(*args)

    program.module.forward = run  # type: ignore[method-assign]


def single_device_plan(program: Program) -> Plan:
    """The plan that runs every op whole on one device."""
    strategies = tuple(map(whole_strategy, program.kinds))
    layers = tuple(PlannedLayer(layer.name, layer.kind, layer.kind) for layer in program.layers)
    return Plan(Decisions(program.fingerprint, 1, 1, layers, strategies, shared_mesh=(1,), shared_storage=()))
