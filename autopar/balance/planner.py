"""Decides which data-parallel rank takes which sequences of a batch: a function of their lengths and the plan alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.balance.assignment import Assignment
from autopar.balance.costs import GroupCost, check_lengths
from autopar.balance.exact import FEW, improve_exactly
from autopar.balance.group_rows import assign_groups
from autopar.balance.groups import best_groups
from autopar.balance.packing import Packed, Places, even_out, longest_first, tightest_rows, work_bound
from autopar.errors import LengthError
from autopar.plan import Plan
from autopar.plan.prediction import RowCost

__all__ = ["BatchPlanner"]


class BatchPlanner:
    """Shares out the sequences of a batch among the data-parallel ranks of a plan, by the plan's own prices.

    Rows have the length that the plan was made for, and are computed whole.  So first as few rows as possible are
    filled, equally many for each rank; then attention, which takes the squares of lengths, is evened out.  More rows
    than the plan is for are in one microbatch if the plan has one and they fit into memory, else in whole microbatches.

    Of a family of plans (`autopar.plan(..., lengths=...)`) the one is taken by which the step is predicted to be
    fastest; `Assignment.row_cost` says which.

    The same lengths give the same assignment on every rank, without communication.

    If the family has groups, a batch may also be shared out among groups of devices of unlike size: few large ones for
    long sequences, small ones for short.  `Assignment.unlike` then says what each group runs, and `Assignment.starts`
    where groups overlap: devices first compute rows of a large group together, then rows of smaller ones.

    Given several plans for the same devices with other degrees, it chooses how many devices work on a sequence
    together, as if each device group computed sequences as the plan of its degree does: a prediction, nothing runs so.

    Example:
        >>> planner = autopar.BatchPlanner(plan)
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
        self.rows = tuple(each.row for each in plans[0].prediction.lengths.plans) or (plans[0].prediction.row,)
        self.longest = max(row.tokens for row in self.rows)
        self.packs = packs
        lengths = plans[0].prediction.lengths
        self.groups = lengths.groups if packs else ()
        self.coupling_s, self.nests = lengths.coupling_s, lengths.nests
        self.devices = plans[0].world_size
        self.devices_of_stage = plans[0].group_size
        self.limit_bytes = plans[0].memory_limit_bytes / (1 + plans[0].memory_error)
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
        if len(self.costs) > 1:
            tokens = check_lengths(lengths, max(cost.tokens for cost in self.costs), "the largest group of devices")
            return self._assign_degrees(tokens)
        tokens = check_lengths(lengths, self.longest, "a row of the plan")
        longest = int(tokens.max(initial=0))
        bounds = [(self._least_s(row, tokens, batches), place) for place, row in enumerate(self.rows)]
        best: Assignment | None = None
        for least_s, place in sorted(bounds):
            if self.rows[place].tokens >= longest and (best is None or least_s < best.step_time_s):
                found = self._assign_rows(self.rows[place], tokens, batches)
                if best is None or found.step_time_s < best.step_time_s:
                    best = found
        assert best is not None  # the plan for the longest rows is one of them
        if self.groups and batches == 1:
            other = assign_groups(self.groups, self.coupling_s, self.devices_of_stage, tokens, nests=self.nests)
            if other is not None and other.step_time_s < best.step_time_s:
                return other
        return best

    def _assign_degrees(self, tokens: np.ndarray) -> Assignment:
        found = best_groups(self.costs, self.devices, tokens)
        packed, once = found.packed, RowCost(step_s=found.fixed_s)
        places = tokens, packed.group, packed.row, found.degrees, found.microbatches
        return Assignment(*places, packed.load, found.bound_s, found.is_exact, once)

    def _taken(self, row: RowCost, tokens: np.ndarray) -> np.ndarray:
        """``[n]`` places of a row that sequences take."""
        return tokens if self.packs else np.full(len(tokens), row.tokens)

    def _least_s(self, row: RowCost, tokens: np.ndarray, batches: int) -> float:
        """No assignment to such rows makes a step faster than this."""
        groups = row.ranks * batches
        pairs = np.square(tokens.astype(np.float64))
        rows = max(1, math.ceil(int(self._taken(row, tokens).sum()) / row.tokens / groups))
        attention_s = row.pair_s * max(float(pairs.sum()) / groups, float(pairs.max(initial=0.0)))
        fixed_s = row.fixed_s(rows, row.at_once(rows, self.limit_bytes))
        return fixed_s + row.token_s * rows * row.tokens + attention_s

    def _assign_rows(self, row: RowCost, tokens: np.ndarray, batches: int) -> Assignment:
        groups = row.ranks * batches
        taken = self._taken(row, tokens)
        # Places without a token are computed like others, so only attention tells ranks apart.
        work = row.pair_s * np.square(tokens.astype(np.float64))[None]
        for rows in self._row_counts(row, taken, groups):
            places = Places(np.zeros(groups, np.int64), rows, float(row.tokens), taken, work)
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
        degrees = np.full(groups, self.devices // row.ranks)
        order = _heaviest_row_first(packed, places)
        at_once = row.at_once(rows, self.limit_bytes)
        return Assignment(tokens, packed.group, order, degrees, rows, packed.load, bound_s, is_exact, row, (), at_once)

    def _row_counts(self, row: RowCost, taken: np.ndarray, groups: int) -> Iterable[int]:
        """How many rows each rank could compute, from what they can't be below to enough for a row for each sequence:
        any number that a microbatch holds, else whole microbatches.
        """
        halves = int((2 * taken > row.tokens).sum())  # no two of these share a row
        least = max(1, math.ceil(int(taken.sum()) / row.tokens / groups), math.ceil(halves / groups))
        most = max(least, math.ceil(len(taken) / groups))
        sizes = ((count, row.at_once(count, self.limit_bytes)) for count in range(least, most + 1))
        return dict.fromkeys(-(-count // size) * size for count, size in sizes)

    def _check_degrees(self, worlds: Sequence[int]) -> None:
        degrees = sorted(cost.degree for cost in self.costs)
        if len(set(worlds)) > 1 or any(b % a or a == b for a, b in itertools.pairwise(degrees)):
            raise LengthError(
                f"plans for groups of several degrees are for the same devices, and their degrees divide each other, "
                f"but these are for {sorted(set(worlds))} devices, with {degrees} to a data-parallel rank"
            )


def _group_cost(plan: Plan) -> GroupCost:
    row = plan.prediction.row
    degree = plan.world_size // row.ranks
    return GroupCost(degree, row.token_s, row.pair_s, row.tokens, row.step_s, row.microbatch_s)


def _heaviest_row_first(packed: Packed, places: Places) -> np.ndarray:
    """``[n]`` rows, renumbered within each group: ranks that wait for each other in every microbatch (ZeRO-3) wait
    least if the heavy ones of all ranks meet.
    """
    groups, rows = packed.left.shape
    flat = packed.group * rows + packed.row
    work = np.bincount(flat, weights=places.work[0], minlength=groups * rows).reshape(groups, rows)
    rank = np.argsort(np.argsort(-work, axis=1, kind="stable"), axis=1, kind="stable")
    return rank.reshape(-1)[flat]
