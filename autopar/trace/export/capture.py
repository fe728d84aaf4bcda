"""From a module and example inputs to an exported graph, without touching the module or computing anything."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, OutputError
from autopar.objects.buffer_questions import BufferQuestion, small_buffers
from autopar.objects.outside_tensors import OutsideTensor
from autopar.trace.calls.model_outputs import AssignedAttribute
from autopar.trace.calls.signature import CallForm, ReadValues
from autopar.trace.calls.structure import (
    Dropped,
    Leaf,
    Structure,
    attributes_of_objects,
    changed_objects,
    describe,
    walk,
)
from autopar.trace.compat import export_shortcuts, torch_internals
from autopar.trace.compat.flex_attention import dense_flex_attention
from autopar.trace.compat.source_lines import user_line
from autopar.trace.export.decomposition import Functional, decompose
from autopar.trace.export.failures import explain_failure
from autopar.trace.export.hidden_views import WrittenDropoutError
from autopar.trace.export.repeated_calls import RepeatedCalls
from autopar.trace.module_attributes.assigned_attributes import AttributeWatch, Changed
from autopar.trace.module_attributes.assigned_buffers import written_assignments
from autopar.trace.module_attributes.attribute_reads import Reads, recorded_reads
from autopar.trace.module_attributes.held_members import HeldMembers
from autopar.trace.module_attributes.hooked_tensors import notes_on_kept_tensors
from autopar.trace.module_attributes.model_copies import copy_with
from autopar.trace.module_attributes.outside_reads import OutsideReads
from autopar.trace.python_values.asked_values import AskedValues, Questions
from autopar.trace.python_values.function_caches import FunctionCaches
from autopar.trace.python_values.host_draws import refuse_host_draws
from autopar.trace.python_values.numbered_writes import NumberedWrites
from autopar.trace.python_values.read_inputs import (
    MOST_COMPUTED,
    UnansweredError,
    ValueReadError,
    inputs_behind,
    known_values,
    with_values_of,
)
from autopar.trace.python_values.tracing_questions import UndecidedMaskError, answered_as_called
from autopar.trace.python_values.unknown_numbers import Names, noted_conversions
from autopar.trace.python_values.value_checks import passed_checks
from autopar.trace.torch_functions.counted_ids import counts_of_known_length
from autopar.trace.torch_functions.ctc_loss import traced_ctc_losses
from autopar.trace.torch_functions.custom_functions import call_as_op
from autopar.trace.torch_functions.embedding_bags import written_embedding_bags
from autopar.trace.torch_functions.feature_order import FEATURE_ORDER, features_in_order
from autopar.trace.torch_functions.inactive_dropout import dropout_as_asked, inputs_of_dropout
from autopar.trace.torch_functions.inner_gradients import traced_gradients
from autopar.trace.torch_functions.module_conversions import kept_modules
from autopar.trace.torch_functions.multihead_attention import batch_first_attention
from autopar.trace.torch_functions.named_devices import NamedDevices
from autopar.trace.torch_functions.packed_sequences import traced_packed_sequences
from autopar.trace.torch_functions.past_autograd import PastAutograd
from autopar.trace.torch_functions.refused_functions import RefusedFunctions, refuse_backward_hooks, refused_seeds
from autopar.trace.torch_functions.running_statistics import written_statistics
from autopar.trace.torch_functions.selected_places import SelectedPlaces
from autopar.trace.torch_functions.selections import Selections, refuse_output
from autopar.trace.torch_functions.synced_norms import unsynced_norms
from autopar.trace.torch_functions.written_functions import written_functions

__all__ = ["WRAPPED", "Captured", "capture"]

_CHECKPOINTS = (
    "the model asks for activation checkpointing (torch.utils.checkpoint, gradient_checkpointing_enable()), which is "
    "left out: the search decides what each layer recomputes; the constraint 'recompute=full' has all layers recompute"
)
_FLEX_ATTENTION = (
    "flex_attention runs as plain ops, not as its fused kernel: scaled_dot_product_attention with a mask, or with a "
    "score_mod the products and a softmax, which hold all scores in memory"
)
_SETS_ATTRIBUTES = (
    "forward sets attributes of an argument, a {}, which the caller's own object does not get: return what is needed"
)
_ASKS = (
    "the model asks here whether it is being traced, and what it computes otherwise can't be traced: the plan has what "
    "it computes under torch.export. If that is not what the model computes when it is called, results differ"
)
# Recurrent modules list their parameters again where these have been replaced, as a trace does.
_SET_BY_RNNS = r"The tensor attributes? (self[\w.]*\._flat_weights\[\d+\](, )?)+ (was|were) assigned during export"
_WRITTEN_OTHERWISE = (
    traced_ctc_losses, traced_packed_sequences, batch_first_attention, written_embedding_bags, written_statistics,
    written_functions, unsynced_norms,
)  # fmt: skip
# Lists of sizes, crops or scales are shorter; what is computed from longer constants stays in the graph alone.
_MOST_ENTRIES = 64
_FAILURES = ("_subclasses.fake_tensor", "export", "_export", "fx.experimental.symbolic_shapes")  # loggers of torch
WRAPPED = "wrapped"  # the attribute under which the wrapper holds the user's module


@dataclass(frozen=True)
class Captured:
    """An exported model.

    Args:
        exported: functional ATen; its modules' paths start with `WRAPPED`.
        outputs: the structure of what the model returns.
        classes: module path -> class name.
        names: every name of a parameter or buffer -> the first name of the same tensor.
        tensors: that first name -> the user's own tensor.
        notes: what the user should know.
        reads: attributes that the forward read, numbers and the like: path of the module, name.
        assigned: attributes that it set; their tensors come behind those that it returned.
        changed: attributes that it read and then set.
        answers: what follows from inputs and is constant in the graph.
        asked: lines that ask for what could be such a constant.
        questions: what was asked of buffers, with the answers that are constant in the graph.
        outside: what it read that is not the model's, and is constant in the graph.
    """

    exported: Functional
    outputs: Structure
    classes: Mapping[str, str]
    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    reads: frozenset[tuple[str, str]] = frozenset()
    assigned: tuple[AssignedAttribute, ...] = ()
    changed: tuple[Changed, ...] = ()
    answers: tuple[ReadValues, ...] = ()
    asked: frozenset[str] = frozenset()
    questions: tuple[BufferQuestion, ...] = ()
    outside: tuple[OutsideTensor, ...] = ()


class _Wrapper(nn.Module):
    """Calls the user's module on a flat list of tensors and returns one; export sees nothing else."""

    def __init__(self, module: nn.Module, form: CallForm, autocast: torch.dtype | None, questions: AskedValues) -> None:
        super().__init__()
        self.questions = questions
        self._autocast = autocast
        self.add_module(WRAPPED, module)
        self._held, self._caches = HeldMembers(module), FunctionCaches()
        self._form = form
        self.records = _Records()
        self.is_second = False

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors that the module returns."""
        with self._held.exchanged(), self._caches.left_without_tensors():
            return self._returned(tensors)

    def _returned(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        args, kwargs = self._form.arguments(with_values_of(self._form, tensors))
        order = kwargs.pop(FEATURE_ORDER, None)
        given = attributes_of_objects((args, kwargs))
        self.questions.begin(tensors, self.get_submodule(WRAPPED))
        try:
            with (
                written_assignments(self.get_submodule(WRAPPED)),
                features_in_order(order),
                refused_seeds(),
                NamedDevices(self.records.outside.on_host),
                RepeatedCalls(self.records.outside.note),
                Questions(self.questions),
                Selections(self.questions),
                SelectedPlaces(self.questions, self.records.notes_once),
                PastAutograd(training=self.training) as past,
                RefusedFunctions(training=self.training),
                dropout_as_asked(),
                NumberedWrites(self.questions, self.records.passed),
            ):
                watch = AttributeWatch(self.get_submodule(WRAPPED), self.records.reads)
                if self.is_second:
                    self._call(*args, **kwargs)
                    watch.begin_second(self.get_submodule(WRAPPED))
                returned = self._call(*args, **kwargs)
        except Exception as error:  # while the trace, in which the error is looked for, is under way
            self.records.read = inputs_behind(error, tensors)
            raise
        for kind in changed_objects(given):
            self.records.notes_once[_SETS_ATTRIBUTES.format(kind)] = None
        self.records.outputs, result = describe(returned)
        if not result:
            refuse_output(returned)
            raise OutputError(_no_tensors(self.records.outputs))
        found = watch.restore(len(result))
        self.records.assigned, self.records.changed = tuple(found.assigned), tuple(found.changed)
        past.check_returned([*result, *found.tensors])
        return [*result, *found.tensors]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module = self.get_submodule(WRAPPED)
        if self._autocast is None:
            return module(*args, **kwargs)
        with torch.autocast("cpu", dtype=self._autocast):
            return module(*args, **kwargs)


@dataclass
class _Records:
    outputs: Structure | None = None
    assigned: tuple[AssignedAttribute, ...] = ()
    changed: tuple[Changed, ...] = ()
    reads: Reads = field(default_factory=Reads)
    notes_once: dict[str, None] = field(default_factory=dict[str, None])
    items: list[str] = field(default_factory=list[str])
    passed: set[str] = field(default_factory=set[str])
    read: tuple[int, ...] = ()
    converted: dict[int, Names] = field(default_factory=dict[int, Names])
    outside: OutsideReads = field(default_factory=OutsideReads)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        items = tuple(
            f"{where}: the number of a tensor that Python gets here is dropped, as nothing is computed from it: to log "
            "it, return the tensor and call .item() outside of the model"
            for where in dict.fromkeys(self.items)
        )
        return (*self.notes_once, *items)


def capture(
    model: nn.Module,
    form: CallForm,
    tensors: Sequence[Tensor],
    *,
    training: bool,
    dtype: torch.dtype | None,
    autocast: torch.dtype | None = None,
    settings: Sequence[Changed] | None = (),
    answered: frozenset[str] = frozenset(),
) -> Captured:
    """Export a copy of `model` made of fake CPU tensors.

    A model that asks whether it is being traced or compiled is told that it isn't, so that it computes what it does
    when it is called.  Where that can't be traced, it is told the truth, and a note says so.  Attributes of `settings`
    have values like those that a forward has given them; with None, the program is that of a call which finds what
    another one before it, with the same inputs, has set.  What lines of `answered` ask, and follows from inputs alone,
    is constant.

    Raises:
        TraceError: control flow that depends on data, or something else that can't be part of one graph.
        ExampleInputsError: the model's own code fails on inputs of these shapes.
        OutputError: the model returns no tensor.
    """
    if training:
        refuse_backward_hooks(model)
    how: dict[str, Any] = {
        "training": training, "dtype": dtype, "autocast": autocast, "settings": settings, "answered": answered,
    }  # fmt: skip
    try:
        return _capture_as_called(model, form, tensors, how)
    except WrittenDropoutError:
        with inputs_of_dropout():
            return _capture_as_called(model, form, tensors, how)


def _capture_as_called(model: nn.Module, form: CallForm, tensors: Sequence[Tensor], how: Mapping[str, Any]) -> Captured:
    """`capture`, first as if nothing was traced or compiled."""
    asked: list[str] = []
    try:
        with answered_as_called(lambda: asked.append(user_line())):
            return _capture_once(model, form, tensors, **how)
    except AutoparError as error:
        if not asked or isinstance(error, UndecidedMaskError | WrittenDropoutError):
            raise
    captured = _capture_once(model, form, tensors, **how)
    where = next((line for line in asked if line), "the model")
    return replace(captured, notes=(*captured.notes, f"{where}: {_ASKS}"))


def _capture_once(
    model: nn.Module,
    form: CallForm,
    tensors: Sequence[Tensor],
    *,
    training: bool,
    dtype: torch.dtype | None,
    autocast: torch.dtype | None,
    settings: Sequence[Changed] | None,
    answered: frozenset[str],
) -> Captured:
    names, own = _tensor_names(model)
    mode = torch_internals.fake_mode()
    fakes: dict[int, Tensor] = {}

    def swap(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = _fake_member(mode, tensor, dtype)
        return fakes[id(tensor)]

    questions = AskedValues(form, tensors, answered, small_buffers(model))
    wrapper = _Wrapper(copy_with(model, list(own.values()), swap), form, autocast, questions)
    wrapper.training, wrapper.is_second = training, settings is None
    if model.training != training:
        wrapper.train(training)  # else parts keep their own modes: a norm may be frozen in a model that trains
    inputs = [torch_internals.fake_tensor(mode, t, _cast(t, dtype)) for t in tensors]
    for each in settings or ():
        setattr(wrapper.get_submodule(WRAPPED).get_submodule(each.path), each.name, each.value())
    with recorded_reads(wrapper.get_submodule(WRAPPED)) as reads:
        wrapper.records.reads = reads
        exported = _export(wrapper, inputs, form)
    assert wrapper.records.outputs is not None
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    classes = {name: type(module).__qualname__ for name, module in modules}
    records = wrapper.records
    of_buffers = tuple(questions.of_buffers)
    answered_at = {question.where for question in of_buffers} | records.passed
    records.items = [where for where in records.items if where not in answered_at]
    asked_notes = dict.fromkeys(question.note for question in of_buffers)
    notes = (*records.notes, *notes_on_kept_tensors(wrapper.get_submodule(WRAPPED)), *asked_notes)
    return Captured(
        exported, wrapper.records.outputs, classes, names, own, notes, frozenset(reads.found), records.assigned,
        records.changed, tuple(questions.reads.values()), questions.asked_in(exported.graph), of_buffers,
        records.outside.tensors(wrapper.get_submodule(WRAPPED)),
    )  # fmt: skip


def _tensor_names(model: nn.Module) -> tuple[dict[str, str], dict[str, Tensor]]:
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    own: dict[str, Tensor] = {}
    members = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in members:
        canonical = first.setdefault(id(tensor), name)
        names[name] = canonical
        own.setdefault(canonical, tensor)
    return names, own


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    return dtype if dtype is not None and tensor.is_floating_point() else None


def _fake_member(mode: Any, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch_internals.fake_tensor(mode, tensor)
    return torch_internals.fake_parameter(mode, tensor, _cast(tensor, dtype))


def _export(wrapper: _Wrapper, inputs: Sequence[Tensor], form: CallForm) -> Functional:
    def note(text: str) -> None:
        wrapper.records.notes_once.update({text: None})

    def note_item() -> None:
        wrapper.records.items.append(user_line())

    def note_conversion(names: Names) -> None:
        wrapper.records.converted[id(names)] = names

    try:
        with warnings.catch_warnings():
            # torch's own, when it copies what it knows of the inputs
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
            warnings.filterwarnings("ignore", message="torch.compile is ignored when called inside torch.export")
            warnings.filterwarnings("ignore", message=_SET_BY_RNNS)
            with ExitStack() as patches:
                patches.enter_context(
                    torch_internals.intercept_autograd_functions(call_as_op, partial(note, _CHECKPOINTS))
                )
                patches.enter_context(dense_flex_attention(partial(note, _FLEX_ATTENTION)))
                for written in _WRITTEN_OTHERWISE:
                    patches.enter_context(written())
                patches.enter_context(kept_modules(wrapper))
                patches.enter_context(refuse_host_draws())
                patches.enter_context(torch_internals.unchecked_values())
                patches.enter_context(passed_checks(note, wrapper.questions.truth_of))
                patches.enter_context(torch_internals.unread_masks())
                patches.enter_context(_known_numbers(bool(form.reads) or wrapper.questions.are_answered))
                patches.enter_context(_unlogged())
                patches.enter_context(torch_internals.unprinted_graphs())
                patches.enter_context(counts_of_known_length())
                patches.enter_context(torch_internals.values_to_print(note_item))
                patches.enter_context(torch_internals.intercept_lists(wrapper.questions.list_of))
                patches.enter_context(noted_conversions(note_conversion))
                patches.enter_context(torch_internals.intercept_gradients(traced_gradients))
                patches.enter_context(export_shortcuts.late_code())
                patches.enter_context(export_shortcuts.kept_regions())
                patches.enter_context(export_shortcuts.known_sizes())
                patches.enter_context(export_shortcuts.known_paths())
                exported = torch.export.export(wrapper, tuple(inputs), strict=False)
                export_shortcuts.inline_grad_regions(exported.graph_module)
                return decompose(exported)
    except UnansweredError as error:
        error.asked &= frozenset(wrapper.questions.asked)
        raise
    except AutoparError:
        raise
    except Exception as error:
        explained = explain_failure(error, form, wrapper.get_submodule(WRAPPED))
        if isinstance(explained, ValueReadError):
            explained.inputs = wrapper.records.read
            explained.asked = wrapper.questions.last_asked
            explained.converted = tuple(wrapper.records.converted.values())
        raise explained from error


@contextmanager
def _known_numbers(has_values: bool) -> Generator[None]:
    """Inside, torch knows what is computed from numbers; from many, if `has_values` of the call."""
    most = MOST_COMPUTED if has_values else _MOST_ENTRIES
    with torch_internals.known_constants(most), known_values() if has_values else nullcontext():
        yield


@contextmanager
def _unlogged() -> Generator[None]:
    """Inside, torch doesn't print failures of its own: they are raised, or show only that something is not possible."""
    loggers = [logging.getLogger(f"torch.{name}") for name in _FAILURES]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _no_tensors(outputs: Structure) -> str:
    dropped = [end for end in walk(outputs) if isinstance(end, Dropped)]
    assert not any(isinstance(end, Leaf) for end in walk(outputs))
    result = ", ".join(end.type_name for end in dropped) or "constants only"
    return (
        f"the model returns no tensor that a parallel program can carry out ({result}). Return tensors, or tuples, "
        "lists, dicts or dataclasses of tensors"
    )
