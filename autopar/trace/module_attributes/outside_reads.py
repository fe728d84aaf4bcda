"""Which tensors a forward reads that are not its model's: those of global variables, closures and other objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.objects.attribute_owners import attribute_owners
from autopar.objects.outside_tensors import OutsideTensor
from autopar.trace.compat import torch_internals
from autopar.trace.compat.source_lines import user_line
from autopar.trace.gradients import differentiable
from autopar.trace.graph import Graph

__all__ = ["OutsideReads", "refuse_lost_gradients"]


class OutsideReads:
    """Those that were arguments of calls in a trace, in which the model's own tensors and the inputs are fake."""

    def __init__(self) -> None:
        """None so far."""
        self._found: dict[int, tuple[Tensor, str]] = {}  # with the tensor, so that its id stays its own
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # likewise

    def note(self, arguments: Any) -> None:
        """Take in the arguments of a call of a function of torch."""
        for x in torch_internals.flatten(arguments)[0]:
            if type(x) in (Tensor, nn.Parameter) and id(x) not in self._found and _has_entries(x):
                self._found[id(x)] = (x, user_line())

    def on_host(self, x: Tensor) -> Tensor:
        """`x`, or the copy on the host, where a trace is, of one on an accelerator."""
        if type(x) not in (Tensor, nn.Parameter) or x.device.type == "cpu" or not _has_entries(x):
            return x
        if id(x) not in self._copies:
            with torch_internals.plain_tensors():
                self._copies[id(x)] = (x, x.detach().cpu().requires_grad_(x.requires_grad))
        return self._copies[id(x)][1]

    def tensors(self, model: nn.Module) -> tuple[OutsideTensor, ...]:
        """As they are now; `model` is what was traced."""
        if not self._found:
            return ()
        attributes = {id(x) for owner in attribute_owners(model).values() for x in _leaves(vars(owner))}
        return tuple(
            OutsideTensor.of(x, where, traced=self.on_host(x), is_attribute=id(x) in attributes)
            for x, where in self._found.values()
        )


def refuse_lost_gradients(graph: Graph, constants: Mapping[str, Any], outside: Sequence[OutsideTensor]) -> None:
    """Raise TraceError if training on one device sends a gradient to one of the constants of a graph.

    An export has the tensors in `outside` under other objects, with the same memory.
    """
    trained = {(each.traced_address, each.shape): each for each in outside if each.requires_grad}
    for name, value in constants.items() if trained else ():
        each = trained.get((value.data_ptr(), tuple(value.shape)))
        if each and not differentiable(replace(graph, trainable=frozenset({name}))).isdisjoint(graph.outputs):
            raise TraceError(
                f"{each.where}: forward reads a tensor ({each.text}) that requires a gradient and is not the model's, "
                "but that of a global variable or another object, so it would get none. Make it or its module an "
                "attribute of the model (self.head = head), or call requires_grad_(False) on it if nothing trains it"
            )


def _has_entries(x: Tensor) -> bool:
    is_plain = torch_internals.has_storage(x) and x.layout is torch.strided and not (x.is_meta or x.is_quantized)
    return is_plain and not torch_internals.is_fake(x) and x.numel() > 0


def _leaves(value: Any) -> Iterable[Any]:
    return torch_internals.flatten(value)[0]
