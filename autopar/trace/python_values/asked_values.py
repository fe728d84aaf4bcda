"""Questions of a forward whose answers follow from inputs alone: which images are padding, is any token global; or from
buffers alone: is this codebook initialized, is the warmup over.

A trace does not know the answers.  Where it can't go on without one, it is made again, and the ops that lead from
inputs or buffers to the question (`Computation`) are run on those of the call: the answer is a constant of the trace,
and later calls compute theirs, to be compared with it.  Questions are told apart by the user's line that asks; of
buffers, truth values apart from other numbers: a counter that is compared with a threshold gives two programs, and one
whose number is computed with a program for each number.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar.objects.buffer_questions import BufferQuestion
from autopar.trace.calls.input_computations import Computation, ComputedOp, Operand, map_arguments
from autopar.trace.calls.signature import MOST_READ, CallForm, ReadValues
from autopar.trace.compat import torch_internals, torch_recording
from autopar.trace.compat.source_lines import frame_of_text, user_line
from autopar.trace.python_values.read_inputs import UnansweredError
from autopar.trace.python_values.recorded_computations import Sources, buffer_computation, computation_of

__all__ = ["AskedValues", "Questions", "buffer_truths", "first_to_answer"]

_NUMBERS = ("item", "__bool__", "__int__", "__index__", "__float__")
_ARRAYS = ("numpy", "__array__")
_FACTORIES = frozenset({"arange", "zeros", "ones", "full", "empty"})
_WITH_SIZES = _FACTORIES | {
    "new_zeros", "new_ones", "new_full", "new_empty", "narrow", "view", "reshape", "expand",
}  # fmt: skip
"""Functions that read numbers of tensors where Python does not see it; those that are no factories of a tensor."""
_TRUTH = "truth of "  # before the line that asks for a truth value that follows from buffers
_PLACES = frozenset({"nonzero", "argwhere", "where"})


def first_to_answer(asked: Collection[str]) -> frozenset[str]:
    """Those of `asked` to answer now: numbers of buffers stay open if truth values that follow from them suffice."""
    return buffer_truths(asked) or frozenset(asked)


def buffer_truths(asked: Collection[str]) -> frozenset[str]:
    """Those that ask for truth values that follow from buffers."""
    return frozenset(each for each in asked if each.startswith(_TRUTH))


class AskedValues:
    """The questions of one trace, and what is answered.

    Attributes:
        asked: the lines that ask what could be answered, in order.
        sizes: those whose answers are sizes.
        reads: the answers that were given, by what gives them.
        numbers: the lines that ask for numbers of buffers.
        of_buffers: the answers that were given and follow from buffers.
    """

    def __init__(
        self, form: CallForm, given: Sequence[Tensor], answered: frozenset[str], buffers: Mapping[str, Tensor]
    ) -> None:
        """Nothing is asked yet.

        Args:
            form: of the call that is traced.
            given: its tensors.
            answered: the lines whose questions are answered.
            buffers: those of the model that may be asked, by their first names.
        """
        self._names = form.names
        self._given = form.cast_inputs(given)
        self._answered = answered
        self._inputs = Sources()
        self._buffers = buffers
        self._own = Sources()
        self.numbers: set[str] = set()
        self.of_buffers: dict[BufferQuestion, None] = {}
        self.asked: list[str] = []
        self.sizes: set[str] = set()
        self.reads: dict[Computation, ReadValues] = {}

    @property
    def are_answered(self) -> bool:
        """Whether any is."""
        return bool(self._answered)

    def begin(self, traced: Sequence[Tensor], model: nn.Module) -> None:
        """`traced` are the tensors of the trace that stand for the call's, and the buffers of `model` for its own."""
        recorder = torch_recording.recorder()
        # Now: an op that gives a tensor as it is becomes what the tensor comes from.
        nodes = [None if recorder is None else recorder.node_of(x) for x in traced]
        self._inputs = Sources({node: place for place, node in enumerate(nodes) if node is not None})
        members = [None if recorder is None else recorder.node_of(model.get_buffer(name)) for name in self._buffers]
        self._own = Sources({node: place for place, node in enumerate(members) if node is not None})
        self.reads.clear()
        self.of_buffers.clear()

    def computation_of(self, x: Tensor) -> Computation | None:
        """See `recorded_computations.computation_of`."""
        recorder = torch_recording.recorder()
        node = None if recorder is None else recorder.node_of(x)
        return None if recorder is None or node is None else computation_of(recorder, node, self._inputs)

    def is_constant(self, x: Tensor) -> bool:
        """Whether `x` is the same in every call of these shapes, such as a mask that forward makes of sizes."""
        computation = self.computation_of(x)
        return computation is not None and not computation.places

    def follows_from_buffers(self, x: Tensor) -> bool:
        """Whether `x` is one of the buffers that may be asked, or computed from them alone."""
        recorder = torch_recording.recorder()
        node = None if recorder is None else recorder.node_of(x)
        if recorder is None or node is None:
            return False
        return buffer_computation(recorder, node, self._own) is not None

    @property
    def last_asked(self) -> frozenset[str]:
        """The lines to answer where a trace ends: that which asked last, or whose sizes it may have ended at."""
        return frozenset([*self.asked[-1:], *self.sizes])

    def asked_in(self, graph: fx.Graph) -> frozenset[str]:
        """The lines to answer where a whole graph can't be a program: not those of buffers' numbers that it doesn't
        compute with.
        """
        left = {
            frame_of_text(node.stack_trace)
            for node in graph.nodes
            if node.stack_trace and isinstance(node.meta.get("val"), torch_internals.SYMBOLIC) and node.users
        }
        needed = self.numbers & left or self.numbers
        return frozenset(self.asked) - (self.numbers - needed)

    def answer(
        self, x: Tensor, *, are_places: bool = False, is_size: bool = False, is_truth: bool = False
    ) -> Tensor | None:
        """What is in `x`, or where it is not zero ([entries, dims]), as a tensor whose values the trace knows.

        With `is_truth` only whether it is zero counts.  None if this does not follow from inputs or buffers alone, or
        the line's questions stay open.

        Raises:
            UnansweredError: the line's questions are to be answered, but the inputs of the call have no values here,
                or it is too much.
        """
        computation = self.computation_of(x)
        if computation is None:
            recorder = torch_recording.recorder()
            node = None if recorder is None else recorder.node_of(x)
            if node is None:
                return None
            return self._answer_of_buffers(node, is_truth=is_truth, are_places=are_places, is_size=is_size)
        if computation.places and (x.is_floating_point() or x.is_complex()):
            return None
        where = user_line()
        if where not in self._answered:
            self.asked.append(where)
            self.sizes |= {where} if is_size else set()
            return None
        if are_places:
            computation = _with_last(computation, "aten.nonzero.default")
        if not computation.places:  # the same in every call of these shapes
            with torch_internals.plain_tensors():
                known = computation.known(())
            return None if known is None else known.tensor()
        read = self.reads.get(computation) or self._read(computation, where)
        self.reads[computation] = read
        return read.known.tensor()

    def _read(self, computation: Computation, where: str) -> ReadValues:
        with torch_internals.plain_tensors():
            known = computation.known(self._given)
        names = ", ".join(repr(self._names[place]) for place in computation.places)
        if known is None:
            raise UnansweredError(
                f"{where}: Python needs a value here that follows from input {names}, which has no values here: pass "
                "example inputs with values. The plan is then for what follows from them, and calls with another "
                "answer are planned when they come"
            )
        num_read = sum(len(read.known.values) for read in self.reads.values()) + len(known.values)
        if num_read > MOST_READ:
            raise UnansweredError(
                f"{where}: Python needs {len(known.values):,} numbers here that follow from input {names}, so that a "
                f"plan would be for more than {MOST_READ:,} of them: compute what needs them outside of the model"
            )
        return ReadValues(computation, known, where)

    def truth_of(self, number: Any) -> bool | None:
        """Whether a number that the trace does not know is true, where this follows from buffers and is answered."""
        recorder = torch_recording.recorder()
        node = None if recorder is None else recorder.node_of_number(number)
        known = None if node is None else self._answer_of_buffers(node, is_truth=True)
        return None if known is None else bool(known.item())

    def _answer_of_buffers(
        self, node: fx.Node, *, is_truth: bool, are_places: bool = False, is_size: bool = False
    ) -> Tensor | None:
        """What a node gives in this call, if it follows from buffers alone and the line's questions are answered.

        See `answer` for what is asked.

        Raises:
            UnansweredError: the buffers have no values here.
        """
        recorder = torch_recording.recorder()
        computation = None if recorder is None else buffer_computation(recorder, node, self._own)
        if computation is None:
            return None
        where = user_line()
        is_truth |= not are_places and getattr(node.meta.get("val"), "dtype", None) == torch.bool
        key = _TRUTH + where if is_truth else where
        self.numbers |= set[str]() if is_truth or are_places else {where}
        if key not in self._answered:
            self.asked.append(key)
            self.sizes |= {where} if is_size else set()
            return None
        places = computation.places
        if is_truth or are_places:
            computation = _with_last(computation, "aten.nonzero.default" if are_places else "operator.truth")
        values = [*self._buffers.values()]
        names = tuple(list(self._buffers)[place] for place in places)
        computation = Computation(tuple(range(len(places))), computation.steps)
        with torch_internals.plain_tensors():
            known = computation.known([values[place] for place in places])
        if known is None:
            raise UnansweredError(
                f"{where}: Python needs a value here that follows from the buffer {' and '.join(map(repr, names))}, "
                "which has no value on the meta device: make the model on a device, so that the plan is for what the "
                "buffer has"
            )
        self.of_buffers[BufferQuestion(names, computation, where, known.values, is_truth=is_truth)] = None
        return known.tensor()

    def list_of(self, x: Tensor, plain: Callable[[Tensor], Any]) -> Any:
        """``x.tolist()``, which is ``plain(x)`` where this is no question that is answered."""
        known = self.answer(x) if torch_recording.recorder() else None
        return plain(x if known is None else known)

    def array_of(self, x: Tensor, plain: Callable[[Tensor], Any]) -> Any:
        """An array of NumPy's of `x`, likewise."""
        known = self.answer(x) if torch_recording.recorder() else None
        if known is None:
            return plain(x)
        values = known.tolist()
        with torch_internals.plain_tensors():
            return plain(torch.tensor(values, dtype=known.dtype))


