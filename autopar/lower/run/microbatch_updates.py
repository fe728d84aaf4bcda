"""Buffers that every microbatch updates: those of modules in which an op takes each microbatch for the whole batch.

Only what a user named does so (`microbatches.time_assignment`).  It is what one device does that trains on the
microbatches one after the other and adds up their gradients, so its modules' other buffers (a count of batches) follow
it.  All other buffers are updated once a step, as by the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ops import family_of
from autopar.plan import Plan
from autopar.program import Op, Program
from autopar.step.layer.value_flows import option_of

__all__ = ["ops_per_microbatch", "updates_per_microbatch"]


def ops_per_microbatch(program: Program, plan: Plan) -> tuple[Op, ...]:
    """The ops that take each microbatch of `plan` for the whole batch."""
    ops: list[Op] = []
    for layer, planned in zip(program.layers, plan.layers, strict=True):
        factors = plan.strategies[planned.strategy].time if plan.num_microbatches > 1 else ()
        # A kernel joins the statistics of slices; in time nothing joins them.
        ops += [op for op, factor in zip(layer.ops, factors, strict=False) if option_of(op, factor).kernel]
    return tuple(ops)


def updates_per_microbatch(program: Program, plan: Plan) -> Mapping[str, str]:
    """Name in the module of each such buffer -> the value that replaces it after a microbatch."""
    own = (op for op in ops_per_microbatch(program, plan) if family_of(op.target).count_arg < 0)
    modules = {op.module for op in own}
    module_of = {name: op.module for layer in program.layers for op in layer.ops for name in op.results}
    return {program.parameters[buffer]: new for buffer, new in program.updates.items() if module_of.get(new) in modules}
