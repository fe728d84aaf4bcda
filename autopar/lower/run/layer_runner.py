"""One layer bound to this rank: its lowered program, and where what it holds comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from autopar.lower.autograd import run_twice
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.moves import COLLECTIVE_KINDS
from autopar.lower.communication.reshard_ops import apply_forward
from autopar.lower.parameters.layer_parameters import LayerParameters, StepParameters
from autopar.lower.program.compiled import SavingOnly
from autopar.lower.program.layer_ops import LayerContext
from autopar.lower.program.layer_program import LayerProgram
from autopar.lower.program.offloading import OffloadedTensors
from autopar.lower.program.recompute import KeepingProgram, run_keeping_less
from autopar.placement import Axis, Step
from autopar.plan import LayerStrategy
from autopar.program import Layer
from autopar.step.activation_policies import activation_policy

__all__ = ["LayerRunner"]

_COPYING = COLLECTIVE_KINDS | {"slice"}


@dataclass(frozen=True)
class LayerRunner:
    """Everything fixed about one layer.

    Args:
        layer: itself.
        strategy: how it runs.
        program: its lowered program, shared by its kind.
        keeping: the variant for selective recomputation, None if the strategy has none or a compiler sees to it.
        parameters: how it gets them.
        buffers: position in the layer's state, name, dtype, moves to the copy layout.
        constants: position in the layer's state, how to have the local part.
        moves: per input, the value's name and the moves from the layout that it has.
        dead: values that no later layer reads.
        first_op: number of its first op in the program.
    """

    layer: Layer
    strategy: LayerStrategy
    program: LayerProgram
    keeping: KeepingProgram | None
    parameters: LayerParameters
    buffers: tuple[tuple[int, str, torch.dtype, tuple[Step, ...]], ...]
    constants: tuple[tuple[int, Callable[[], Tensor]], ...]
    moves: tuple[tuple[str, tuple[Step, ...]], ...]
    dead: tuple[str, ...]
    first_op: int

    @cached_property
    def only_copied(self) -> frozenset[str]:
        """The values that it reads only after a move, of whose result none of their own data is a part."""
        kept = {name for name, steps in self.moves if not _copies(steps)}
        return frozenset(name for name, _ in self.moves) - kept

    @property
    def axes(self) -> frozenset[Axis]:
        """Every axis on which something of this layer may communicate."""
        steps = [step for steps in self.parameters.steps for step in steps]
        steps += [step for _, moved in self.moves for step in moved]
        axes = {step.axis for step in steps}
        for node in self.program.module.graph.nodes:
            axes |= node.meta.get("axes", frozenset())
        return frozenset(axis for axis in axes if axis.size > 1)

    def run(
        self,
        parameters: StepParameters,
        inputs: Sequence[Tensor],
        context: LayerContext,
        offloaded: OffloadedTensors | None = None,
    ) -> Sequence[Tensor]:
        """The layer's outputs, remembering for backward what the strategy says; `offloaded` takes what leaves the
        device.
        """
        others = self._others(context.communicator)
        is_recording = torch.is_grad_enabled()
        if is_recording and activation_policy(self.strategy.recompute).keeps_inputs_only:
            return self._run_again_in_backward(parameters, inputs, others, context, offloaded)
        state = self._layer_state(parameters.differentiable(), others)
        if is_recording and (parameters.frees or self.keeping or offloaded):
            return run_keeping_less(self.program, self.keeping, inputs, state, context, parameters, offloaded)
        return self.program.module(*inputs, *state, context)

    def _run_again_in_backward(
        self,
        parameters: StepParameters,
        inputs: Sequence[Tensor],
        others: Mapping[int, Tensor],
        context: LayerContext,
        offloaded: OffloadedTensors | None,
    ) -> Sequence[Tensor]:
        def run(*inputs: Tensor) -> Sequence[Tensor]:
            return self.program.module(*inputs, *self._layer_state(parameters.differentiable(), others), context)

        # Random ops draw from seeds of their own.
        if offloaded is None:
            return run_twice(run, inputs, SavingOnly)
        return offloaded.take_from(lambda: run_twice(run, inputs, SavingOnly))

    def _others(self, communicator: Communicator) -> dict[int, Tensor]:
        """The constants and buffers by position in the layer's state, as they are now.

        Buffers are copied, for backward to find what forward read: forward updates some.
        """
        tensors = {position: part() for position, part in self.constants}
        for position, name, dtype, steps in self.buffers:
            buffer = self.parameters.store.buffer(name).to(dtype, copy=True)
            tensors[position] = apply_forward(buffer, steps, communicator)
        return tensors

    def _layer_state(self, copies: Sequence[Tensor], others: Mapping[int, Tensor]) -> list[Tensor]:
        state = {**others, **dict(zip(self.parameters.positions, copies, strict=True))}
        return [state[position] for position in range(len(self.layer.state))]


def _copies(steps: Sequence[Step]) -> bool:
    """Whether what these steps give has none of the data that they begin with: it was received, or copied."""
    return any(step.forward in _COPYING and step.axis.size > 1 for step in steps)
