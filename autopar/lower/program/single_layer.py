"""One layer under one strategy as a single rank of any world computes it, without communication, to be timed.

Inputs and state are made up: random numbers of the local shapes, integers in the range of what they index, and
documents as long as prices take them to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.lower.autograd import run_twice
from autopar.lower.communication.null_communicator import NullCommunicator
from autopar.lower.kernels.random import RandomState
from autopar.lower.program.compiled import SavingOnly, compile_program
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.layer_program import layer_program
from autopar.lower.program.recompute import keeping_program, run_keeping_less
from autopar.ops import family_of
from autopar.ops.attention import DOCUMENTS, document_length
from autopar.plan import LayerStrategy
from autopar.program import Layer, Program
from autopar.step.activation_policies import activation_policy
from autopar.step.layer.instructions import LocalValue

__all__ = ["SingleLayer"]

_LEAST = 2
"""Integers that index nothing are 0 and 1: masks of integers, lengths."""


class SingleLayer:
    """A lowered layer with inputs, ready to run forward and backward again and again.

    Args:
        program: that the layer is in.
        layer: the first of its kind.
        strategy: how it runs; its mesh says how large the world is.
        num_microbatches: into how many the batch is cut.
        device: where to run; without a GPU only ``"cpu"``.
        compiled: compile it as `parallelize(compile=True)` would.
        constants: values of the program's constants where they are at hand; others are made up.
    """

    def __init__(
        self,
        program: Program,
        layer: Layer,
        strategy: LayerStrategy,
        num_microbatches: int = 1,
        device: torch.device | str = "cpu",
        *,
        compiled: bool = False,
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Lower the layer and make its inputs.

        Raises:
            PlanMismatchError: the strategy is not for this layer.
        """
        self.device = torch.device(device)
        lowered = layer_program(program, layer, strategy, num_microbatches, device=str(self.device))
        self._program = lowered
        self._reruns = activation_policy(strategy.recompute).keeps_inputs_only
        self._keeping = keeping_program(lowered, compiled=compiled)
        random = RandomState(0, self.device) if any(op.is_random for op in layer.ops) else None
        self._context = LayerContext(NullCommunicator(math.prod(strategy.mesh), self.device), random=random)
        maker = _LayerMaker(program, layer, self.device, constants or {})
        local = lowered.local
        self._inputs = [maker.make(local.values[index]) for index in local.inputs]
        self._state = [maker.make(local.values[index]) for index in local.state]
        self._leaves = [x for x in (*self._inputs, *self._state) if x.requires_grad]
        if compiled:
            lowered.module.forward = compile_program(lowered, self._context.communicator)
        outputs = self.forward()
        self._gradients = [
            torch.randn_like(x) if x.requires_grad and i not in lowered.unread else None for i, x in enumerate(outputs)
        ]

    @property
    def is_differentiable(self) -> bool:
        """Whether there is anything to run backward."""
        return bool(self._leaves) and any(gradient is not None for gradient in self._gradients)

    def forward(self) -> Sequence[Tensor]:
        """The outputs, with what backward needs."""
        module, state, context = self._program.module, self._state, self._context
        if self._reruns:
            return run_twice(lambda *inputs: module(*inputs, *state, context), self._inputs, SavingOnly)
        if self._keeping is not None:
            return run_keeping_less(self._program, self._keeping, self._inputs, state, context)
        return module(*self._inputs, *state, context)

    def backward(self, outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Gradients of inputs and state, of outputs that `forward` gave; once per forward."""
        pairs = [(x, g) for x, g in zip(outputs, self._gradients, strict=True) if g is not None]
        roots, gradients = zip(*pairs, strict=True)
        return torch.autograd.grad(roots, self._leaves, gradients, allow_unused=True)


class _LayerMaker:
    """Makes up values."""

    def __init__(self, program: Program, layer: Layer, device: torch.device, constants: Mapping[str, Tensor]) -> None:
        self.program = program
        self.device = device
        self.constants = constants
        self.limits = _limits(program, layer)
        self.documents = {
            op.operands[3]: document_length(op, program.type_of(op.operands[1]).shape[2])
            for op in layer.ops
            if op.target == DOCUMENTS
        }
        self.generator = torch.Generator(device).manual_seed(0)

    def make(self, local: LocalValue) -> Tensor:
        """A value of this local type; a leaf that takes a gradient if the program's value does."""
        name, tensor_type = local.value.name, local.type
        known = self.constants.get(name)
        if known is not None and tuple(known.shape) == tensor_type.shape:
            return known.detach().to(self.device)
        dtype: torch.dtype = getattr(torch, tensor_type.dtype)
        if name in self.documents:
            numbers = torch.arange(tensor_type.shape[-1], dtype=dtype, device=self.device) // self.documents[name]
            return numbers.expand(tensor_type.shape).contiguous()
        if dtype is torch.bool:
            return torch.ones(tensor_type.shape, dtype=dtype, device=self.device)
        if not (dtype.is_floating_point or dtype.is_complex):
            limit = self.limits.get(name, _LEAST)
            return torch.randint(limit, tensor_type.shape, generator=self.generator, dtype=dtype, device=self.device)
        value = torch.randn(tensor_type.shape, generator=self.generator, device=self.device).to(dtype)
        return value.requires_grad_(self.program.values[name].requires_grad and self.program.training)


def _limits(program: Program, layer: Layer) -> dict[str, int]:
    """For integers that index something: what they must stay below.  Ops between pass it on to what they read."""
    limits: dict[str, int] = {}

    def note(name: str, limit: int) -> None:
        if not program.type_of(name).is_floating:
            limits[name] = min(limit, limits.get(name, limit))

    for op in reversed(layer.ops):
        names, num_choices = op.operands, family_of(op.target).num_choices
        if num_choices is not None:
            shape = program.type_of(names[0]).shape
            for name in names[1:] or names:
                note(name, num_choices(op, shape) if shape else _LEAST)
        else:
            passed = [limits[name] for name in op.results if name in limits]
            for name in names if passed else ():
                note(name, min(passed))
    return limits
