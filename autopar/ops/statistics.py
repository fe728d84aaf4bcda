"""Statistics of the batch without a gradient that meet others in a product, as the fractions of a balance loss do."""

from __future__ import annotations

from autopar.ops.family import Kernel, OpFamily, Types
from autopar.program import KernelCollective, Op

__all__ = ["BATCH_STATISTIC", "FAMILIES"]

BATCH_STATISTIC = "autopar.batch_statistic"
"""``(x, times)``: x, `times` of it where each of so many microbatches takes its own terms for the whole sum."""


def _collectives(op: Op, operand_types: Types) -> tuple[KernelCollective, ...]:
    return (KernelCollective("all_reduce", "forward", 0, dtype=operand_types[0].dtype),)


FAMILIES = (
    OpFamily(
        {BATCH_STATISTIC: "*, # -> * | plus 0"},
        function="batch_statistic",
        kernels={"sum_statistic": Kernel(_collectives, uses_statistics=True)},
        num_differentiable=0,
        count_arg=1,
    ),
)
