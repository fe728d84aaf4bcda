"""What the padding of an op's result contains; see `autopar.trace.padded.prefixes`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from autopar.ops import family_of, filled_with
from autopar.ops.family import argument, packet_name
from autopar.program import Arg, Op, Ref
from autopar.trace.evaluation import run_op
from autopar.trace.padded.op_pairs import LABELS_OF, Fill, Longer, OpPair

__all__ = ["SAME_ENTRIES", "beyond", "carries_labels", "is_no_index", "looks_up", "padding"]

_PADS = {"aten.constant_pad_nd", "aten.pad"}
SAME_ENTRIES = {"aten.clone", "aten.contiguous", *_PADS}
_JOINS = {"aten.cat", "aten.slice_scatter", "aten.select_scatter"}
_INDEXING = ("embedding", "index", "gather", "scatter", "take", "one_hot")  # parts of op names
# Entries are tracked one by one for rows of labels and of masks, which are shorter than this.
_MOST_ENTRIES = 1 << 20


def beyond(pair: OpPair, cut: set[tuple[int, int]], made: tuple[int, int]) -> Longer:
    """The padding of a result at `made`, its (index, dim), along the factor that operands have at `cut`, theirs."""
    fill = _fill(pair, cut)
    entries = _entries(pair, cut, made) if fill is None else None
    if entries is not None:
        first = entries.flatten()[0]
        if bool((entries == first).all()):
            return Longer(first.item())
    return Longer(fill, entries=entries)


def _fill(pair: OpPair, cut: set[tuple[int, int]]) -> Fill:
    """The number that pads a result along the factor that operands have at `cut`; None: it is not one number."""
    op = pair.op
    fills = {place: pair.states[place][at].fill for place, at in cut}
    if op.target == "autopar.cross_entropy":
        return 0.0 if fills.get(1) == pair.ignore_index else None
    if pair.kind in _PADS:
        return fills[0] if fills[0] == padding(op) else None
    if (created := filled_with(op)) is not None:
        return created
    if op.is_view or pair.kind in SAME_ENTRIES:
        return fills.get(0)
    return _computed(pair, fills) if family_of(op.target).is_pointwise else None


def _computed(pair: OpPair, fills: Mapping[int, Fill]) -> Fill:
    """The result of a pointwise op on padding."""
    op, kind = pair.op, pair.kind
    if kind == "aten.mul" and 0 in fills.values():
        return 0
    if kind == "aten.where" and fills.get(0) is not None:
        chosen: Arg = op.args[1 if fills[0] else 2]
        return _beyond(pair, chosen, fills)
    if kind == "aten.masked_fill" and fills.get(1) is not None:
        return _beyond(pair, op.args[2 if fills[1] else 0], fills)
    if kind in ("aten.bitwise_and", "aten.logical_and", "aten.__and__") and False in fills.values():
        return False if pair.results[0][0].dtype == "bool" else None
    if kind in ("aten.bitwise_or", "aten.logical_or", "aten.__or__") and True in fills.values():
        return True if pair.results[0][0].dtype == "bool" else None
    if kind == "aten.add" and -math.inf in fills.values():
        return -math.inf
    values: dict[str, Tensor] = {}
    for place in range(len(op.operands)):
        fill = _operand_beyond(pair, place, fills)
        if fill is None:
            return None
        values[str(place)] = torch.tensor(fill, dtype=getattr(torch, pair.operands[place][0].dtype))
    result = _run(op, values)
    return None if result is None else result.item()


def _beyond(pair: OpPair, arg: Arg, fills: Mapping[int, Fill]) -> Fill:
    if isinstance(arg, Ref):
        return _operand_beyond(pair, pair.op.operands.index(arg.name), fills)
    return arg if isinstance(arg, bool | int | float) else None


def _operand_beyond(pair: OpPair, place: int, fills: Mapping[int, Fill]) -> Fill:
    """The number that pads an operand, or that all of it is."""
    constant = pair.constants[place][0]
    if place in fills:
        return fills[place]
    return constant.item() if constant is not None and constant.numel() == 1 else None


def _entries(pair: OpPair, cut: set[tuple[int, int]], made: tuple[int, int]) -> Tensor | None:
    """One slice of the result's padding, if it can be computed from a slice of each operand."""
    op, kinds = pair.op, pair.results[0][0]
    is_elementwise = family_of(op.target).is_pointwise or pair.kind in (*SAME_ENTRIES, "aten.slice", "aten.select")
    if len(pair.results) > 1 or kinds.is_floating or not (is_elementwise or pair.kind in _JOINS):
        return None
    if cut != pair.longer() or len({place for place, _ in cut}) < len(cut):
        return None
    dims, values = dict(cut), dict[str, Tensor]()
    for place in range(len(op.operands)):
        part = _slice_beyond(pair, place, dims.get(place))
        if part is None:
            return None
        values[str(place)] = part
    result = _run(op, values)
    shape = (*kinds.shape[: made[1]], 1, *kinds.shape[made[1] + 1 :])
    return result if result is not None and result.shape == shape and result.numel() else None


