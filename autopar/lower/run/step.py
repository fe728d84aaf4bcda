"""The gradients of one step whose backward passes run inside the forward call, until ``loss.backward()`` asks for them.

ZeRO-0 and 1 add up gradients of the compute copies and reduce them once, in the last microbatch's backward where that
is known beforehand, else at the end of the step; ZeRO-2 and 3 reduce in every microbatch's backward. Levels 0 to 2
gather parameters once a step, level 3 for each use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autopar.errors import AutoparError
from autopar.lower.compat import call_function, local_part_of
from autopar.lower.parameters.layer_parameters import Gathering, Reduction
from autopar.lower.run.execution import Executor
from autopar.lower.run.layer_runner import LayerUse

__all__ = ["StepGradients", "release_later", "spread_overflow", "trained_parameters"]


def trained_parameters(executor: Executor) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for runner in executor.runners.values():
        for name, parameter in zip(runner.parameters.names, runner.parameters.current(), strict=True):
            if parameter.requires_grad:
                found.setdefault(id(parameter), (name, parameter))
    return dict(found.values())


class StepGradients:
    """One step's parameters and the gradients that its microbatches add up."""

    def __init__(self, executor: Executor, split: Iterable[int] = ()) -> None:
        """`split` are the layers whose backward runs in two parts, first for inputs, then for parameters.

        There every parameter must be a leaf of its own, so ZeRO-2 reduces by hand; ZeRO-3 can't be split.  Who knows
        which backward is the step's last says so by `is_last`, before the forward: what is reduced once a step is then
        reduced in that backward, beside the compute of the layers before.
        """
        self._executor = executor
        self._split = frozenset(split)
        self._gathered: dict[int, Gathering] = {}
        self._leaves: dict[int, list[Tensor]] = {}
        self._sums: dict[int, list[Tensor | None]] = {}
        self._stored: dict[int, list[Tensor]] = {}  # of layers whose gradients are reduced in the last backward
        self.is_last = False

    def open_layer(self, index: int) -> LayerUse:
        """The layer's parameters as leaves that collect gradients."""
        runner = self._executor.runners[index]
        zero = runner.strategy.zero
        stored = runner.parameters.current()
        if zero < 2 or index in self._split:
            if index not in self._leaves:
                values = Gathering(runner.parameters, stored).values()
                self._leaves[index] = _leaves(values, stored)
            if self.is_last and index not in self._split:
                return self._open_last(index)
            return LayerUse(fixed=self._leaves[index])
        if index not in self._leaves:
            self._leaves[index] = _leaves(map(local_part_of, stored), stored)
        if zero == 2:
            if index not in self._gathered:
                self._gathered[index] = Gathering(runner.parameters, self._leaves[index], is_shared=True, prefetch=True)
            return LayerUse.of(self._gathered[index])
        return LayerUse.of(Gathering(runner.parameters, self._leaves[index], is_freed=True, prefetch=True))

    def _open_last(self, index: int) -> LayerUse:
        """The same copies, whose gradients are reduced at once, together with those of earlier microbatches."""
        runner, leaves = self._executor.runners[index], self._leaves[index]
        stored = runner.parameters.current()

        def add(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
            sums = self._sums.pop(index, None) or [leaf.grad for leaf in leaves]
            self._stored[index] = parts
            for position, (gradient, parameter) in enumerate(zip(gradients, stored, strict=True)):
                leaves[position].grad = None
                if gradient is not None:
                    sums[position] = _add(sums[position], gradient.to(parameter.dtype))
            return sums

        parts = _leaves(map(local_part_of, stored), stored)
        return LayerUse.of(Gathering(runner.parameters, parts, values=[leaf.detach() for leaf in leaves], add=add))

    def open_layers_for_step(self) -> None:
        """Gather now what is gathered once a step: else every stage would when the first microbatch comes by, one stage
        after the other.
        """
        for index, runner in self._executor.runners.items():
            if runner.strategy.zero < 3:
                self.open_layer(index)

    def is_split(self, indices: range) -> bool:
        """Whether the backward of these layers runs in two parts."""
        return self._split.issuperset(indices)

    def leaves(self, index: int) -> list[Tensor]:
        """The leaves of a layer of `split` that collect gradients."""
        return [leaf for leaf in self._leaves[index] if leaf.requires_grad]

    def finish_microbatch(self, indices: range) -> None:
        """Take what the backward of one microbatch has left in these layers' leaves, where it can't stay there.

        ZeRO-2 reduces it, if autograd did not; what was computed in a narrower dtype is added up in the stored one.
        """
        for index in indices:
            runner = self._executor.runners[index]
            stored, leaves = runner.parameters.current(), self._leaves[index]
            by_hand = index in self._split and runner.strategy.zero == 2
            if by_hand or any(leaf.dtype != p.dtype for leaf, p in zip(leaves, stored, strict=True)):
                terms = [leaf.grad for leaf in leaves]
                if by_hand:
                    terms = runner.parameters.start_reduce(terms).wait()
                sums = self._sums.setdefault(index, [None] * len(leaves))
                for position, (term, parameter) in enumerate(zip(terms, stored, strict=True)):
                    if term is not None:
                        sums[position] = _add(sums[position], term.to(parameter.dtype))
                    leaves[position].grad = None

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> list[Tensor | None]:
        """The step's gradient of each parameter, as DTensors."""
        found: dict[int, Tensor] = {}
        for index, local in self._reduced():
            for parameter, gradient in zip(self._executor.runners[index].parameters.current(), local, strict=True):
                if gradient is not None:
                    found[id(parameter)] = _add(found.get(id(parameter)), gradient)
        store = self._executor.store
        return [
            store.wrap(name, found[id(p)].to(p.dtype)) if id(p) in found else None for name, p in parameters.items()
        ]

    def _reduced(self) -> Iterator[tuple[int, Sequence[Tensor | None]]]:
        """Per layer the gradients of the stored parts; the next layer's are on their way while one's are waited for."""
        before: tuple[int, Reduction] | None = None
        for index, leaves in self._leaves.items():
            runner = self._executor.runners[index]
            if index in self._stored:
                reduction = Reduction([part.grad for part in self._stored[index]])
            else:
                sums = self._sums.get(index, [None] * len(leaves))
                local = [leaf.grad if s is None else s for leaf, s in zip(leaves, sums, strict=True)]
                reduction = runner.parameters.start_reduce(local) if runner.strategy.zero < 2 else Reduction(local)
                del sums, local
                self._sums.pop(index, None)
                for leaf in leaves:
                    leaf.grad = None
            if before is not None:
                yield before[0], before[1].wait()
            before = index, reduction
        if before is not None:
            yield before[0], before[1].wait()


def _add(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)


def _leaves(values: Iterable[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    return [v.detach().requires_grad_(p.requires_grad) for v, p in zip(values, parameters, strict=True)]


def spread_overflow(gradients: Sequence[Tensor | None], any_rank: Callable[[Tensor], Tensor]) -> None:
    """Where some rank's gradients are not finite, make every rank's not finite: a gradient scaler, which looks on the
    devices of one stage only, then skips the step on all of them.

    Args:
        gradients: of this rank, changed in place.
        any_rank: a scalar that is 1.0 or 0.0 here -> the largest on all ranks.
    """
    locals_ = _locals(gradients)
    flags = [local.isfinite().all().logical_not() for local in locals_]
    is_bad = any_rank(torch.stack(flags).any().float() if flags else torch.zeros(())) > 0
    for local in locals_:
        first = local.view(-1)[:1]
        first.copy_(torch.where(is_bad, torch.inf, first))


def _locals(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [local_part_of(g) for g in gradients if g is not None]


def release_later(
    loss: Tensor,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[nn.Parameter],
    spread: Callable[[Sequence[Tensor | None]], None] | None = None,
    *,
    is_scaled: bool = False,
) -> Tensor:
    """`loss` with a backward that gives `gradients` to `parameters`, scaled by the gradient that comes in.

    Args:
        loss: a scalar outside autograd.
        gradients: one per parameter.
        parameters: where they go; there may be none, and the loss is differentiable all the same.
        spread: see `spread_overflow`.  Called if they are scaled (by a gradient scaler): with stages an overflow may be
            in one of them only.
        is_scaled: expect a gradient scaler, even where its scale is 1.
    """
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    return call_function(_Release, loss, _Waiting(list(gradients), spread, is_scaled), anchor, *parameters)


class _Waiting:
    """Gradients that wait for ``loss.backward()``; they can be taken once."""

    def __init__(
        self,
        gradients: list[Tensor | None],
        spread: Callable[[Sequence[Tensor | None]], None] | None,
        is_scaled: bool,
    ) -> None:
        self._gradients: list[Tensor | None] | None = gradients
        self._spread = spread
        self._is_scaled = is_scaled

    def take(self, scale: Tensor) -> list[Tensor | None]:
        if self._gradients is None:
            raise AutoparError(
                "the gradients of this step were already released by an earlier backward(): with "
                "microbatches or pipeline stages, call the model again before each backward()"
            )
        gradients, self._gradients = self._gradients, None
        for local in _locals(gradients):
            local.mul_(scale.to(local.dtype))
        if self._spread is not None and (self._is_scaled or float(scale) != 1.0):
            self._spread(gradients)
        return gradients


class _Release(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, waiting: _Waiting, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.waiting = waiting
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Any, ...]:
        return None, None, None, *ctx.waiting.take(gradients[0])
