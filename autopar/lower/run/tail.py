"""The tail of a program as this rank runs it: once a step, behind all layers, on whole sums (`variants.tail`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.lower.parameters.store import ParameterStore
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.layer_program import layer_program
from autopar.program import Layer, Program
from autopar.step.layer.local_layer import whole_strategy

__all__ = ["Tail"]


class Tail:
    """What `Program.tail` makes of whole values.

    Attributes:
        results: the names of what the caller or a buffer gets of it.
    """

    def __init__(
        self,
        program: Program,
        store: ParameterStore,
        context: LayerContext,
        constant: Callable[[str], Callable[[], Tensor]],
    ) -> None:
        """Lower it; `constant` gives, for the name of a constant, what gives it whole in a step."""
        made = {name for op in program.tail for name in op.results}
        needed = (program.loss, *program.outputs, *program.updates.values())
        self.results = tuple(dict.fromkeys(name for name in needed if name in made))
        read = dict.fromkeys(name for op in program.tail for name in op.operands if name not in made)
        state = tuple(name for name in read if program.values[name].role != "op")
        layer = Layer("behind all layers", len(program.kinds), program.tail, program.tail_reads, state, self.results)
        device = str(context.communicator.device)
        self.module = layer_program(program, layer, whole_strategy(layer), device=device).module
        self._program = program
        self._context = context
        self._store = store
        self._state = {name: None if program.values[name].role == "buffer" else constant(name) for name in state}

    def run(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its results, of what it reads of layers, whole."""
        state = [self._buffer(name) if give is None else give() for name, give in self._state.items()]
        made = self.module(*(values[name] for name in self._program.tail_reads), *state, self._context)
        return dict(zip(self.results, made, strict=True))

    def run_with_gradients(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Its results, and the gradients of the loss, which is one of them, of what it reads of layers."""
        program = self._program
        trained = [name for name in program.tail_reads if program.values[name].requires_grad]
        leaves = {name: values[name].detach().requires_grad_() for name in trained}
        with torch.enable_grad():
            made = self.run({**values, **leaves})
        computed: Any = torch.autograd.grad(made[program.loss], list(leaves.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(trained, computed, strict=True) if g is not None}
        return {name: x.detach() for name, x in made.items()}, gradients

    def _buffer(self, name: str) -> Tensor:
        dtype: torch.dtype = getattr(torch, self._program.type_of(name).dtype)
        return self._store.buffer(self._program.parameters[name]).detach().to(dtype)
