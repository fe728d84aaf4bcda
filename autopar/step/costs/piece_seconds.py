"""Seconds of collectives that overlap with products in pieces, and the best number of pieces.

Of n pieces, each c seconds of the collective and k of the products alone, with interference a (the part of its speed
that compute loses meanwhile), a gather ahead of its products takes

``c + max((n - 1) c + k, a (n - 1) c + n k)``

as the first piece arrives, and then whichever is slower goes on; a reduction behind a product takes the same, the
other way round.  Backward, the product for the gradient of the matrix overlaps with the last reductions, and behind the
gathers.  What is copied to cut and join rows is a part of k.  c has a collective's latency and the bandwidth of a
piece, k the efficiency of a product of a piece: both from the prices that whole ones have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from autopar.placement import LOCAL
from autopar.program import Op, Ref, TensorType
from autopar.step.activation_policies import activation_policy
from autopar.step.layer.instructions import InPieces, LocalProgram, RunOp
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.local_program import local_program
from autopar.step.layer.pieces import most_pieces, pieced_collectives, row_product, runs_once, with_count
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec, is_differentiable, own_training

__all__ = ["COUNTS", "best_pieces", "demanded_pieces", "hidden_s"]

COUNTS = (2, 4, 8)
"""How many pieces are tried: of more, what is exposed (one piece) shrinks less than launches and copies grow."""

_COPY = Op("copy", "autopar.fused", (Ref("x"),), (), ("y",))
_TIMED = ("layers", "scaled")  # prices from whole layers: of pieces there are none


class _Phase(NamedTuple):
    """One run of the products, with the move in pieces: seconds of the move's pieces, and of the products'.

    `whole_s` is what the products take in one piece, `rest_s` what else runs in the end.
    """

    kind: str
    move_s: float
    piece_s: float
    whole_s: float
    rest_s: float
    comes_first: bool


def hidden_s(
    local: LocalProgram, each: InPieces, placed: PlacedLayer, prices: Prices, training: TrainingSpec
) -> dict[str, float]:
    """Seconds of its collectives that compute hides, of one microbatch, in ``"forward"`` and ``"backward"``.

    Less than 0: it takes longer in pieces than whole.
    """
    seconds: dict[str, float] = {}
    for name, phase in _phases(local, each, placed, prices, training):
        count, taken = each.count, prices.interference(phase.kind, each.move.steps[0].axis)
        move_s, piece_s, rest_s = phase.move_s, phase.piece_s, phase.rest_s
        if phase.comes_first:
            pipelined_s = move_s + max(
                (count - 1) * move_s + piece_s, taken * (count - 1) * move_s + count * piece_s
            )  # fmt: skip
            total_s = pipelined_s + rest_s
        else:
            overlapped = (count if rest_s else count - 1) * move_s
            total_s = max(
                piece_s + count * move_s,
                count * piece_s + taken * (count - 1) * move_s + move_s,
                count * piece_s + taken * overlapped + rest_s,
            )
        whole_s = phase.whole_s + rest_s
        seconds[name] = count * move_s + whole_s - total_s
    return seconds


def best_pieces(
    placed: PlacedLayer, recompute: Iterable[str], prices: Prices, training: TrainingSpec
) -> dict[str, tuple[tuple[str, int], ...]]:
    """Which collectives of a layer are faster in pieces, and in how many, by how it keeps activations."""
    training = own_training(placed.program, placed.layer, training)
    local = local_program(placed)
    pieced = pieced_collectives(local)
    gains = {
        name: {} if _is_timed(each, placed, prices, training) else _gains(local, each, placed, prices, training)
        for name, each in pieced.items()
    }
    return {how: _best(pieced, gains, how) if any(gains.values()) else () for how in recompute}


_Gains = dict[int, tuple[float, float]]


def _best(pieced: Mapping[str, InPieces], gains: Mapping[str, _Gains], recompute: str) -> tuple[tuple[str, int], ...]:
    ahead = 2 if activation_policy(recompute).keeps_inputs_only else 1
    choices: list[tuple[str, int]] = []
    taken: set[int] = set()
    for name, each in pieced.items():
        if not runs_once(each, recompute):
            continue
        total_s = {count: ahead * gain[0] + gain[1] for count, gain in gains[name].items()}
        best = max(total_s, key=lambda count: total_s[count], default=0)
        if best and total_s[best] > 0 and not any(run.index in taken for run in each.products):
            choices.append((name, best))
            taken |= {run.index for run in each.products}
    return tuple(choices)


def _gains(local: LocalProgram, each: InPieces, placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> _Gains:
    """By number of pieces, how many seconds less they take than one, forward and backward."""
    whole_s = _collective_s(each, prices)
    gains: _Gains = {}
    for count in COUNTS:
        cut = with_count(local, each, count)
        if cut is not None:
            hidden, piece_s = hidden_s(local, cut, placed, prices, training), _collective_s(cut, prices)
            ahead_s, back_s = (
                hidden[phase] + whole_s[phase] - count * piece_s[phase] if phase in hidden else 0.0
                for phase in ("forward", "backward")
            )
            gains[count] = ahead_s, back_s
    return gains


def demanded_pieces(placed: PlacedLayer, count: int, recompute: str = "none") -> tuple[tuple[str, int], ...]:
    """Every collective that can run in pieces, in `count` of them, or as many below it as its rows divide into."""
    counts: list[tuple[str, int]] = []
    taken: set[int] = set()
    local = local_program(placed)
    for name, each in pieced_collectives(local, recompute).items():
        most = most_pieces(local, each, count)
        if most > 1 and not any(run.index in taken for run in each.products):
            counts.append((name, most))
            taken |= {run.index for run in each.products}
    return tuple(counts)


def _collective_s(each: InPieces, prices: Prices) -> dict[str, float]:
    """Seconds of one piece's collective, forward and backward."""
    (step,) = each.move.steps
    num_bytes = each.move.tensor.num_bytes * step.fraction / each.count
    kinds = {"forward": step.forward, "backward": step.backward}
    return {
        phase: 0.0 if kind in LOCAL else prices.collective_s(kind, step.axis, num_bytes)
        for phase, kind in kinds.items()
    }


