"""Products of statistics of which each microbatch takes its own for the whole batch's.

A balance loss multiplies two means over all tokens: one has no gradient (which part of them chose an expert), one has
(how probable each expert was).  Microbatches have terms of both.  `with_statistics` puts an op
``autopar.batch_statistic`` in front of each operand without a gradient; where a user allows it by name
(``"batch_statistic: per_microbatch"``), a microbatch takes its own term, times the number of microbatches, for the
sum.  The loss is then the mean of those of the microbatches, as if each were a batch, which is not what one device
computes of the whole one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from autopar.errors import PlanMismatchError
from autopar.ops import with_rule
from autopar.ops.statistics import BATCH_STATISTIC
from autopar.placement import PARTIAL, REPLICATE
from autopar.program import KernelCollective, Layer, Op, Option, Program, Ref, Value

__all__ = ["with_statistics"]


def with_statistics(program: Program, names: Collection[str]) -> Program:
    """`program` with such an op in front of each operand without a gradient of the ops of these names.

    Raises:
        PlanMismatchError: there are no such ops, or not in all layers of a kind.
    """
    if not names:
        return program
    missing = sorted(set(names) - {op.name for layer in program.layers for op in layer.ops})
    if missing:
        raise PlanMismatchError(f"statistics: the program has no op {missing[0]!r}")
    for kind in program.kinds:
        same_kind = [layer for layer in program.layers if layer.kind == kind.kind]
        if any(
            len({op.name in names for op in ops}) > 1 for ops in zip(*(each.ops for each in same_kind), strict=True)
        ):
            raise PlanMismatchError(
                f"statistics: of {', '.join(sorted(names))} only some are in layers like {kind.name}"
            )
    values = dict(program.values)
    layers = tuple(_with_statistics(layer, names, values) for layer in program.layers)
    ordered = tuple(op.name for layer in program.layers for op in layer.ops if op.name in names)
    return replace(program, layers=layers, values=values, statistics=ordered)


def _with_statistics(layer: Layer, names: Collection[str], values: dict[str, Value]) -> Layer:
    ops: list[Op] = []
    for op in layer.ops:
        if op.name in names:
            made = list(_statistics_of(op, values))
            ops += made
            op = op.reading({each.operands[0]: each.name for each in made})
        ops.append(op)
    return replace(layer, ops=tuple(ops)) if len(ops) > len(layer.ops) else layer


def _statistics_of(op: Op, values: dict[str, Value]) -> Iterator[Op]:
    for number, name in enumerate(dict.fromkeys(op.operands)):
        value = values[name]
        if value.role != "op" or value.requires_grad:
            continue
        own = f"{op.name}_statistic{number or ''}"
        values[own] = replace(value, name=own)
        made = replace(
            op, name=own, target=BATCH_STATISTIC, args=(Ref(name), 1), kwargs=(), results=(own,), options=(), saves=(),
            saved_extra_bytes=0, size_args=(), is_view=False,
        )  # fmt: skip
        made = with_rule(made, (value.type,), (value.type,))
        summed = KernelCollective("all_reduce", "forward", 0, dtype=value.type.dtype)
        batch = Option("batch", (PARTIAL,), (REPLICATE,), kernel="sum_statistic", collectives=(summed,))
        yield replace(made, options=(*made.options, batch))
