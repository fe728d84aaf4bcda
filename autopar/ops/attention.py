"""Attention: each row of the query is independent of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from autopar.ops.family import Buffers, Kernel, OpFamily, Saves, Types, argument, aten
from autopar.ops.memory_order import followed
from autopar.ops.work import Work, sum_bytes
from autopar.program import KernelCollective, Op, itemsize_bytes

__all__ = [
    "DOCUMENTS",
    "FAMILIES",
    "WINDOWS",
    "document_length",
    "second_document_length",
    "shares_heads",
    "with_document_length",
]

DOCUMENTS = "autopar.document_attention"
"""``(query, key, value, ids, scale, is_causal, is_sorted, length, window)``: attention within documents.

Tokens see the tokens of their row that have the same id in `ids` (``[tokens]`` or ``[batch or 1, tokens]``), with
`is_causal` none after themselves.  `is_sorted`: ids never decrease along a row.  `length`: the mean number of tokens of
a token's document, for prices only; by default the row.  `window`: tokens see those less than `window` positions away;
by default all.
"""

_MAX_CUDNN_HEAD = 128
"""Head size up to which cuDNN has a backward in all its versions; for larger heads flash attention is assumed."""

WINDOWS = "autopar.window_attention"
"""``(query, key, value, scale, window, is_causal)``: tokens see those of their row that are less than `window`
positions away, with `is_causal` none after themselves.
"""


_LENGTH = 7  # the position of `length` in the arguments of `DOCUMENTS`


def document_length(op: Op, row: int) -> int:
    """The length of a token's document that prices assume for a `DOCUMENTS` op; by default that of the row."""
    return cast("int", argument(op, _LENGTH, "length", row))


def with_document_length(op: Op, length: int) -> Op:
    """A `DOCUMENTS` op for which prices assume documents of this length."""
    return replace(op, args=(*op.args[:_LENGTH], length, *op.args[_LENGTH + 1 :]))


# A whole row, or an eighth of it where documents are longer than half a row: times at lengths that are near to each
# other would say more about their noise than about their slope.
_NEAR, _SHORT = 2, 8


