"""How one op propagates padding from its operands to its results; see `autopar.trace.padded.prefixes`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from autopar.ops import family_of, options_for
from autopar.ops.family import argument
from autopar.program import Arg, Op, Option, Ref
from autopar.trace.padded.entries_beyond import beyond, carries_labels, is_no_index, padding
from autopar.trace.padded.op_pairs import LABELS_OF, Longer, OpPair, Prefix, Types

__all__ = ["follow"]

_SUMS = {"aten.sum", "aten.nansum"}
_PRODUCTS = {"aten.mm", "aten.bmm", "aten.matmul", "aten.linear", "aten.dot", "aten.mv", "aten.einsum"}
_DRAWS_APART = {"autopar.dropout", "aten.scaled_dot_product_attention"}  # each entry draws its own random number


def follow(pair: OpPair, *, is_known: bool) -> list[Prefix | None] | None:
    """What is known of each result (None: nothing), or None if nothing is known of any.

    Args:
        pair: the op in both programs.
        is_known: whether something is known of every operand; else only an index that selects the last entry helps.
    """
    op = pair.op
    if not is_known:
        return _last_entry(pair)
    differing = _differing(op, pair.other)
    if not pair.longer() and not differing and all(a == b for a, b in pair.results):
        return [{} for _ in pair.results]
    if op.is_random and pair.kind not in _DRAWS_APART:
        return None
    if is_no_index(pair):
        return None
    special = _SPECIAL.get(pair.kind)
    if special is not None and (special is _reshape or pair.is_in_one()):
        special(pair)
    for option in _options(pair):
        _split(pair, option)
    if not pair.longer() <= pair.is_followed or not differing <= pair.literals | _sizes(pair):
        return None
    return [_result(pair, place, kinds) for place, kinds in enumerate(pair.results)]


def _options(pair: OpPair) -> Sequence[Option]:
    """The ways in which its rule can split the op; hoisted ops don't record theirs."""
    if pair.op.options:
        return pair.op.options if pair.op.rule_source == "rule" else ()
    operands, results = (tuple(long for long, _ in kinds) for kinds in (pair.operands, pair.results))
    match = options_for(pair.op, operands, results)
    return () if match is None else match.options


def _result(pair: OpPair, place: int, kinds: Types) -> Prefix | None:
    """What is known of a result; None unless its longer dims are those that rules account for."""
    long, short = (kind.shape for kind in kinds)
    is_of_labels = carries_labels(pair, place)
    known = {
        dim: longer._replace(is_of_labels=is_of_labels)
        for (which, dim), longer in pair.made.items() if which == place
    }  # fmt: skip
    differs = {dim for dim, (a, b) in enumerate(zip(long, short, strict=False)) if a != b}
    return known if known.keys() == differs and len(long) == len(short) and kinds[0].dtype == kinds[1].dtype else None


def _split(pair: OpPair, option: Option) -> None:
    """Propagate along the factor that `option` splits, if it is longer."""
    cut = {(place, placement.dim) for place, placement in enumerate(option.operands) if placement.is_shard}
    if option.kernel or not option.extent or not cut or not cut <= pair.longer() or cut & pair.is_followed:
        return
    made = {(place, placement.dim) for place, placement in enumerate(option.results) if placement.is_shard}
    sizes = [_sizes_of(pair.operands[place], dim) for place, dim in cut]
    sizes += [_sizes_of(pair.results[place], dim) for place, dim in made]
    # The op computes each of `extent` slices separately; the shorter operands and results are the first of these.
    counts = {short * option.extent / long for long, short in sizes}
    if len(counts) != 1 or not counts.pop().is_integer():
        return
    blocks = {pair.states[place][dim].blocks for place, dim in cut}
    if len(blocks) != 1 or (blocks != {1} and any(long != option.extent for long, _ in sizes)):
        return
    rest = [place for place, placement in enumerate(option.results) if not placement.is_shard]
    if rest and not _is_nothing_beyond(pair, cut):
        return
    pair.is_followed |= cut
    pair.made |= {at: beyond(pair, cut, at)._replace(blocks=min(blocks)) for at in made}


def _sizes_of(types: Types, dim: int) -> tuple[int, int]:
    return types[0].shape[dim], types[1].shape[dim] if dim < len(types[1].shape) else 0


def _is_nothing_beyond(pair: OpPair, cut: set[tuple[int, int]]) -> bool:
    """Whether the padding adds nothing to a sum along a factor."""
    fills = {place: pair.states[place][dim].fill for place, dim in cut}
    if pair.op.target in LABELS_OF:
        return fills.get(LABELS_OF[pair.op.target]) == pair.ignore_index
    if pair.kind in _SUMS:
        return set(fills.values()) == {0}
    return pair.kind in _PRODUCTS and 0 in fills.values()


