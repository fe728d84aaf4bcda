"""Where a parallel run first departs from the single device: op by op, forward, then backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from autopar.api import ExampleInputs
from autopar.errors import VerificationError
from autopar.lower import ParallelModule
from autopar.lower.compat import on_gradient, run_backward
from autopar.lower.layer_program import find_option
from autopar.placement import REPLICATE, Layout, format_layout
from autopar.plan import LayerCost, LayerStrategy, Plan, PlannedLayer
from autopar.program import Layer, Op, Program
from autopar.rehearsal import gradient_layout, join_layout, loss_of, run_ranks
from autopar.trace import Traced

__all__ = ["first_difference"]

_TOLERANCE = 1e-9


def first_difference(model: nn.Module, traced: Traced, plan: Plan, inputs: ExampleInputs) -> str:
    """A sentence that names the first op whose result, or else the last whose gradient, differs from one
    device's.

    Microbatches and recomputation are left out of this second run, as they change when an op runs but not
    what it gives.
    """
    program = traced.program
    simple = replace(
        plan,
        num_microbatches=1,
        strategies=tuple(replace(strategy, time=(), recompute="none") for strategy in plan.strategies),
    )
    expected = _observe(model, traced, _single_device_plan(program), inputs)[0]
    found = _observe(model, traced, simple, inputs)
    ops = [(layer, index, op) for layer in program.layers for index, op in enumerate(layer.ops)]
    for layer, index, op in ops:
        for result, name in enumerate(op.results):
            layout, mesh = _layout_of(simple, program, layer, index, op, result)
            problem = _compare(name, expected.values, [rank.values for rank in found], layout, mesh)
            if problem:
                return _describe("The first op whose result differs is", layer, op, layout, problem)
    for layer, index, op in reversed(ops):
        for result, name in enumerate(op.results):
            layout, mesh = _layout_of(simple, program, layer, index, op, result)
            gradients = [rank.gradients for rank in found]
            problem = _compare(name, expected.gradients, gradients, gradient_layout(layout), mesh)
            if problem:
                return _describe(
                    "Forward agrees; the first gradient that differs is that of", layer, op, layout, problem
                )
    return (
        "Results and gradients of all ops agree in one pass without microbatches and recomputation: the difference "
        "comes from those, from how parameters are stored, or from the optimizer"
    )


@dataclass
class _Observed:
    """What one rank computed: value name -> local result, and local gradient."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


class _Observer(fx.Interpreter):
    """Runs a layer program node by node and keeps what the layer's ops give."""

    def __init__(self, module: fx.GraphModule, names: Mapping[str, str], seen: _Observed) -> None:
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
        self._seen.gradients[name] = gradient.detach().clone()


def _observe(model: nn.Module, traced: Traced, plan: Plan, inputs: ExampleInputs) -> list[_Observed]:
    def action(parallel: ParallelModule) -> _Observed:
        seen = _Observed({}, {})
        _watch(parallel, traced.program, seen)
        loss = loss_of(parallel(**inputs) if isinstance(inputs, Mapping) else parallel(*inputs))
        run_backward(loss)
        return seen

    return run_ranks(model, traced, plan, inputs, action)


def _watch(parallel: ParallelModule, program: Program, seen: _Observed) -> None:
    """Make every layer program of `parallel` run through an observer; layers run in order, so calls tell them apart."""
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


def _single_device_plan(program: Program) -> Plan:
    whole: Layout = (REPLICATE,)
    strategies = tuple(
        LayerStrategy(
            mesh=(1,), assignments=(("-",),) * len(layer.ops), time=(), inputs=(whole,) * len(layer.inputs),
            outputs=(whole,) * len(layer.outputs), copies=(), storage=(whole,) * len(layer.held),
        )
        for layer in program.kinds
    )  # fmt: skip
    return Plan(
        fingerprint=program.fingerprint, world_size=1, device="", num_microbatches=1,
        layers=tuple(PlannedLayer(layer.name, layer.kind, layer.kind) for layer in program.layers),
        strategies=strategies, costs=(LayerCost(),) * len(strategies), shared_mesh=(1,), shared_storage=(),
        step_time_s=0.0, peak_memory_bytes=0.0, memory_limit_bytes=0.0, samples_per_step=0,
        optimality_gap=0.0,
    )  # fmt: skip


def _layout_of(
    plan: Plan, program: Program, layer: Layer, index: int, op: Op, result: int
) -> tuple[Layout, tuple[int, ...]]:
    position = program.layers.index(layer)
    strategy = plan.strategies[plan.layers[position].strategy]
    layout = tuple(find_option(op, factor).results[result] for factor in strategy.assignments[index])
    return layout, strategy.mesh


def _compare(
    name: str, expected: Mapping[str, Tensor], found: list[dict[str, Tensor]], layout: Layout, mesh: tuple[int, ...]
) -> str:
    """What is wrong with value `name`; empty if nothing is (or it was not seen)."""
    if name not in expected or any(name not in rank for rank in found):
        return ""
    try:
        whole = join_layout([rank[name] for rank in found], layout, mesh, name)
    except (VerificationError, RuntimeError) as error:
        return str(error)
    if whole.shape != expected[name].shape:
        return f"its shape is {tuple(whole.shape)} in place of {tuple(expected[name].shape)}"
    difference = (whole.double() - expected[name].double()).abs().max().item() if whole.numel() else 0.0
    scale = expected[name].double().abs().max().item() if whole.numel() else 0.0
    return (
        f"off by {difference:.3g} where the largest entry is {scale:.3g}"
        if difference > _TOLERANCE * max(scale, 1e-6)
        else ""
    )


def _describe(what: str, layer: Layer, op: Op, layout: Layout, problem: str) -> str:
    where = f" ({op.source})" if op.source else ""
    place = f"in layer {layer.name}, laid out as {format_layout(layout)}"
    return f"{what} {op.name} = {op.target}{where} {place}: {problem}"
