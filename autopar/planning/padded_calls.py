"""Calls that run as longer ones do: a batch with rows that don't count, cut off from what the caller gets.

The longer call is traced as well, and `autopar.trace.prefixes` says whether its outputs begin with those of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.lower.compat import map_leaves
from autopar.lower.run.lowering import Cuts, Executable
from autopar.plan import Plan
from autopar.program import Program
from autopar.step.data_split import data_split
from autopar.trace import LongerProgram, Traced

__all__ = ["as_longer", "padded_rows", "with_size"]


def padded_rows(rows: int, known: Sequence[tuple[Program, Plan]]) -> list[int]:
    """To how many rows a batch may be padded, so that it splits as others do, the fewest first.

    Less than twice as many: more would take as long as the whole batch on every device, or longer.
    """
    parts = {data_split(program, plan).size for program, plan in known}
    return sorted({-(-rows // size) * size for size in parts if rows % size and -(-rows // size) * size < 2 * rows})


def with_size(tree: Any, dim: int, size: int, longer: int) -> Any:
    """The arguments of a call, on the meta device, with the tensors that have `size` along `dim` longer there."""

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() <= dim or x.shape[dim] != size:
            return x
        shape = (*x.shape[:dim], longer, *x.shape[dim + 1 :])
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    return map_leaves(change, tree)


def as_longer(short: Traced, long: Traced, plan: Plan, known: LongerProgram, fills: Mapping[str, int]) -> Executable:
    """What runs the calls of `short` by the `plan` of `long`."""
    names = long.program.inputs
    wanted = [long.program.type_of(name).shape for name in names]

    def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        tensors = short.flatten_inputs(args, kwargs)
        return [_pad(x, shape, fills.get(name)) for name, x, shape in zip(names, tensors, wanted, strict=True)]

    own = ((name, short.program.type_of(name)) for name in short.program.inputs)
    form = ", ".join(f"{name} {list(kind.shape)} {kind.dtype}" for name, kind in own)
    cuts = _always(known.cuts)
    return Executable(long.program, plan, long.constants, flatten, short.unflatten_outputs, cuts=cuts, form=form)


def _always(cuts: Cuts) -> Callable[[Sequence[Any], Mapping[str, Any]], Cuts]:
    return lambda args, kwargs: cuts


def _pad(x: Tensor, shape: Sequence[int], fill: int | None) -> Tensor:
    """`x` in a longer shape, with `fill` behind it, or with its last entries again: numbers that the model may see."""
    for dim, size in enumerate(shape):
        missing = size - x.shape[dim]
        if missing > 0:
            last = x.narrow(dim, x.shape[dim] - 1, 1)
            last = last if fill is None else torch.full_like(last, fill)
            repeats = [missing if place == dim else 1 for place in range(x.dim())]
            x = torch.cat([x, last.repeat(repeats)], dim)
    return x