def second_document_length(length: int, row: int) -> int:
    """The length at which attention is priced and timed as well, for what is linear in tokens and what is in pairs."""
    return row if length * _NEAR <= row else max(1, row // _SHORT)


def _rule(op: Op, operand_types: Types, result_types: Types) -> tuple[str, ...]:
    """scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal).

    ``*`` stands for the batch and the heads; with `enable_gqa` k and v have fewer heads, and their number limits the
    slices.  A causal mask depends on the position of rows, so slices of the query's rows need a kernel that knows their
    positions; there is none with dropout, or for fewer rows than columns.  Factor ``q`` splits rows of the query and
    leaves keys and values whole; ``r`` splits all three, and keys and values travel.
    """
    sizes = {kind.shape[-2] for kind in operand_types[:2]}
    can_split = all(len(kind.shape) == 4 for kind in operand_types[:3]) and len(sizes) == 1 and not _drops(4)(op)
    rows, remark = "q", ""
    if argument(op, 5, "is_causal", False):
        rows, remark = ("q", " | by q context_attention") if can_split else ("_", "")
    gathered = f"* {rows} _, * _ _, * _ _, attn_mask: * {rows} _ -> * {rows} _{remark}"
    ring = "* r _, * r _, * r _ -> * r _ | by r ring_attention"
    return (gathered, ring) if can_split and len(operand_types) == 3 else (gathered,)


def _documents(op: Op, operand_types: Types, result_types: Types) -> tuple[str, ...]:
    """Batch and heads split without regard to documents; splitting rows needs a kernel.

    Factor ``q`` splits the rows of the query and leaves keys and values whole; ``r`` splits all three.  With a window,
    a device needs columns near its rows only.  Without one, long documents are shared out among all devices, and keys
    and values travel round a ring.
    """
    ids = "_" if len(operand_types[3].shape) == 1 else "b _"
    gathered = f"b h q _, b h _ _, b h _ _, {ids} -> b h q _ | by q context_documents"
    near = f"b h r _, b h r _, b h r _, {ids} -> b h r _ | by r "
    if not _window(op):
        return gathered, f"{near}ring_documents"
    is_in_order = argument(op, 5, "is_causal", False) and argument(op, 6, "is_sorted", False)
    return (gathered, f"{near}neighbor_documents") if is_in_order else (gathered,)


def _windows(op: Op, operand_types: Types, result_types: Types) -> tuple[str, ...]:
    """Slices of rows see columns near to them: with ``q`` every device has all columns, with ``r`` its slice and rows
    of the previous device.
    """
    gathered = "b h q _, b h _ _, b h _ _ -> b h q _ | by q context_windows"
    sliced = "b h r _, b h r _, b h r _ -> b h r _ | by r neighbor_windows"
    return (gathered, sliced) if op.args[5] else (gathered,)


def _window(op: Op) -> int:
    return cast("int", op.args[4] if op.target == WINDOWS else argument(op, 8, "window", 0))


def _keys_and_values(operands: Types) -> float:
    """How many times the size of the keys both have together."""
    return 1.0 + operands[2].num_elements / max(1, operands[1].num_elements)  # a batch may have no rows


def _exchanges(op: Op, operands: Types) -> tuple[KernelCollective, ...]:
    """Half of the rows are sent to the mirrored device, and half of the result comes back; so do their gradients.

    Backward sends the query again, and the result with its gradient; keeping them would need more memory.
    """
    query, result, dtype = 0, len(operands), operands[0].dtype
    return (
        KernelCollective("send", "forward", query, dtype=dtype, count=0.5),
        KernelCollective("send", "forward", result, dtype=dtype, count=0.5),
        KernelCollective("send", "backward", query, dtype=dtype, count=0.5),
        KernelCollective("send", "backward", result, dtype=dtype, count=1.0),
        KernelCollective("send", "backward", query, dtype=dtype, count=0.5),
    )


def _ring_sends(op: Op, operands: Types) -> tuple[KernelCollective, ...]:
    """Keys and values and their gradients travel round the ring; causal attention also exchanges halves with the
    mirrored device.

    Gradients travel in float32 at least, as all devices add to them, and take one step more than there are other
    devices.
    """
    query, result, dtype = 0, len(operands), operands[0].dtype
    both = _keys_and_values(operands)
    wide = "float64" if dtype == "float64" else "float32"
    sends = [
        KernelCollective("send", "forward", 1, dtype=dtype, count=both, is_ring=True),
        KernelCollective("send", "backward", 1, dtype=dtype, count=both, is_ring=True),
        KernelCollective("send", "backward", 1, dtype=wide, count=both, is_ring=True, returns=True),
    ]
    if argument(op, 5, "is_causal", False):
        halves = [("forward", operand, 0.5) for operand in (query, 1, 2, result)]
        halves += [("backward", operand, count) for operand, count in ((result, 1.0), (query, 0.5), (1, 0.5), (2, 0.5))]
        sends += [KernelCollective("send", phase, at, dtype=dtype, count=count) for phase, at, count in halves]
    return tuple(sends)


def _buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Exchanged halves, and results of blocks, which are joined in float32 at least; in a ring also slices that are
    sent and received.
    """
    if not has_kernel:
        return Buffers()
    query, result = operands[0].num_bytes, results[0].num_bytes
    widening = max(1.0, itemsize_bytes("float32") / itemsize_bytes(results[0].dtype))
    wide = result * widening
    if operands[0].shape[-2] == operands[1].shape[-2]:  # a ring: keys are split as queries are
        slices = sum_bytes(operands[1:3])
        return Buffers(
            forward=query + 3.0 * slices + result + 2.0 * wide,
            backward=widening * query + 2.0 * slices + 3.0 * widening * slices + 2.0 * result,
        )
    return Buffers(
        forward=0.5 * query + 1.5 * result + wide,
        backward=2.0 * query + 2.0 * result + sum_bytes(operands[1:3]),
    )


def _document_exchanges(op: Op, operands: Types) -> tuple[KernelCollective, ...]:
    """As `_exchanges`, but received tensors are kept, so that backward sends only gradients."""
    query, result, dtype = 0, len(operands), operands[0].dtype
    sent = (("forward", query), ("forward", result), ("backward", result), ("backward", query))
    return tuple(KernelCollective("send", phase, operand, dtype=dtype, count=0.5) for phase, operand in sent)


def _document_ring(op: Op, operands: Types) -> tuple[KernelCollective, ...]:
    """As `_ring_sends`, but only of the documents that are shared out, whose tokens first go to the devices that
    compute them; results and gradients come back.
    """
    query, result, dtype = 0, len(operands), operands[0].dtype
    wide = "float64" if dtype == "float64" else "float32"
    both = _keys_and_values(operands)
    growth = _shared_parts(op, operands)
    exchanges = [("forward", query), ("forward", 1), ("forward", 2), ("forward", result)]
    exchanges += [("backward", result), ("backward", query), ("backward", 1), ("backward", 2)]
    return (
        *(KernelCollective("all_to_all", phase, each, dtype=dtype, growth=growth) for phase, each in exchanges),
        KernelCollective("send", "forward", 1, dtype=dtype, count=both, is_ring=True, growth=growth),
        KernelCollective("send", "backward", 1, dtype=dtype, count=both, is_ring=True, growth=growth),
        KernelCollective("send", "backward", 1, dtype=wide, count=both, is_ring=True, returns=True, growth=growth),
    )


def _shared_parts(op: Op, operands: Types) -> tuple[tuple[int, float], ...]:
    """By number of devices, the part of all tokens whose documents are shared out (`lower/kernels/ring_documents.py`).

    An estimate for documents of one length, the mean one: all of them if a document is longer than half of a slice,
    which is what a number of devices stands for that is not listed; else one document at each end of a slice.
    """
    tokens = operands[1].shape[2]
    length = document_length(op, tokens)
    most = int(tokens // (2 * length))
    return tuple((count, length * count / tokens) for count in range(2, most + 1) if tokens % count == 0)


def _document_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Copies by document of operands and results; backward of the gradients as well.

    If slices of keys and values travel round a ring, the devices that compute shared documents save their operands and
    results until backward.  All documents may be shared out, whatever lengths are expected, so memory is for that.
    """
    if has_kernel and operands[0].shape[2] == operands[1].shape[2]:  # keys are slices as queries are
        if _window(op):
            return _window_buffers(op, operands, results, trains, has_kernel)
        query, slices, result = operands[0].num_bytes, sum_bytes(operands[1:3]), results[0].num_bytes
        wide = max(1.0, itemsize_bytes("float32") / itemsize_bytes(results[0].dtype))
        return Buffers(
            forward=2.0 * slices + wide * result,
            backward=query + slices + result + (2.0 + 2.0 * wide) * slices,
            kept=2.0 * query + slices + result,
        )
    read, result = sum_bytes(operands[:3]), results[0].num_bytes
    return Buffers(forward=read + result, backward=2.0 * (read + result))


def _window_sends(op: Op, operands: Types) -> tuple[KernelCollective, ...]:
    """Rows of keys and values are sent to the next device, and their gradients back."""
    both = _keys_and_values(operands)
    count = max(0, _window(op) - 1) * both
    sends = (KernelCollective("send", phase, 1, (2,), operands[1].dtype, count) for phase in ("forward", "backward"))
    return tuple(sends) if count else ()


def _window_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Copies by tile of operands and results, with each column in two tiles; backward of the gradients as well.

    Slices of columns are kept together with the rows from the previous device.
    """
    query, result, columns = operands[0].num_bytes, results[0].num_bytes, sum_bytes(operands[1:3])
    rows, kept = operands[1].shape[2], 0.0
    if has_kernel and rows == operands[0].shape[2]:
        received = columns * (_window(op) - 1) / rows
        columns, kept = columns + received, query + received
    return Buffers(forward=query + 2.0 * columns + result, backward=2.0 * (query + 2.0 * columns + result), kept=kept)


def _flash(op: Op, operand_types: Types, result_types: Types) -> str:
    """(q, k, v, dropout_p, scale, causal, window, window, softcap, alibi_slopes, ...).

    Tensors are [batch, seq, heads, dim].  Results: out, log-sum-exp [batch, heads, seq], a debug mask that is empty,
    and the generator's state.
    """
    tensor = "b _ h _"
    literals = ", #" * 6
    slopes = "b h" if len(operand_types) > 3 and len(operand_types[3].shape) == 2 else "h"
    return f"{tensor}, {tensor}, {tensor}{literals}, {slopes} -> {tensor}, b h _, =..., =..."


def _drops(position: int) -> Callable[[Op], bool]:
    return lambda op: argument(op, position, "dropout_p", 0.0) != 0.0


def _runs_new_kernel(operands: Types) -> bool:
    """Whether torch's dispatcher prefers cuDNN to flash attention on devices for which cuDNN has a kernel.

    On data center Hopper and Blackwell since torch 2.11, in 16 bits (`check_prefer_cudnn_attention` in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; pytorch/pytorch#162073).  Queries with fewer rows than keys
    are assumed to be a slice, whose special kernel (`lower/kernels/attention_blocks.py`) calls flash attention.
    """
    query, key, value = operands[:3]
    head = query.shape[-1]
    return (
        query.dtype in ("bfloat16", "float16")
        and query.shape[-2] == key.shape[-2]
        and head == value.shape[-1]
        and head <= _MAX_CUDNN_HEAD
        and head % 8 == 0
    )


def _work(
    sequence: int, runs_new_kernel: Callable[[Types], bool] = lambda operands: False
) -> Callable[[Op, Types, Types], Work]:
    """Return a `count_work` for operands with the sequence in dim `sequence`.

    `runs_new_kernel` says for the operands' types whether a kernel for the newest devices runs.
    """

    def count(op: Op, operands: Types, results: Types) -> Work:
        """Two products of [queries, keys] by the head size, half of that if causal; backward has five such products."""
        query, key, value = operands[:3]
        heads_and_batch = query.num_elements / (query.shape[sequence] * query.shape[-1])
        length = key.shape[sequence]
        if op.target == DOCUMENTS:  # tokens see only their own document
            length = document_length(op, length)
        if op.target in (DOCUMENTS, WINDOWS) and 0 < _window(op) < length:
            # The length of causal rows that see as many columns: half of it in the mean.
            length = round(2 * _window(op) - _window(op) ** 2 / length)
        is_causal = argument(op, 5, "is_causal") is True or argument(op, 5, "causal") is True
        flops = 2.0 * heads_and_batch * query.shape[sequence] * length * (query.shape[-1] + value.shape[-1])
        flops *= 0.5 if is_causal else 1.0
        read = sum_bytes(operands)
        return Work(
            "attention",
            query.dtype,
            flops=flops,
            backward_flops=2.5 * flops,
            read_bytes=read,
            write_bytes=sum_bytes(results[:1]),
            backward_read_bytes=read + 2 * sum_bytes(results[:1]),
            backward_write_bytes=sum_bytes(operands[:3]),
            num_backward_kernels=2,
            length=length,
            head_dim=query.shape[-1],
            is_causal=is_causal,
            extents=(query.shape[sequence], length),
            is_plain=bool(op.plain_saves or op.plain_saved_extra_bytes),
            is_new_kernel=runs_new_kernel(operands),
        )

    return count


def shares_heads(dtype: str, *, has_mask: bool) -> bool:
    """Whether a fast kernel of GPUs lets heads of the query share a head of keys and values.

    FlashAttention does, in 16 bits and without a mask; the memory-efficient kernel does not, and in its place torch
    would take plain products (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13).
    """
    return dtype in ("bfloat16", "float16") and not has_mask


def _buffers_on_gpus(op: Op, operands: Types, trains: Sequence[bool]) -> Buffers:
    """What torch's attention needs besides what a fast kernel reads, makes and saves.

    Where no fast kernel `shares_heads`, keys and values are made for every head of the query, and saved
    (`lower.kernels.masked_attention`); so are their gradients.  A mask gets a gradient for every head of every row of
    the batch, which is then summed.
    """
    query, key, value = operands[:3]
    has_mask = len(operands) > 3
    scores = query.num_elements // max(1, query.shape[-1]) * key.shape[-2] * itemsize_bytes(query.dtype)
    repeats = query.shape[-3] // max(1, key.shape[-3]) if len(query.shape) > 3 else 1
    is_repeated = repeats > 1 and not shares_heads(query.dtype, has_mask=has_mask)
    repeated = repeats * sum_bytes((key, value)) if is_repeated else 0.0
    return Buffers(backward=repeated + (scores if has_mask and trains[3] else 0.0), kept=repeated)


def _saves(op: Op, operands: Types, results: Types) -> Saves:
    """Query, key, value, mask and result are saved, and one float32 for each row of the query and head."""
    statistics = math.prod(operands[0].shape[:-1]) * itemsize_bytes("float32")
    return (*range(len(operands)), len(operands)), statistics


FAMILIES = (
    OpFamily(
        aten({"scaled_dot_product_attention": _rule}),
        is_random=_drops(4),
        is_cheap=False,
        kernels={
            "context_attention": Kernel(_exchanges, unit=2),
            "ring_attention": Kernel(_ring_sends, unit=2, traveling=(1, 2)),
        },
        buffers=_buffers,
        buffers_on_gpus=_buffers_on_gpus,
        count_work=_work(-2, _runs_new_kernel),
        function="attention",
        saves=_saves,
        runs_plain=True,
        place=followed,
        is_attention=True,
    ),
    OpFamily(
        {DOCUMENTS: _documents},
        is_cheap=False,
        kernels={
            "context_documents": Kernel(_document_exchanges, unit=2),
            "ring_documents": Kernel(_document_ring, traveling=(1, 2), is_on_one_axis=True),
            "neighbor_documents": Kernel(
                _window_sends, least=lambda op, operands: _window(op) - 1, traveling=(1, 2), is_on_one_axis=True
            ),
        },
        buffers=_document_buffers,
        count_work=_work(-2),
        function="document_attention",
        saves=_saves,
        place=followed,
        is_attention=True,
        runs_apart=True,
    ),
    OpFamily(
        {WINDOWS: _windows},
        is_cheap=False,
        kernels={
            "context_windows": Kernel(),
            "neighbor_windows": Kernel(
                _window_sends, least=lambda op, operands: _window(op) - 1, traveling=(1, 2), is_on_one_axis=True
            ),
        },
        buffers=_window_buffers,
        count_work=_work(-2),
        function="window_attention",
        saves=_saves,
        place=followed,
        is_attention=True,
        runs_apart=True,
    ),
    OpFamily(
        aten(
            {
                "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu": None,
                "_scaled_dot_product_efficient_attention": None,
            }
        ),
        is_cheap=False,
        count_work=_work(-2),
        place=followed,
        is_attention=True,
    ),
    OpFamily(
        aten({"_scaled_dot_product_cudnn_attention": None}),
        is_cheap=False,
        count_work=_work(-2, lambda operands: True),
        place=followed,
        is_attention=True,
    ),
    OpFamily(
        aten(
            {
                "_flash_attention_forward _efficient_attention_forward _native_multi_head_attention": None,
                "_scaled_dot_product_attention_math _triton_scaled_dot_attention": None,
            }
        ),
        is_cheap=False,
    ),
    # The FlashAttention package.
    OpFamily(
        {"flash_attn._flash_attn_forward.default": _flash},
        is_random=_drops(3),
        is_cheap=False,
        count_work=_work(-3),
    ),
    OpFamily(
        {"flash_attn._flash_attn_varlen_forward.default": "_ h _, _ h _, _ h _, _, _ -> _ h _, h _, =..., =..."},
        is_random=_drops(7),
        is_cheap=False,
    ),
    # torch.nn.attention.varlen
    OpFamily(
        {"torch_attn._varlen_attn.default": "_ h _, _ h _, _ h _, _, _ -> _ h _, h _, =..."},
        is_cheap=False,
        num_differentiable=1,
    ),
    OpFamily(
        {"flash_attn_3._flash_attn_forward.default": None},
        is_cheap=False,
        count_work=_work(-3, lambda operands: True),
    ),
)
