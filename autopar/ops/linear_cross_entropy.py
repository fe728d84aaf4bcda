"""A product and the cross entropy of its result, in pieces of tokens, so that the logits never exist as a whole.

``autopar.linear_cross_entropy(hidden [..., h], weight [v, h], bias [v] or None, target [...], class_weight [v] or None,
chain, ignore_index, label_smoothing, tokens)`` is the sum of the loss terms of all tokens.  For `tokens` of them at a
time it computes the logits, the elementwise ops of `chain`, the loss and its gradients.  The gradients are accumulated,
kept until backward, and scaled there (as in Liger's fused linear cross entropy, arXiv 2410.10989).

``autopar.linear_token_losses`` has the same arguments, and ``has_log_sums``; its results are the loss of each token
and, if requested, the logarithm of the sum of the exponentials of each token's logits, both ``[...]``.  As the
gradients of its results aren't known in forward, it saves its operands, and backward computes the logits of each piece
again.

`chain` has an entry ``(target, args, kwargs, saves)`` for each op between product and loss, with `X` in place of its
operand, and its `Op.saves`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from autopar.ops.family import Buffers, Kernel, OpCall, OpFamily, Types
from autopar.ops.losses import loss_collectives
from autopar.ops.views import dim_names, text_of
from autopar.ops.work import Work
from autopar.program import Arg, KernelCollective, Op, Ref, TensorType, itemsize_bytes

__all__ = ["FAMILIES", "TARGET", "TOKEN_LOSSES", "X", "chain_entry", "linear_cross_entropy"]

TARGET = "autopar.linear_cross_entropy"
TOKEN_LOSSES = "autopar.linear_token_losses"
X = "x"
"""The operand of an op in a chain."""


class _LossCall(NamedTuple):
    """The arguments of one call that aren't tensors, and whether there is a bias."""

    chain: tuple[Op, ...]
    ignore_index: int
    label_smoothing: float
    tokens: int
    has_bias: bool


def chain_entry(op: Op) -> Arg:
    """The entry of `chain` for an op of one operand."""
    template = op.map_args(lambda arg: X if isinstance(arg, Ref) else arg)
    return (op.target, template.args, cast("Arg", template.kwargs), op.saves)


def linear_cross_entropy(like: Op, product: Op, hidden: str, target: str, chain: Sequence[Op], tokens: int) -> Op:
    """The op that replaces `like`, a cross entropy of the result of `chain` applied to `product`; without options."""
    weight = product.args[1]
    bias = product.args[2] if len(product.args) > 2 else dict(product.kwargs).get("bias")
    class_weight, _, ignore_index, label_smoothing, _ = like.args[2:7]
    entries = tuple(map(chain_entry, chain))
    args = (
        Ref(hidden), weight, bias, Ref(target), class_weight, entries, ignore_index, label_smoothing, tokens
    )  # fmt: skip
    return replace(
        like, target=TARGET, args=args, kwargs=(), options=(), saves=(), module=product.module or like.module
    )


def _read(op: Op) -> _LossCall:
    _, _, bias, _, _, chain, ignore_index, label_smoothing, tokens = op.args[:9]
    ops: list[Op] = []
    for entry in cast("tuple[tuple[str, Arg, tuple[tuple[str, Arg], ...], tuple[int, ...]], ...]", chain):
        target, args, kwargs, saves = entry
        piece_op = Op("piece", target, cast("tuple[Arg, ...]", args), kwargs, ("y",), saves=saves)
        ops.append(piece_op.map_args(lambda arg: Ref(X) if arg == X else arg))
    is_biased = isinstance(bias, Ref)
    return _LossCall(
        tuple(ops), cast("int", ignore_index), cast("float", label_smoothing), cast("int", tokens), is_biased
    )


