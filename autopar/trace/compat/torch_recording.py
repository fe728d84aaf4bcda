"""How torch.export and the dispatcher see ops: the private parts of torch that need it (seen on torch 2.13)."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._export.utils import _is_cia_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.trace.compat import torch_internals
from autopar.trace.compat.source_lines import user_lines
from autopar.trace.tensor_values import TensorValues, values_of

__all__ = [
    "ASSERT_CODE",
    "OpsBelow",
    "Recorder",
    "Result",
    "difference",
    "is_composite",
    "is_same_computation",
    "is_torch_function",
    "plain_calls",
    "recorder",
    "symbol_of",
    "symbols_of",
    "tensor_of_number",
    "truth_values",
]

ASSERT_CODE: types.CodeType = torch._assert.__code__
_NATIVE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)


def plain_calls() -> contextlib.AbstractContextManager[Any]:
    """Inside, calls of torch functions pass by all modes for functions."""
    return torch._C.DisableTorchFunction()


def is_torch_function(func: Any) -> bool:
    """Whether it is one of torch's own, native or not, or an op.

    Not so a gradient, which depends on how its arguments were computed.
    """
    module = str(getattr(func, "__module__", None) or "")
    return isinstance(func, _NATIVE) or (f"{module}.".startswith("torch.") and not module.startswith("torch.autograd"))


def is_composite(target: str) -> bool:
    """Whether the op called ``namespace.name.overload`` runs as others, without a backward of its own."""
    op: Any = torch_internals.overload(target)
    return op is not None and _is_cia_op(op)


class _Computed(torch.autograd.Function):
    """Gives the tensors that it is given in a list, as results that depend on `anchor`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: list[Tensor]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx, anchor
        return tuple(made)


_MOST_WRITTEN = 1024  # entries of a constant of what later calls compute again: a list that a program spells out
_RECORDING = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
_ANCHOR = torch.zeros((), requires_grad=True)


