"""Layer programs compiled by inductor, forward and backward, each once for all layers of its kind.

A program is traced as it runs, collectives and special kernels included, so a kind of layer is one graph without
breaks.  What must be new in every call stays outside: random draws and slices of the running microbatch; and so do
collectives that overlap with compute, which stand in the order in which they overlap, and ops that run backward inside
their forward.  Those cut a program into pieces.

What is compiled has a gradient for each of its differentiable outputs, zeros where none came.  So outputs that only the
model's caller reads, as logits next to a loss, leave it without: should the caller's loss depend on one, the program
runs once more, uncompiled, in the backward (`_CallerOutputs`).

Where a forward runs again in backward (``recompute=full``), nobody reads what it puts out (`SavingOnly`).  A program
that is compiled in one go then leaves out what leads to nothing that backward reads, as the last product of a block
and its collective: `autopar.step.layer_tensors.rerun_forward` has the same rule for prices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function, edge_of, gradients_of
from autopar.lower.communication.collectives import Collective
from autopar.lower.communication.communicator import Communicator
from autopar.lower.compiler import compile_graph, run_again_in_backward, split_graph
from autopar.lower.kernels import APART, KERNELS
from autopar.lower.program.layer_ops import (
    LayerContext,
    begin_kernel,
    continue_kernel,
    draw,
    finish_kernel,
    microbatch_slice,
    microbatch_term,
    moved_product,
    products_of_moved,
    redistribute,
    run_kernel,
)
from autopar.lower.program.layer_program import LayerProgram
from autopar.ops import family_of
from autopar.step.activation_policies import activation_policy, rerun_ops

__all__ = ["SavingOnly", "compile_program"]

_SAVES_ONLY = ContextVar("saves_only", default=False)


class SavingOnly:
    """A context, to be entered any number of times, in which programs run for what they save for backward alone: nobody
    reads what they put out.
    """

    def __enter__(self) -> None:
        """See the class."""
        self._token = _SAVES_ONLY.set(True)

    def __exit__(self, *_: object) -> None:
        """See the class."""
        _SAVES_ONLY.reset(self._token)


def compile_program(program: LayerProgram, communicator: Communicator) -> Callable[..., Any]:
    """What a layer program's module computes, compiled when it is first called (and again for other strides).

    The compiler runs cheap ops again in backward by itself, which takes the place of ``recompute=selective``.  If the
    strategy names the ops that run again, it does so with those, as far as they are inside of one piece.
    """
    module = _detaching(program.module, program.unread) if program.unread else program.module
    if rerun_ops(program.strategy.recompute):
        run_again_in_backward(node for node in module.graph.nodes if node.name in program.rerun)
    pieces = _pieces(module.graph)
    parts = split_graph(module, lambda node: pieces[node])
    # A special kernel may have collectives that its results do not lead to: they run in every forward.
    leaves_out = not any(pieces.values()) and not any(node.target is run_kernel for node in pieces)
    for name, part in list(parts.named_children()):
        assert isinstance(part, fx.GraphModule)
        if not any(_stays_outside(node) for node in part.graph.nodes):
            setattr(parts, name, _Piece(part, communicator, leaves_out=leaves_out and _runs_again(program)))
    return partial(_run, program.module.forward, parts.forward, program.unread) if program.unread else parts.forward


def _runs_again(program: LayerProgram) -> bool:
    """Whether its whole forward runs again in backward."""
    return activation_policy(program.strategy.recompute).keeps_inputs_only


def _detaching(module: fx.GraphModule, positions: Sequence[int]) -> fx.GraphModule:
    """A copy of a program whose outputs at these positions are outside of autograd."""
    graph = fx.Graph()
    copied: Any = graph.graph_copy(module.graph, {})
    outputs: list[fx.Node] = list(copied)
    for position in positions:
        outputs[position] = graph.call_function(torch.ops.aten.detach.default, (outputs[position],))
    graph.output(tuple(outputs))
    return fx.GraphModule(module, graph)


def _run(
    run_eagerly: Callable[..., Sequence[Tensor]],
    run: Callable[..., Sequence[Tensor]],
    positions: Sequence[int],
    *args: Any,
) -> Sequence[Tensor]:
    """``run(*args)``, compiled, whose outputs at these positions get their gradients from ``run_eagerly(*args)``."""
    outputs = list(run(*args))
    *tensors, context = args
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):

        def run_again(*tensors: Tensor) -> list[Tensor]:
            made = run_eagerly(*tensors, context)
            return [made[position] for position in positions]

        detached = [outputs[position] for position in positions]
        made = call_function(_CallerOutputs, run_again, detached, *tensors)
        for position, output in zip(positions, made, strict=True):
            outputs[position] = output
    return outputs


class _CallerOutputs(torch.autograd.Function):
    """Tensors that have been computed, as functions of `tensors` that are differentiated only if they get gradients."""

    @staticmethod
    def forward(
        ctx: Any, run_again: Callable[..., Sequence[Tensor]], made: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run_again = run_again
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        needed = ctx.needs_input_grad[2:]
        tensors = [x.detach().requires_grad_(n) for x, n in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            outputs = ctx.run_again(*tensors)
        roots = [(edge_of(x), g) for x, g in zip(outputs, gradients, strict=True) if g is not None]
        found = iter(
            gradients_of([x for x, _ in roots], [g for _, g in roots], [x for x in tensors if x.requires_grad])
        )
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


def _stays_outside(node: fx.Node) -> bool:
    """Whether a node is not compiled.

    Nor is a move between layouts that one of these reads: where it does nothing forward, what is compiled would put out
    a view, and the way back through that would pass the move's backward by.
    """
    if node.op != "call_function":
        return False
    if node.target is redistribute:
        return any(_stays_outside(user) for user in node.users)
    kernel = KERNELS.get(str(node.args[0])) if node.target is run_kernel else node.target
    return node.target in _OUTSIDE or kernel in APART or family_of(str(node.target)).runs_apart


_OUTSIDE = frozenset(
    (
        draw,
        microbatch_slice,
        microbatch_term,
        moved_product,
        products_of_moved,
        begin_kernel,
        continue_kernel,
        finish_kernel,
    )
)


def _pieces(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of the piece of each op: even inside, odd outside of what is compiled."""
    piece_of: dict[fx.Node, int] = {}
    now = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        first = node.args[0] if node.args else None
        is_part = node.target is operator.getitem and isinstance(first, fx.Node) and piece_of.get(first, 0) % 2 == 1
        if _stays_outside(node) or is_part:
            now += now % 2 == 0
        else:
            now += now % 2
        piece_of[node] = now
    return piece_of