def _rule(op: Op, operand_types: Types, result_types: Types) -> str | None:
    positions = dim_names(len(operand_types[0].shape) - 1)
    if operand_types[3 if isinstance(op.args[2], Ref) else 2].shape != operand_types[0].shape[:-1]:
        return None
    hidden, target = " ".join([*positions, "_"]), text_of(positions)
    if op.target == TOKEN_LOSSES:
        remarks = "sum v, by v vocab_parallel_linear_token_losses"
        return f"{hidden}, v _, v, {target}, class_weight: _ -> {target}, {target} | {remarks}"
    summed = " ".join(["v", *positions])
    return f"{hidden}, v _, v, {target}, class_weight: _ -> () | sum {summed}, by v vocab_parallel_linear_cross_entropy"


def _collectives(op: Op, operand_types: Types) -> tuple[KernelCollective, ...]:
    """The collectives of the cross entropy for every piece; in backward too if it computes the logits again."""
    call = _read(op)
    hidden = operand_types[0]
    last = _piece_types(call, operand_types, 1)[-1]
    logits = replace(last, shape=(*hidden.shape[:-1], last.shape[-1]))
    of_loss = loss_collectives(logits, len(logits.shape) - 1, call.label_smoothing)
    phases = ("forward", "backward") if op.target == TOKEN_LOSSES else ("forward",)
    drop_dims = (len(hidden.shape) - 1,)
    return tuple(replace(c, phase=phase, drop_dims=drop_dims, piece=call.tokens) for phase in phases for c in of_loss)


def _piece_types(call: _LossCall, operands: Types, rows: int) -> list[TensorType]:
    """The local types of the logits of `rows` tokens, and of the result of each op of the chain."""
    dtype = operands[0].dtype
    types = [TensorType((rows, operands[1].shape[0]), dtype)]
    for op in call.chain:
        cast_to = dict(op.kwargs).get("dtype") if op.target == "aten._to_copy.default" else None
        dtype = cast_to.removeprefix("torch.") if isinstance(cast_to, str) else dtype
        types.append(TensorType(types[0].shape, dtype))
    return types


def _num_tokens(operands: Types) -> int:
    return operands[0].num_elements // max(1, operands[0].shape[-1])


def _pieces(call: _LossCall, operands: Types) -> Iterator[tuple[int, int]]:
    """(number of tokens, number of pieces with so many tokens), for full pieces and the rest."""
    full, rest = divmod(_num_tokens(operands), call.tokens)
    yield from ((rows, times) for rows, times in ((call.tokens, full), (rest, 1)) if rows and times)


def _calls(op: Op, operands: Types, results: Types) -> Iterator[OpCall]:
    """The ops that a call runs: product, chain and loss of every piece, forward and backward."""
    call = _read(op)
    hidden, weight = operands[:2]
    bias = operands[2:3] if call.has_bias else ()
    loss = TensorType((), "float64" if hidden.dtype == "float64" else "float32")
    refs = (Ref("x"), Ref("w"), *([Ref("b")] if call.has_bias else []))
    product = Op("product", "aten.linear.default", refs, (), ("y",), saves=(0, 1))
    entropy = Op(
        "loss", "autopar.cross_entropy",
        (Ref("x"), Ref("t"), None, 1, call.ignore_index, call.label_smoothing, "sum"), (), ("y",), saves=(0, 1),
    )  # fmt: skip
    accumulation = Op("adds", "autopar.fused", (Ref("x"),), (), ())
    for rows, times in _pieces(call, operands):
        types = _piece_types(call, operands, rows)
        part = TensorType((rows, hidden.shape[-1]), hidden.dtype)
        yield OpCall(product, (part, weight, *bias), (types[0],), times)
        for chain_op, operand, result in zip(call.chain, types, types[1:], strict=False):
            yield OpCall(chain_op, (operand,), (result,), times)
        yield OpCall(entropy, (types[-1], TensorType((rows,), "int64")), (loss,), times)
        if len(results) > 1:
            sums = Op("sums", "aten.logsumexp.default", (Ref("x"), (-1,)), (), ("y",), saves=(0, 1))
            yield OpCall(sums, (types[-1],), (replace(types[-1], shape=(rows,)),), times)
        # Each piece reads the gradient of the weight in order to add to it.
        if op.target == TARGET:
            yield OpCall(accumulation, (TensorType((weight.num_bytes,), "uint8"),), (), times)