def _with_last(computation: Computation, target: str) -> Computation:
    """One more op, of what a computation gives."""
    last = Operand(len(computation.places) + len(computation.steps) - 1)
    return Computation(computation.places, (*computation.steps, ComputedOp(target, (last,))))


class Questions(TorchFunctionMode):
    """In this context, numbers of tensors and places of entries are what `asked` answers."""

    def __init__(self, asked: AskedValues) -> None:
        """Nothing is asked yet."""
        super().__init__()
        self._asked = asked
        # As they are now: tracing replaces some of them.
        self._numbers = frozenset(getattr(Tensor, name) for name in _NUMBERS)
        self._truth = Tensor.__bool__

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        x = args[0] if args else named.get("input")
        if name in _WITH_SIZES:
            own = 0 if name in _FACTORIES else 1
            args = (*args[:own], *map_arguments(tuple(args[own:]), self._size))
            named = {key: map_arguments(arg, self._size) for key, arg in named.items()}
        if func in self._numbers and isinstance(x, Tensor):
            known = self._asked.answer(x, is_truth=func is self._truth)
            return func(*args, **named) if known is None else func(known)
        if name in _ARRAYS and isinstance(x, Tensor):
            return self._asked.array_of(x, lambda known: func(known, *args[1:], **named))
        if name in _PLACES and isinstance(x, Tensor) and (name != "where" or len(args) + len(named) == 1):
            places = self._asked.answer(x, are_places=True, is_size=True)
            if places is not None:
                return places.unbind(1) if name == "where" or named.get("as_tuple") else places
        return func(*args, **named)

    def _size(self, x: Any) -> Any:
        known = self._asked.answer(x, is_size=True) if isinstance(x, Tensor) and not x.dim() else None
        return x if known is None else cast("int", known.item())
