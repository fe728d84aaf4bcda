"""What a model does in calls: those that it is parallelized for, and others, traced on a copy without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.errors import ExampleInputsError, InputShapeError
from autopar.lower.compat import map_leaves
from autopar.lower.run.attributes import THAWED, Settings
from autopar.lower.run.carried_tensor import CarriedTensor
from autopar.objects.attribute_contents import current_value
from autopar.objects.attribute_owners import attributes_of, own_records
from autopar.objects.buffer_questions import BufferQuestion, small_buffers
from autopar.objects.gradient_requests import GRADIENTS
from autopar.plan import Plan
from autopar.planning.splitting import variant_like
from autopar.search import stages_of
from autopar.trace import (
    LayerNeeds,
    Traced,
    as_batch,
    as_called,
    as_model,
    bind,
    can_be_read,
    check_memory,
    copy_with,
    default_example_inputs,
    require_target,
    trace,
    without_loss,
)

__all__ = [
    "CallTraces", "ExampleInputs", "Mode", "as_call", "example_call", "on_meta", "shape_of", "trace_model",
]  # fmt: skip


class Mode(NamedTuple):
    """What a call is apart from its inputs.

    Args:
        is_training: in training mode.
        part: the submodule that is called; ``""``: the model.
        autocast: to which dtype calls are autocast; None: to none.
        any_output: backward begins with the caller's gradients of any outputs.
    """

    is_training: bool
    part: str = ""
    autocast: torch.dtype | None = None
    any_output: bool = False


_MOST_TRACES = 8  # those that padding asks for again are recent; each holds as much as an executable

ExampleInputs = Sequence[Any] | Mapping[str, Any]


def trace_model(
    model: nn.Module,
    example_inputs: Tensor | ExampleInputs | None,
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
    device_type: str = "cpu",
    num_layers: int = 1,
) -> Traced:
    """Trace `model` on its example inputs, to run on devices of this type; raises what `autopar.trace.trace` raises.

    It has at least `num_layers` layers where it can be cut into as many.

    For training, whatever mode it is in: pretrained models come in eval mode, and switch before they train.

    Raises:
        ModelError: a tensor that training changes shares memory with another one.
        ExampleInputsError: the batch has no rows, so there is nothing to plan for.
    """
    traced = trace(
        model, *example_call(model, example_inputs), training=training, dtype=dtype, device_type=device_type,
        needs=LayerNeeds(count=num_layers),
    )  # fmt: skip
    if not traced.program.batch_size:
        raise ExampleInputsError(
            "the example inputs have a batch of 0 rows, for which nothing can be planned: pass one as the training "
            "loop does (later calls may have 0 rows)"
        )
    check_memory(model, {traced.program.parameters[buffer] for buffer in traced.program.updates})
    return require_target(model, traced) if training else traced


def example_call(
    model: nn.Module, example_inputs: Tensor | ExampleInputs | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The ``args, kwargs`` of the example, which the model itself may declare."""
    given = as_batch(example_inputs)
    return as_call(default_example_inputs(model) if given is None else given)