def _differing(op: Op, other: Op) -> set[int | str]:
    """The arguments whose literals differ."""
    one, two = op.with_numbered_operands(), other.with_numbered_operands()
    differing: set[int | str] = {place for place in range(max(len(one.args), len(two.args)))
                                 if not _equal(one.args[place : place + 1], two.args[place : place + 1])}  # fmt: skip
    first, second = dict(one.kwargs), dict(two.kwargs)
    return differing | {key for key in first.keys() | second.keys() if not _equal(first.get(key), second.get(key))}


def _equal(a: Arg, b: Arg) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _sizes(pair: OpPair) -> set[int | str]:
    """The arguments that are the sizes of the result."""
    return {
        place for place in family_of(pair.op.target).size_args
        if all(map(_fits, (pair.op.args[place], pair.other.args[place]), (kind.shape for kind in pair.results[0])))
    }  # fmt: skip


def _fits(arg: Arg, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(arg, tuple) and len(arg) == len(shape) and all(a in (b, -1) for a, b in zip(arg, shape, strict=True))
    )


# ---------------------------------------------------------------- ops that can't be split along a longer dim


def _dim_of(pair: OpPair, default: int = 0) -> int:
    dim, rank = argument(pair.op, 1, "dim", default), len(pair.operands[0][0].shape)
    return dim % rank if isinstance(dim, int) and rank else -1


def _attention(pair: OpPair) -> None:
    """(q, k, v, mask, dropout_p, is_causal): a query attends to keys up to its own, or to those the mask allows."""
    ranks = [len(kinds[0].shape) for kinds in pair.operands]
    query, key, value = ((place, rank - 2) for place, rank in enumerate(ranks[:3]))
    longer = pair.longer()
    if argument(pair.op, 5, "is_causal", False):
        # Positions count from the first row, so queries and keys must have the same length in both programs.
        both = {_sizes_of(pair.operands[place], dim) for place, dim in (query, key, value)}
        if len(both) == 1 and {query, key, value} <= longer and len(ranks) == 3:
            pair.is_followed |= {query, key, value}
            pair.made[0, query[1]] = Longer()
    elif len(ranks) == 4 and {key, value} <= longer:
        mask = (3, ranks[3] - 1)
        hidden = pair.states[3].get(mask[1], Longer()).fill
        if mask in longer and hidden in (False, -math.inf) and not (hidden == 0 and pair.operands[3][0].is_floating):
            pair.is_followed |= {key, value, mask}


def _softmax(pair: OpPair) -> None:
    place = (0, _dim_of(pair, -1))
    if place in pair.longer() and pair.states[0][place[1]].fill == -math.inf:
        pair.is_followed.add(place)
        pair.made[place] = Longer(0.0)


def _running(pair: OpPair) -> None:
    """Cumulative ops: each entry depends only on earlier ones."""
    place = (0, _dim_of(pair))
    if place in pair.longer():
        pair.is_followed.add(place)
        pair.made[place] = Longer()


def _slice(pair: OpPair) -> None:
    """slice(x, dim, start, end, step)."""
    dim = _dim_of(pair)
    size, shorter = _sizes_of(pair.operands[0], dim)
    spans = [range(length)[_span(op)] for op, length in ((pair.op, size), (pair.other, shorter))]
    long, short = spans
    if not long or not short or long.step != short.step:
        return
    if size == shorter:  # a slice of a table, longer in the padded program
        if long.start == short.start and len(long) != len(short):
            pair.made[0, dim] = Longer()
            pair.literals |= {2, 3}
    elif dim in pair.states[0]:
        if len(long) == len(short) == 1 and (long[0], short[0]) == (size - 1, shorter - 1):
            _take_last(pair, dim)
        elif long == short:
            pair.is_followed.add((0, dim))
            pair.literals |= {2, 3}
        elif long.start == short.start and long.step == 1 and (long.stop, short.stop) == (size, shorter):
            pair.is_followed.add((0, dim))
            pair.made[0, dim] = pair.states[0][dim]
            pair.literals |= {3}


def _span(op: Op) -> slice:
    start, end, step = (argument(op, at, "", default) for at, default in ((2, None), (3, None), (4, 1)))
    return slice(*(x if isinstance(x, int) else None for x in (start, end, step)))


def _select(pair: OpPair) -> None:
    """select(x, dim, index)."""
    dim = _dim_of(pair)
    if dim not in pair.states[0]:
        return
    size, shorter = _sizes_of(pair.operands[0], dim)
    long, short = (argument(op, 2, "index") for op in (pair.op, pair.other))
    if not isinstance(long, int) or not isinstance(short, int):
        return
    long, short = range(size)[long], range(shorter)[short]
    if (long, short) == (size - 1, shorter - 1):
        _take_last(pair, dim)
    elif long == short:
        pair.is_followed.add((0, dim))


