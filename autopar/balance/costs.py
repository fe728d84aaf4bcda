"""What sequences cost on a group of devices: seconds linear in tokens, and quadratic in the tokens of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.errors import LengthError

__all__ = ["GroupCost", "check_lengths"]


@dataclass(frozen=True)
class GroupCost:
    """The cost of sequences on one group of devices, which share every sequence of the group.

    Args:
        degree: devices of the group.
        token_s: seconds per token, communication between these devices included.
        pair_s: seconds per pair of tokens of one sequence.
        tokens: the capacity of a microbatch, and so the length of the longest sequence.
        step_s: seconds of a step that don't depend on its sequences.
        microbatch_s: seconds of a microbatch that don't depend on its sequences.  All groups run equally many
            microbatches, because ZeRO-3 gathers parameters over all devices in each.
    """

    degree: int
    token_s: float
    pair_s: float
    tokens: float
    step_s: float = 0.0
    microbatch_s: float = 0.0

    def seconds(self, lengths: np.ndarray) -> np.ndarray:
        """``[n]`` lengths in tokens -> seconds of each."""
        exact = lengths.astype(np.float64)
        return self.token_s * exact + self.pair_s * exact * exact


def check_lengths(lengths: object, most: float, where: str, what: str = "sequence {} of the batch") -> np.ndarray:
    """Lengths as ``[n]`` int64; `what` says in errors which one is meant, with a place for its index.

    Raises:
        LengthError: one is not a positive whole number, or larger than `most`, the room that `where` has.
    """
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise LengthError(
            f"lengths are whole numbers of tokens in one dimension, but these have shape {list(tokens.shape)} and "
            f"dtype {tokens.dtype}: pass a list of int"
        )
    for index in np.flatnonzero(tokens < 1)[:1]:
        raise LengthError(
            f"{what.format(index)} has length {tokens[index]}, but a sequence has at least one token: leave "
            "empty ones out of the data set"
        )
    for index in np.flatnonzero(tokens > most)[:1]:
        raise LengthError(
            f"{what.format(index)} has {tokens[index]:,} tokens, more than {where} holds ({int(most):,}): cut "
            "it, or plan with longer example inputs"
        )
    return tokens.astype(np.int64)
