"""Programs that run texts of any length up to their own: checks that the model runs the same ops for all lengths, and
makes ops that select the last entry take its index as an input.
"""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ops import with_rule
from autopar.program import Layer, Op, Program, Ref, TensorType, Value
from autopar.trace.calls.signature import CallForm, call_form
from autopar.trace.calls.structure import describe
from autopar.trace.module_attributes.model_copies import copy_with
from autopar.trace.padded.prefixes import PaddingError

__all__ = ["check_one_graph", "reading_last_entry"]

_LAST = "last_entry"
_SIZES = {"sym_size.int", "sym_constrain_range_for_size.default", "sym_constrain_range.default"}


class _Flat(nn.Module):
    """Calls a model on a list of tensors, and returns one."""

    def __init__(self, model: nn.Module, form: CallForm) -> None:
        super().__init__()
        self.model = model
        self._form = form

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        args, kwargs = self._form.arguments(tensors)
        return describe(self.model(*args, **kwargs))[1]


def check_one_graph(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: range) -> None:
    """Check that `model`, in eval mode, runs the same code for all `sizes` of dim 1 of all tensors of a call.

    torch.export finds branches that depend on the size, and limits of it.  Numbers that the model computes from the
    size are refused, other than the size plus or minus a constant.

    Raises:
        PaddingError: it runs different code, or can't be exported with this dim dynamic.
    """
    made: dict[int, Tensor] = {}

    def swap(tensor: Tensor) -> Tensor:
        """A tensor without memory, as nothing is computed; on the CPU, where tensors that a forward creates are."""
        if id(tensor) not in made:
            like = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(like, requires_grad=False) if is_parameter else like
        return made[id(tensor)]

    copied = copy_with(model, [*model.parameters(), *model.buffers()], swap).eval()
    form, tensors = call_form(copied, args, kwargs, None)
    size = torch.export.Dim("length", min=sizes[0], max=sizes[-1])
    given = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in tensors)
    shapes = {"tensors": tuple({1: size} for _ in given)}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            exported = torch.export.export(_Flat(copied, form), given, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise PaddingError(f"the model does not run the same code for all lengths: {error}") from error
    _check_numbers(exported.graph)


def _check_numbers(graph: torch.fx.Graph) -> None:
    """Raise PaddingError for symbolic numbers other than a size plus or minus a constant."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            continue
        name = getattr(node.target, "__name__", str(node.target)).removeprefix("aten.")
        is_sum = node.target in (operator.add, operator.sub) and any(isinstance(x, int) for x in node.args)
        if name not in _SIZES and not is_sum:
            raise PaddingError(f"the model computes with its length: {node.format_node()}")


def reading_last_entry(program: Program, last: Mapping[str, int]) -> Program:
    """`program` with one more input, int64 of shape [1]: the index that ops use which selected the last entry.

    Args:
        program: a program of eval mode.
        last: names of ops that select the last entry of their first operand -> along which dim.

    Raises:
        PaddingError: such an op is in a layer that occurs several times, or selects from a buffer.
    """
    if not last:
        return program
    values = dict(program.values)
    values[_LAST] = Value(_LAST, TensorType((1,), "int64"), "input", False)
    layers: list[Layer] = []
    for layer in program.layers:
        readers = [op for op in layer.ops if op.name in last]
        if readers and sum(other.kind == layer.kind for other in program.layers) > 1:
            raise PaddingError(f"{readers[0].source}: several equal layers select the last entry")
        layers.append(_changed(layer, last, values) if readers else layer)
    if any(op.name in last for op in program.hoisted):
        raise PaddingError("the model selects the last entry of a buffer")
    text = f"{program.fingerprint} {sorted(last.items())}"
    return replace(
        program, values=values, layers=tuple(layers), inputs=(*program.inputs, _LAST),
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
    )  # fmt: skip


def _changed(layer: Layer, last: Mapping[str, int], values: dict[str, Value]) -> Layer:
    ops: list[Op] = []
    for op in layer.ops:
        ops += _taking(op, last[op.name], values) if op.name in last else [op]
    read = {name for op in ops for name in op.operands}
    state = tuple(name for name in layer.state if name in read)
    return replace(layer, ops=tuple(ops), state=state, inputs=(*layer.inputs, _LAST))


def _taking(op: Op, dim: int, values: dict[str, Value]) -> list[Op]:
    """The ops that select the entry at the input's index, in place of `op`."""
    source, result = values[op.operands[0]], values[op.results[0]]
    shape = (*source.type.shape[:dim], 1, *source.type.shape[dim + 1 :])
    keeps_dim = result.type.shape == shape
    taken = result.name if keeps_dim else f"{result.name}_kept"
    values[taken] = replace(result, name=taken, type=TensorType(shape, result.type.dtype))
    made = [_op(op, op.name, "aten.index_select.default", (Ref(source.name), dim, Ref(_LAST)), taken, values)]
    if not keeps_dim:
        made.append(_op(op, f"{op.name}_kept", "aten.squeeze.dim", (Ref(taken), dim), result.name, values))
    return made


def _op(like: Op, name: str, target: str, args: tuple[Any, ...], result: str, values: Mapping[str, Value]) -> Op:
    bare = Op(name, target, args, (), (result,), source=like.source, module=like.module)
    return with_rule(bare, tuple(values[each].type for each in bare.operands), (values[result].type,))