def as_call(inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The ``args, kwargs`` of a call with these inputs."""
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


class CallTraces:
    """Traces of a model with the attributes and modes that it has at a call.

    Attributes:
        twin: the model without memory, with the attributes that were `set` last.
        reads: attributes that some trace read: path of the owner, name.
    """

    def __init__(
        self,
        model: nn.Module,
        traced: Traced,
        plan: Plan,
        *,
        dtype: torch.dtype | None = None,
        device_type: str = "cpu",
        finish: Callable[[Traced], Traced] = lambda traced: traced,
    ) -> None:
        """Nothing else is traced yet.

        Args:
            model: its values are not kept.
            traced: what the model does in the calls that it was parallelized for, finished.
            plan: of its program, which others are cut like.
            dtype: as in `trace`, and so is `device_type`.
            finish: applied to what is traced.
        """
        self.reads = traced.reads
        self._first = traced.program
        self._needs = LayerNeeds(stages_of(traced.program, plan), count=max(1, len(plan.stages)))
        self.twin = on_meta(model)
        own_records(self.twin, model)  # its attributes are `set`
        self._known: dict[Mode, list[tuple[Settings, Traced]]] = {Mode(traced.program.training): [((), traced)]}
        self._dtype = dtype
        self._device_type = device_type
        self._finish = finish
        self._settings: Settings = ()  # of the twin
        self._first_buffers = {name: x.detach().clone() for name, x in small_buffers(model).items()}
        self._before: dict[tuple[str, str], Any] = {}  # the twin's attributes that settings replaced
        self._modes = [(module, module.training) for module in self.twin.modules()]

    def set(self, settings: Settings, is_training: bool, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Have the twin's attributes be the model's, which is in training mode or not.

        `buffers` are those that forward may ask in Python; None: as they were when the model was parallelized.
        """
        values = self._first_buffers if buffers is None else buffers
        for name, own in small_buffers(self.twin).items():
            if not values[name].is_meta:
                own.copy_(values[name])
        for path, name, value in self._settings:
            if name == THAWED:
                self._set_trained(value, is_trained=False)
            else:
                attributes_of(self.twin, path)[name] = self._before[path, name]
        for module, own in self._modes:  # a norm may be frozen in a model that trains
            module.training = own if is_training == self._modes[0][1] else is_training
        for path, name, value in settings:
            if name == THAWED:
                self._set_trained(value, is_trained=True)
                continue
            own = attributes_of(self.twin, path)
            self._before.setdefault((path, name), own.get(name))
            own[name] = current_value(value)
        self._settings = settings

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Mode) -> Traced:
        """What such a call does; padding asks again for forms that came before."""
        model = as_called(as_model(self.twin, mode.part), kwargs)
        positional, named = map_leaves(_with_values, (tuple(args), dict(kwargs)))
        known = self._known.setdefault(mode, [])
        for settings, traced in known:
            if settings != self._settings or not self.have(traced.questions):
                continue
            with suppress(InputShapeError):
                given = zip(traced.program.inputs, traced.flatten_inputs(positional, named), strict=True)
                if all(x.requires_grad == traced.program.values[name].requires_grad for name, x in given):
                    return traced
        try:
            bind(model, positional, named)
        except ExampleInputsError as error:
            raise InputShapeError(str(error)) from error
        with torch.autocast("cpu", enabled=False):  # which this may be called in
            traced = trace(
                model, positional, named, training=mode.is_training, dtype=self._dtype, autocast=mode.autocast,
                device_type=self._device_type, needs=self._needs,
            )  # fmt: skip
        traced = replace(traced, questions=tuple(question.under(mode.part) for question in traced.questions))
        program = traced.program
        program = (
            without_loss(program) if mode.any_output or GRADIENTS in kwargs else variant_like(program, self._first)
        )
        traced = replace(traced, program=program)
        requires_target = mode.is_training and not mode.any_output  # which a first run had
        if requires_target:
            traced = require_target(model, traced, is_given=kwargs.get("target") is not None)
        traced = self._finish(traced)
        known.insert(0, (self._settings, traced))
        del known[_MOST_TRACES:]
        self.reads |= traced.reads
        return traced

    def have(self, questions: Sequence[BufferQuestion]) -> bool:
        """Whether a program that asks these questions is for what the buffers have."""
        buffers = small_buffers(self.twin) if questions else {}
        return all(question.answer([buffers[n] for n in question.names]) == question.known for question in questions)

    def read(self, settings: Settings) -> Settings:
        """Those that some program was made with."""
        return tuple(entry for entry in settings if entry[:2] in self.reads or entry[1] == THAWED)

    def submodule(self, part: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The submodule as it was, with these parameters and buffers, by their names in the model."""
        original = self.twin.get_submodule(part)
        named = (*original.named_parameters(), *original.named_buffers())
        ids = {id(x): tensors[f"{part}.{name}"] for name, x in named}
        return copy_with(original, [x for _, x in named], lambda x: ids[id(x)])

    def _set_trained(self, names: Sequence[str], *, is_trained: bool) -> None:
        for name in names:
            self.twin.get_parameter(name).requires_grad_(is_trained)


def on_meta(model: nn.Module) -> nn.Module:
    """A twin of `model` on the meta device, so that what can be traced later holds no memory.

    Small buffers are on the host, with their values, which forward may ask for in Python.
    """
    asked = {id(x) for x in small_buffers(model).values()}
    made: dict[int, Tensor] = {}

    def swap(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.zeros_like(tensor, device="cpu" if id(tensor) in asked else "meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    return copy_with(model, [*model.parameters(), *model.buffers()], swap)


def _with_values(x: Any) -> Any:
    """What a trace takes of an input: a tensor as it is, as forward may ask what follows from its values."""
    is_kept = isinstance(x, Tensor) and not (x.is_meta or isinstance(x, CarriedTensor) or can_be_read(x.shape, x.dtype))
    return x.detach().requires_grad_(x.requires_grad) if is_kept else shape_of(x)


def shape_of(x: Any) -> Any:
    """A tensor's form, as a tensor on the meta device; anything else as it is, and what forward may read in Python."""
    if isinstance(x, CarriedTensor):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    if isinstance(x, Tensor) and not x.is_meta and can_be_read(x.shape, x.dtype):
        return x.detach().cpu()
    return x.detach().to("meta").requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
