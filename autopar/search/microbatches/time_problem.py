"""The axis in time as a problem: what placements values may have in microbatches, and what ties them.

An exact way to run in microbatches is a choice of one option per op such that every operand's placement follows by a
free move from the placement of its value (`microbatches.time_assignment`).  Layers of one kind get the same choice.
The search is arc consistency over the sets of placements that values can have, then one pass of choices with
propagation; the number of variables is that of the layer *kinds*, not of the layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopar.ops import family_of
from autopar.ops.halos import space_dim
from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Placement, shard
from autopar.program import Layer, Op, Option, Program

__all__ = [
    "TimeConstraint", "TimeProblem", "Variable", "build_problem", "choose", "is_named", "narrow",
    "only_rows", "option_per_microbatch", "propagate_forward", "without_whole_batches",
]  # fmt: skip

Variable = tuple[int, str, int, int]  # layer kind, "state" | "input" | "op", position, index of the result


@dataclass
class TimeConstraint:
    """One op of one layer kind, or (without an op) a value that crosses from one layer to another."""

    kind: int
    op: Op | None
    operands: tuple[Variable, ...]
    results: tuple[Variable, ...]
    options: list[Option]


@dataclass
class TimeProblem:
    """Every variable's possible placements, and what ties them."""

    domains: dict[Variable, set[Placement]] = field(default_factory=dict[Variable, set[Placement]])
    differentiable: set[Variable] = field(default_factory=set[Variable])
    state: set[Variable] = field(default_factory=set[Variable])
    crossing: set[Variable] = field(default_factory=set[Variable])
    of_batch: set[Variable] = field(default_factory=set[Variable])  # computed from inputs, not from state alone
    constraints: list[TimeConstraint] = field(default_factory=list[TimeConstraint])
    readers: dict[Variable, list[TimeConstraint]] = field(default_factory=dict[Variable, list[TimeConstraint]])
    final: dict[Variable, set[str]] = field(default_factory=dict[Variable, set[str]])


def build_problem(program: Program, num_microbatches: int, per_microbatch: Sequence[str]) -> TimeProblem:
    """The problem of `program` in so many microbatches; `per_microbatch` as in `time_assignment`."""
    problem = TimeProblem()
    producer = _producers(program)
    crossing: dict[tuple[Variable, Variable], None] = {}
    seen: set[int] = set()
    for layer in program.layers:
        names = _layer_variables(layer)
        for name, variable in names.items():
            if name in program.with_gradient:
                problem.differentiable.add(variable)
        for position, name in enumerate(layer.inputs):
            target = (layer.kind, "input", position, 0)
            if name in producer:
                crossing.setdefault((producer[name], target))
                problem.crossing.add(target)
            else:  # a model input: whole, and without a gradient
                problem.domains.setdefault(target, set()).add(REPLICATE)
                problem.of_batch.add(target)
    for layer in program.kinds:
        seen.add(layer.kind)
        _add_layer(problem, layer, num_microbatches, _named_ops(program, layer, per_microbatch))
    for source, target in crossing:
        problem.constraints.append(TimeConstraint(source[0], None, (source,), (target,), []))
    _order(problem)
    _follow_batch(problem)
    _require_outputs(problem, program, producer)
    for constraint in problem.constraints:
        for variable in (*constraint.operands, *constraint.results):
            problem.readers.setdefault(variable, []).append(constraint)
    return problem


def without_whole_batches(problem: TimeProblem) -> TimeProblem:
    """The problem if no microbatch computes anything that carries a gradient of the whole batch; changed in place."""
    for constraint in problem.constraints:
        if not problem.of_batch.isdisjoint(constraint.operands):
            constraint.options = [option for option in constraint.options if option.factor != "~"]
    return problem


def only_rows(problem: TimeProblem, variable: Variable) -> None:
    """Let microbatches slice the variable along dim 0 only; changed in place."""
    for constraint in problem.readers.get(variable, ()):
        constraint.options = [option for option in constraint.options if _slices_rows(constraint, option, variable)]


def _slices_rows(constraint: TimeConstraint, option: Option, variable: Variable) -> bool:
    pairs = zip(constraint.operands, option.operands, strict=True)
    return all(not placement.is_shard or placement == shard(0) for name, placement in pairs if name == variable)


def _producers(program: Program) -> dict[str, Variable]:
    return {
        name: (layer.kind, "op", position, index)
        for layer in program.layers
        for position, op in enumerate(layer.ops)
        for index, name in enumerate(op.results)
    }


def _layer_variables(layer: Layer) -> dict[str, Variable]:
    names: dict[str, Variable] = {}
    for what, group in (("input", layer.inputs), ("state", layer.state)):
        for position, name in enumerate(group):
            names[name] = (layer.kind, what, position, 0)
    for position, op in enumerate(layer.ops):
        for index, name in enumerate(op.results):
            names[name] = (layer.kind, "op", position, index)
    return names


