"""Decides which data-parallel rank takes which sequences of a batch: a function of their lengths and the plan alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar.balance.assignment import Assignment
from autopar.balance.costs import GroupCost, check_lengths
from autopar.balance.group_rows import assign_groups
from autopar.balance.groups import best_groups
from autopar.balance.rows import assign_rows, taken_places
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

    def __init__(self, plan: Plan | Sequence[Plan], *, packs: bool | None = None, uses_groups: bool = True) -> None:
        """`packs`: whether several sequences share a row; else each is padded to a row of its own; None: as the plan
        expects.  `uses_groups`: whether groups of unlike size may run in one step, if the plan has them.

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
        lengths = plans[0].prediction.lengths
        self.packs = lengths.packs if packs is None else packs
        self.groups = lengths.groups if uses_groups else ()
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
                ``k * ranks`` to ``(k + 1) * ranks - 1``, whose work is as equal as possible.

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
                assignment = assign_rows(
                    self.rows[place], tokens, self.devices, self.limit_bytes, packs=self.packs, batches=batches
                )
                if best is None or assignment.step_time_s < best.step_time_s:
                    best = assignment
        assert best is not None  # the plan for the longest rows is one of them
        if self.groups and batches == 1:
            return assign_groups(
                self.groups, self.coupling_s, self.devices_of_stage, tokens,
                nests=self.nests, below_s=best.step_time_s, packs=self.packs,
            ) or best  # fmt: skip
        return best

    def _assign_degrees(self, tokens: np.ndarray) -> Assignment:
        chosen = best_groups(self.costs, self.devices, tokens)
        packed, once = chosen.packed, RowCost(step_s=chosen.fixed_s)
        places = tokens, packed.group, packed.row, chosen.degrees, chosen.microbatches
        return Assignment(*places, packed.load, chosen.bound_s, chosen.is_exact, once)

    def _least_s(self, row: RowCost, tokens: np.ndarray, batches: int) -> float:
        """No assignment to such rows makes a step faster than this."""
        groups = row.ranks * batches
        pairs = np.square(tokens.astype(np.float64))
        rows = max(1, math.ceil(int(taken_places(row, tokens, packs=self.packs).sum()) / row.tokens / groups))
        attention_s = row.pair_s * max(float(pairs.sum()) / groups, float(pairs.max(initial=0.0)))
        fixed_s = row.fixed_s(rows, row.at_once(rows, self.limit_bytes))
        return fixed_s + row.place_s * rows * row.tokens + attention_s

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
    return GroupCost(degree, row.token_s, row.own_pair_s, row.tokens, row.step_s, row.microbatch_s)
