"""Which ranks form a group in a step: read from the lengths of the rows that they pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.errors import InputShapeError

__all__ = ["Group", "read_groups"]


class Group(NamedTuple):
    """`degree` neighbouring ranks from `start` on, which compute the same rows together."""

    start: int
    degree: int

    @property
    def ranks(self) -> range:
        """Its ranks."""
        return range(self.start, self.start + self.degree)


def read_groups(tokens: Sequence[int], degrees: Mapping[int, int]) -> tuple[Group, ...]:
    """The groups of a step, by rank.

    A group begins at a multiple of its degree.  So along an axis of a plan for so many devices it has the members that
    the axis has among all ranks, and needs no process groups of its own.

    Args:
        tokens: of the rows that each rank passes.
        degrees: tokens of rows -> how many ranks compute them together.

    Raises:
        InputShapeError: no plan has such rows, or too few neighbours pass them.
    """
    groups: list[Group] = []
    rank = 0
    while rank < len(tokens):
        length = tokens[rank]
        if length not in degrees:
            raise InputShapeError(
                f"ranks pass rows of unlike lengths, and rank {rank} passes rows of {length} tokens, but the plan's "
                f"groups of devices have rows of {', '.join(map(str, sorted(degrees)))}: pass the batches that "
                "autopar.balanced gives, or pad to one length that all ranks share"
            )
        group = Group(rank, degrees[length])
        own = list(tokens[rank : rank + group.degree])
        if rank % group.degree or own != [length] * group.degree:
            raise InputShapeError(
                f"rows of {length} tokens are computed by groups of {group.degree} ranks, which begin at a multiple of "
                f"{group.degree} and pass the same rows, but ranks {rank} to {rank + len(own) - 1} pass rows of {own} "
                "tokens: pass the batches that autopar.balanced gives"
            )
        groups.append(group)
        rank += group.degree
    return tuple(groups)