def _named_ops(program: Program, layer: Layer, patterns: Sequence[str]) -> frozenset[int]:
    """The positions of ops that are named in every layer of this kind, as these run the same program."""
    same_kind = [other for other in program.layers if other.kind == layer.kind] if patterns else []
    positions = range(len(layer.ops)) if same_kind else ()
    return frozenset(p for p in positions if all(is_named(other.ops[p], patterns) for other in same_kind))


def _add_layer(problem: TimeProblem, layer: Layer, num_microbatches: int, named: frozenset[int]) -> None:
    names = _layer_variables(layer)
    for name in layer.state:
        variable = names[name]
        problem.state.add(variable)
        problem.domains[variable] = {REPLICATE}
    for position, op in enumerate(layer.ops):
        results = tuple((layer.kind, "op", position, index) for index in range(len(op.results)))
        operands = tuple(names[name] for name in op.operands)
        differentiable = any(result in problem.differentiable for result in results)
        options = _time_options(op, num_microbatches, differentiable, alone=position in named)
        problem.constraints.append(TimeConstraint(layer.kind, op, operands, results, options))


def _time_options(op: Op, num_microbatches: int, differentiable: bool, *, alone: bool) -> list[Option]:
    """The options that may be assigned to the axis in time, the preferred first.

    Without a gradient an op runs whole where it can (it may be needed whole, as a loss's denominator is).
    With one, "whole" would give its operands the same gradient from each microbatch, so only terms (``~``)
    and slices are right.
    """
    whole = {"-": REPLICATE, "~": BROADCAST}
    allowed = option_per_microbatch(op) if alone else None
    options = [
        option
        for option in op.options
        if option is allowed or not (option.kernel or option.collectives or space_dim(option.factor))
    ]
    for factor, placement in whole.items():
        if all(option.factor != factor for option in options):
            num_operands, num_results = len(op.operands), len(op.results)
            options.append(Option(factor, (placement,) * num_operands, (placement,) * num_results))
    fitting = [
        o
        for o in options
        if o.extent % num_microbatches == 0 and (not _runs_whole(o) if differentiable else o.factor != "~")
    ]
    rank = {"-": 0, "~": 3, "+": 2}
    return sorted(fitting, key=lambda o: (rank.get(o.factor, 1), min((p.dim for p in o.results), default=0)))


def _runs_whole(option: Option) -> bool:
    """Also as ``~``, where the op's backward takes no terms of a gradient."""
    return option.factor in "-~" and BROADCAST not in option.operands


def _order(problem: TimeProblem) -> None:
    """Constraints in an order in which, except for links between kinds, values are defined before they are read."""
    waiting = deque(problem.constraints)
    known = set(problem.domains)
    ordered: list[TimeConstraint] = []
    skipped = 0
    while waiting:
        constraint = waiting.popleft()
        if skipped <= len(waiting) and not all(operand in known for operand in constraint.operands):
            waiting.append(constraint)
            skipped += 1
            continue
        skipped = 0
        ordered.append(constraint)
        known.update(constraint.results)
    problem.constraints[:] = ordered


def _follow_batch(problem: TimeProblem) -> None:
    before = -1
    while before != len(problem.of_batch):
        before = len(problem.of_batch)
        for constraint in problem.constraints:
            if not problem.of_batch.isdisjoint(constraint.operands):
                problem.of_batch.update(constraint.results)


def _require_outputs(problem: TimeProblem, program: Program, producer: Mapping[str, Variable]) -> None:
    for name in program.outputs:
        if name in producer:
            value = program.values[name]
            joined = ({"P"} if value.can_be_loss else {"S"}) if not program.loss and value.requires_grad else set("RSP")
            problem.final.setdefault(producer[name], joined)
    for name in (*program.updates.values(), *program.tail_reads):
        if name in producer:
            problem.final[producer[name]] = {"P"} if program.values[name].requires_grad else {"R", "P"}
    if program.loss in producer:
        problem.final[producer[program.loss]] = {"P"}


def _is_free(problem: TimeProblem, variable: Variable, source: Placement, target: Placement) -> bool:
    if variable in problem.differentiable:
        # What is made of the batch is never computed whole by all microbatches for one of them to keep.
        is_kept_in_first = (source, target) == (BROADCAST, PARTIAL) and variable not in problem.of_batch
        return source == target or (variable in problem.state and target == BROADCAST) or is_kept_in_first
    whole = source.kind in "RB"
    # What crossed a boundary may be sharded on devices, and the axis in time is outside of those.
    targets = "RBP" if variable in problem.crossing else "RBPS"
    return source == target or (whole and target.kind in targets)


def _operands_fit(problem: TimeProblem, constraint: TimeConstraint, option: Option) -> bool:
    return all(
        any(_is_free(problem, variable, source, target) for source in problem.domains.get(variable, ()))
        for variable, target in zip(constraint.operands, option.operands, strict=True)
    )


