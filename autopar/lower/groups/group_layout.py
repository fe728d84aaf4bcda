"""Which ranks form groups in a step: read from the lengths of the rows that they pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autopar.errors import InputShapeError

__all__ = ["Group", "check_lengths", "count_rows", "read_groups"]


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


def read_groups(
    rows: Sequence[Sequence[int]], degrees: Mapping[int, int], stages: int = 1
) -> dict[int, tuple[Group, ...]]:
    """Tokens of a row -> the groups of a step that compute such rows, in the order of `degrees`.

    A group begins at a multiple of its degree.  So along an axis of a plan for so many devices it has the members that
    the axis has among all ranks, and needs no process groups of its own.  A rank may be in several groups.

    Args:
        rows: of each rank, how many rows it passes of each of these lengths.
        degrees: tokens of rows -> how many ranks of each stage compute them together.
        stages: number of pipeline stages, of equally many ranks each.

    Raises:
        InputShapeError: too few neighbors pass the same number of rows, or the ranks of another stage pass others.
    """
    ranks_of_stage = len(rows) // stages
    for rank, counts in enumerate(rows):
        first = rank % ranks_of_stage
        if counts != rows[first]:
            raise InputShapeError(
                f"ranks {first} and {rank} have the same place in their pipeline stages, and pass the same rows, but "
                f"of {_listed(degrees)} tokens they pass {list(rows[first])} and {list(counts)}: pass the batches that "
                "autopar.balanced gives"
            )
    by_tokens: dict[int, tuple[Group, ...]] = {}
    for kind, (tokens, degree) in enumerate(degrees.items()):
        groups: list[Group] = []
        for start in range(0, ranks_of_stage, degree):
            own = [counts[kind] for counts in rows[start : min(start + degree, ranks_of_stage)]]
            if own != own[:1] * degree and any(own):
                raise InputShapeError(
                    f"rows of {tokens} tokens are computed by groups of {degree} ranks, which begin at a multiple of "
                    f"{degree} and pass the same rows, but ranks {start} to {start + len(own) - 1} pass {own} of them: "
                    "pass the batches that autopar.balanced gives, with the same loader on every rank"
                )
            if any(own):
                groups.append(Group(start, degree, stages, ranks_of_stage))
        by_tokens[tokens] = tuple(groups)
    return by_tokens


def count_rows(tokens: Sequence[int], degrees: Mapping[int, int]) -> list[int]:
    """How many rows have each of the lengths that groups have; those of other lengths are left out."""
    return [sum(each == length for each in tokens) for length in degrees]


def check_lengths(tokens: Sequence[int], degrees: Mapping[int, int]) -> None:
    """Raise InputShapeError, on every rank, unless groups have rows of the `tokens` that each rank passes."""
    for rank, length in enumerate(tokens):
        if length not in degrees:
            raise InputShapeError(
                f"ranks pass rows of unlike lengths, and rank {rank} passes rows of {length} tokens, but the plan's "
                f"groups of devices have rows of {_listed(sorted(degrees))}: pass the batches that autopar.balanced "
                "gives, or pad to one length that all ranks share"
            )


def _listed(lengths: Iterable[int]) -> str:
    return ", ".join(map(str, lengths))