class _Piece(nn.Module):
    """A part of a layer program, with a compiled twin for every way in which its arguments lie; with `leaves_out`, also
    one that runs for what it saves alone.
    """

    def __init__(self, part: fx.GraphModule, communicator: Communicator, *, leaves_out: bool = False) -> None:
        super().__init__()
        self._part = part
        self._saves_only = _SAVES_ONLY.get if leaves_out else None
        self._communicator = communicator
        names = [node.name for node in part.graph.nodes if node.op == "placeholder"]
        self._context = names.index("context") if "context" in names else None
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def forward(self, *args: Any) -> Any:
        tensors = [x for index, x in enumerate(args) if index != self._context]
        with_gradients = torch.is_grad_enabled()
        key = (with_gradients, *((x.stride(), x.requires_grad and with_gradients) for x in tensors))
        if key not in self._compiled:
            self._compiled[key] = self._compile(tensors)
        return self._compiled[key](*tensors)

    def _compile(self, tensors: Sequence[Tensor]) -> Callable[..., Any]:
        traced = self._communicator.traced()
        twin = fx.GraphModule(self._part, fx.Graph(), class_name="Layer")
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self._part.graph.nodes:
            if node.op == "placeholder" and node.name == "context":
                mapping[node] = twin.graph.create_node("get_attr", "context")
            else:
                mapping[node] = twin.graph.node_copy(node, lambda n: mapping[n])
        object.__setattr__(twin, "context", LayerContext(traced))
        twin.recompile()

        def noting(graph: fx.GraphModule) -> Callable[[], None]:
            run: tuple[Collective, ...] = traced.collectives_in(graph)
            return lambda: self._communicator.note(run)

        return compile_graph(twin, tensors, noting, self._saves_only)
