"""What a plan's rows cost by the lengths of the sequences in them: seconds per token, and seconds per pair of tokens.

Attention to a sequence of n tokens takes ``a * n + b * n**2``: kernels reach less of their rate on short sequences, and
read and write each token once.  Where sequences are documents of a row, both numbers are those of the plan's own prices
at two lengths, at which layers are timed.  Elsewhere a kernel computes all pairs of places of a row, whatever its mask
says, so that attention depends on the length of the row alone.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.ops import family_of
from autopar.ops.attention import DOCUMENTS, document_length, second_document_length, with_document_length
from autopar.plan.prediction import LayerCost, RowCost
from autopar.program import Op
from autopar.step.costs.layer_cost import computing_seconds
from autopar.step.layer.data_split import attention_split, batch_inputs
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.op_states import OpState
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec, is_differentiable

__all__ = ["row_cost"]


class _Attention(NamedTuple):
    """Seconds of a step in attention; of that by documents the part that is linear in tokens, and the rest for each
    token of a document; and all of other attention.
    """

    total_s: float = 0.0
    linear_s: float = 0.0
    length_s: float = 0.0
    row_s: float = 0.0


def row_cost(
    layers: PlannedLayers,
    costs: tuple[LayerCost, ...],
    prices: Prices,
    training: TrainingSpec,
    step_s: float,
    peak_bytes: float,
) -> RowCost:
    """What the rows of a step of `step_s` seconds cost, whose layers cost `costs`, with a peak of `peak_bytes`.

    Computing and communicating activations is shared out among tokens, attention among tokens and pairs.  The rest does
    not depend on sequences: parameters are gathered, reduced and updated, once a step or in each microbatch.
    """
    program, decisions = layers.program, layers.decisions
    shapes = (program.type_of(name).shape for name in batch_inputs(program))
    tokens = next((shape[1] for shape in shapes if len(shape) > 1), 0)
    ranks = attention_split(program, decisions).size
    rows = program.batch_size // ranks
    if not tokens or not rows:
        return RowCost(ranks)
    groups = decisions.num_groups
    parts = layers.find("attention", lambda placed: _attention(placed, tokens, prices, training))
    total_s, attention_linear_s, length_s, attention_row_s = (sum(part) / groups for part in zip(*parts, strict=True))
    row_s = sum(
        cost.forward_s + cost.backward_s + cost.recompute_s + cost.offload_s + cost.activation_comm_s for cost in costs
    ) / groups  # fmt: skip
    # What is timed as a whole may be less than its parts, and communication of activations may be overlapped.
    other_s = max(0.0, min(row_s, step_s) - total_s)
    fixed_s = max(0.0, step_s - total_s - other_s)
    is_pipeline = bool(decisions.stages)
    once_s = fixed_s if is_pipeline else min(fixed_s, sum(cost.in_step_s for cost in costs))
    at_once = max(1, rows // decisions.num_microbatches)
    fixed_bytes = min(peak_bytes, sum(cost.static_bytes for cost in costs) / groups)
    return RowCost(
        ranks,
        at_once,
        tokens,
        max(0.0, other_s + attention_linear_s) / (rows * tokens),
        length_s / (rows * tokens),
        once_s,
        (fixed_s - once_s) / decisions.num_microbatches,
        decisions.num_microbatches,
        fixed_bytes,
        (peak_bytes - fixed_bytes) / at_once,
        attention_row_s / (rows * tokens**2),
    )


def _attention(placed: PlacedLayer, row: int, prices: Prices, training: TrainingSpec) -> _Attention:
    """That of a layer, in rows of so many tokens."""
    total_s = linear_s = length_s = row_s = 0.0
    runs = computing_seconds(placed, prices, training)
    for op, state, (_, seconds) in zip(placed.layer.ops, placed.states, runs, strict=True):
        if not family_of(op.target).is_attention:
            continue
        total_s += seconds
        if op.target != DOCUMENTS:
            row_s += seconds
            continue
        own_s = seconds * _linear_share(placed, op, state, row, prices, training)
        linear_s += own_s
        length_s += (seconds - own_s) / document_length(op, row)
    return _Attention(total_s, linear_s, length_s, row_s)


def _linear_share(
    placed: PlacedLayer, op: Op, state: OpState, row: int, prices: Prices, training: TrainingSpec
) -> float:
    """The part of the seconds of attention by documents that does not depend on how long these are.

    It is negative where layers were timed and attention takes more of them than its own price says: the prices of other
    ops are then too high by as much.
    """
    length = document_length(op, row)
    other = second_document_length(length, row)
    if other == length:
        return 0.0

    def seconds(each: Op) -> float:
        trains = is_differentiable(placed.program, op, training)
        time = prices.op_s(each, state.work_types, state.result_types, trains)
        return time.forward_s + time.backward_s

    own_s = seconds(op)
    slope_s = (seconds(with_document_length(op, other)) - own_s) / (other - length)
    return min(1.0, 1.0 - slope_s * length / own_s) if own_s else 0.0
