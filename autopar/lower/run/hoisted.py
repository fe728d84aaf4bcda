"""Values that layers read as constants, computed from buffers at the beginning of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx

from autopar.lower.communication.reshard_ops import apply_forward
from autopar.lower.parameters.store import ParameterStore
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.layer_program import layer_program
from autopar.placement import Step
from autopar.program import Layer, Program
from autopar.step.layer.local_layer import whole_strategy

__all__ = ["HoistedValues"]


class HoistedValues:
    """The results of `Program.hoisted` that are `needed` on this rank, whole, and their local parts, in this step.

    Attributes:
        module: the code that computes them.
    """

    def __init__(
        self,
        program: Program,
        constants: Mapping[str, Tensor],
        store: ParameterStore,
        context: LayerContext,
        needed: Collection[str],
    ) -> None:
        """Lower the ops; `constants` are the program's folded ones by value name, whole."""
        ops = program.hoisted
        results = {name for op in ops for name in op.results}
        read = tuple(dict.fromkeys(name for op in ops for name in op.operands if name not in results))
        self._names = tuple(name for name in needed if name in results)
        layer = Layer("once a step", len(program.kinds), ops, inputs=(), state=read, outputs=self._names)
        device = context.communicator.device

        def make() -> tuple[fx.GraphModule, Program]:
            module = layer_program(program, layer, whole_strategy(layer), device=str(device)).module
            module.graph.eliminate_dead_code()
            module.recompile()
            return module, program  # whose identity stands for it in the key

        self.module, _ = context.communicator.made_once(("once a step", id(program), self._names), make)
        self._store = store
        self._context = context
        self._buffers = {
            name: (program.parameters[name], getattr(torch, program.type_of(name).dtype))
            for name in read
            if program.values[name].role == "buffer"
        }
        self._read = {name: None if name in self._buffers else constants[name].to(device) for name in read}
        self._values: dict[str, Tensor] = {}
        self._parts: dict[tuple[str, tuple[Step, ...]], Tensor] = {}

    @torch.no_grad()
    def begin_step(self) -> None:
        """Compute them from the buffers as they are now; copies, for backward to find what forward read."""
        self._values, self._parts = {}, {}  # those of the step before are gone before their successors come
        if not self._names:
            return
        store = self._store
        buffers = {n: store.buffer(member).to(dtype, copy=True) for n, (member, dtype) in self._buffers.items()}
        values = self.module(*{**self._read, **buffers}.values(), self._context)
        self._values = dict(zip(self._names, values, strict=True))

    def part(self, name: str, steps: tuple[Step, ...]) -> Tensor:
        """What `steps` leave of a value on this rank."""
        key = (name, steps)
        if key not in self._parts:
            self._parts[key] = apply_forward(self._values[name], steps, self._context.communicator)
        return self._parts[key]
