"""How ops handle rows: which work row by row, and which values depend on the order of sorted rows alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import torch
from torch import Tensor

from autopar.ops import family_of, options_for
from autopar.placement import shard
from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.evaluation import run_op
from autopar.trace.graph import Graph

__all__ = ["RowOrder", "divisor_to", "is_rowwise", "random_ids", "with_columns", "with_sizes", "without_rows"]

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_MOST_EXPERTS_OF_A_TOKEN = 64  # published models have up to 22


def divisor_to(least: int, size: int) -> int:
    """What to divide `size` by to get about `least`, and no less; 1 if nothing divides it so."""
    return next((size // small for small in range(least, min(size // 2, 64 * least) + 1) if size % small == 0), 1)


def with_sizes(op: Op, small: Mapping[int, int]) -> Op:
    """The op with other sizes among its arguments."""

    def swap(arg: Arg) -> Arg:
        return small.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg

    return op.map_args(swap)


@dataclass(frozen=True)
class RowOrder:
    """What depends on the sorted ids alone.

    Args:
        ops: that compute it, the sort among them.
        values: on random ids, by name.
        kinds: ``"order"``, ``"sorted"``, ``"inverse"``, ``"ends"``, for values that are that.
        order: of the random ids.
        fewer: how many times as many rows the graph has.
    """

    ops: tuple[Op, ...]
    values: Mapping[str, Tensor]
    kinds: Mapping[str, str]
    order: Tensor
    fewer: int = 1

    @property
    def sorted_ids(self) -> set[str]:
        """Names of values that are the sorted ids."""
        return {name for name, kind in self.kinds.items() if kind == "sorted"}

    def are_places(self, name: str, num_entries: int) -> bool:
        """Whether the value says which of so many entries each sorted row reads, if rows read them in their order."""
        value = self.values.get(name, self.order[:0])
        if value.dim() == 2 and bool((value == value[:, :1]).all()):  # repeated for each column
            value = value[:, 0]
        per_entry = len(self.order) * self.fewer // num_entries
        return value.shape == self.order.shape and torch.equal(value, (self.order // per_entry).to(value.dtype))

    @classmethod
    def of(cls, graph: Graph, place: int, num_experts: int, fewer: int) -> RowOrder:
        """Evaluate what follows the sort at `place`, with so many times fewer rows."""
        sort = graph.ops[place]
        num_rows = graph.types[sort.operands[0]].shape[0]
        small = {num_rows // k: num_rows // k // fewer for k in range(1, _MOST_EXPERTS_OF_A_TOKEN + 1)
                 if num_rows % (k * fewer) == 0 and num_rows // k != num_experts}  # fmt: skip
        given = sort.operands[0]
        values = {given: random_ids(num_rows // fewer, num_experts, seed=0)}
        free = {name: graph.constants[name] for name, role in graph.roles.items() if role == "constant"}
        producers = graph.producers
        # The ids of each token in a row: for what reads those, as if they came from the flat ones.
        ops: list[Op] = []
        for name in with_columns(graph, given):
            op = Op("", "aten.reshape.default", (Ref(given), graph.types[name].shape), (), (name,))
            with contextlib.suppress(RuntimeError):  # so many fewer rows are no whole tokens
                values.update(zip(op.results, run_op(with_sizes(op, small), values), strict=True))
                ops.append(op)
        pending = sorted({at for name in (*values, *sort.results) for at in graph.readers.get(name, ())} | {place})
        seen = set(pending)
        while pending:
            op = graph.ops[heappop(pending)]
            if not all(name in values or name in free or _is_free(producers, name) for name in op.operands):
                continue
            before = [producers[n] for n in op.operands if n not in values and n not in free]
            try:
                for each in (*before, op):
                    made = run_op(with_sizes(each, small), {**free, **values})
                    values.update(zip(each.results, made, strict=True))
            except Exception:  # noqa: BLE001  (not computed from the order alone in a way that can be looked at)
                continue
            ops += [each for each in (*before, op) if each not in ops]
            for reader in (at for name in op.results for at in graph.readers.get(name, ())):
                if reader not in seen:
                    seen.add(reader)
                    heappush(pending, reader)
        ids = values.pop(given)
        order = values[sort.results[-1]]
        return cls(tuple(ops), values, dict(_kinds(values, ids, order, num_experts)), order, fewer)


def with_columns(graph: Graph, ids: str) -> tuple[str, ...]:
    """What the flat ids are a view of: [tokens, k], the ids of each token; () if there is no such value."""
    op = graph.producers.get(ids)
    is_view = op is not None and op.target in _VIEWS and len(graph.types[op.operands[0]].shape) > 1
    return (op.operands[0],) if op is not None and is_view else ()


def _is_free(producers: Mapping[str, Op], name: str) -> bool:
    """Whether the value is computed from nothing, as a range is."""
    op = producers.get(name)
    return op is not None and not op.operands and not family_of(op.target).draws(op)


def random_ids(num_rows: int, num_experts: int, seed: int) -> Tensor:
    """Skewed: most rows have one of few experts, and with many experts some have none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(num_rows, generator=generator).square() * num_experts
    return drawn.long().clamp_(max=num_experts - 1)


def _kinds(values: Mapping[str, Tensor], ids: Tensor, order: Tensor, num_experts: int) -> Iterable[tuple[str, str]]:
    in_order = ids[order]
    is_sorted = bool((in_order.diff() >= 0).all()) and torch.equal(order.sort().values, torch.arange(len(order)))
    if not is_sorted:
        return
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    forms = {
        "order": order, "sorted": in_order, "inverse": inverse,
        "ends": torch.bincount(ids, minlength=num_experts).cumsum(0),
    }  # fmt: skip
    for name, value in values.items():
        for kind, form in forms.items():
            if not value.is_floating_point() and value.shape == form.shape and bool((value == form).all()):
                yield name, kind
                break


def is_rowwise(op: Op, types: Mapping[str, TensorType], rows: Iterable[str]) -> bool:
    """Whether a factor of the op cuts the rows of its operands and results, all else whole, without a kernel."""
    rows = set(rows)
    operands, results = (tuple(types[name] for name in names) for names in (op.operands, op.results))
    match = options_for(op, operands, results)
    if match is None or match.is_random or family_of(op.target).is_uninitialized:
        return False
    return any(
        not option.kernel
        and all(placement == shard(0) for placement in option.results)
        and all((name in rows) == (p == shard(0)) and (name in rows or not p.is_shard)
                for name, p in zip(op.operands, option.operands, strict=True))
        for option in match.options
    )  # fmt: skip


def without_rows(op: Op, num_rows: int) -> Op:
    """The op with -1 for the number of rows among sizes that are arguments."""
    args = list(op.args)
    for place in family_of(op.target).size_args:
        sizes = args[place]
        if isinstance(sizes, tuple) and sizes[:1] == (num_rows,):
            args[place] = (-1, *sizes[1:])
    return replace(op, args=tuple(args))
