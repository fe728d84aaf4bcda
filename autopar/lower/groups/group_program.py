"""The program of a rank in a group: rows of one length, one after the other, on its own copy of the parameters.

With pipeline stages each row is a microbatch, so that stages compute different rows at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopar.lower.communication.communicator import Communicator
from autopar.lower.groups.target_count import LossCount
from autopar.lower.kernels.random import derive_seed
from autopar.lower.parameters.skeleton import copy_skeleton
from autopar.lower.parameters.store import ParameterStore, storage_layouts
from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Executable
from autopar.lower.run.run_step import run_step
from autopar.lower.run.stage_map import StageMap
from autopar.lower.run.step_runner import BACKWARD, FORWARD, StepRunner
from autopar.placement import BROADCAST, Layout, Step, refine_mesh, reshard
from autopar.plan import Plan
from autopar.program import Program
from autopar.step.simulation.actions import StepActions

__all__ = ["Gradients", "GroupProgram", "part_layouts"]

Gradients = dict[tuple[str, tuple[Step, ...]], Tensor]
"""Name of a parameter, and how a group's part of it is made of the whole -> the part's gradient."""


def part_layouts(program: Program, plan: Plan) -> tuple[tuple[int, ...], dict[str, Layout]]:
    """The mesh of a group with this plan, and name of a parameter -> how it is laid out there for a step.

    What is not cut is there for gradients that are terms, as ranks of a group are added up with all others.
    """
    mesh = refine_mesh(plan.shared_mesh, *(strategy.mesh for strategy in plan.strategies))
    stored = storage_layouts(program, plan, mesh)
    return mesh, {name: tuple(p if p.is_shard else BROADCAST for p in layout) for name, layout in stored.items()}


class GroupProgram:
    """Rows on the ranks of a group, by a plan of one row for so many devices.

    Parameters are here for a step only: `GroupParts` gives them, and takes their gradients.

    Attributes:
        executable: what runs.
        counted: what its loss is divided by.
        executor: runs it.
        parts: name of a parameter -> the steps that make this group's part of it of the whole.
    """

    def __init__(
        self,
        executable: Executable,
        counted: LossCount,
        store: ParameterStore,
        communicator: Communicator,
        stages: StageMap,
        *,
        compile_layers: bool,
    ) -> None:
        """`counted` is what the loss of a row is divided by, `store` and `stages` are those of all ranks.  Every rank
        calls it, for every degree in one order, whatever its own groups are to be.
        """
        program, plan = executable.program, executable.plan
        self.executable = executable
        self._communicator = communicator
        self.counted = counted
        mesh, by_name = part_layouts(program, plan)
        whole = (BROADCAST,) * len(mesh)
        layouts = {store.first_name.get(name, name): layout for name, layout in by_name.items()}
        self.parts = {
            name: reshard(whole, layout, mesh)
            for name, layout in layouts.items()
            if stages.group in store.stored[name].groups
        }
        self._module = nn.Module()
        copy_skeleton(store.module, self._module, _empty, lambda buffer: buffer)
        stored = {name: replace(x, layout=layouts.get(store.first_name.get(name, name), x.layout))
                  for name, x in store.stored.items()}  # fmt: skip
        # Parameters of a group are plain tensors.
        self._store = replace(store, mesh=mesh, module=self._module, stored=stored, has_parts=False)
        self.executor = Executor(executable, self._store, communicator, compile_layers, stages.plan.group_size)
        self._names: dict[str, list[str]] = {}
        for name, first in store.first_name.items():
            self._names.setdefault(first, []).append(name)
        self._actions: dict[int, StepActions] = {}  # by rows of a step, with stages

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return self.executor.is_random

    def sums_of(self, tensors: Sequence[Tensor]) -> tuple[float, ...]:
        """What counts in a row: see `LossCount`."""
        return self.counted.sums_of(dict(zip(self.executable.program.inputs, tensors, strict=True)))

    def run(
        self, rows: Sequence[Sequence[Tensor]], weights: Sequence[float], seed: int, gradients: Gradients
    ) -> Tensor | None:
        """The sum of the losses of rows times their weights, whole on all ranks of the group (with stages on those of
        the last one, elsewhere None); adds their gradients to `gradients`.
        """
        if self.executor.stages.is_pipeline:
            return self._run_stages(rows, weights, seed, gradients)
        losses = [
            self._run_row(tensors, weight, derive_seed(seed, number), gradients)
            for number, (tensors, weight) in enumerate(zip(rows, weights, strict=True))
        ]
        return torch.stack(losses).sum()

    @torch.enable_grad()
    def _run_stages(
        self, rows: Sequence[Sequence[Tensor]], weights: Sequence[float], seed: int, gradients: Gradients
    ) -> Tensor | None:
        executor, name = self.executor, self.executable.program.loss
        if len(rows) not in self._actions:
            self._actions[len(rows)] = executor.row_actions(len(rows))
        actions = self._actions[len(rows)]
        added = executor.row_schedule(len(rows)).microbatches - len(rows)
        # What fills up a round is a row that can be computed, and whose gradients are zeros.
        rows, weights = [*rows, *[rows[-1]] * added], [*weights, *[0.0] * added]
        step = StepRunner(executor, actions, [executor.take_parts(row) for row in rows], seed)
        like = self.executable.program.type_of(name)
        dtype: torch.dtype = getattr(torch, like.dtype)
        one = torch.ones(like.shape, dtype=dtype, device=self._communicator.device)
        step.begin()
        step.values.expect({name: one}, weights=weights)
        step.run(FORWARD | BACKWARD)
        step.end()
        for each, gradient in step.gradients().items():
            self._add(self._store.first_name.get(each, each), gradient, gradients)
        if executor.stages.group_of(name) != executor.stages.group:
            return None
        losses = [
            values[name].detach().double() * weight for values, weight in zip(step.values.outputs, weights, strict=True)
        ]
        return torch.stack(losses).sum()

    def _run_row(self, tensors: Sequence[Tensor], weight: float, seed: int, gradients: Gradients) -> Tensor:
        executor, loss_name = self.executor, self.executable.program.loss
        with torch.enable_grad():
            values = run_step(executor, executor.take_parts(tensors), seed).values
            loss = executor.outputs.make(loss_name, values[loss_name]) * weight
        values.clear()
        trained = {name: p for name in self.parts if (p := self._module.get_parameter(name)).requires_grad}
        computed = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True) if trained else ()
        for name, gradient in zip(trained, computed, strict=True):
            self._add(name, gradient, gradients)
        return loss.detach().double()

    def _add(self, name: str, gradient: Tensor, gradients: Gradients) -> None:
        key = name, self.parts[name]
        total = gradients.get(key)
        gradients[key] = gradient if total is None else total.add_(gradient)

    def free(self) -> None:
        """Give the parameters up."""
        for name in self.parts:
            self.put(name, _empty(name, self._module.get_parameter(name)))

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Have this part of a parameter for a step."""
        for each in self._names[name]:
            table, last = self._store.slot(each)
            table[last] = parameter


def _empty(name: str, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=parameter.device), parameter.requires_grad)
