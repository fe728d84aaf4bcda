"""Several microbatches per step: forward and backward of each run at once, and ``loss.backward()`` hands the
gradients out.

ZeRO-0 and 1 add up gradients of the compute copies and reduce them once; ZeRO-2 and 3 reduce after every
microbatch. Levels 0 to 2 gather parameters once a step, level 3 for each use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.lower.compat import call_function, local_tensor, run_backward
from autopar.lower.execution import Executor
from autopar.lower.layer_runner import LayerUse
from autopar.lower.parameters import Gathering

__all__ = ["run_microbatches"]


def run_microbatches(executor: Executor, tensors: Sequence[Tensor], base_seed: int) -> dict[str, Tensor]:
    """Run all microbatches of one step.

    Under grad mode their backward passes run here, too, and the loss that is returned carries their
    gradients: its backward releases them, scaled by the gradient that it gets.  Other outputs carry no
        gradient.

    Returns:
        Outputs (local parts as they lie, whole over time) and updates; the loss is whole.
    """
    program = executor.executable.program
    parameters = _trained_parameters(executor)
    with_gradients = torch.is_grad_enabled() and bool(parameters)
    step = _Step(executor) if with_gradients else None
    found: list[dict[str, Tensor]] = []
    for microbatch in range(executor.num_microbatches):
        values = executor.run(tensors, base_seed, microbatch, step.open_layer if step else None)
        values[program.loss] = executor.make_whole(program.loss, values[program.loss])
        if step is not None:
            run_backward(values[program.loss])
            step.finish_microbatch()
        found.append({name: value.detach() for name, value in values.items()})
    joined = {name: _join(executor, name, [values[name] for values in found]) for name in found[0]}
    if step is not None:
        store = _Stored(step.gradients(parameters))
        joined[program.loss] = call_function(_Release, joined[program.loss], store, *parameters.values())
    return joined


def _trained_parameters(executor: Executor) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for runner in executor.runners.values():
        for name, parameter in zip(runner.parameters.names, runner.parameters.current(), strict=True):
            if parameter.requires_grad:
                found.setdefault(id(parameter), (name, parameter))
    return dict(found.values())


def _join(executor: Executor, name: str, parts: list[Tensor]) -> Tensor:
    """The microbatches' parts of an output as one: terms add up, slices are laid side by side."""
    time = executor.lies[name].time
    if time.kind == "P":
        return torch.stack(parts).sum(0)
    if not time.is_shard:
        return parts[-1]
    # The slices of devices and microbatches interleave, so what is to be plain is gathered along that dim first.
    if not executor.stays_cut(name):
        parts = [executor.gather_along(name, part, time.dim) for part in parts]
    return torch.cat(parts, time.dim)


class _Step:
    """One step's parameters and the gradients that its microbatches add up."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._shared: dict[int, LayerUse] = {}
        self._leaves: dict[int, list[Tensor]] = {}
        self._sums: dict[int, list[Tensor | None]] = {}

    def open_layer(self, index: int) -> LayerUse:
        """The layer's parameters as leaves that collect gradients."""
        runner = self._executor.runners[index]
        zero = runner.strategy.zero
        if index in self._shared:
            return self._shared[index]
        stored = runner.parameters.current()
        if zero < 2:
            values = Gathering(runner.parameters, stored).values()
            leaves = [_leaf(v, p.requires_grad) for v, p in zip(values, stored, strict=True)]
            self._shared[index] = LayerUse(fixed=leaves)
            self._leaves[index] = leaves
            return self._shared[index]
        if index not in self._leaves:
            locals_ = [local_tensor(p) if isinstance(p, DTensor) else p for p in stored]
            self._leaves[index] = [_leaf(x, p.requires_grad) for x, p in zip(locals_, stored, strict=True)]
        use = LayerUse(Gathering(runner.parameters, self._leaves[index], is_freed=zero == 3, prefetch=True))
        if zero == 2:
            self._shared[index] = use
        return use

    def finish_microbatch(self) -> None:
        """Add gradients up in the stored dtype, where they are computed in a narrower one."""
        for index, leaves in self._leaves.items():
            stored = self._executor.runners[index].parameters.current()
            for position, (leaf, parameter) in enumerate(zip(leaves, stored, strict=True)):
                if leaf.grad is not None and leaf.dtype != parameter.dtype:
                    sums = self._sums.setdefault(index, [None] * len(leaves))
                    term = leaf.grad.to(parameter.dtype)
                    before = sums[position]
                    sums[position] = term if before is None else before.add_(term)
                    leaf.grad = None

    def gradients(self, parameters: dict[str, nn.Parameter]) -> list[Tensor | None]:
        """The step's gradient of each parameter, as DTensors."""
        found: dict[int, Tensor] = {}
        for index, leaves in self._leaves.items():
            layer = self._executor.runners[index].parameters
            sums = self._sums.get(index, [None] * len(leaves))
            local = [leaf.grad if s is None else s for leaf, s in zip(leaves, sums, strict=True)]
            if self._executor.runners[index].strategy.zero < 2:
                local = layer.reduce(local)
            for parameter, gradient in zip(layer.current(), local, strict=True):
                if gradient is not None:
                    before = found.get(id(parameter))
                    found[id(parameter)] = gradient if before is None else before + gradient
        store = self._executor.store
        return [
            store.wrap(name, found[id(p)].to(p.dtype)) if id(p) in found else None for name, p in parameters.items()
        ]


def _leaf(value: Tensor, requires_grad: bool) -> Tensor:
    return value.detach().requires_grad_(requires_grad)


class _Stored:
    """Gradients that wait for ``loss.backward()``; they can be taken once."""

    def __init__(self, gradients: list[Tensor | None]) -> None:
        self._gradients: list[Tensor | None] | None = gradients

    def take(self) -> list[Tensor | None]:
        if self._gradients is None:
            raise AutoparError(
                "the gradients of this step were already released by an earlier backward(): with "
                "microbatches, call the model again before each backward()"
            )
        gradients, self._gradients = self._gradients, None
        return gradients


class _Release(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, stored: _Stored, *parameters: Tensor) -> Tensor:
        ctx.stored = stored
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Any, ...]:
        scale = gradients[0]
        taken: list[Tensor | None] = ctx.stored.take()
        for gradient in taken:
            if gradient is not None:
                local = local_tensor(gradient) if isinstance(gradient, DTensor) else gradient
                local.mul_(scale.to(local.dtype))
        return None, None, *taken
