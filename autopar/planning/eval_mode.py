"""A model that was planned for training in eval mode: traced and planned when that is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.lower.compat import map_leaves
from autopar.lower.run.parallel_module import EvalFactory
from autopar.plan import Plan
from autopar.program import Program
from autopar.trace import Traced, as_batch, copy_with, default_example_inputs, require_target, trace, without_target

__all__ = ["EvalFactories", "eval_factories", "trace_model"]

ExampleInputs = Sequence[Any] | Mapping[str, Any]

EvalFactories = tuple[EvalFactory | None, EvalFactory | None]
"""For calls with and, with a loss function, without a target."""


def trace_model(
    model: nn.Module,
    example_inputs: Tensor | ExampleInputs | None,
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
) -> Traced:
    """Trace `model` on its example inputs; raises what `autopar.trace.trace` raises.

    For training, whatever mode it is in: pretrained models come in eval mode, and switch before they train.
    """
    given = as_batch(example_inputs)
    inputs = default_example_inputs(model) if given is None else given
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    traced = trace(model, args, kwargs, training=training, dtype=dtype)
    return require_target(model, traced) if training else traced


def eval_factories(
    model: nn.Module,
    example_inputs: ExampleInputs | None,
    plan_alike: Callable[[Program], Plan],
    *,
    dtype: torch.dtype | None = None,
    finish: Callable[[Traced], Traced] = lambda traced: traced,
) -> EvalFactories:
    """What makes the programs of eval mode when they are asked for.

    Args:
        model: its values are not kept.
        example_inputs: as in `autopar.parallelize`.
        plan_alike: the plan of a program, with the stages of the plan for training.
        dtype: as in `trace_model`.
        finish: applied to what is traced.
    """
    twin = _on_meta(model)
    example = map_leaves(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, example_inputs)
    outputs_example = without_target(twin, example)

    def make(inputs: ExampleInputs | None) -> Sequence[Any]:
        traced = finish(trace_model(twin, inputs, training=False, dtype=dtype))
        return (
            traced.program, plan_alike(traced.program), traced.constants, traced.flatten_inputs,
            traced.unflatten_outputs,
        )  # fmt: skip

    return partial(make, example), None if outputs_example is None else partial(make, outputs_example)


def _on_meta(model: nn.Module) -> nn.Module:
    """A twin of `model` on the meta device, so that what can be traced later holds no memory."""
    made: dict[int, Tensor] = {}

    def swap(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    return copy_with(model, [*model.parameters(), *model.buffers()], swap)
