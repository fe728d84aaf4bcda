"""Which ops must run once a step, on sums over the whole batch, for microbatches to be exact.

Where values that carry terms of sums over microbatches meet in an op that takes no terms, the totals are needed: that
op, and all that read its result, go to the program's tail (`variants.tail`).  That is possible where they are few
small tensors and nothing before the loss reads them again: balance losses of experts, a root of a mean, a ratio of
two sums, biases that a forward updates by what all tokens chose.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.placement import BROADCAST, PARTIAL, REPLICATE
from autopar.program import Op, Program
from autopar.search.microbatches.time_assignment import time_assignment
from autopar.search.microbatches.time_problem import (
    TimeConstraint,
    TimeProblem,
    Variable,
    build_problem,
    propagate_forward,
    without_whole_batches,
)
from autopar.step.variants.tail import with_tail

__all__ = ["late_program"]

_SMALL_BYTES = 1 << 24
"""Of all that the tail reads and makes: every device has it whole, for each microbatch.  Statistics of 256 experts in
60 layers take 0.1 MiB; a matrix of similarities of a batch, whose rows are no sums anyway, would be larger."""


def late_program(program: Program, num_microbatches: int, per_microbatch: Sequence[str] = ()) -> Program | None:
    """`program` with a tail, so that so many microbatches are exact; None if that is not enough, or not needed.

    `per_microbatch` as in `time_assignment`.
    """
    names = _late_ops(program, num_microbatches, per_microbatch)
    if not names:
        return None
    made = with_tail(program, names)
    sizes = {name for op in made.tail for name in (*op.operands, *op.results)}
    if not made.layers or sum(program.type_of(name).num_bytes for name in sizes) > _SMALL_BYTES:
        return None
    return None if isinstance(time_assignment(made, num_microbatches, per_microbatch=per_microbatch), str) else made


def _late_ops(program: Program, num_microbatches: int, per_microbatch: Sequence[str]) -> tuple[str, ...]:
    """The names of the ops that microbatches can't get through, and of all behind them; () if there are none, or what
    they read are not sums.
    """
    problem = without_whole_batches(build_problem(program, num_microbatches, per_microbatch))
    late: list[TimeConstraint] = []
    made: set[Variable] = set()
    while (stuck := propagate_forward(problem)) is not None:
        behind = _with_all_behind(problem, stuck)
        made.update(variable for each in behind for variable in each.results)
        late += behind
        problem.constraints = [each for each in problem.constraints if not any(each is other for other in behind)]
    if not all(_takes_sums(problem, each, made) for each in late):
        return ()
    late += _absorbed(program, problem, late)
    ops = {(each.kind, each.op.name) for each in late if each.op is not None}
    places = {
        (kind.kind, place) for kind in program.kinds for place, op in enumerate(kind.ops) if (kind.kind, op.name) in ops
    }
    return tuple(
        op.name for layer in program.layers for place, op in enumerate(layer.ops) if (layer.kind, place) in places
    )


def _with_all_behind(problem: TimeProblem, stuck: TimeConstraint) -> list[TimeConstraint]:
    behind, made = [stuck], set(stuck.results)
    before = 0
    while before != len(behind):
        before = len(behind)
        for each in problem.constraints:
            if not made.isdisjoint(each.operands) and not any(each is other for other in behind):
                behind.append(each)
                made.update(each.results)
    return behind


def _absorbed(program: Program, problem: TimeProblem, late: list[TimeConstraint]) -> list[TimeConstraint]:
    """The small ops before these that nothing else reads and that read one sum: so they round as on one device.

    What adds up several sums stays: devices then reduce one of them.
    """
    known = {id(each) for each in late}
    absorbed: list[TimeConstraint] = []
    for each in reversed(problem.constraints):
        readers = [reader for variable in each.results for reader in problem.readers[variable] if reader is not each]
        is_alone = bool(readers) and all(id(reader) in known for reader in readers)
        if not is_alone or any(variable in problem.final for variable in each.results):
            continue
        sums = [variable for variable in each.operands if REPLICATE not in problem.domains[variable]]
        if each.op is None or (len(sums) < 2 and _is_small(program, each.op) and _takes_sums(problem, each, set())):
            known.add(id(each))
            absorbed.append(each)
    return absorbed


def _is_small(program: Program, op: Op) -> bool:
    """Whether the op reads no more than it makes, and could run behind all layers."""
    made = max(program.type_of(name).num_elements for name in op.results)
    is_free = not (op.is_random or op.has_collectives)
    read = [program.values[name] for name in op.operands]
    return is_free and bool(read) and all(v.role != "parameter" and v.type.num_elements <= made for v in read)


def _takes_sums(problem: TimeProblem, late: TimeConstraint, made: set[Variable]) -> bool:
    """Whether all that an op reads of layers is a sum, or, without gradients, whole in every microbatch."""
    for variable in late.operands:
        if variable in made:
            continue
        domain = problem.domains.get(variable, set())
        if variable in problem.differentiable:
            if PARTIAL not in domain or (variable in problem.state and BROADCAST not in domain):
                return False
        elif not domain & {PARTIAL, REPLICATE, BROADCAST}:
            return False
    return True
