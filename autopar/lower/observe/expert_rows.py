"""How many rows each expert gets in a step: counted where devices sort them, and added up over devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.lower.communication.shards import Shards
from autopar.lower.observe.stopwatch import Stopwatch
from autopar.lower.run.execution import Executor
from autopar.lower.run.layer_runner import LayerRunner
from autopar.ops.experts import EXPERTS
from autopar.placement import Axis, Layout, mesh_axes
from autopar.program import iter_refs
from autopar.step.layer.instructions import RunOp

__all__ = ["ExpertRows"]

_OPS: Any = torch.ops


class ExpertRows(TorchFunctionMode):
    """A context that counts, in forwards of a step that a stopwatch watches, the rows of the experts of each layer.

    Nothing waits for a device, and nothing is communicated until the rows are read.
    """

    def __init__(self, executor: Executor, stopwatch: Stopwatch) -> None:
        """Nothing is counted yet."""
        super().__init__()
        self._executor = executor
        self._stopwatch = stopwatch
        self._counts: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what comes to a call of the op."""
        layer = self._stopwatch.forward_layer
        ops = (_OPS.autopar_traced.experts, _OPS.autopar_traced.sorted_experts)
        if layer >= 0 and func in (*ops, *(op.default for op in ops)):
            self._count(layer, args[0].detach(), len(args[2][0]))
        return func(*args, **dict(kwargs or {}))

    def _count(self, layer: int, ids: Tensor, num_local: int) -> None:
        """Rows of other devices' experts, and those that fill slices up, have numbers behind those of this device's."""
        rows = torch.zeros(num_local + 1, dtype=torch.int64, device=ids.device)
        rows = rows.index_add(0, ids.clamp(max=num_local), torch.ones_like(ids))[:num_local]
        before = self._counts.get(layer)
        self._counts[layer] = rows if before is None else before + rows

    def read(self) -> dict[str, tuple[int, ...]]:
        """Rows of each expert in the whole batch, by layer of this rank's device group.  Every rank calls it."""
        by_layer: dict[str, tuple[int, ...]] = {}
        for index, rows in self._counts.items():
            runner = self._executor.runners[index]
            total = _of_all_devices(runner, next(_regions(runner)), rows, self._executor)
            counted: list[int] = cast("Any", total).tolist()
            by_layer[runner.layer.name] = tuple(counted)
        return by_layer


def _regions(runner: LayerRunner) -> Iterator[RunOp]:
    singles = runner.program.local.singles
    return (run for run in singles if isinstance(run, RunOp) and run.op.target == EXPERTS)


def _of_all_devices(runner: LayerRunner, run: RunOp, rows: Tensor, executor: Executor) -> Tensor:
    """Each device's count at the place of its experts, added up where devices have other rows or other experts."""
    ids, experts = run.state.operands[0], run.state.operands[1 + len(list(iter_refs(run.op.args[1])))]
    shards = Shards(executor.communicator, tuple(_cut(runner, experts)))
    total = rows.new_zeros(rows.numel() * shards.count)
    total[shards.index * rows.numel() :][: rows.numel()] = rows
    for axis in dict.fromkeys((*_cut(runner, ids), *_cut(runner, experts))):
        total = executor.communicator.all_reduce(total, axis)
    return total


def _cut(runner: LayerRunner, layout: Layout) -> Iterator[Axis]:
    """The axes on which devices have different slices along the first dim."""
    for axis, placement in zip(mesh_axes(runner.strategy.mesh), layout, strict=True):
        if axis.size > 1 and placement.is_shard and placement.dim == 0:
            yield axis