@dataclass(frozen=True)
class Result:
    """A tensor that a call gives.

    Args:
        shape: its sizes.
        stride: in elements.
        dtype: of its elements.
        device: that it says it is on.
        has_gradient: whether it is part of autograd's graph.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    has_gradient: bool


class Recorder:
    """The trace under way: the graph that it makes, and which op each tensor comes from."""

    def __init__(self, mode: Any, fakes: Any) -> None:
        """`mode` records ops on tensors of the mode `fakes`."""
        self._tracer = mode.tracer
        self._fakes = fakes
        self._num_modes = torch._C._len_torch_dispatch_stack()
        notes_lines = "create_node" in vars(self._tracer)  # there is a recorder for each question that is asked
        if getattr(self._tracer, "_record_forward_stack_traces_only", False) and not notes_lines:
            self._note_lines()

    def _note_lines(self) -> None:
        """Of the stack of calls, note with each op the line that is looked for later only: texts of all take longer."""
        create = self._tracer.create_node

        def create_node(*args: Any, **kwargs: Any) -> fx.Node:
            node = create(*args, **kwargs)
            if not node.stack_trace:
                _, (file, line) = user_lines()
                node.stack_trace = f'File "{file}", line {line}, in forward' if file else None
            return node

        self._tracer.record_stack_traces = False
        self._tracer.create_node = create_node

    def is_current(self) -> bool:
        """Whether ops are recorded here now, and by nobody else: not under vmap, autocast or another mode."""
        mode = proxy_tensor.get_proxy_mode()
        return (
            mode is not None
            and mode.tracer is self._tracer
            and torch._C._len_torch_dispatch_stack() == self._num_modes
            and not torch._C._functorch.maybe_current_level()
            and not torch._C._is_any_autocast_enabled()
        )

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        """The op that made `tensor`; None if it is no fake tensor of this trace, or its value is known."""
        slot: Any = proxy_tensor.get_proxy_slot(tensor, self._tracer, None)
        if slot is None or not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self._fakes:
            return None
        has_value = (slot.constant is not None or tensor.constant is not None) and tensor.numel() > 0
        return None if has_value else slot.proxy.node

    def node_of_number(self, number: Any) -> fx.Node | None:
        """What made a symbolic number of this trace; None if torch knows it."""
        slot: Any = proxy_tensor.get_proxy_slot(number, self._tracer, None)
        return None if slot is None else slot.force().node

    def constant_of(self, node: fx.Node) -> TensorValues | None:
        """A tensor that forward has written down, or that existed before the call; None if it is large or unknown."""
        value: Any = getattr(self._tracer.root, str(node.target), None)
        is_known = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not value.is_meta
        if not is_known or value.numel() > _MOST_WRITTEN:
            return None
        with torch_internals.plain_tensors():
            return values_of(value)

    def type_of(self, x: Any) -> tuple[Any, ...]:
        """All that the results of an op on `x` depend on, but its values."""
        return (
            x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device, x.requires_grad, x.is_conj(), x.is_neg(),
        )  # fmt: skip

    def is_ordinary(self, x: Tensor) -> bool:
        """Whether it is a fake tensor and nothing more, such as a parameter."""
        return type(x) is FakeTensor and not (isinstance(x, torch.nn.Parameter) or x.is_conj() or x.is_neg())

    def result_like(self, x: Any) -> Result:
        """What there is to know of an ordinary tensor in memory of its own."""
        return Result(tuple(x.shape), x.stride(), x.dtype, x.fake_device, x.requires_grad)

    @property
    def graph(self) -> fx.Graph:
        """What has been recorded."""
        return self._tracer.graph

    def last_node(self) -> fx.Node:
        """What was recorded last."""
        return next(iter(reversed(self._tracer.graph.nodes)))

    def nodes_after(self, node: fx.Node) -> list[fx.Node]:
        """What was recorded since."""
        made: list[fx.Node] = []
        while (node := node.next).op != "root":
            made.append(node)
        return made

    def unrecorded(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, ops run on fake tensors and are not recorded."""
        return torch._C._ExcludeDispatchKeyGuard(_RECORDING)

    @contextlib.contextmanager
    def forgotten_results(self) -> Generator[None]:
        """Inside, torch does not keep what ops on fake tensors give, for ops that are not called again.

        To keep it takes a sixth of what a trace of such ops takes.
        """
        before = self._fakes.cache_enabled
        self._fakes.cache_enabled = False
        try:
            yield
        finally:
            self._fakes.cache_enabled = before

    def new_tensors(self, results: Sequence[Result]) -> list[Tensor]:
        """Fake tensors with memory of their own; those that have a gradient are no leaves."""
        with self.unrecorded(), no_dispatch():
            metas = [torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device="meta") for each in results]
        made: list[Tensor] = [
            FakeTensor(self._fakes, meta, each.device) for meta, each in zip(metas, results, strict=True)
        ]
        places = [place for place, each in enumerate(results) if each.has_gradient]
        if places:
            with torch.enable_grad():
                computed = torch_internals.apply_itself(_Computed, _ANCHOR, [made[place] for place in places])
            for place, tensor in zip(places, computed, strict=True):
                made[place] = tensor
        return made

    def copy_nodes(self, nodes: Sequence[fx.Node], names: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
        """Record copies of `nodes` that read what `names` says, in the module that is running."""
        tracer = self._tracer
        copies = dict(names)
        stack = {
            key: (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
            for key, (path, kind) in tracer.module_stack.items()
        }
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            made = tracer.graph.create_node(node.op, node.target, args, kwargs, _stem(tracer.graph, node))
            made.meta = {**node.meta, "nn_module_stack": dict(stack)}
            tracer.node_name_to_scope[made.name] = (tracer.scope.module_path, tracer.scope.module_type)
            copies[node] = made
        return [copies[node] for node in nodes]

    def attach(self, tensor: Tensor, node: fx.Node) -> None:
        """From now on `tensor` is the result of `node`."""
        proxy = fx.Proxy(node, self._tracer)
        proxy_tensor.set_proxy_slot(tensor, self._tracer, proxy_tensor._ProxyTensor(proxy, None))


class OpsBelow(TorchDispatchMode):
    """In this context, what the dispatcher gets for calls of ops on fake tensors without gradients is added to a graph.

    Args:
        graph: the ops are added at its end.
        made: tensors that they may read -> their nodes there; the results of ops are added.
    """

    def __init__(self, graph: fx.Graph, made: dict[Tensor, fx.Node]) -> None:
        """Nothing is recorded yet."""
        super().__init__()
        self._graph = graph
        self._made = made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor | tuple | list):  # else a question about its device
            given, named = pytree.tree_map_only(Tensor, self._made.__getitem__, (tuple(args), dict(kwargs or {})))
            name = self._graph._target_to_str(func.overloadpacket.__name__)
            node = self._graph.create_node("call_function", func, given, named, name)
            node.meta["val"] = result
            self._define(node, result)
        return result

    def _define(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, Tensor):
            self._made[result] = node
            return
        for index, part in enumerate(result):
            taken = self._graph.call_function(getitem, (node, index))
            taken.meta["val"] = part
            self._made[part] = taken


def sources_of(graph: fx.Graph, symbols: Collection[str] = ()) -> tuple[list[fx.Node], bool]:
    """The placeholders that numbers follow from which depend on data: all of them, or those with these `symbols`.

    And whether one of these numbers is a truth value.
    """
    known: set[str] = set()
    waiting: list[fx.Node] = []
    is_truth = False
    for node in graph.nodes:
        new = _symbols_of(node.meta.get("val")) - known  # what comes after takes them from here
        known |= new
        if new and (not symbols or not new.isdisjoint(symbols)):
            waiting.append(node)
            is_truth |= isinstance(node.meta.get("val"), torch.SymBool)
    seen: dict[fx.Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting.extend(node.all_input_nodes)
    return [node for node in seen if node.op == "placeholder"], is_truth


def _symbols_of(value: Any) -> set[str]:
    """The names of the numbers that depend on data in what an op gives: in a number, or in the sizes of a tensor."""
    leaves, _ = torch_internals.flatten(value)
    numbers = [part for x in leaves for part in (x.shape if isinstance(x, Tensor) else [x])]
    symbolic = (part for part in numbers if isinstance(part, torch_internals.SYMBOLIC))
    return {str(symbol) for part in symbolic for symbol in part.node.expr.free_symbols}


def symbol_of(number: Any) -> str | None:
    """The name of a whole number that a tensor gave and the trace does not know; None of what is computed from some."""
    is_symbol = isinstance(number, torch.SymInt) and number.node.expr.is_Symbol
    return str(number.node.expr) if is_symbol else None


def symbols_of(number: torch.SymInt) -> set[str]:
    """The names of the numbers that `number` is computed from."""
    return {str(symbol) for symbol in number.node.expr.free_symbols}


def difference(stop: Any, start: Any) -> int | None:
    """``stop - start``, if this is the same whatever the numbers that depend on data are."""
    if not (isinstance(stop, torch.SymInt) and isinstance(start, torch.SymInt)):
        return None
    result = stop.node.expr - start.node.expr
    return int(result) if result.is_Integer else None


def tensor_of_number(number: torch.SymInt, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """A scalar that is `number`, computed from those that are its symbols; None for other arithmetic of Python's."""
    result = _evaluated(number.node.expr, tensors)
    return result if isinstance(result, Tensor) else None


def _evaluated(expression: Any, tensors: Mapping[str, Tensor]) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return tensors.get(str(expression))
    function = _ARITHMETIC.get(type(expression).__name__)
    args = [_evaluated(arg, tensors) for arg in expression.args]
    return None if function is None or any(arg is None for arg in args) else functools.reduce(function, args)


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Mod": torch.remainder,
    "PythonMod": torch.remainder,
    "FloorDiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}
"""Of expressions, on whole numbers and tensors of them."""


def _stem(graph: fx.Graph, node: fx.Node) -> str | None:
    """What tracing names such a node, but for a number."""
    packet = getattr(node.target, "overloadpacket", None)
    return None if packet is None else graph._target_to_str(packet.__name__)


def recorder() -> Recorder | None:
    """The trace under way, if it is one of torch.export."""
    mode = proxy_tensor.get_proxy_mode()
    fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None or not mode.pre_dispatch or fakes is None or fx.traceback.has_preserved_node_meta():
        return None
    return Recorder(mode, fakes) if hasattr(mode.tracer, "module_stack") else None


def is_same_computation(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a trace under way come of the same ops on the same values, none of which is written to."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return False
    slots: list[Any] = [proxy_tensor.get_proxy_slot(x, mode.tracer, None) for x in (one, other)]
    return all(slot is not None for slot in slots) and _are_equal(*(slot.proxy.node for slot in slots))


def _are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return one == other
    if one is other:
        return True
    nodes, target = (one, other), cast("Any", one.target)
    is_plain = torch_internals.is_plain_op
    if target != other.target or not is_plain(target) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if any(is_plain(user.target) and torch_internals.writes(user.target) for node in nodes for user in node.users):
        return False
    leaves, structures = zip(*(torch_internals.flatten((node.args, node.kwargs)) for node in nodes), strict=True)
    return structures[0] == structures[1] and all(map(_are_equal, *leaves))


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def truth_values(decide: Callable[[types.FrameType, tuple[Any, ...]], bool | None]) -> Iterator[None]:
    """Inside, a truth value that depends on data is what `decide` says of the frame that asks, and of what it asks for
    it, if that is not None.

    Also what ``torch.equal`` and ``torch.allclose`` say.
    """

    def asking(ask: Callable[..., bool], is_unknown: Callable[[Any], bool]) -> Callable[..., bool]:
        def truth(*values: Any, **how: Any) -> bool:
            answer = decide(sys._getframe(1), values) if any(map(is_unknown, values)) else None
            return ask(*values, **how) if answer is None else answer

        return truth

    def is_unknown(value: object) -> bool:
        tracing = recorder()
        return isinstance(value, Tensor) and tracing is not None and tracing.node_of(value) is not None

    symbolic = asking(torch.SymBool.__bool__, lambda value: not value.node.has_hint())
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(Tensor, "__bool__", asking(torch._C.TensorBase.__bool__, is_unknown)))
        patches.enter_context(patch.object(torch.SymBool, "__bool__", symbolic))
        for name in ("equal", "allclose"):
            patches.enter_context(patch.object(torch, name, asking(getattr(torch, name), is_unknown)))
            method = getattr(torch._C.TensorBase, name)
            patches.enter_context(patch.object(Tensor, name, asking(method, is_unknown)))
        yield
