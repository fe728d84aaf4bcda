"""The outputs of a parallel module, made of the values that its layers computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import hooks

from autopar.errors import OutputError
from autopar.lower.autograd import refuse_gradient
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.run.carried_tensor import CarriedTensor
from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Cuts, Executable

__all__ = ["caller_outputs", "cut_outputs", "differentiable_outputs", "do_outputs_fit"]

Later = Callable[[str, Callable[[], Tensor]], Tensor]
"""``(name, gather)`` -> ``gather()``, when all ranks have come to read the output of that name."""


def caller_outputs(
    executor: Executor, values: Mapping[str, Tensor], later: Later, *, is_later: bool
) -> list[Tensor | None]:
    """The program's outputs in order; None where only other stages have one.

    Args:
        executor: that computed the values; `OutputLayouts.whole` says in what form the caller wants them.
        values: by name, this rank's parts.
        later: gathers those that the caller reads later.
        is_later: those that are not whole are gathered when the caller reads them.
    """
    program = executor.executable.program
    names = program.outputs
    late = {names[each.place] for each in program.late}
    made = {
        name: _output(executor, name, values.get(name), later, is_later or name in late)
        for name in dict.fromkeys(names)
    }
    for x in made.values():
        _take_plain_gradients(x)
    return [made[name] for name in names]


def differentiable_outputs(
    executor: Executor, outputs: Sequence[Tensor | None], with_gradient: Callable[[int, Tensor], Tensor] | None
) -> list[Tensor | None]:
    """The outputs of a step, with a gradient also where the step's backward is over, if they have one on one device.

    `with_gradient` gives it to an output at a place; None: there is none, which is an error of the backward that comes
    to it.  DTensors (``outputs="local"``) have none either.
    """

    def give(place: int, name: str, x: Tensor) -> Tensor:
        if with_gradient is None:
            return refuse_gradient(x, _no_gradient(executor, name))
        made = with_gradient(place, x)
        _take_plain_gradients(made)
        return made

    made = list(outputs)
    for place, (name, x) in enumerate(zip(executor.executable.program.outputs, outputs, strict=True)):
        if x is None or isinstance(x, DTensor | CarriedTensor) or not _had_its_step(executor, name):
            continue
        made[place] = x.followed_by(partial(give, place, name)) if isinstance(x, LateTensor) else give(place, name, x)
    return made


def cut_outputs(names: Sequence[str], outputs: Sequence[Tensor | None], cuts: Cuts) -> list[Tensor | None]:
    """Outputs without what padding added to them; `names` are theirs."""

    def cut(name: str, x: Tensor) -> Tensor:
        for dim, length in cuts[name].items():
            x = x.narrow(dim, 0, length)
        return x

    return [
        x
        if x is None or name not in cuts
        else x.then(partial(cut, name))
        if isinstance(x, LateTensor)
        else cut(name, x)
        for name, x in zip(names, outputs, strict=True)
    ]


def do_outputs_fit(executable: Executable) -> bool:
    """Whether all outputs other than the loss fit whole in a device's memory, next to what the plan needs.

    The same on all ranks.
    """
    program, plan = executable.program, executable.plan
    others = {name for name in program.outputs if name != program.loss} - program.carried
    whole_bytes = sum(program.type_of(name).num_bytes for name in others)
    return plan.peak_memory_bytes * (1 + plan.memory_error) + whole_bytes <= plan.memory_limit_bytes


def _output(executor: Executor, name: str, value: Tensor | None, later: Later, is_later: bool) -> Tensor | None:
    program = executor.executable.program
    if executor.tail is not None and name in executor.tail.results:
        return value
    if name in program.carried and value is not None:
        return _carried(executor, name, value, later)
    if name in executor.outputs.returned_whole:
        return value
    if is_later and executor.outputs.is_apart(name):
        return _read_later(executor, name, value, later)
    made = None if value is None else executor.outputs.make(name, value)
    return executor.share_across_groups(name, made) if executor.outputs.whole else made


def _had_its_step(executor: Executor, name: str) -> bool:
    """Whether gradients of this output, which one device would have, are not to be had: the step's backward is over."""
    program = executor.executable.program
    is_over = bool(program.loss) and not executor.training_actions.is_single
    requires_grad = name != program.loss and program.values[name].requires_grad
    return torch.is_grad_enabled() and program.training and is_over and requires_grad


def _no_gradient(executor: Executor, name: str) -> OutputError:
    loss = executor.executable.program.loss
    cut = "pipeline stages" if executor.stages.is_pipeline else "microbatches"
    return OutputError(
        f"a loss is computed from the output {name!r}, but with {cut} the backward passes run inside the forward call, "
        f"from the output {loss!r} alone, and this module was lowered without a planner for other backwards. Compute "
        "the loss in the model's forward and return it as 'loss', or use output.detach() if no gradient is meant"
    )


def _take_plain_gradients(x: Tensor | None) -> None:
    """Where the caller adds what it computes of parameters, as penalties are, the gradient of `x` is a DTensor."""
    if x is not None and x.requires_grad and not isinstance(x, LateTensor):
        untyped: Any = x
        untyped.register_hook(_plain)


def _plain(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


_untyped: Any = hooks
_untyped.unserializable_hook(_plain)  # outputs are saved without it, and without a warning


def _carried(executor: Executor, name: str, value: Tensor, later: Later) -> Tensor:
    like = executor.executable.program.type_of(name)
    dtype: torch.dtype = getattr(torch, like.dtype)
    shape = torch.empty((), dtype=dtype, device=value.device).expand(like.shape)
    made = CarriedTensor.of(shape, lambda: later(name, lambda: executor.make_whole(name, value)))
    made.part, made.value_layout = value, executor.value_layouts[name]
    return made


def _read_later(executor: Executor, name: str, value: Tensor | None, later: Later) -> Tensor:
    tensor_type = executor.executable.program.type_of(name)
    dtype: torch.dtype = getattr(torch, tensor_type.dtype)
    is_over = _had_its_step(executor, name)
    is_differentiable = value is not None and value.requires_grad and not executor.stages.is_pipeline and not is_over

    def gather() -> Tensor:
        with torch.set_grad_enabled(is_differentiable):
            whole = None if value is None else executor.outputs.join_devices(name, value)
            shared = executor.share_across_groups(name, whole)
            _take_plain_gradients(shared)
        return shared

    like = torch.empty((), dtype=dtype, device=executor.communicator.device).expand(tensor_type.shape)
    return LateTensor.of(like.requires_grad_(is_differentiable or is_over), lambda: later(name, gather))
