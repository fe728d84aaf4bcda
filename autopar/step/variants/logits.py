"""Logits in pieces: the product that makes them and the loss that is summed over them as one op, piece by piece.

`in_pieces` finds what it can by what the graph does: in one layer a product ``[..., h] x [v, h]``, ops of one operand
element by element (casts, scales, softcaps) and moves of tokens (a shift, a view) between it and a cross entropy.  The
moves run on the hidden states instead, as they move rows.  Where nothing else reads what is between, the whole is
``autopar.linear_cross_entropy`` if the cross entropy is summed; what the caller reads of it is computed when that is
read (`Program.late`).  With a loss for each token, or where a logarithm of sums of exponentials is taken of the same
logits (a z-loss), it is ``autopar.linear_token_losses``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.ops import family_of, with_rule
from autopar.ops.linear_cross_entropy import TOKEN_LOSSES, linear_cross_entropy
from autopar.program import Arg, LateOutput, Layer, Op, Program, Ref, TensorType, Value

__all__ = ["PIECE_TOKENS", "in_pieces", "logits_bytes"]

PIECE_TOKENS = 2048
"""Tokens of a piece where nobody says so: products of as many rows run at an H100's full rate, and adding to the
gradient of the weight for each piece takes a few percent of them (each piece's products take 6 * 2048 flops for each
element of the weight, an H100 does about 300 for each byte)."""

_PRODUCT = "aten.linear.default"
_LOSS = "autopar.cross_entropy"
_LOG_SUM = "aten.logsumexp.default"
_VIEWS = ("aten.reshape.default", "aten.view.default")
_SLICE = "aten.slice.Tensor"


@dataclass(frozen=True)
class _LossRegion:
    """A product, what becomes of it in order, and the loss; `layer` is the index of their layer.

    `log_sum`: what else reads the logits that the loss reads.
    """

    layer: int
    product: Op
    chain: tuple[Op, ...]
    moves: tuple[Op, ...]
    loss: Op
    log_sum: Op | None

    @property
    def is_sum(self) -> bool:
        """Whether the loss is summed over tokens, and nothing else is computed of the logits."""
        return self.loss.args[6] == "sum" and self.log_sum is None

    @property
    def inside(self) -> tuple[Op, ...]:
        """The ops that are gone, but the loss."""
        return (self.product, *self.chain, *self.moves)


@lru_cache(maxsize=16)
def _regions(program: Program) -> tuple[_LossRegion, ...]:
    if not (program.training and program.loss) or program.piece_tokens:
        return ()
    alone = {kind.kind for kind in program.kinds} - _repeated(program)
    regions = (
        _region(program, index, op)
        for index, layer in enumerate(program.layers)
        if layer.kind in alone
        for op in layer.ops
        if op.target == _LOSS and program.values[op.results[0]].requires_grad
    )
    return tuple(region for region in regions if region is not None)


def _repeated(program: Program) -> set[int]:
    seen: set[int] = set()
    return {layer.kind for layer in program.layers if layer.kind in seen or seen.add(layer.kind)}


def logits_bytes(program: Program) -> int:
    """Bytes of the logits that `in_pieces` would never make whole, in the dtype that the loss reads; 0: of none."""
    return sum(program.type_of(region.loss.operands[0]).num_bytes for region in _regions(program))


def in_pieces(program: Program, tokens: int) -> Program:
    """`program` with logits of at most so many tokens at a time; as it is for 0, and where there is nothing to cut."""
    regions = _regions(program) if tokens else ()
    made = program
    for region in regions:
        made = _with_region(made, region, tokens)
    return replace(made, piece_tokens=tokens) if regions else program


# --- finding


def _region(program: Program, index: int, loss: Op) -> _LossRegion | None:
    """The region that ends in a loss of the layer `index`."""
    layer = program.layers[index]
    makers = {name: op for op in layer.ops for name in op.results}
    readers = _count_readers(program)
    last = len(program.type_of(loss.operands[0]).shape) - 1
    if not last or loss.args[3] not in (last, -1):
        return None
    chain: list[Op] = []
    moves: list[Op] = []
    log_sum: Op | None = None
    name = loss.operands[0]
    while (op := makers.get(name)) is not None and len(op.results) == 1:
        if readers[name] == 2 and not chain and all(move.target in _VIEWS for move in moves) and log_sum is None:
            log_sum = _log_sum(program, layer, name, loss)
        if readers[name] != 1 and (log_sum is None or log_sum.operands != (name,) or readers[name] != 2):
            return None
        if op.target == _PRODUCT:
            region = _LossRegion(index, op, tuple(reversed(chain)), tuple(reversed(moves)), loss, log_sum)
            return region if _can_be_late(program, region) else None
        if _is_row_move(program, op):
            moves.append(op)
        elif _is_elementwise(program, op):
            chain.append(op)
        else:
            return None
        name = op.operands[0]
    return None


def _log_sum(program: Program, layer: Layer, name: str, loss: Op) -> Op | None:
    """The logarithm of the sum of exponentials of the logits `name`, if all can be made where the first of both is."""
    last = len(program.type_of(name).shape) - 1
    for place, op in enumerate(layer.ops):
        if op.target == _LOG_SUM and op.operands == (name,) and op.args[1] in ((last,), (-1,)):
            made_later = {result for each in layer.ops[min(place, layer.ops.index(loss)) :] for result in each.results}
            return None if made_later & set(loss.operands[1:]) else op
    return None


def _count_readers(program: Program) -> Mapping[str, int]:
    counts = dict.fromkeys(program.values, 0)
    ops = (op for layer in program.layers for op in layer.ops)
    for name in [*(name for op in ops for name in op.operands), *program.updates.values()]:
        counts[name] += 1
    return counts


def _is_elementwise(program: Program, op: Op) -> bool:
    if len(op.operands) != 1 or not family_of(op.target).is_pointwise or op.is_random:
        return False
    before, after = program.type_of(op.operands[0]), program.type_of(op.results[0])
    changes_dtype = before.dtype != after.dtype
    return before.shape == after.shape and (not changes_dtype or op.target == "aten._to_copy.default")


def _is_row_move(program: Program, op: Op) -> bool:
    """Whether the op moves rows ``[..., classes]`` only."""
    if len(op.operands) != 1:
        return False
    before, after = (program.type_of(name).shape for name in (op.operands[0], op.results[0]))
    if op.target == _SLICE:
        dim = op.args[1] if len(op.args) > 1 else 0
        return isinstance(dim, int) and dim % len(before) != len(before) - 1
    return op.target in _VIEWS and bool(after) and before[-1] == after[-1] and len(after) > 1


def _can_be_late(program: Program, region: _LossRegion) -> bool:
    """Whether what the caller reads of the region can be computed from hidden states and parameters."""
    if not any(name in program.outputs for op in region.inside for name in op.results):
        return True
    weights = region.product.operands[1:]
    return all(program.values[name].role == "parameter" for name in weights)


# --- rewriting


def _with_region(program: Program, region: _LossRegion, tokens: int) -> Program:
    layer = program.layers[region.layer]
    hidden = region.product.operands[0]
    moved, values = _moved(program, region.moves, hidden)
    last, target = moved[-1].results[0] if moved else hidden, region.loss.operands[1]
    if region.is_sum:
        last, target, moved = _without_flattening(program, layer, region, moved, hidden)
    values = {name: value for name, value in values.items() if any(name in op.results for op in moved)}
    values = {**program.values, **values}
    made = linear_cross_entropy(region.loss, region.product, last, target, region.chain, tokens)
    made = [made] if region.is_sum else _token_losses(region, made, values)
    made[0] = _with_rule(made[0], values)
    gone = {op.name for op in region.inside}
    ends = {region.loss.name, *([region.log_sum.name] if region.log_sum else [])}
    ops: list[Op] = []
    for op in layer.ops:
        if op.name in ends:
            ops += [*moved, *made]
            moved, made = [], []
        elif op.name not in gone:
            ops.append(op)
    inside = {name for op in region.inside for name in op.results}
    late = tuple(_late_outputs(program, region))
    outputs = tuple(hidden if name in inside else name for name in program.outputs)
    layers = list(program.layers)
    layers[region.layer] = _layer_of(layer, ops, inside, hidden if late else "")
    for name in inside:
        del values[name]
    late_values = {n: program.values[n] for each in late for op in each.ops for n in op.results}
    return replace(
        program, values={**values, **late_values}, layers=tuple(layers), outputs=outputs, late=(*program.late, *late)
    )


def _with_rule(op: Op, values: Mapping[str, Value]) -> Op:
    types = (tuple(values[name].type for name in names) for names in (op.operands, op.results))
    saves = (0,) if op.target != TOKEN_LOSSES else tuple(range(len(op.operands)))
    return replace(with_rule(op, *types), saves=saves, saved_extra_bytes=0)


def _token_losses(region: _LossRegion, like: Op, values: dict[str, Value]) -> list[Op]:
    """The op with a loss for each token in place of `like`, the sum, and what makes of it what was read before."""
    loss, log_sum = region.loss, region.log_sum
    kind = TensorType(values[loss.operands[1]].type.shape, values[loss.operands[0]].type.dtype)
    results = [loss.results[0]] if loss.args[6] == "none" else [f"{loss.name}_each"]
    ops: list[Op] = []
    if loss.args[6] == "sum":
        values[results[0]] = Value(results[0], kind, "op", requires_grad=True)
        dtype = (("dtype", f"torch.{values[loss.results[0]].type.dtype}"),)
        ops.append(_made("aten.sum.default", (Ref(results[0]),), dtype, loss, values))
    if log_sum is not None:
        shape = values[log_sum.results[0]].type.shape
        results.append(log_sum.results[0] if shape == kind.shape else f"{log_sum.name}_each")
        if shape != kind.shape:
            values[results[1]] = Value(results[1], kind, "op", requires_grad=True)
            ops.append(_made(_VIEWS[0], (Ref(results[1]), shape), (), log_sum, values))
    args = (*like.args, log_sum is not None)
    return [replace(like, name=results[0], target=TOKEN_LOSSES, args=args, results=tuple(results)), *ops]


def _made(
    target: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], like: Op, values: Mapping[str, Value]
) -> Op:
    """An op in place of `like`, of its name and results."""
    op = replace(like, target=target, args=args, kwargs=kwargs, options=(), saves=(), saved_extra_bytes=0)
    types = (tuple(values[name].type for name in names) for names in (op.operands, op.results))
    return with_rule(op, *types)


def _moved(program: Program, moves: Sequence[Op], hidden: str) -> tuple[list[Op], dict[str, Value]]:
    """The moves of rows on the hidden states instead of the logits, and what they make."""
    values: dict[str, Value] = {}
    like = program.values[hidden]
    name, ops = hidden, list[Op]()
    for op in moves:
        shape = (*program.type_of(op.results[0]).shape[:-1], like.type.shape[-1])
        value = Value(f"{op.results[0]}_hidden", TensorType(shape, like.type.dtype), "op", like.requires_grad)
        made = replace(op, name=value.name, args=_move_args(op, name, shape), results=(value.name,))
        operand = values[name].type if name in values else like.type
        ops.append(with_rule(made, (operand,), (value.type,)))
        values[value.name] = value
        name = value.name
    return ops, values


def _move_args(op: Op, name: str, shape: tuple[int, ...]) -> tuple[Arg, ...]:
    if op.target == _SLICE:
        return (Ref(name), *op.args[1:])
    return (Ref(name), shape)


def _without_flattening(
    program: Program, layer: Layer, region: _LossRegion, moved: list[Op], hidden: str
) -> tuple[str, str, list[Op]]:
    """Hidden states, targets and moves without a last view that only joins the dims of tokens of both.

    So that these dims can be split one by one.
    """
    target = region.loss.operands[1]
    last = moved[-1].results[0] if moved else hidden
    maker = next((op for op in layer.ops if target in op.results), None)
    if not moved or maker is None or moved[-1].target not in _VIEWS or maker.target not in _VIEWS:
        return last, target, moved
    before = program.type_of(region.moves[-1].operands[0]).shape[:-1]
    if program.type_of(maker.operands[0]).shape != before:
        return last, target, moved
    return moved[-1].operands[0], maker.operands[0], moved[:-1]


def _late_outputs(program: Program, region: _LossRegion) -> Iterator[LateOutput]:
    """What the caller reads of the region, with the ops up to it."""
    makers = {name: op for op in region.inside for name in op.results}
    for place, output in enumerate(program.outputs):
        ops: list[Op] = []
        name = output
        while name in makers:
            ops.append(makers[name])
            name = makers[name].operands[0]
        if output in makers:
            yield LateOutput(place, tuple(reversed(ops)), output)


def _layer_of(layer: Layer, ops: Sequence[Op], inside: Iterable[str], returned: str) -> Layer:
    """The layer with these ops, which puts out what is `returned` in place of what is `inside` no more."""
    made = {name for op in ops for name in op.results}
    read = {name for op in ops for name in op.operands}
    outputs = [name for name in layer.outputs if name not in set(inside)]
    if returned in made and returned not in outputs:
        outputs.append(returned)
    return replace(
        layer,
        ops=tuple(ops),
        inputs=tuple(name for name in layer.inputs if name in read),
        state=tuple(name for name in layer.state if name in read),
        outputs=tuple(outputs),
    )
