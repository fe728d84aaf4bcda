"""What leads to a tensor of the trace under way, and from inputs or buffers, as a computation that later calls run
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental import proxy_tensor

from autopar.trace.calls.input_computations import Computation, ComputedOp, Operand, function_name, map_arguments
from autopar.trace.compat import torch_internals
from autopar.trace.compat.torch_recording import Recorder

__all__ = ["Sources", "buffer_computation", "computation_of", "depend_on_calls"]

_NAMES = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
_OF_SHAPES = frozenset(getattr(torch.ops.aten, name) for name in _NAMES)
"""Ops that read no entry of what they are given."""


@dataclass
class Sources:
    """What the computations of a trace under way may begin with.

    Attributes:
        places: those nodes, and the place of each among what a computation is given.
        without: nodes that follow from something else as well; what follows from one of these does so, too.
    """

    places: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    without: set[fx.Node] = field(default_factory=set[fx.Node])

    def stops(self, node: fx.Node) -> bool:
        """Whether no computation has this node: it is, or follows from, a parameter, a random number and the like."""
        is_other = node.op not in ("call_function", "get_attr") or _draws(node)
        return node in self.without or (is_other and node not in self.places)


def computation_of(recording: Recorder, last: fx.Node, sources: Sources) -> Computation | None:
    """What leads from inputs, the `sources`, to the result of an op of the trace under way.

    None if it follows from anything else as well, such as parameters or random numbers, if an input is written to, or
    if floats are rounded.  A computation without inputs is one of constants, such as a mask that forward makes itself.
    """
    made = _computation_of_inputs(recording, last, sources)
    if made is None:
        sources.without.add(last)
    return made


def _computation_of_inputs(recording: Recorder, last: fx.Node, sources: Sources) -> Computation | None:
    needed, places = _behind(recording.graph, [last], stops=sources.stops), sources.places
    if needed is None:
        return None
    memory = {key for node in needed if node in places for key in _memory_of(node)}
    for node in needed:
        if node not in places and (_is_rounding(node) or _is_number(node) or not memory.isdisjoint(_written_by(node))):
            return None
    return _computation(recording, needed, last, places)


def buffer_computation(recording: Recorder, last: fx.Node, sources: Sources) -> Computation | None:
    """The same for buffers, which may be floats that are rounded, and may be written to on the way, as counters are.

    The computation leaves the buffers as they are.  None if nothing follows from them, or if it follows from anything
    else as well.
    """
    if not sources.places:
        return None
    needed = _behind(recording.graph, [last], stops=sources.stops)
    if needed is None:
        sources.without.add(last)
    if needed is None or sources.places.keys().isdisjoint(needed):
        return None
    made = _computation(recording, needed, last, sources.places, copies=True)
    return made if made is not None and made.places else None


def _computation(
    recording: Recorder,
    needed: Sequence[fx.Node],
    last: fx.Node,
    places: Mapping[fx.Node, int],
    *,
    copies: bool = False,
) -> Computation | None:
    own = [node for node in needed if node in places]
    results: dict[fx.Node, Any] = {node: Operand(index) for index, node in enumerate(own)}
    steps: list[ComputedOp] = []

    def given(arg: Any) -> Any:
        return results[arg] if isinstance(arg, fx.Node) else arg

    def add(step: ComputedOp) -> Operand:
        steps.append(step)
        return Operand(len(own) + len(steps) - 1)

    for node in _written(own, needed) if copies else ():
        results[node] = add(ComputedOp("aten.clone.default", (results[node],)))
    for node in needed:
        if node in results:
            continue
        constant = recording.constant_of(node) if node.op == "get_attr" else None
        step = _repeated(node, given)
        if constant is None and step is None:
            return None
        results[node] = constant if step is None else add(step)
    if not own and not steps:
        return None
    if steps and results[last] != Operand(len(own) + len(steps) - 1):  # written to since: the result comes last
        add(ComputedOp("aten.alias.default", (results[last],)))
    return Computation(tuple(places[node] for node in own), tuple(steps))


def _written(own: Sequence[fx.Node], needed: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of `own` that one of `needed` writes to."""
    written = {key for node in needed for key in _written_by(node)}
    return [node for node in own if not written.isdisjoint(_memory_of(node))]


