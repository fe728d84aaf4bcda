"""`trace`: capture -> normalize -> factors -> layers -> kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from autopar.errors import AutoparError, ExampleInputsError, OutputError, TraceError
from autopar.host.default_device import on_host
from autopar.host.garbage import collected_seldom
from autopar.objects.attribute_owners import joined
from autopar.objects.buffer_questions import BufferQuestion
from autopar.objects.outside_tensors import OutsideTensor
from autopar.plan import Decisions
from autopar.program import Program, Value
from autopar.step.variants.logits import in_pieces
from autopar.step.variants.planned_program import as_decided
from autopar.trace.annotations.factors import attach_factors
from autopar.trace.calls.loss_output import find_loss
from autopar.trace.calls.model_outputs import ModelOutputs
from autopar.trace.calls.signature import CallForm, ComputedValues, call_form, make_flatten
from autopar.trace.calls.structure import Dropped, Structure, carried, walk
from autopar.trace.compat.foreign_kernels import launches_left_out
from autopar.trace.compat.script_functions import scripts_run_op_by_op
from autopar.trace.compat.watching_tools import unwatched
from autopar.trace.experts import expert_regions
from autopar.trace.export.capture import Captured, capture
from autopar.trace.export.conversion import convert
from autopar.trace.export.failures import communication_refused
from autopar.trace.gradients import differentiable
from autopar.trace.graph import Graph, check, number_names
from autopar.trace.layers.cutting import LayerNeeds, cut_layers, divide_layers
from autopar.trace.layers.kinds import assign_kinds, build_layers, fingerprint
from autopar.trace.layers.repetition import OpSpan
from autopar.trace.module_attributes.assigned_attributes import Changed
from autopar.trace.module_attributes.hooked_tensors import refuse_kept_tensors
from autopar.trace.op_dtypes import check_dtypes
from autopar.trace.passes import (
    alike_pieces,
    broadcasting,
    cleanup,
    complex_writes,
    documents,
    folding,
    heads,
    masks,
    merged_rows,
    padding,
    plain_numbers,
    python_loops,
    reader_order,
    rewrites,
)
from autopar.trace.python_values.asked_values import buffer_truths, first_to_answer
from autopar.trace.python_values.read_inputs import (
    UnansweredError,
    UnreadInputError,
    ValueReadError,
    also_asking,
    reading,
    with_values,
)
from autopar.trace.python_values.unknown_numbers import Names, unknown_numbers
from autopar.trace.torch_functions.gpu_casts import casts_of
from autopar.trace.torch_functions.refused_functions import UnknownShiftError

__all__ = ["PASSES", "Traced", "normalize", "trace"]


@dataclass(frozen=True)
class Traced:
    """A program, and the adapters to call it as the model is called.

    Args:
        program: the traced model.
        constants: value name -> tensor, for the values of role "constant" that no op of ``program.hoisted``
            computes (CPU; may be expanded views).
        flatten_inputs: ``(args, kwargs)`` of a call -> the tensors in the order of ``program.inputs``, floating ones in
            the trace's dtype; raises InputShapeError if the call differs from the example in structure,
            shape, dtype or in an argument that is no tensor.
        unflatten_outputs: one entry per ``program.outputs`` -> what the model itself would return, and the attributes
            that its forward sets.
        reads: attributes with whose values it was traced: path of the module, name.
        read_values: inputs with whose values it was traced, as its calls must have them.
        computed_values: what follows from inputs, with whose values it was traced, likewise.
        questions: what forward asks of buffers in Python, with the answers that they must give at a call.
        outside: what it reads that is not the model's, and is constant in the program.
    """

    program: Program
    constants: Mapping[str, Tensor] = field(hash=False)
    flatten_inputs: Callable[[Sequence[Any], Mapping[str, Any]], list[Tensor]]
    unflatten_outputs: ModelOutputs
    reads: frozenset[tuple[str, str]] = frozenset()
    read_values: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]], hash=False)
    computed_values: tuple[ComputedValues, ...] = ()
    questions: tuple[BufferQuestion, ...] = ()
    outside: tuple[OutsideTensor, ...] = ()

    def in_pieces(self, tokens: int) -> Traced:
        """The same with logits of so many tokens at a time, where there are any to cut; 0: as it is."""
        return replace(self, program=in_pieces(self.program, tokens))

    def decided_by(self, decisions: Decisions) -> Traced:
        """The same with the program that a plan of these decisions runs."""
        return replace(self, program=as_decided(self.program, decisions))


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    cleanup.drop_aliases,
    cleanup.drop_dead_ops,
    cleanup.drop_needless_copies,
    cleanup.spell_out_sizes,
    cleanup.spell_out_copies,
    rewrites.make_gradients_dense,
    rewrites.rewrite_dropout,
    rewrites.rewrite_batch_norm,
    heads.rewrite_transposed_products,
    rewrites.rewrite_cross_entropy,
    heads.rewrite_picked_log_probabilities,
    rewrites.rewrite_losses,
    rewrites.rewrite_means,
    plain_numbers.rewrite_number_terms,
    broadcasting.expand_single_rows,
    merged_rows.keep_rows_apart,
    merged_rows.keep_terms_apart,
    broadcasting.expand_repeats,
    cleanup.drop_dead_ops,
    cleanup.drop_identities,
    cleanup.drop_aliases,
    masks.restore_attention_masks,
    documents.restore_documents,
    broadcasting.drop_neutral_masks,
    broadcasting.delay_expansions,
    padding.join_padding,
    alike_pieces.batch_alike_pieces,
    cleanup.drop_dead_ops,
    python_loops.join_python_loops,
    complex_writes.rewrite_complex_writes,
    expert_regions.join_experts,
    cleanup.drop_dead_ops,
    plain_numbers.rewrite_created_like,
    folding.fold_constants,
    folding.share_equal_constants,
    cleanup.drop_dead_ops,
    folding.hoist_buffer_ops,
    folding.copy_what_leaves,
    reader_order.order_by_readers,
    number_names,
)


_NO_NEEDS = LayerNeeds()


@unwatched()
@on_host()
@launches_left_out()
@scripts_run_op_by_op()
@collected_seldom()
def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    training: bool | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    device_type: str = "cpu",
    needs: LayerNeeds = _NO_NEEDS,
) -> Traced:
    """Trace `model`, which is not touched and may be on any device, meta included; nothing of its size is
    computed.

    Args:
        model: any module.
        args: positional arguments of an example call; only their shapes and dtypes matter.
        kwargs: its keyword arguments.
        training: trace in training mode; by default the model's own.
        dtype: take floating parameters and floating inputs as of this dtype (mixed precision).
        autocast: with the casts that ``torch.autocast(device_type, autocast)`` around the call makes.
        device_type: of the devices that will run it; autocast, inside the model too, casts as it does there.
        needs: what layers are needed for, for which they are cut again.

    Raises:
        TraceError: the model is not one graph, for instance because control flow depends on data, or a hook on a
            submodule keeps a tensor outside of the model.
        ExampleInputsError: the arguments don't fit the model.
        OutputError: the model returns no tensor, or its cache was requested.
    """
    form, tensors = call_form(model, args, kwargs, dtype)
    is_training = model.training if training is None else training
    with casts_of(device_type):
        captured, graph, form = _capture(model, form, tensors, training=is_training, dtype=dtype, autocast=autocast)
        refuse_kept_tensors(model)
        if kwargs.get("use_cache") is True and not is_training:
            _refuse_cache(captured.outputs)
        if not _casts_here(device_type):
            check_dtypes(graph, form)
        graph = normalize(graph)
    graph = replace(graph, notes=(*graph.notes, *captured.notes, *form.notes, *_dropped_notes(captured.outputs)))
    layers = divide_layers(graph, cut_layers(graph, captured.classes), needs)
    graph, pieces = _merge_within_layers(graph, layers)
    graph = attach_factors(graph)
    values = _values(graph)
    loss, notes = find_loss(captured.outputs, graph, values)
    program = Program(
        values=values,
        layers=assign_kinds(build_layers(graph, pieces), values, graph),
        hoisted=graph.hoisted,
        inputs=graph.inputs,
        parameters=graph.parameters,
        aliases={name: first for name, first in captured.names.items() if name != first},
        outputs=graph.outputs,
        loss=loss,
        updates=graph.updates,
        notes=(*graph.notes, *(notes if is_training else ())),
        fingerprint=fingerprint(graph, values, training=is_training),
        training=is_training,
        carried=frozenset() if is_training else _carried(graph, values, form.structure, captured.outputs),
    )
    unflatten = ModelOutputs(captured.outputs, captured.assigned)
    return Traced(
        program, graph.constants, make_flatten(form), unflatten, captured.reads, form.read_values, form.computed_values,
        captured.questions, tuple(each for each in captured.outside if not each.is_attribute),
    )  # fmt: skip


def _casts_here(device_type: str) -> bool:
    """Whether autocast is in force around the trace, as for a compiler backend; then ops cast when they run."""
    kinds = {"cpu", device_type}
    return any(torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) for kind in kinds)


def _capture(
    model: nn.Module, form: CallForm, tensors: Sequence[Tensor], **how: Any
) -> tuple[Captured, Graph, CallForm]:
    """The exported model, its graph, and the form with what of the values of inputs had to be known.

    What is computed of inputs is known only where there is no way without.
    """
    answered: frozenset[str] = frozenset()
    first: UnreadInputError | None = None
    while True:
        try:
            return _capture_with_inputs(model, form, tensors, **how, answered=answered)
        except UnansweredError as error:
            new = first_to_answer(error.asked - answered)
            if not new:
                raise TraceError(str(first or error)) from error
            if isinstance(error, UnreadInputError):
                first = first or error  # which says what to do
            answered |= new


def _capture_with_inputs(
    model: nn.Module, form: CallForm, tensors: Sequence[Tensor], **how: Any
) -> tuple[Captured, Graph, CallForm]:
    """The same where lines are given whose questions are answered.

    Numbers that Python makes of tensors stay unknown if this is possible: else a check such as
    ``int(labels.max()) < classes`` would need a plan for every batch.
    """
    try:
        return _capture_once(model, form, tensors, how)
    except ValueReadError as error:
        first = error
    unknown: UnknownShiftError | None = None
    with also_asking(first):
        if first.converted:
            try:
                return _capture_with_values(model, form, tensors, how, first.converted)
            except UnansweredError as error:
                first.asked |= buffer_truths(error.asked)
            except UnknownShiftError as error:
                unknown = error
            except AutoparError:
                pass
        try:
            return _capture_with_values(model, with_values(form, tensors, first), tensors, how, ())
        except TraceError as error:
            if unknown is None or (isinstance(error, UnansweredError) and error.asked):
                raise
            raise unknown from error  # which says more


def _capture_with_values(
    model: nn.Module, form: CallForm, tensors: Sequence[Tensor], how: Mapping[str, Any], modules: tuple[Names, ...]
) -> tuple[Captured, Graph, CallForm]:
    """The same where numbers stay unknown that one of `modules` makes of tensors, and others follow from values."""
    keeps_unknown = bool(modules)
    while True:
        try:
            with unknown_numbers(modules):
                return _capture_once(model, form, tensors, how)
        except ValueReadError as error:
            known = {id(names) for names in modules}
            new = [names for names in error.converted if id(names) not in known]
            if keeps_unknown and new:
                modules = (*modules, *new)
            else:
                form = with_values(form, tensors, error)


def _capture_once(
    model: nn.Module, form: CallForm, tensors: Sequence[Tensor], how: Mapping[str, Any]
) -> tuple[Captured, Graph, CallForm]:
    captured = _with_changes(capture(model, form, tensors, **how), partial(capture, model, form, tensors, **how))
    graph = _convert(captured, form, tensors, training=how["training"])
    return captured, graph, replace(form, reads=(*form.reads, *captured.answers))


def _with_changes(captured: Captured, capture_again: Callable[..., Captured]) -> Captured:
    """`captured`, if its program also stands for the calls after it, which find what forward has set.

    Raises:
        TraceError: it doesn't.
    """

    def is_same(settings: Sequence[Changed]) -> bool:
        try:
            again = capture_again(settings=settings)
        except ExampleInputsError:  # as what was set with these is missing
            return False
        return captured.exported.is_same(again.exported)

    numbers = [each for each in captured.changed if each.is_plain]
    tensors = [each for each in captured.changed if not each.is_plain]
    notes: list[str] = []
    if numbers:
        changes = [f"{joined(each.path, each.name)!r} from {each.before!r} to {each.value()!r}" for each in numbers]
        text = f"forward reads and changes {', '.join(changes)}"
        if not is_same(numbers):
            if _is_repeated(captured, capture_again):
                return replace(
                    captured,
                    notes=(*captured.notes, f"{text}, with tables that are the same in every call of these shapes"),
                    reads=captured.reads - {(each.path, each.name) for each in captured.changed},
                )
            raise TraceError(
                f"{text}, and computes something else then, but a program is the same in every call: change it outside "
                "of the model before a call, which is then planned again, or keep it as a tensor in a buffer"
            )
        notes.append(f"{text}, which the program leaves as it is: it computes the same with both values")
    reads = captured.reads
    if tensors and is_same(tensors):
        reads -= {(each.path, each.name) for each in tensors}
    elif passed := [joined(each.path, each.name) for each in tensors if each.before is not None]:
        raise TraceError(
            f"forward reads {', '.join(map(repr, passed))}, and sets it to a tensor that depends on the call, which "
            "the next call would read, as a program can do with buffers only: register it with register_buffer"
        )
    return replace(captured, notes=(*captured.notes, *notes), reads=reads)


def _is_repeated(captured: Captured, capture_again: Callable[..., Captured]) -> bool:
    """Whether a call after one with the same inputs computes the same, of what that one has left in attributes.

    So it is where these are tables of a length, and the length: the program makes them in every call.
    """
    with suppress(ExampleInputsError):
        return captured.exported.gives_same(capture_again(settings=None).exported)
    return False


def _convert(captured: Captured, form: CallForm, tensors: Sequence[Tensor], *, training: bool) -> Graph:
    try:
        return convert(captured, form.names, training=training)
    except TraceError as error:
        exported = captured.exported
        names = [spec.arg.name for spec in exported.inputs if spec.kind is InputKind.USER_INPUT]
        needs = reading(error, exported.graph, names, tensors)
        needs.asked = captured.asked
        if not (needs.inputs or needs.asked):
            raise
        raise needs from error


def normalize(graph: Graph) -> Graph:
    """Run `PASSES`, checking the graph after each that changes it.

    Raises:
        TraceError: the model communicates.
    """
    check(graph)
    for op in graph.ops:
        if op.target.startswith(("_c10d_functional.", "c10d.", "c10d_functional.")):
            raise communication_refused(op.source, op.target)
    for step in PASSES:
        made = step(graph)
        if made is not graph:
            check(made)
        graph = made
    return graph


def _carried(graph: Graph, values: Mapping[str, Value], inputs: Structure, outputs: Structure) -> frozenset[str]:
    names = [graph.inputs[place] for place in carried(inputs)] + [graph.outputs[place] for place in carried(outputs)]
    return frozenset(name for name in names if values[name].type.is_floating)


def _refuse_cache(outputs: Structure) -> None:
    """Raise OutputError if a requested cache would be None."""
    for end in walk(outputs):
        if isinstance(end, Dropped) and end.path[-1:] in (("past_key_values",), ("cache",)):  # before, since 5.24
            raise OutputError(
                f"use_cache=True asks for {end.path[-1]}, which can't be carried out of a parallel program: leave it "
                "out, and pass the whole text in each call, as generate() does"
            )


def _dropped_notes(outputs: Structure) -> list[str]:
    return [
        f"output {'.'.join(end.path) or 'of the model'} ({end.type_name}) can't be carried out of a parallel program: "
        "it is None"
        for end in walk(outputs)
        if isinstance(end, Dropped)
    ]


def _merge_within_layers(graph: Graph, pieces: Sequence[OpSpan]) -> tuple[Graph, list[OpSpan]]:
    """Eliminate common subexpressions inside each layer; across layers this would make equal layers differ."""
    owner = {graph.ops[place].name: index for index, piece in enumerate(pieces) for place in piece.places}
    merged = cleanup.drop_dead_ops(cleanup.merge_equal_ops(graph, within=owner))
    check(merged)
    sizes = Counter(owner[op.name] for op in merged.ops)
    made: list[OpSpan] = []
    start = 0
    for index, piece in enumerate(pieces):
        if sizes[index]:
            made.append(OpSpan(start, start + sizes[index], piece.unit))
        start += sizes[index]
    return merged, made


def _values(graph: Graph) -> dict[str, Value]:
    live = differentiable(graph)
    return {
        name: Value(name, kind, graph.roles.get(name, "op"), requires_grad=name in live)
        for name, kind in graph.types.items()
    }