def _run(op: Op, values: Mapping[str, Tensor]) -> Tensor | None:
    """The result of an op with one result, on operands keyed by position; None if it can't run on them."""
    try:
        (result,) = run_op(op.with_numbered_operands(), values)
    except (KeyError, RuntimeError, TypeError, ValueError):
        return None
    return cast("Tensor", result)


def _slice_beyond(pair: OpPair, place: int, dim: int | None) -> Tensor | None:
    """One slice of an operand's padding along `dim`, or the whole operand if it is not padded."""
    kind = pair.operands[place][0]
    if dim is None:
        return pair.constants[place][0]
    shape = (*kind.shape[:dim], 1, *kind.shape[dim + 1 :])
    fill, blocks, entries, _ = pair.states[place][dim]
    if blocks > 1 or math.prod(shape) > _MOST_ENTRIES:
        return None
    if entries is None and fill is not None:
        return torch.full(shape, fill, dtype=getattr(torch, kind.dtype))
    return entries


def carries_labels(pair: OpPair, place: int) -> bool:
    """Whether a result may contain ignored labels, or numbers computed from them, which are no valid indices."""
    if pair.op.target in LABELS_OF or looks_up(pair.op) or filled_with(pair.op) is not None:
        return False
    is_kept = pair.op.is_view or pair.kind in SAME_ENTRIES or family_of(pair.op.target).is_pointwise
    is_of_labels = any(longer.is_of_labels for state in pair.states for longer in state.values())
    return is_of_labels and (is_kept or not pair.results[place][0].is_floating)


def is_no_index(pair: OpPair) -> bool:
    """Whether the op may use padding as an index that is out of range, such as an ignored label."""
    op = pair.op
    does_not_read = op.target in LABELS_OF or filled_with(op) is not None or pair.kind in _JOINS
    if does_not_read or op.is_view or pair.kind in SAME_ENTRIES or family_of(op.target).is_pointwise:
        return False
    for state, (kind, _) in zip(pair.states, pair.operands, strict=True):
        if kind.is_floating or kind.dtype == "bool":
            continue
        for longer in state.values():
            least, most = _range(longer, is_index=looks_up(op))
            if least < 0 or (looks_up(op) and most >= _table_size(pair, longer)):
                pair.reads_out_of_range = least if least < 0 else most
                return True
    return False


def _range(longer: Longer, *, is_index: bool) -> tuple[float, float]:
    """The smallest and the largest number in the padding; unknown padding is a valid index (0), or none (-1) if it
    comes from ignored labels.
    """
    if longer.entries is not None:
        return longer.entries.min().item(), longer.entries.max().item()
    if longer.fill is not None:
        return longer.fill, longer.fill
    least = -1 if is_index and longer.is_of_labels else 0
    return least, 0


def _table_size(pair: OpPair, longer: Longer) -> float:
    """The number of entries that an index selects from; without a known dim, the smallest size."""
    shape = pair.operands[0][0].shape
    if pair.kind == "aten.embedding":
        return shape[0]
    return min(shape) if longer.is_of_labels and shape else math.inf


def looks_up(op: Op) -> bool:
    """Whether an op reads or writes at indices that are given by operands."""
    return packet_name(op.target) not in _JOINS and any(word in op.target for word in _INDEXING)


def padding(op: Op) -> Arg:
    """The number that a padding op pads with; None for one that repeats entries."""
    if packet_name(op.target) == "aten.constant_pad_nd":
        return argument(op, 2, "value", 0)
    value = argument(op, 3, "value")
    return (0 if value is None else value) if argument(op, 2, "mode", "constant") == "constant" else None