def propagate_forward(problem: TimeProblem) -> TimeConstraint | None:
    """Grow every variable's placements from what it is computed from; that of the first op that can't run, or None.

    Layers of one kind follow each other, so the order has loops; the sets only grow, so repeating ends.
    """
    changed = True
    while changed:
        changed = False
        for constraint in problem.constraints:
            before = sum(len(problem.domains.get(result, ())) for result in constraint.results)
            _grow(problem, constraint)
            changed |= sum(len(problem.domains[result]) for result in constraint.results) != before
    for constraint in problem.constraints:
        if constraint.op is not None and not all(problem.domains[result] for result in constraint.results):
            return constraint
    return None


def _grow(problem: TimeProblem, constraint: TimeConstraint) -> None:
    if constraint.op is None:
        problem.domains.setdefault(constraint.results[0], set()).update(problem.domains.get(constraint.operands[0], ()))
        return
    for result in constraint.results:
        problem.domains.setdefault(result, set())
    for option in constraint.options:
        if _operands_fit(problem, constraint, option):
            for result, placement in zip(constraint.results, option.results, strict=True):
                problem.domains[result].add(placement)


def narrow(problem: TimeProblem, start: Iterable[TimeConstraint]) -> Op | None:
    """Remove placements and options that fit nothing, until all fit; an op without any left, or None."""
    for variable, kinds in problem.final.items():
        problem.domains[variable] = {p for p in problem.domains[variable] if p.kind in kinds}
    queue = deque(start)
    queued = {id(constraint) for constraint in queue}
    while queue:
        constraint = queue.popleft()
        queued.discard(id(constraint))
        changed = _revise(problem, constraint)
        if changed is None:
            return constraint.op or _op_of(problem, constraint)
        for variable in changed:
            for reader in problem.readers[variable]:
                if reader is not constraint and id(reader) not in queued:
                    queue.append(reader)
                    queued.add(id(reader))
    return None


def _revise(problem: TimeProblem, constraint: TimeConstraint) -> set[Variable] | None:
    """Make one constraint consistent: the variables that it narrowed, or None if nothing is left."""
    if constraint.op is None:
        allowed = _crossing_pairs(problem, constraint)
    else:
        constraint.options = [option for option in constraint.options if _fits(problem, constraint, option)]
        allowed = _allowed_by_options(problem, constraint)
    changed: set[Variable] = set()
    for variable, placements in allowed.items():
        kept = problem.domains[variable] & placements
        if not kept:
            return None
        if kept != problem.domains[variable]:
            problem.domains[variable] = kept
            changed.add(variable)
    return changed


def _crossing_pairs(problem: TimeProblem, constraint: TimeConstraint) -> dict[Variable, set[Placement]]:
    """A value keeps its placement where it crosses."""
    source, target = constraint.operands[0], constraint.results[0]
    both = problem.domains[source] & problem.domains[target]
    return {source: both, target: both}


def _fits(problem: TimeProblem, constraint: TimeConstraint, option: Option) -> bool:
    return _operands_fit(problem, constraint, option) and all(
        placement in problem.domains[result]
        for result, placement in zip(constraint.results, option.results, strict=True)
    )


def _allowed_by_options(problem: TimeProblem, constraint: TimeConstraint) -> dict[Variable, set[Placement]]:
    allowed: dict[Variable, set[Placement]] = {}
    for position, variable in enumerate(constraint.operands):
        targets = {option.operands[position] for option in constraint.options}
        fitting = {
            p for p in problem.domains[variable] if any(_is_free(problem, variable, p, target) for target in targets)
        }
        allowed[variable] = allowed.get(variable, fitting) & fitting
    for position, variable in enumerate(constraint.results):
        allowed[variable] = {option.results[position] for option in constraint.options}
    return allowed


def _op_of(problem: TimeProblem, constraint: TimeConstraint) -> Op | None:
    for variable in (*constraint.results, *constraint.operands):
        for other in problem.constraints:
            if other.op is not None and variable in (*other.results, *other.operands):
                return other.op
    return None


def choose(problem: TimeProblem, constraint: TimeConstraint) -> bool:
    """Fix a constraint to the first of its options that leaves the rest solvable."""
    if constraint.op is None:
        return True
    choices = list(constraint.options)
    domains = dict(problem.domains)
    options = [list(other.options) for other in problem.constraints] if len(choices) > 1 else []
    for option in choices:
        constraint.options = [option]
        if narrow(problem, [constraint]) is None:
            return True
        problem.domains = dict(domains)
        for other, before in zip(problem.constraints, options, strict=False):
            other.options = list(before)
    return False


def option_per_microbatch(op: Op) -> Option | None:
    """The option in which `op` takes a slice of the batch, or its term of a sum, for all of it, if it can do so."""
    kernels = family_of(op.target).kernels
    for option in op.options:
        is_part = option.operands[:1] in ((shard(0),), (PARTIAL,))
        if is_part and option.kernel in kernels and kernels[option.kernel].uses_statistics:
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
