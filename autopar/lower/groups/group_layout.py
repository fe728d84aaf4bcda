"""Which ranks form a group in a step: read from the lengths of the rows that they pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.errors import InputShapeError

__all__ = ["Group", "read_groups"]


class Group(NamedTuple):
    """`degree` neighboring ranks from `start` on, which compute the same rows together; with pipeline stages, those
    with the same places among the ranks of every stage.

    `stages` is the number of stages, each of `ranks_of_stage` ranks.
    """

    start: int
    degree: int
    stages: int = 1
    ranks_of_stage: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks."""
        own = range(self.start, self.start + self.degree)
        return tuple(stage * self.ranks_of_stage + rank for stage in range(self.stages) for rank in own)


def read_groups(tokens: Sequence[int], degrees: Mapping[int, int], stages: int = 1) -> tuple[Group, ...]:
    """The groups of a step, by the place of their ranks among those of a stage.

    A group begins at a multiple of its degree.  So along an axis of a plan for so many devices it has the members that
    the axis has among all ranks, and needs no process groups of its own.

    Args:
        tokens: of the rows that each rank passes.
        degrees: tokens of rows -> how many ranks of each stage compute them together.
        stages: number of pipeline stages, of equally many ranks each.

    Raises:
        InputShapeError: no plan has such rows, too few neighbors pass them, or the ranks of another stage pass others.
    """
    ranks_of_stage = len(tokens) // stages
    for rank, length in enumerate(tokens):
        if length != tokens[rank % ranks_of_stage]:
            first = rank % ranks_of_stage
            raise InputShapeError(
                f"ranks {first} and {rank} have the same place in their pipeline stages, and pass the same rows, but "
                f"theirs have {tokens[first]} and {length} tokens: pass the batches that autopar.balanced gives"
            )
    groups: list[Group] = []
    rank = 0
    while rank < ranks_of_stage:
        length = tokens[rank]
        if length not in degrees:
            raise InputShapeError(
                f"ranks pass rows of unlike lengths, and rank {rank} passes rows of {length} tokens, but the plan's "
                f"groups of devices have rows of {', '.join(map(str, sorted(degrees)))}: pass the batches that "
                "autopar.balanced gives, or pad to one length that all ranks share"
            )
        group = Group(rank, degrees[length], stages, ranks_of_stage)
        own = list(tokens[rank : min(rank + group.degree, ranks_of_stage)])
        if rank % group.degree or own != [length] * group.degree:
            raise InputShapeError(
                f"rows of {length} tokens are computed by groups of {group.degree} ranks, which begin at a multiple of "
                f"{group.degree} and pass the same rows, but ranks {rank} to {rank + len(own) - 1} pass rows of {own} "
                "tokens: pass the batches that autopar.balanced gives"
            )
        groups.append(group)
        rank += group.degree
    return tuple(groups)
