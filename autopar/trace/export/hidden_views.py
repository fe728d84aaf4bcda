"""Views that an export doesn't know as such: results of composite ops that share memory with an operand.

An example is ``torch.einsum("ij->ji", x)``.  Of an op that an export keeps, the result is a new tensor to it unless the
op's schema says otherwise; so what is written to either of both would not be found in the other one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export.graph_signature import OutputKind

from autopar.errors import TraceError
from autopar.trace.compat import torch_internals, torch_recording
from autopar.trace.compat.source_lines import frame_of_text

__all__ = ["WrittenDropoutError", "refuse_writes_to_hidden_views"]

_DROPOUT = "aten.dropout.default"


class WrittenDropoutError(TraceError):
    """Such a view is of dropout that drops nothing, which another trace can follow."""


def refuse_writes_to_hidden_views(graph: fx.Graph) -> None:
    """Check that nothing reads such a view after its operand was written to in place, or the other way round.

    Raises:
        TraceError: something does.
    """
    ops = [node for node in graph.nodes if node.op == "call_function" and torch_internals.is_plain_op(node.target)]
    writes = [op for op in ops if torch_internals.writes(op.target)]
    memory = _memory(ops) if writes else {}
    places = {node: place for place, node in enumerate(graph.nodes)}
    for write in writes:
        made, views = memory.get(write, (write, ()))
        for other, (made_too, other_views) in memory.items():
            earlier = [view for view in {*views} ^ {*other_views} if places[view] < places[write]]
            if made_too is made and earlier and any(places[write] < places[x] for x in other.users):
                raise _refused(write, earlier[0])


def _refused(write: fx.Node, view: fx.Node) -> TraceError:
    name = str(view.target).removeprefix("aten.").removesuffix(".default")
    kind = WrittenDropoutError if name == "dropout" else TraceError
    return kind(
        f"{frame_of_text(write.meta.get('stack_trace') or '') or 'the model'}: writes in place where {name} gives the "
        "memory of the tensor that it is given, so that both change, which a program doesn't know: write y = y + 1 in "
        f"place of y += 1, or take a copy, {name}(...).clone()"
    )


def _memory(ops: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, tuple[fx.Node, ...]]]:
    """By each node whose memory something may write to: the node that made that, and the hidden views on the way."""
    hidden: dict[str, tuple[int, ...]] = {}
    memory: dict[fx.Node, tuple[fx.Node, tuple[fx.Node, ...]]] = {}
    for op in ops:
        sources, views = [*_operands(op, torch_internals.shared(op.target))], ()
        if not sources and _may_hide(op):
            if (key := _kind(op)) not in hidden:
                hidden[key] = _hidden(op)
            sources, views = [*_operands(op, hidden[key])], (op,)
        for source in sources:
            made, before = memory.setdefault(source, (source, ()))
            memory[op] = made, (*before, *views)
    return memory


def _operands(op: fx.Node, places: tuple[int, ...]) -> Iterator[fx.Node]:
    for place in places:
        given = op.args[place] if place < len(op.args) else None
        if isinstance(given, fx.Node):
            yield given
        elif isinstance(given, list | tuple):
            yield from (each for each in given if isinstance(each, fx.Node))


def _may_hide(op: fx.Node) -> bool:
    is_kept = str(op.target) == _DROPOUT or torch_internals.stays(op.target)
    if not (is_kept and torch_recording.is_composite(str(op.target))):
        return False
    # Of tensors within vmap nothing can be computed when it has ended.
    values = [node.meta.get("val") for node in op.all_input_nodes]
    return all(
        isinstance(x, Tensor) and torch_internals.has_storage(x) and all(type(size) is int for size in x.shape)
        for x in values
    )


def _kind(op: fx.Node) -> str:
    """All that tells with what its results share memory, as text."""
    tensors = _tensors(op)
    types = [f"{tuple(x.shape)} {x.stride()} {x.dtype}" for x in tensors.values()]
    number = {node: slice(index) for index, node in enumerate(tensors)}  # no op takes slices
    return f"{op.target} {fx.map_arg((op.args, op.kwargs), number.__getitem__)} {types}"


def _tensors(op: fx.Node) -> dict[fx.Node, Tensor]:
    return {node: node.meta["val"] for node in op.all_input_nodes}


def _hidden(op: fx.Node) -> tuple[int, ...]:
    """The positions of the arguments whose memory the results have, if decomposing loses that."""
    if str(op.target) == _DROPOUT:  # here it gives a copy of its input
        given = {**dict(zip(("input", "p", "train"), op.args, strict=False)), **op.kwargs}
        return () if given["train"] and given["p"] else (0,)
    known, mode = _tensors(op), torch_internals.fake_mode(repeats=False)
    target: Any = op.target
    with mode, torch.no_grad():
        made = {node: torch_internals.fake_tensor(mode, x.detach()) for node, x in known.items()}
        args, kwargs = fx.map_arg((op.args, op.kwargs), made.__getitem__)
        try:
            results = torch_internals.flatten(target(*args, **kwargs))[0]
        except RuntimeError:  # it needs what was there when it was traced, such as autocast: nothing is known of it
            return ()
    # An operand that is given back is known as what it is.
    own = {id(x) for x in made.values()}
    memory = {torch_internals.storage_key(x) for x in results if isinstance(x, Tensor) and id(x) not in own}
    given = [torch_internals.flatten(arg)[0] for arg in cast("tuple[Any, ...]", args)]
    shared = tuple(
        place
        for place, leaves in enumerate(given)
        if any(isinstance(x, Tensor) and torch_internals.storage_key(x) in memory for x in leaves)
    )
    return () if shared and _is_followed(op, made) else shared


def _is_followed(op: fx.Node, operands: Mapping[fx.Node, Tensor]) -> bool:
    """Whether decomposing finds that who writes to what `op` gives writes to an operand; or nobody can write there."""
    graph = fx.Graph()
    inputs = {node: graph.placeholder(f"x{index}") for index, node in enumerate(operands)}
    copy = graph.node_copy(op, inputs.__getitem__)
    written = copy if isinstance(op.meta["val"], Tensor) else graph.call_function(getitem, (copy, 0))
    graph.call_function(torch.ops.aten.zero_.default, (written,))
    graph.output((written,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    try:
        exported = torch.export.export(module, tuple(operands.values()), strict=False)
        specs = torch_internals.run_decompositions(exported).graph_signature.output_specs
    except RuntimeError:  # memory that has an entry twice
        return True
    return any(spec.kind is OutputKind.USER_INPUT_MUTATION for spec in specs)
