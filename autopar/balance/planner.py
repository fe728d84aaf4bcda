"""Decides which data-parallel rank takes which sequences of a batch: a function of their lengths and the plan alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.balance.assignment import Assignment
from autopar.balance.costs import GroupCost, check_lengths
from autopar.balance.exact import FEW, improve_exactly
from autopar.balance.groups import best_groups
from autopar.balance.packing import Packed, Places, even_out, longest_first, tightest_rows, work_bound
from autopar.errors import LengthError
from autopar.plan import Plan

__all__ = ["BatchPlanner"]


class BatchPlanner:
    """Shares out the sequences of a batch among the data-parallel ranks of a plan, by the plan's own prices.

    Rows have the length that the plan was made for, and are computed whole.  So first as few rows as possible are
    filled, equally many for each rank; then attention, which takes the squares of lengths, is evened out.  A rank
    computes ``rows`` of them at once, or fewer, or in microbatches of so many: memory is as the plan predicts.

    The same lengths give the same assignment on every rank, without communication.

    Given several plans for the same devices with other degrees, it also chooses how many devices work on a sequence
    together: each device group computes sequences as the plan of its degree does.  That is a prediction: no runtime
    runs groups of several degrees in one step yet.

    Example:
        >>> planner = BatchPlanner(plan)
        >>> assignment = planner.assign([4096, 512, 131072, 900])
        >>> assignment.rows_of(0)
        [[2]]
    """

    def __init__(self, plan: Plan | Sequence[Plan], *, packs: bool = True) -> None:
        """`packs`: whether several sequences share a row; else each is padded to a row of its own.

        Raises:
            LengthError: the plan has no predicted costs of rows; plans of several degrees are for other devices, or
                their degrees don't divide each other.
        """
        plans = [plan] if isinstance(plan, Plan) else list(plan)
        for each in plans:
            if not each.prediction.row.tokens:
                raise LengthError(
                    "the plan doesn't say what a row costs: it has no prediction, or no input of shape [rows, tokens]. "
                    "Plan with this version of autopar, and with such example inputs"
                )
        self.row = plans[0].prediction.row
        self.packs = packs
        self.devices = plans[0].world_size
        self.costs = tuple(_group_cost(each) for each in plans)
        if len(plans) > 1:
            self._check_degrees([each.world_size for each in plans])

    def assign(self, lengths: Sequence[int] | np.ndarray, *, batches: int = 1) -> Assignment:
        """A place for every sequence.

        Args:
            lengths: in tokens.
            batches: over how many steps they are spread, which changes what samples a step has: step k has the groups
                ``k * ranks`` to ``(k + 1) * ranks - 1``, whose work is as alike as can be.

        Raises:
            LengthError: a length is not a positive whole number, or larger than a row.
        """
        most = max(cost.tokens for cost in self.costs)
        where = "a row of the plan" if len(self.costs) == 1 else "the largest group of devices"
        tokens = check_lengths(lengths, most, where)
        if len(self.costs) > 1:
            degrees, packed, bound_s, is_exact = best_groups(self.costs, self.devices, tokens)
            return Assignment(tokens, packed.group, packed.row, degrees, 1, packed.load, bound_s, is_exact)
        return self._assign_rows(tokens, batches)

    def _assign_rows(self, tokens: np.ndarray, batches: int) -> Assignment:
        cost, groups = self.costs[0], self.row.ranks * batches
        taken = tokens if self.packs else np.full(len(tokens), self.row.tokens)
        # Places without a token are computed like others, so only attention tells ranks apart.
        work = self.row.pair_s * np.square(tokens.astype(np.float64))[None]
        for rows in self._row_counts(taken, groups):
            places = Places(np.zeros(groups, np.int64), rows, float(self.row.tokens), taken, work)
            bound_s = work_bound(places)
            packed = longest_first(places) or tightest_rows(places)
            is_exact = False
            if packed is not None:
                packed = even_out(places, packed, bound_s)
            if len(tokens) <= FEW:
                packed, is_exact = improve_exactly(places, packed, bound_s)
            if packed is not None:
                break
        else:
            raise AssertionError("a row for each sequence has room for all")
        if batches > 1:  # groups of a step wait for each other: those of like work meet
            packed = packed.renumbered(np.argsort(np.argsort(-packed.load, kind="stable"), kind="stable"))
        degrees = np.full(groups, cost.degree)
        order = _heaviest_row_first(packed, places)
        return Assignment(tokens, packed.group, order, degrees, rows, packed.load, bound_s, is_exact)

    def _row_counts(self, tokens: np.ndarray, groups: int) -> Iterable[int]:
        """How many rows each rank could compute, from what they can't be below to enough for a row for each sequence:
        as many as the plan computes at once, or fewer, or whole microbatches.
        """
        at_once = self.row.rows
        halves = int((2 * tokens > self.row.tokens).sum())  # no two of these share a row
        least = max(1, math.ceil(int(tokens.sum()) / self.row.tokens / groups), math.ceil(halves / groups))
        most = max(least, math.ceil(len(tokens) / groups))
        counts = (count if count <= at_once else -(-count // at_once) * at_once for count in range(least, most + 1))
        return dict.fromkeys(counts)

    def _check_degrees(self, worlds: Sequence[int]) -> None:
        degrees = sorted(cost.degree for cost in self.costs)
        if len(set(worlds)) > 1 or any(b % a or a == b for a, b in itertools.pairwise(degrees)):
            raise LengthError(
                f"plans for groups of several degrees are for the same devices, and their degrees divide each other, "
                f"but these are for {sorted(set(worlds))} devices, with {degrees} to a data-parallel rank"
            )


def _group_cost(plan: Plan) -> GroupCost:
    row = plan.prediction.row
    return GroupCost(plan.world_size // row.ranks, row.token_s, row.pair_s, row.tokens)


def _heaviest_row_first(packed: Packed, places: Places) -> np.ndarray:
    """``[n]`` rows, renumbered within each group: ranks that wait for each other in every microbatch (ZeRO-3) wait
    least if the heavy ones of all ranks meet.
    """
    groups, rows = packed.left.shape
    flat = packed.group * rows + packed.row
    work = np.bincount(flat, weights=places.work[0], minlength=groups * rows).reshape(groups, rows)
    rank = np.argsort(np.argsort(-work, axis=1, kind="stable"), axis=1, kind="stable")
    return rank.reshape(-1)[flat]
