"""Calls of torch functions that repeat while a model is traced: their ops are copied, not traced again.

A deep model calls the same functions on tensors of the same shapes in every layer.  Its Python code runs as always,
layer by layer; but a call like one before it (the same function, the same literals, tensors of the same shapes, strides
and dtypes, from the same line of the user's) adds copies of the ops that the first one added, with the operands and the
module of its own, and gives tensors like those that the first one gave.  The graph is the one that tracing all of it
gives, names included.

Whatever doesn't fit into that is traced as always: calls that write to tensors, take or give anything but tensors and
plain values, read tensors that aren't arguments, or are made under autocast or vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autopar.objects.tensor_questions import QUESTIONS
from autopar.trace.compat import torch_internals, torch_recording
from autopar.trace.compat.source_lines import user_lines
from autopar.trace.compat.torch_recording import Recorder, Result

__all__ = ["RepeatedCalls"]

_PLAIN = (int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format, type)


class _UnfitError(Exception):
    """A call can't be compared with others."""


@dataclass(frozen=True)
class _RecordedCall:
    """A call: its kind, its tensor arguments, and the ops that these come from, each once."""

    key: Any
    tensors: Sequence[Tensor]
    operands: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _FirstCall:
    """What the first call of its kind did.

    Args:
        operands: the ops whose results it read.
        nodes: those that it added.
        results: the tensors that it gave.
        sources: for each of them, the number of its op among `nodes`.
        structure: of what it gave.
        gives_views: whether results share memory with operands, or with each other.
    """

    operands: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[Result, ...]
    sources: tuple[int, ...]
    structure: Any
    gives_views: bool


class RepeatedCalls(TorchFunctionMode):
    """In this context, calls like one before add copies of its ops."""

    def __init__(self, note_unknown: Callable[[Any], None] = lambda arguments: None) -> None:
        """Nothing has been called yet; `note_unknown` gets arguments among which may be tensors of no op."""
        super().__init__()
        self._note_unknown = note_unknown
        self._recorder = torch_recording.recorder()
        self._known: dict[Any, _FirstCall | None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        given = kwargs or {}
        if func in QUESTIONS:
            with torch_recording.plain_calls():
                return func(*args, **given)
        recorder = self._recorder
        if recorder is None or not recorder.is_current() or not torch_recording.is_torch_function(func):
            with torch_recording.plain_calls():
                self._note_unknown((args, given))
            return func(*args, **given)
        with torch_recording.plain_calls():
            call = _read(func, args, given, recorder)
            if call is None:
                self._note_unknown((args, given))
            known = None if call is None else self._known.get(call.key)
            if call is not None and known is not None:
                return _repeat(func, args, given, call, known, recorder)
        if call is None or call.key in self._known:
            return func(*args, **given)
        before = recorder.last_node()
        with recorder.forgotten_results():
            result = func(*args, **given)
        with torch_recording.plain_calls():
            self._known[call.key] = _learn(call, recorder.nodes_after(before), result, recorder)
        return result


def _read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], recorder: Recorder) -> _RecordedCall | None:
    """The call, unless it can't be compared with others."""
    tensors: list[Tensor] = []
    nodes: dict[fx.Node, int] = {}

    def read(value: Any) -> Any:
        kind = cast("type[object]", type(value))
        if isinstance(value, Tensor):
            node = recorder.node_of(value)
            if node is None:
                raise _UnfitError
            tensors.append(value)
            return nodes.setdefault(node, len(nodes)), *recorder.type_of(value)
        if kind is float:
            return kind, value.hex()
        if kind is slice:
            return kind, read(value.start), read(value.stop), read(value.step)
        if kind in (tuple, list, torch.Size):
            return kind, tuple(map(read, value))
        if issubclass(kind, _PLAIN):
            return kind, value
        raise _UnfitError

    try:
        given = tuple(map(read, args)), tuple((name, read(value)) for name, value in kwargs.items())
        key = (func, given, torch.is_grad_enabled(), torch.get_default_dtype(), user_lines())
        hash(key)
    except (_UnfitError, TypeError):  # symbolic sizes have no hash
        return None
    return _RecordedCall(key, tensors, tuple(nodes))


def _learn(call: _RecordedCall, nodes: Sequence[fx.Node], returned: Any, recorder: Recorder) -> _FirstCall | None:
    """What is to be done for a call like this; None if it is to be traced again."""
    results, structure = torch_internals.flatten(returned)
    if not results or not all(isinstance(x, Tensor) and recorder.is_ordinary(x) for x in results):
        return None
    tensors = cast("list[Tensor]", results)
    sources = {*call.operands, *nodes}
    # ``torch.tensor([])`` is a constant, which is taken in (`decompose`); two without elements may be one.
    is_empty = not call.operands and not any(x.numel() for x in tensors)
    for node in nodes:
        if not (is_empty or _is_copyable(node)) or not sources.issuperset(node.all_input_nodes):
            return None
    memory = {torch_internals.storage_key(x) for x in tensors}
    gives_views = len(memory) < len(tensors) or any(torch_internals.storage_key(x) in memory for x in call.tensors)
    places = {node: place for place, node in enumerate(nodes)}
    operand_places = [places.get(cast("fx.Node", recorder.node_of(x))) for x in tensors]
    given = {id(x) for x in call.tensors}
    if any(id(x) in given or (x.requires_grad and x.is_leaf) for x in tensors):
        return None
    if None in operand_places or (not gives_views and any(x.storage_offset() for x in tensors)):
        return None
    made = tuple(map(recorder.result_like, tensors))
    return _FirstCall(
        call.operands, tuple(nodes), made, tuple(cast("list[int]", operand_places)), structure, gives_views
    )


def _is_copyable(node: fx.Node) -> bool:
    if isinstance(node.meta.get("val"), torch_internals.SYMBOLIC):
        return False  # another call's number, as in ``x[:, places[0]]``, is another one
    if node.target is getitem:
        return True
    return torch_internals.is_plain_op(node.target) and not torch_internals.writes(node.target)


def _repeat(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call: _RecordedCall,
    known: _FirstCall,
    recorder: Recorder,
) -> Any:
    """What `func` gives, when a call like this one is known."""
    if known.gives_views:
        with recorder.unrecorded():
            results, _ = torch_internals.flatten(func(*args, **kwargs))
    else:
        results = recorder.new_tensors(known.results)
    copies = recorder.copy_nodes(known.nodes, dict(zip(known.operands, call.operands, strict=True)))
    for tensor, source in zip(results, known.sources, strict=True):
        recorder.attach(tensor, copies[source])
    return torch_internals.unflatten(results, known.structure)