def _last_entry(pair: OpPair) -> list[Prefix | None] | None:
    """index(x, [None, indices]) with different indices that both select the last entry."""
    if pair.kind == "aten.index" and pair.is_in_one():
        _index(pair)
    return follow(pair, is_known=True) if pair.last is not None else None


def _index(pair: OpPair) -> None:
    """index(x, indices) with constant indices that select the same entries, or the last one."""
    indices = argument(pair.op, 1, "indices")
    if not isinstance(indices, tuple) or any(a is None or b is None for a, b in pair.constants[1:]):
        return
    dims = [place for place, index in enumerate(indices) if isinstance(index, Ref)]
    given = [(cast("Tensor", a), cast("Tensor", b)) for a, b in pair.constants[1:]]
    if not set(dims) & pair.states[0].keys() or any(a.dtype == torch.bool for a, _ in given):
        return
    if len(dims) == 1 and given[0][0].shape == (1,) == given[0][1].shape and dims[0] in pair.states[0]:
        sizes = _sizes_of(pair.operands[0], dims[0])
        if [range(size)[int(x.item())] for size, x in zip(sizes, given[0], strict=True)] == [
            size - 1 for size in sizes
        ]:
            _take_last(pair, dims[0])
            return
    if any(bool((b < 0).any()) for _, b in given):
        return
    # The shorter program reads entries that both have, so the result is longer only where the indices are.
    rank = max(a.dim() for a, _ in given)
    start = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    long, short = (kind.shape for kind in pair.results[0])
    pair.is_followed |= {(0, dim) for dim in dims if dim in pair.states[0]}
    pair.is_followed |= {(place, dim) for place, state in enumerate(pair.states[1:], 1) for dim in state}
    pair.made |= {(0, dim): Longer() for dim in range(start, start + rank) if long[dim] != short[dim]}


def _take_last(pair: OpPair, dim: int) -> None:
    pair.last = dim
    pair.is_followed.add((0, dim))
    pair.literals |= {1, 2, 3}


def _pad(pair: OpPair) -> None:
    """constant_pad_nd(x, pad, value): at the start, or at the end with the value that the padding has already."""
    pads = argument(pair.op, 1, "pad", ())
    rank = len(pair.operands[0][0].shape)
    value = padding(pair.op)
    for dim, longer in pair.states[0].items():
        at = 2 * (rank - 1 - dim)
        if not isinstance(pads, tuple) or at >= len(pads):
            continue
        before, behind = pads[at], pads[at + 1]
        fits = isinstance(before, int) and isinstance(behind, int) and before >= 0
        is_there = isinstance(behind, int) and behind > 0 and longer.fill is not None and longer.fill == value
        if fits and value is not None and (behind == 0 or is_there):
            pair.is_followed.add((0, dim))
            pair.made[0, dim] = longer


def _expand(pair: OpPair) -> None:
    """expand: a dim of size 1 is repeated."""
    source, (long, short) = pair.operands[0][0].shape, (kind.shape for kind in pair.results[0])
    shift = len(long) - len(source)
    for dim, (a, b) in enumerate(zip(long, short, strict=False)):
        if a != b and (dim < shift or source[dim - shift] == 1):
            pair.made[0, dim] = Longer()


def _reshape(pair: OpPair) -> None:
    """The same entries in the same order in another shape: rows and positions are flattened, or unflattened again."""
    if len(pair.states[0]) != 1:
        return
    ((dim, longer),) = pair.states[0].items()
    source, short_source = (kind.shape for kind in pair.operands[0])
    target, short_target = (kind.shape for kind in pair.results[0])
    changed = [place for place, (a, b) in enumerate(zip(target, short_target, strict=False)) if a != b]
    if len(changed) != 1 or len(target) != len(short_target):
        return
    # In the flat order of entries, each of `runs` contiguous runs ends with padding.
    runs, before = math.prod(source[:dim]) * longer.blocks, math.prod(target[: changed[0]])
    is_same = math.prod(source) == math.prod(target) and math.prod(short_source) == math.prod(short_target)
    if not is_same or before == 0 or runs % before or pair.operands[0][0].dtype != pair.results[0][0].dtype:
        return
    made = runs // before
    if target[changed[0]] % made == short_target[changed[0]] % made == 0:
        pair.is_followed.add((0, dim))
        pair.made[0, changed[0]] = Longer(longer.fill, made)


_RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")

_SPECIAL: Mapping[str, Callable[[OpPair], None]] = {
    "aten.scaled_dot_product_attention": _attention,
    "aten.softmax": _softmax,
    "aten._softmax": _softmax,
    "aten._safe_softmax": _softmax,
    "aten.cumsum": _running,
    "aten.cumprod": _running,
    "aten.slice": _slice,
    "aten.select": _select,
    "aten.index": _index,
    "aten.constant_pad_nd": _pad,
    "aten.pad": _pad,
    "aten.expand": _expand,
    **{f"aten.{name}": _reshape for name in _RESHAPES},
}
