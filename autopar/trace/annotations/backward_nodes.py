"""The backward of one call, node by node, in the order and with the sums of autograd's engine, without the engine.

The engine starts a thread for each device when it first runs, which a device that is registered later never gets, so
that tracing must not start it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autopar.trace.compat import torch_internals

__all__ = ["gradients_by_hand"]

_Edge = tuple[Node, int]


def gradients_by_hand(roots: list[_Edge], arriving: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of `inputs`, none of them a leaf, when `arriving` come to `roots`; both lists are emptied.

    Whoever calls holds no other part of the graph, so that nodes and what they save are freed as they have run.

    Raises:
        RuntimeError: a custom backward calls autograd's engine.
    """
    walk = _Walk([cast("_Edge", (x.grad_fn, x.output_nr)) for x in inputs])
    with torch.no_grad(), torch_internals.intercept_gradients(_refuse):
        while roots:
            walk.give(*roots.pop(), arriving.pop())
        while walk.waiting:
            walk.run_next()
    return walk.ends


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a backward calls autograd's engine")


class _Walk:
    """Nodes at which gradients have arrived.

    Attributes:
        ends: the gradients that are asked for, as far as they have arrived.
        waiting: by node, the gradients of its results.
        owners: by node, what keeps it alive until it has run, where Python can't (`torch_internals.keeps_nodes`).
    """

    def __init__(self, ends: Sequence[_Edge]) -> None:
        self._places = {edge: index for index, edge in enumerate(ends)}
        self.ends: list[Tensor | None] = [None] * len(ends)
        self.waiting: dict[Node, list[Tensor | None]] = {}
        self.owners: dict[Node, object] = {}

    def give(self, node: Node, number: int, gradient: Tensor) -> None:
        """A gradient arrives at this result of a node: it gets the result's shape and dtype, and is added up."""
        untyped: Any = node
        kinds = untyped._input_metadata
        kind = kinds[number]
        if gradient.shape != tuple(kind.shape):
            gradient = gradient.sum_to_size(kind.shape)
        gradient = gradient.to(kind.dtype)
        place = self._places.get((node, number))
        if place is not None:
            self.ends[place] = self._sum(self.ends, place, gradient)
        else:
            buffer = self.waiting.setdefault(node, [None] * len(kinds))
            buffer[number] = self._sum(buffer, number, gradient)

    def run_next(self) -> None:
        """Run the node that was made last: all that read its results were made later."""
        node = max(self.waiting, key=_order)
        gradients = self.waiting.pop(node)
        edges = node.next_functions
        made = _run(node, gradients)
        owner = None if torch_internals.keeps_nodes() else (node, self.owners.pop(node, None))
        del node, gradients
        for index, (following, number) in enumerate(edges):
            gradient = made[index] if index < len(made) else None
            made[index : index + 1] = [None]
            if following is not None and gradient is not None and not _is_leaf(following):
                if owner is not None and isinstance(following, torch.autograd.function.BackwardCFunction):
                    self.owners[following] = owner
                self.give(following, number, gradient)

    def _sum(self, buffer: list[Tensor | None], number: int, gradient: Tensor) -> Tensor:
        """As the engine adds up: in place in what nobody else reads."""
        before, buffer[number] = buffer[number], None
        if before is None:
            return gradient
        key = torch_internals.storage_key(before)
        others = (x for each in (self.ends, buffer, *self.waiting.values()) for x in each if x is not None)
        is_shared = key in map(torch_internals.storage_key, (gradient, *others))
        return before + gradient if is_shared or not before.is_contiguous() else before.add_(gradient)


def _order(node: Node) -> int:
    untyped: Any = node
    return untyped._sequence_nr()


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def _run(node: Node, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients that `node` makes of these, one for each of its `next_functions`."""
    untyped: Any = node
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        made: Any = untyped(*gradients)
        return _listed(made)
    kinds = zip(gradients, untyped._input_metadata, strict=True)
    whole = [torch.zeros(kind.shape, dtype=kind.dtype, device=kind.device) if x is None else x for x, kind in kinds]
    gradients.clear()
    # One for each argument, of which `next_functions` has the tensors.
    of_args = zip(_listed(untyped.apply(*whole)), untyped.needs_input_grad, strict=False)
    needed = iter([x for x, needs in of_args if needs])
    return [None if following is None else next(needed) for following, _ in node.next_functions]


def _listed(made: Any) -> list[Tensor | None]:
    return list(cast("tuple[Tensor | None, ...]", made)) if isinstance(made, tuple) else [made]