def _work(op: Op, operands: Types, results: Types) -> Work:
    """All three products run in forward; backward scales two gradients."""
    flops = 2.0 * _num_tokens(operands) * operands[1].num_elements
    kept = float(_gradient_bytes(operands, has_bias=isinstance(op.args[2], Ref)))
    return Work(
        "bytes",
        operands[0].dtype,
        flops=3 * flops,
        read_bytes=kept,
        backward_read_bytes=kept,
        backward_write_bytes=kept,
    )


def _token_work(op: Op, operands: Types, results: Types) -> Work:
    """Backward reads and writes the gradient of the weight for each piece."""
    num_pieces = sum(times for _, times in _pieces(_read(op), operands))
    read = 2.0 * num_pieces * operands[1].num_bytes
    return replace(_work(op, operands, results), read_bytes=0.0, backward_read_bytes=read, backward_write_bytes=0.0)


def _gradient_bytes(operands: Types, *, has_bias: bool, trains: Sequence[bool] = ()) -> int:
    floating = operands[: 3 if has_bias else 2]
    return sum(t.num_bytes for at, t in enumerate(floating) if not trains or trains[at])


def _buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Forward needs the peak of the largest piece; the gradients are kept until backward."""
    call = _read(op)
    kept = _gradient_bytes(operands, has_bias=call.has_bias, trains=trains)
    rows = min(call.tokens, _num_tokens(operands))
    types = _piece_types(call, operands, rows)
    saved = {at + index for at, chain_op in enumerate(call.chain) for index in chain_op.saves}
    saved_bytes = types[0].num_bytes + sum(types[at].num_bytes for at in saved if 0 < at < len(types) - 1)
    last = types[-1]
    if not has_kernel:  # log-probabilities, their gradient, and that of the logits
        return Buffers(forward=saved_bytes + 3 * last.num_bytes, kept=kept)
    # The kernel keeps its operand, and computes exponentials in a copy with at least four bytes per element.
    wide = last.num_elements * max(4, itemsize_bytes(last.dtype))
    return Buffers(forward=saved_bytes + (last.num_bytes if call.chain else 0) + wide, kept=kept)


def _token_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Forward needs a piece's logits and the results of its chain; backward as much as `TARGET` needs in forward."""
    call = _read(op)
    types = _piece_types(call, operands, min(call.tokens, _num_tokens(operands)))
    last = types[-1]
    wide = max(last.num_bytes, 4 * last.num_elements) if has_kernel else last.num_bytes
    forward = types[0].num_bytes + (last.num_bytes if call.chain else 0) + wide
    return Buffers(forward=forward, backward=_buffers(op, operands, results, trains, has_kernel).forward)


FAMILIES = (
    OpFamily(
        {TOKEN_LOSSES: _rule},
        function="linear_token_losses",
        kernels={"vocab_parallel_linear_token_losses": Kernel(_collectives, cuts_vocabulary=True)},
        count_work=_token_work,
        calls=_calls,
        calls_again=True,
        saves=lambda op, operands, results: (tuple(range(len(operands))), 0),
        buffers=_token_buffers,
        is_cheap=False,
        runs_apart=True,
    ),
    OpFamily(
        {TARGET: _rule},
        function="linear_cross_entropy",
        kernels={"vocab_parallel_linear_cross_entropy": Kernel(_collectives, cuts_vocabulary=True)},
        count_work=_work,
        calls=_calls,
        saves=lambda op, operands, results: ((0,), 0),
        buffers=_buffers,
        is_cheap=False,
        runs_apart=True,
    ),
)