def depend_on_calls(
    tensors: Sequence[Tensor], *, constants_too: bool = False, other_than: Sequence[Tensor] = ()
) -> bool:
    """Whether tensors of a trace under way follow from inputs, parameters, buffers or random numbers.

    With `constants_too`, those that follow from other tensors that exist before the call do so, too; those that follow
    from `other_than`, which exist before it, don't.
    """
    mode = proxy_tensor.get_proxy_mode()

    def nodes_of(some: Sequence[Tensor]) -> list[fx.Node]:
        slots: list[Any] = [] if mode is None else [proxy_tensor.get_proxy_slot(x, mode.tracer, None) for x in some]
        return [slot.proxy.node for slot in slots if slot is not None]

    given = ("placeholder", "get_attr") if constants_too else ("placeholder",)
    others = {node for node in nodes_of(other_than) if node.op == "placeholder"}
    last = nodes_of(tensors)
    behind = _behind(last[0].graph, last, past_shapes=False) if last else None
    return any(node.op in given or _draws(node) for node in behind or () if node not in others)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _repeated(node: fx.Node, given: Callable[[Any], Any]) -> ComputedOp | None:
    """An op on what is `given` for its operands; None if it is none that gives the same with the same operands."""
    target = cast("Any", node.target)
    if node.op != "call_function":
        return None
    if torch_internals.is_plain_op(target):
        name = None if torch.Tag.nondeterministic_seeded in target.tags else str(target)
    else:
        name = function_name(target)
    if name is None:
        return None
    kwargs = tuple((key, map_arguments(arg, given)) for key, arg in node.kwargs.items())
    return ComputedOp(name, map_arguments(node.args, given), kwargs)


def _is_number(node: fx.Node) -> bool:
    """Whether Python computes it of numbers of tensors, which may round floats."""
    return function_name(node.target) not in (None, "operator.getitem")


def _is_rounding(node: fx.Node) -> bool:
    """Whether it makes integers of floats, which are others in every batch; to compare them gives truth values."""
    kinds = {x.dtype for x in _tensors(node)}
    has_integers = any(not kind.is_floating_point and kind != torch.bool for kind in kinds)
    return has_integers and any(x.is_floating_point() for each in node.all_input_nodes for x in _tensors(each))


def _tensors(node: fx.Node) -> list[Tensor]:
    leaves, _ = torch_internals.flatten(node.meta.get("val"))
    return [x for x in leaves if isinstance(x, Tensor)]


def _behind(
    graph: fx.Graph,
    last: Sequence[fx.Node],
    *,
    past_shapes: bool = True,
    stops: Callable[[fx.Node], bool] = lambda _: False,
) -> list[fx.Node] | None:
    """The nodes that the values of `last` follow from now, in order: with those that write to what these read.

    None if one of them `stops` the search.  Without `past_shapes`, not those of which only shapes are read.
    """
    needed: set[fx.Node] = set()
    memory: set[int] = set()
    writes: list[fx.Node] | None = None
    waiting = deque(last)
    while waiting:
        while waiting:
            node = waiting.popleft()  # nearest first, as what stops is often near
            if node not in needed:
                needed.add(node)
                memory |= _memory_of(node)
                if past_shapes or getattr(node.target, "overloadpacket", None) not in _OF_SHAPES:
                    waiting.extend(node.all_input_nodes)
                if stops(node):
                    return None
        if writes is None:
            writes = [node for node in graph.nodes if _written_by(node)]
        waiting.extend(node for node in writes if node not in needed and not memory.isdisjoint(_written_by(node)))
    return [node for node in graph.nodes if node in needed]


def _memory_of(node: fx.Node) -> set[int]:
    return {torch_internals.storage_key(x) for x in _tensors(node)}


def _written_by(node: fx.Node) -> set[int]:
    """The memory of what an op writes to."""
    target = cast("Any", node.target)
    if node.op != "call_function" or not torch_internals.is_plain_op(target) or not torch_internals.writes(target):
        return set()
    written = [node.args[at] for at in torch_internals.shared(target) if at < len(node.args)]
    return {key for arg in written if isinstance(arg, fx.Node) for key in _memory_of(arg)}