def _is_timed(each: InPieces, placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> bool:
    def source(run: RunOp) -> str:
        differentiable = is_differentiable(placed.program, run.op, training)
        return prices.op_s(run.op, run.state.operand_types, run.state.result_types, differentiable).source

    return any(source(run) in _TIMED for run in each.products)


def _phases(
    local: LocalProgram, each: InPieces, placed: PlacedLayer, prices: Prices, training: TrainingSpec
) -> Iterator[tuple[str, _Phase]]:
    (step,) = each.move.steps
    move_s = _collective_s(each, prices)
    values = placed.program.values
    ahead_s = piece_ahead_s = back_s = piece_back_s = matrix_s = 0.0
    rows_bytes = results_bytes = 0
    for run in each.products:
        product = row_product(run)
        assert product is not None
        differentiable = is_differentiable(placed.program, run.op, training)
        whole = prices.op_s(run.op, run.state.operand_types, run.state.result_types, differentiable)
        operands = tuple(
            _piece(kind, each) if index == product.rows else kind for index, kind in enumerate(run.state.operand_types)
        )
        results = tuple(_piece(kind, each) for kind in run.state.result_types)
        piece = prices.op_s(run.op, operands, results, differentiable)
        trains = [values[run.op.operands[index]].requires_grad for index in (product.rows, product.matrix)]
        share = 0.5 if all(trains) else float(trains[1])  # its two gradients are products of equal size
        ahead_s += whole.forward_s
        piece_ahead_s += max(piece.forward_s, whole.forward_s / each.count)
        back_s += (1 - share) * whole.backward_s
        piece_back_s += (1 - share) * max(piece.backward_s, whole.backward_s / each.count)
        matrix_s += share * whole.backward_s
        rows_bytes = run.state.operand_types[product.rows].num_bytes
        results_bytes += run.state.result_types[0].num_bytes
    whole_shape = local.values[each.move.target if each.moves_first else each.move.source].type.shape
    # Products write to where rows belong if these lie at one distance.  In one piece only a gather along another dim
    # than the first makes a copy, which has no price.
    is_apart = math.prod(whole_shape[: each.dim]) > 1
    is_first = math.prod(whole_shape[: max(0, each.sharded_dim)]) == 1
    shard_bytes = local.values[each.move.source if each.moves_first else each.move.target].type.num_bytes
    if step.forward not in LOCAL:
        joined = rows_bytes * is_first + results_bytes * is_apart
        copied = joined if each.moves_first else shard_bytes + rows_bytes * is_apart
        piece_s = piece_ahead_s + _copy_s(copied, prices) / each.count
        yield "forward", _Phase(step.forward, move_s["forward"], piece_s, ahead_s, 0.0, each.moves_first)
    has_gradient = training.is_training and local.values[each.move.source].value.requires_grad
    if step.backward not in LOCAL and has_gradient:
        joined = results_bytes * is_first + rows_bytes * is_apart
        copied = shard_bytes + results_bytes * is_apart if each.moves_first else joined
        piece_s = piece_back_s + _copy_s(copied, prices) / each.count
        yield "backward", _Phase(step.backward, move_s["backward"], piece_s, back_s, matrix_s, not each.moves_first)


def _piece(tensor: TensorType, each: InPieces) -> TensorType:
    shape = tensor.shape
    return replace(tensor, shape=(*shape[: each.dim], shape[each.dim] // each.count, *shape[each.dim + 1 :]))


def _copy_s(num_bytes: float, prices: Prices) -> float:
    tensor = TensorType((round(num_bytes),), "uint8")
    return prices.op_s(_COPY, (tensor,), (tensor,), differentiable=False).forward_s if num_bytes else 0.0
