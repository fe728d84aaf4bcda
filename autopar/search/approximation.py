"""Ops that need the whole batch but may, where the user says so by name, take each microbatch for all of it.

What comes out is another number than one device's, so it is never chosen without a constraint, and the plan says it.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from autopar.ops import family_of
from autopar.placement import shard
from autopar.program import Op, Option

__all__ = ["PER_MICROBATCH", "is_named", "option_per_microbatch"]

PER_MICROBATCH = "per_microbatch"  # the constraint: "batch_norm: per_microbatch"


def option_per_microbatch(op: Op) -> Option | None:
    """The option in which `op` reads a slice of the batch and uses the statistics of that slice, if it can do so."""
    kernels = family_of(op.target).kernels
    for option in op.options:
        if option.kernel in kernels and kernels[option.kernel].uses_statistics and option.operands[0] == shard(0):
            return option
    return None


def is_named(op: Op, patterns: Collection[str]) -> bool:
    """Whether one of `patterns` names the op (``"batch_norm"``), or a module that it is in."""
    names = (op.target, op.target.partition(".")[2])
    return any(
        any(fnmatchcase(name, pattern) for name in names)
        or bool(op.module and (fnmatchcase(op.module, pattern) or fnmatchcase(op.module, f"{pattern}.*")))
        for pattern in patterns
    )
