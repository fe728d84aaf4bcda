"""What a compiled layer leaves out of a forward that runs again in backward: what leads to nothing that backward reads,
as the last product of a block, the collective behind it, and the residual that is added.

That is so only where a layer is compiled in one go and has no special kernel (`lower.program.compiled`).  Eager layers
run their whole forward again, since autograd records it op by op.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from autopar.step.layer.instructions import Reshard, RunOp
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.local_program import local_program
from autopar.step.layer_tensors.fusion import training_graphs
from autopar.step.layer_tensors.tensor_graph import TensorGraph, TensorNode, tensor_graph

__all__ = ["NOTHING", "LeftOut", "left_out", "surely_run_again"]


class LeftOut(NamedTuple):
    """The numbers of ops in their layer, and of the local values that moves would give."""

    ops: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()


NOTHING = LeftOut()


@lru_cache(maxsize=64)  # collectives and seconds of one layer are priced one after the other
def left_out(placed: PlacedLayer, *, fuses_attention: bool) -> LeftOut:
    """What does not run again of a compiled layer in training; `fuses_attention` as in `TrainingSpec`."""
    whole, saving = training_graphs(placed, fuses_attention=fuses_attention)
    if not _is_compiled_in_one_go(placed, whole):
        return NOTHING
    out = [node for node, runs in zip(whole.nodes, _running(whole, saving.nodes), strict=True) if not runs]
    return LeftOut(
        frozenset(node.op_index for node in out if node.op),
        frozenset(key[2] for node in out if not node.op for key in node.makes),
    )


def surely_run_again(placed: PlacedLayer, *, fuses_attention: bool) -> frozenset[int]:
    """The numbers of the ops that run again however the layer is sharded, where `placed` has it whole on one device."""
    whole = tensor_graph(placed, fuses_attention=fuses_attention)
    if not _is_compiled_in_one_go(placed, whole):
        return frozenset(range(len(placed.layer.ops)))
    # What is fused may compute again what it reads from other tensors, and which depends on sizes.
    kept = [node if not node.fuses else node._replace(saves=(), saved_extra=0.0) for node in whole.nodes]
    runs = zip(whole.nodes, _running(whole, kept), strict=True)
    return frozenset(node.op_index for node, is_running in runs if is_running and node.op)


def _is_compiled_in_one_go(placed: PlacedLayer, graph: TensorGraph) -> bool:
    """Whether it is one piece without kernels: a kernel may have collectives that its results do not lead to."""
    if not all(isinstance(each, RunOp | Reshard) for each in local_program(placed).instructions):
        return False
    return not any(node.piece or node.has_kernel for node in graph.nodes)


def _running(graph: TensorGraph, saving: Iterable[TensorNode]) -> list[bool]:
    """Of each node of `graph`, whether it leads to what the nodes `saving` save, which are the same ones."""
    saves = list(saving)
    needed = {key for node in saves for key in node.saves}
    running: list[bool] = []
    for node, own in zip(reversed(graph.nodes), reversed(saves), strict=True):
        # A view has no tensor of its own.
        runs = not node.makes or own.saved_extra > 0 or not needed.isdisjoint(node.makes)
        if runs:
            needed.update(node.reads)
        running.append(runs)
    return running[::-1]
