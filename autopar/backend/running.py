"""Runs a planned graph on the user's own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.backend.dynamo_graph import CapturedGraph
from autopar.backend.options import Options
from autopar.backend.planning import PlannedGraph
from autopar.backend.session import Session
from autopar.backend.storage import as_expected
from autopar.lower.compat import module_tables
from autopar.lower.kernels.random import agree_base_seed
from autopar.lower.parameters.store import ParameterStore, Stored
from autopar.lower.run.execution import Executor
from autopar.lower.run.run_step import run_step
from autopar.placement import refine_layout, refine_mesh
from autopar.plan import Plan
from autopar.planning.call_plans import executable_of
from autopar.program import Program

__all__ = ["RunningGraph"]


class RunningGraph:
    """One graph for one set of sizes, lowered for this rank."""

    def __init__(self, graph: CapturedGraph, planned: PlannedGraph, options: Options, session: Session) -> None:
        """Lower it; every rank does so at the same time."""
        self._graph = graph
        self._module = planned.module
        self._fixed = planned.fixed
        self._constants = planned.traced.constants
        self._communicator = session.communicator
        self._executor = Executor(
            executable_of(planned.traced, planned.plan), _store(planned, options, session), session.communicator,
            planned.plan.compiled,
        )  # fmt: skip
        self._executor.outputs.whole = True

    @property
    def program(self) -> Program:
        """What it runs."""
        return self._executor.executable.program

    @property
    def plan(self) -> Plan:
        """How."""
        return self._executor.executable.plan

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The graph's outputs for its flat arguments: whole on every rank, and differentiable."""
        self._bind(values)
        executor, graph = self._executor, self._graph
        program = self.program
        given = [values[place] for place in graph.places("input")]
        with torch.autocast(self._communicator.device.type, enabled=False):  # the traced program has its casts
            tensors = self._compared(executor.executable.flatten_inputs(given, {}))
            seed = agree_base_seed(self._communicator) if executor.is_random else 0
            executor.begin_step()
            result = run_step(executor, tensors, seed).values
            executor.update_buffers(result)
            made = {name: self._output(name, result[name]) for name in dict.fromkeys(program.outputs)}
        entries = iter([made[name] for name in program.outputs])
        count = len(program.outputs) + len(self._fixed)
        leaves = [self._fixed_output(self._fixed[n]) if n in self._fixed else next(entries) for n in range(count)]
        results = iter(executor.executable.unflatten_outputs(leaves))
        outputs = [next(results) if place < 0 else values[place] for place in graph.passed]
        return tuple(
            output if expected is None or place >= 0 else as_expected(output, expected)
            for output, expected, place in zip(outputs, graph.outputs, graph.passed, strict=True)
        )

    def _compared(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """`tensors`, when ranks have made sure that they run the same graph on the same batch.

        What another graph computed may differ by a rounding: floating point numbers are compared in training only,
        where those of another graph require gradients.
        """
        calls = self._communicator.calls
        if calls is None:
            return tensors
        named = zip(self.program.inputs, tensors, strict=True)
        is_training = torch.is_grad_enabled()
        batch = [(name, x) for name, x in named if not x.is_floating_point() or (is_training and not x.requires_grad)]
        return calls.enter(f"call {{}} of graph {self.program.fingerprint}", lambda: (tensors, batch))

    def _bind(self, values: Sequence[Any]) -> None:
        """Register the arguments of this call under their names."""
        for argument, value in zip(self._graph.arguments, values, strict=True):
            path, _, last = argument.name.rpartition(".")
            if argument.role == "parameter":
                module_tables(self._module.get_submodule(path)).parameters[last] = value
            elif argument.role == "buffer":
                module_tables(self._module.get_submodule(path)).buffers[last] = value

    def _output(self, name: str, value: Tensor) -> Tensor:
        return value if name in self._executor.outputs.returned_whole else self._executor.outputs.make(name, value)

    def _fixed_output(self, name: str) -> Tensor:
        program = self.program
        if name in self._constants:
            return self._constants[name].to(self._communicator.device, copy=True)
        member = program.parameters[name]
        return dict([*self._module.named_parameters(), *self._module.named_buffers()])[member]


def _store(planned: PlannedGraph, options: Options, session: Session) -> ParameterStore:
    """The user's parameters as they are."""
    plan = planned.plan
    meshes = *(strategy.mesh for strategy in plan.strategies), *(mesh for _, mesh, _ in planned.stored)
    sizes = refine_mesh(plan.shared_mesh, *meshes)
    layouts = {name: refine_layout(layout, mesh, sizes) for name, mesh, layout in planned.stored}
    stored = {
        name: Stored(name, layouts[name], tuple(parameter.shape), parameter.stride(), parameter.dtype)
        for name, parameter in planned.module.named_parameters()
    }
    mesh = session.fine_mesh(options) if options.shard else session.mesh
    return ParameterStore(sizes, mesh, mesh, planned.module, stored, {name: name for name in stored})
