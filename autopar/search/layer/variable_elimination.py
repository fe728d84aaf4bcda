"""Exact minimization of a sum of tables by variable elimination.

Given variables x with finitely many states and tables f_k over few of them, minimize ``sum_k f_k(x)``, for
every joint state of some *kept* variables.  Bucket elimination (Dechter 1999) in min-plus algebra: take a
variable, add the tables that mention it, minimize it out, keep the result as a new table over its neighbors.
Always the variable with the smallest joint table is next.

Before tables grow, dominated states are dropped: state s of v when some t has
``sum_k min_y (f_k(s, y) - f_k(t, y)) >= 0`` (Goldstein 1994); whatever the others do, t is as good.

Should a joint table exceed a limit, its tables are minimized in groups instead (mini-buckets).  That gives a
lower bound; states are then chosen one by one against it.  If their cost equals the bound, they are optimal
all the same; else the answer says that it is not exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Elimination", "Table", "minimize"]

Array = npt.NDArray[np.float64]
States = npt.NDArray[np.intp]

# (variables, costs with one dimension per variable).  Infinite entries forbid.
Table = tuple[tuple[int, ...], Array]

_INFINITE = 1e30  # stands for infinity inside, so that differences are defined
_DOMINANCE_ENTRIES = 150_000  # below this joint size eliminating is cheaper than looking for dominated states
_DOMINANCE_LIMIT = 20_000_000  # entries times states: comparing more takes longer than what is dropped would
_SAMPLED = 16  # columns that are compared first: most states that are not dominated show it there
_CHUNK_ENTRIES = 400_000  # joint tables are formed in pieces of about this size, to stay in the cache


@dataclass(frozen=True)
class Elimination:
    """The result, indexed by the states of the kept variables in the order they were given.

    `values` is the cost of `assignments` (one more dimension at the end: a state per variable);
    `lower_bounds` is equal to it if `exact`.
    """

    values: Array
    lower_bounds: Array
    assignments: States
    exact: bool


@dataclass(frozen=True)
class _Bucket:
    """An eliminated variable with the tables that mentioned it, and which states these had."""

    variable: int
    tables: tuple[Table, ...]
    domains: dict[int, States]


@dataclass
class _Elimination:
    """What is left to do: tables by variables, and the surviving states of each variable."""

    tables: dict[tuple[int, ...], Array]
    domains: dict[int, States]
    left: set[int]
    buckets: list[_Bucket] = field(default_factory=list[_Bucket])
    exact: bool = True

    def add(self, scope: tuple[int, ...], costs: Array) -> None:
        known = self.tables.get(scope)
        self.tables[scope] = costs if known is None else known + costs

    def scopes_of(self, variable: int) -> list[tuple[int, ...]]:
        return [scope for scope in self.tables if variable in scope]


def minimize(
    sizes: Sequence[int],
    tables: Iterable[Table],
    keep: Sequence[int] = (),
    max_entries: int = 30_000_000,
) -> Elimination:
    """Minimize the sum of `tables` over all variables but `keep`, for every joint state of `keep`.

    Args:
        sizes: number of states of each variable, at least 1.
        tables: costs; a scope may name a variable once.
        keep: variables that index the result.
        max_entries: largest joint table that is formed; beyond it the result is a bounded approximation.
    """
    originals = tuple((tuple(scope), np.minimum(costs, _INFINITE)) for scope, costs in tables)
    work = _Elimination({}, {v: np.arange(size) for v, size in enumerate(sizes)}, set(range(len(sizes))) - set(keep))
    for scope, costs in originals:
        ordered = tuple(sorted(scope))
        work.add(ordered, costs.transpose([scope.index(v) for v in ordered]))
    _eliminate_all(work, max_entries)
    kept = tuple(sorted(keep))
    bound = np.zeros([sizes[v] for v in kept])
    for scope, costs in work.tables.items():
        bound = bound + _spread_to((scope, costs), kept)
    bound = bound.transpose([kept.index(v) for v in keep])
    assignments = _backtrack(work.buckets, sizes, keep)
    values = bound if work.exact else _evaluate(originals, assignments)
    is_proven = work.exact or bool((values <= bound + 1e-12 * np.abs(bound)).all())
    return Elimination(
        np.where(values >= _INFINITE / 2, np.inf, values),
        np.where(bound >= _INFINITE / 2, np.inf, bound),
        assignments,
        is_proven,
    )


def _eliminate_all(work: _Elimination, max_entries: int) -> None:
    dominance_at = _DOMINANCE_ENTRIES
    neighbors = _neighbors(work)
    joint = {v: _joint_entries(work, neighbors[v], v) for v in work.left}
    while work.left:
        entries, variable = min((joint[v], v) for v in work.left)
        if entries > dominance_at:
            dominance_at = max(dominance_at * 64, entries)
            _drop_dominated(work)
            joint = {v: _joint_entries(work, neighbors[v], v) for v in work.left}
            continue
        _eliminate(work, variable, max_entries)
        around = neighbors.pop(variable)
        for other in around:
            neighbors[other] = (neighbors[other] | around) - {variable, other}
            if other in work.left:
                joint[other] = _joint_entries(work, neighbors[other], other)


def _neighbors(work: _Elimination) -> dict[int, set[int]]:
    neighbors: dict[int, set[int]] = {v: set() for v in work.domains}
    for scope in work.tables:
        for variable in scope:
            neighbors[variable].update(scope)
    for variable, around in neighbors.items():
        around.discard(variable)
    return neighbors


def _joint_entries(work: _Elimination, neighbors: set[int], variable: int) -> int:
    return math.prod(len(work.domains[v]) for v in neighbors) * len(work.domains[variable])


def _eliminate(work: _Elimination, variable: int, max_entries: int) -> None:
    scopes = work.scopes_of(variable)
    tables = tuple((scope, work.tables.pop(scope)) for scope in scopes)
    mentioned = {v for scope in scopes for v in scope}
    work.buckets.append(_Bucket(variable, tables, {v: work.domains[v] for v in mentioned | {variable}}))
    work.left.discard(variable)
    groups = _group(tables, max_entries)
    work.exact = work.exact and len(groups) <= 1
    for group in groups:
        work.add(*_minimize_out(variable, group))


def _group(tables: tuple[Table, ...], max_entries: int) -> list[list[Table]]:
    """Tables that are added up before minimizing: all in one group if that stays under the limit."""
    groups: list[tuple[dict[int, int], list[Table]]] = []
    for scope, costs in sorted(tables, key=lambda table: -table[1].size):
        extents = dict(zip(scope, costs.shape, strict=True))
        for known, members in groups:
            if math.prod((known | extents).values()) <= max_entries:
                known.update(extents)
                members.append((scope, costs))
                break
        else:
            groups.append((extents, [(scope, costs)]))
    return [members for _, members in groups]


def _minimize_out(variable: int, tables: list[Table]) -> Table:
    """``min over variable of sum(tables)``, formed piece by piece along the first remaining variable."""
    extents = {v: size for scope, costs in tables for v, size in zip(scope, costs.shape, strict=True)}
    scope = tuple(sorted(set(extents) - {variable}))
    order = (variable, *scope)  # a minimum over the first dimension is the fast one
    # Small tables first, so that the big sum is formed once.
    spread = [_spread_to(table, order) for table in sorted(tables, key=lambda table: table[1].size)]
    shape = tuple(extents[v] for v in scope)
    result = np.empty(shape)
    if not scope:
        return scope, np.asarray(sum(spread[1:], spread[0]).min())
    rows = max(1, _CHUNK_ENTRIES // max(1, math.prod(shape[1:]) * extents[variable]))
    for start in range(0, shape[0], rows):
        pieces = [part if part.shape[1] == 1 else part[:, start : start + rows] for part in spread]
        total = pieces[0] + pieces[1] if len(pieces) > 1 else pieces[0]
        whole = (extents[variable], min(rows, shape[0] - start), *shape[1:])
        for piece in pieces[2:]:
            if total.shape == whole:  # in place
                total += piece
            else:
                total = total + piece
        np.minimum.reduce(total, axis=0, out=result[start : start + rows])
    return scope, result


def _spread_to(table: Table, order: tuple[int, ...]) -> Array:
    """The table with its dimensions in this order and length 1 for variables that it lacks."""
    scope, costs = table
    costs = costs.transpose([scope.index(v) for v in order if v in scope])
    shape = iter(costs.shape)
    return costs.reshape([next(shape) if v in scope else 1 for v in order])


def _drop_dominated(work: _Elimination) -> None:
    """Drop dominated states of every variable that is left, until none is."""
    pending = sorted(work.left)
    while pending:
        variable = pending.pop(0)
        scopes = work.scopes_of(variable)
        alive = _undominated([(scope, work.tables[scope]) for scope in scopes], variable)
        if alive is None or alive.all():
            continue
        work.domains[variable] = work.domains[variable][alive]
        for scope in scopes:
            work.tables[scope] = np.compress(alive, work.tables[scope], axis=scope.index(variable))
        around = {v for scope in scopes for v in scope if v != variable and v in work.left}
        pending += sorted(around - set(pending))


def _undominated(tables: list[Table], variable: int) -> npt.NDArray[np.bool_] | None:
    """Which states of `variable` survive; None where finding out costs too much."""
    rows = [np.moveaxis(costs, scope.index(variable), 0).reshape(costs.shape[scope.index(variable)], -1)
            for scope, costs in tables]  # fmt: skip
    if not rows or len(rows[0]) == 1 or sum(r.size * len(r) for r in rows) > _DOMINANCE_LIMIT:
        return None
    # By how much s costs more than t, at the least: first in a few columns of each table, which rules most pairs out.
    size = len(rows[0])
    excess = np.zeros((size, size))
    for row in rows:
        columns = np.ascontiguousarray(row[:, :: -(-row.shape[1] // _SAMPLED)].T)
        excess += (columns[:, :, None] - columns[:, None, :]).min(axis=0)
    np.fill_diagonal(excess, -np.inf)
    more, less = np.nonzero(excess >= 0)
    surely = np.zeros(len(more))
    for row in rows:
        surely += (row[more] - row[less]).min(axis=1)
    beaten = np.zeros((size, size), dtype=bool)
    beaten[more, less] = surely >= 0
    alive = np.ones(size, dtype=bool)
    for state in np.flatnonzero(beaten.any(axis=1)).tolist():  # one by one, so that of equals one survives
        alive[state] = not beaten[state][alive].any()
    return alive


def _backtrack(buckets: list[_Bucket], sizes: Sequence[int], keep: Sequence[int]) -> States:
    """The minimizing states, for all joint states of `keep` at once."""
    shape = tuple(sizes[v] for v in keep)
    chosen: dict[int, States] = dict(zip(keep, np.indices(shape).reshape(len(keep), math.prod(shape)), strict=True))
    count = math.prod(shape)
    for bucket in reversed(buckets):
        domain = bucket.domains[bucket.variable]
        total = np.zeros((count, len(domain)))
        for scope, costs in bucket.tables:
            others = tuple(np.searchsorted(bucket.domains[v], chosen[v]) for v in scope if v != bucket.variable)
            total += np.moveaxis(costs, scope.index(bucket.variable), -1)[others]
        chosen[bucket.variable] = domain[total.argmin(axis=1)]
    columns = [chosen[v] for v in range(len(sizes))]
    return np.stack(columns, axis=-1).reshape(*shape, len(sizes)) if columns else np.zeros((*shape, 0), np.intp)


def _evaluate(tables: Iterable[Table], assignments: States) -> Array:
    total = np.zeros(assignments.shape[:-1])
    for scope, costs in tables:
        total = total + costs[tuple(assignments[..., v] for v in scope)]
    return total
