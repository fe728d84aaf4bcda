"""How the devices of a plan split the rows of a batch, for samplers and data loaders.

A plan splits the batch layer by layer, and layers may split it differently.  What counts here is the first op that
splits it: of a plan with data parallelism that is most often the embedding, or the op behind it.  Ranks that differ in
other axes only (tensor parallel), and the same places of other pipeline stages, want the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ops import family_of
from autopar.placement import REPLICATE, Layout, mesh_axes, shard
from autopar.plan import Decisions
from autopar.program import Op, Program
from autopar.step.layer.value_flows import option_of, options_of

__all__ = ["DataSplit", "attention_split", "batch_inputs", "data_split", "output_rows"]


@dataclass(frozen=True)
class DataSplit:
    """Which rows of a batch each device passes.

    Args:
        mesh: of the devices of a group, as in `LayerStrategy`.
        layout: of a tensor whose dim 0 are the rows: ``S(0)`` on the axes that split them, ``R`` on others.
    """

    mesh: tuple[int, ...]
    layout: Layout

    @property
    def size(self) -> int:
        """Into how many parts the rows are split."""
        return math.prod(n for n, placement in zip(self.mesh, self.layout, strict=True) if placement.is_shard)

    def rank_of(self, rank: int) -> int:
        """Which of these parts global `rank` has."""
        data_rank = 0
        for axis, placement in zip(mesh_axes(self.mesh), self.layout, strict=True):
            if placement.is_shard:
                data_rank = data_rank * axis.size + axis.coordinate(rank)
        return data_rank


def batch_inputs(program: Program) -> tuple[str, ...]:
    """The inputs whose dim 0 are the rows of the batch: those that have as many as the first one has."""
    rows = program.batch_size
    return tuple(name for name in program.inputs if program.type_of(name).shape[:1] == (rows,))


def data_split(program: Program, decisions: Decisions) -> DataSplit:
    """The split by the first op that splits the rows; in one part, if none does."""
    splits = (split for _, split in _splits(program, decisions) if split.size > 1)
    return next(splits, DataSplit((decisions.group_size,), (REPLICATE,)))


def attention_split(program: Program, decisions: Decisions) -> DataSplit:
    """The split by the first attention, which alone tells rows of equal length apart; without one `data_split`."""
    splits = (split for op, split in _splits(program, decisions) if family_of(op.target).is_attention)
    return next(splits, data_split(program, decisions))


def _splits(program: Program, decisions: Decisions) -> Iterator[tuple[Op, DataSplit]]:
    """Each op that reads rows of the batch, and how it splits them."""
    batch_dims = dict.fromkeys(batch_inputs(program), 0)
    for layer, strategy in zip(program.layers, decisions.layer_strategies, strict=True):
        for op, factors in zip(layer.ops, strategy.assignments, strict=True):
            options = [option_of(op, factor) for factor in factors]
            for index, dim in _batched_operands(op, batch_dims):
                placements = [option.operands[index] for option in options]
                yield (
                    op,
                    DataSplit(strategy.mesh, tuple(shard(0) if p == shard(dim) else REPLICATE for p in placements)),
                )
            _follow(op, batch_dims)


def output_rows(program: Program) -> dict[str, int]:
    """The outputs of the program that hold the rows of the batch, and along which dim."""
    batch_dims = dict.fromkeys(batch_inputs(program), 0)
    for layer in program.layers:
        for op in layer.ops:
            _follow(op, batch_dims)
    return {name: batch_dims[name] for name in program.outputs if name in batch_dims}


def _batched_operands(op: Op, batch_dims: dict[str, int]) -> Iterator[tuple[int, int]]:
    return ((index, batch_dims[name]) for index, name in enumerate(op.operands) if name in batch_dims)


def _follow(op: Op, batch_dims: dict[str, int]) -> None:
    """Note which dim of the op's results the rows are, as its ways to split them say."""
    batch_placements = [(index, shard(dim)) for index, dim in _batched_operands(op, batch_dims)]
    for option in options_of(op):
        if any(option.operands[index] == placement for index, placement in batch_placements):
            results = zip(op.results, option.results, strict=True)
            batch_dims.update({name: placement.dim for name, placement in results if placement.is_shard})
