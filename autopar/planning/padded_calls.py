"""Calls that run padded: batches with additional rows that the loss ignores, texts with additional positions that no
earlier position attends to.

The padded call is traced too, `padded.prefixes` proves that it computes the same, and outputs are cut back to
their own size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputShapeError
from autopar.lower.compat import map_leaves
from autopar.lower.run.call_inputs import Call
from autopar.lower.run.lowering import Cuts, Executable
from autopar.plan import Plan
from autopar.program import Program
from autopar.search.microbatches.row_sums import RowPieces
from autopar.step.layer.data_split import data_split
from autopar.trace import LongerProgram, PaddingError, Traced, call_opener, reading_last_entry

__all__ = [
    "as_any_length",
    "as_longer",
    "is_growing",
    "lengths_of",
    "padded_lengths",
    "padded_rows",
    "with_pieces",
    "with_rows",
    "with_size",
]

# Texts are padded to a multiple of it.  Each multiple needs a plan, which takes about a second; more would be padding.
_LENGTH_STEP = 64


def padded_rows(rows: int, known: Sequence[tuple[Program, Plan]]) -> list[int]:
    """The numbers of rows that a batch may be padded to so that it splits as known plans split theirs, ascending.

    Less than twice `rows`: with more, replicating the batch on every device would be as fast.
    """
    parts = {data_split(program, plan.decisions).size for program, plan in known}
    return sorted({-(-rows // size) * size for size in parts if rows % size and -(-rows // size) * size < 2 * rows})


def is_growing(program: Program, made: Sequence[Executable]) -> bool:
    """Whether the inputs are texts ``[rows, positions]`` and earlier calls had texts of other lengths, as in a loop
    that samples one token a call.
    """
    kinds = [program.type_of(name) for name in program.inputs]
    first = kinds[0].shape
    if len(first) != 2 or first[1] < 2 or any(kind.shape != first or kind.is_floating for kind in kinds):
        return False
    return any(
        [name for name in each.program.inputs if name in program.inputs] == list(program.inputs)
        and all(each.program.type_of(name).shape[:1] == first[:1] for name in program.inputs)
        and any(each.program.type_of(name).shape[1:] != first[1:] for name in program.inputs)
        for each in made
    )


def padded_lengths(length: int, known: Sequence[Program]) -> list[int]:
    """The lengths that a text may be padded to: a multiple, or, if the model refuses that, one that came before."""
    longest = -(-length // _LENGTH_STEP) * _LENGTH_STEP
    shapes = (program.type_of(program.inputs[0]).shape for program in known)
    others = {shape[1] for shape in shapes if len(shape) == 2 and length < shape[1] < longest}
    return [] if longest == length else [longest, *sorted(others, reverse=True)]


def lengths_of(longest: int) -> range:
    """The lengths that are padded to `longest`.  Not length 1, which models may treat as a step with a cache."""
    return range(max(2, (longest - 1) // _LENGTH_STEP * _LENGTH_STEP + 1), longest + 1)


def as_any_length(short: Traced, long: Traced, plan: Plan, known: LongerProgram, sizes: range) -> Executable:
    """An executable for calls as that of `short` with texts of any of the `sizes`, up to that of `long`.

    Raises:
        PaddingError: an output is padded along a dim that is not as long as the text.
    """
    (rows, own), (_, most) = (t.program.type_of(t.program.inputs[0]).shape for t in (short, long))
    for name, lengths in known.cuts.items():
        if any(size != own or long.program.type_of(name).shape[dim] != most for dim, size in lengths.items()):
            raise PaddingError(f"output {name} is padded but is not as long as the text")

    def length_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        lengths = {x.shape[1] for x in tensors if x.dim() == 2}
        if len(lengths) != 1 or any(x.dim() != 2 for x in tensors) or min(lengths) not in sizes:
            raise InputShapeError(f"the plan was made for texts of {sizes[0]} to {sizes[-1]} tokens")
        return lengths.pop()

    def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        length = length_of(args, kwargs)

        def pad(x: Any) -> Any:
            return _pad(x, (x.shape[0], most), None) if isinstance(x, Tensor) else x

        args, kwargs = map_leaves(pad, (tuple(args), dict(kwargs)))
        tensors = list(long.flatten_inputs(args, kwargs))
        last = [torch.tensor([length - 1], device=tensors[0].device)] if known.last else []
        return [*tensors, *last]

    def cuts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cuts:
        length = length_of(args, kwargs)
        return {name: dict.fromkeys(lengths, length) for name, lengths in known.cuts.items()}

    form = ", ".join(f"{name} [{rows}, {sizes[0]} to {most}]" for name in short.program.inputs)
    program = reading_last_entry(long.program, known.last)
    return Executable(
        program, plan, long.constants, flatten, long.unflatten_outputs, cuts=cuts, form=form,
        read_values=frozenset(long.read_values), questions=long.questions, outside=long.outside,
    )  # fmt: skip


def with_size(tree: Any, dim: int, size: int, longer: int) -> Any:
    """The arguments of a call in which tensors of `size` along `dim` have size `longer` there, on the meta device."""

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() <= dim or x.shape[dim] != size:
            return x
        shape = (*x.shape[:dim], longer, *x.shape[dim + 1 :])
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    return map_leaves(change, tree)


def with_rows(tree: Any, before: tuple[int, ...], after: tuple[int, int]) -> Any:
    """The arguments of a call with other numbers of rows and of tokens a row; what changes is on the meta device.

    A dim 0 with as many entries as there are rows is taken for rows, any other dim with as many as tokens for tokens.
    """
    (rows, tokens), (rows_after, room) = before, after
    sizes: list[int] = []
    map_leaves(lambda x: sizes.append(x.dim()) if isinstance(x, Tensor) else None, tree)
    made: Any = with_size(tree, 0, rows, rows_after)
    for dim in range(1, max(sizes)):
        made = with_size(made, dim, tokens, room)
    return made


def with_pieces(model: nn.Module, call: Call, like: Call, pieces: RowPieces | None, count: int = 0) -> Call:
    """The call with so many pieces, which are like those of the call `like` in all else; 0: as many as that has."""
    if pieces is None:
        return call
    open_call = call_opener(model)
    forms = open_call(*like).named
    made: dict[int, Tensor] = {}
    for name, x in open_call(*call).named.items():
        if name in pieces.inputs:
            shape = forms[name].shape
            made[id(x)] = torch.empty(count or shape[0], *shape[1:], dtype=x.dtype, device="meta")
    args, kwargs = map_leaves(lambda x: made.get(id(x), x), call)
    return args, kwargs


def as_longer(short: Traced, long: Traced, plan: Plan, known: LongerProgram, fills: Mapping[str, int]) -> Executable:
    """An executable that runs calls of `short` padded, by the `plan` of `long`."""
    names = long.program.inputs
    shapes = [long.program.type_of(name).shape for name in names]

    def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        tensors = short.flatten_inputs(args, kwargs)
        return [_pad(x, shape, fills.get(name)) for name, x, shape in zip(names, tensors, shapes, strict=True)]

    own = ((name, short.program.type_of(name)) for name in short.program.inputs)
    form = ", ".join(f"{name} {list(kind.shape)} {kind.dtype}" for name, kind in own)
    cuts = _always(known.cuts)
    return Executable(
        long.program, plan, long.constants, flatten, short.unflatten_outputs, cuts=cuts, form=form,
        read_values=frozenset(short.read_values), questions=short.questions, outside=long.outside,
    )  # fmt: skip


def _always(cuts: Cuts) -> Callable[[Sequence[Any], Mapping[str, Any]], Cuts]:
    return lambda args, kwargs: cuts


def _pad(x: Tensor, shape: Sequence[int], fill: int | None) -> Tensor:
    """`x` padded at the end with `fill`, or else with copies of its last entries, which are valid values."""
    for dim, size in enumerate(shape):
        missing = size - x.shape[dim]
        if missing > 0:
            last = x.narrow(dim, x.shape[dim] - 1, 1)
            last = last if fill is None else torch.full_like(last, fill)
            repeats = [missing if place == dim else 1 for place in range(x.dim())]
            x = torch.cat([x, last.repeat(repeats)], dim)
    return x
