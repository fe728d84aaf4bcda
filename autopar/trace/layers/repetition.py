"""Where a program repeats: by its modules, or, without any, by the pattern of its ops.

Both give *runs*: consecutive ops that belong together.  `autopar.trace.layers.cutting` makes layers of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.program import Op, TensorType, iter_refs

__all__ = ["MAX_OPS", "MIN_OPS", "OpSpan", "find_period", "module_runs", "op_signature"]

MIN_OPS = 6  # a repetition with fewer ops is no layer of its own
MAX_OPS = 150  # the search inside a layer grows faster than linearly with its ops


@dataclass(frozen=True)
class OpSpan:
    """Ops `start` to `stop` (exclusive); `unit` is the path of the repeated module that ran them, "" between those."""

    start: int
    stop: int
    unit: str

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def places(self) -> range:
        """The positions of its ops."""
        return range(self.start, self.stop)


def module_runs(ops: Sequence[Op], classes: Mapping[str, str]) -> list[OpSpan]:
    """Cut `ops` where repeated sibling modules begin and end; one run without a unit if no module repeats."""
    units = _repeated_modules(ops, classes)
    owners = [_owner(op.module, units) for op in ops]
    runs: list[OpSpan] = []
    for unit, group in groupby(enumerate(owners), key=lambda pair: pair[1]):
        places = [index for index, _ in group]
        runs.append(OpSpan(places[0], places[-1] + 1, unit))
    return _attach_glue(ops, runs)


def _repeated_modules(ops: Sequence[Op], classes: Mapping[str, str]) -> frozenset[str]:
    """Paths of modules that have siblings of the same class, each with enough ops, not too many; outermost first."""
    sizes: Counter[str] = Counter()
    for op in ops:
        parts = op.module.split(".")
        sizes.update(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    families: dict[tuple[str, str], list[str]] = {}
    for path in sizes:
        parent, _, last = path.rpartition(".")
        if last.isdigit() and path in classes:
            families.setdefault((parent, classes[path]), []).append(path)
    chosen: set[str] = set()
    for (parent, _), members in sorted(families.items(), key=lambda item: item[0][0].count(".")):
        typical = sorted(sizes[path] for path in members)[len(members) // 2]
        inside = any(parent == path or parent.startswith(path + ".") for path in chosen)
        if len(members) > 1 and MIN_OPS <= typical <= MAX_OPS and not inside:
            chosen.update(members)
    return frozenset(chosen)


def _owner(module: str, units: frozenset[str]) -> str:
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        if (path := ".".join(parts[:depth])) in units:
            return path
    return ""


def _attach_glue(ops: Sequence[Op], runs: Sequence[OpSpan]) -> list[OpSpan]:
    """Give the few ops between two repetitions to the one before; the same ops after the last one too."""
    made: list[OpSpan] = []
    glue: tuple[str, ...] = ()
    for index, run in enumerate(runs):
        follows = bool(made) and made[-1].unit != "" and run.unit == ""
        is_between = follows and index + 1 < len(runs) and len(run) < MIN_OPS
        targets = tuple(op.target for op in ops[run.start : run.stop])
        if is_between:
            glue = targets
            made[-1] = OpSpan(made[-1].start, run.stop, made[-1].unit)
        elif follows and glue and targets[: len(glue)] == glue:
            made[-1] = OpSpan(made[-1].start, run.start + len(glue), made[-1].unit)
            made.append(OpSpan(run.start + len(glue), run.stop, ""))
        elif made and run.unit and made[-1].unit == run.unit:
            made[-1] = OpSpan(made[-1].start, run.stop, run.unit)
        else:
            made.append(run)
    return [run for run in made if len(run)]


def find_period(signatures: Sequence[int], longest: int | None = None) -> tuple[int, int, int] | None:
    """The stretch of a sequence that repeats most: ``(start, period, repetitions)``, or None; no period is longer than
    `longest`.

    >>> find_period([7, 1, 2, 1, 2, 1, 2, 9])
    (1, 2, 3)
    """
    best: tuple[int, int, int] | None = None
    best_covered = 0
    for period in range(1, min(len(signatures) // 2, longest or len(signatures)) + 1):
        start = 0
        while start + 2 * period <= len(signatures):
            stop = start + period
            while stop < len(signatures) and signatures[stop] == signatures[stop - period]:
                stop += 1
            repetitions = (stop - start) // period
            if repetitions > 1 and repetitions * period > best_covered:
                best, best_covered = (start, period, repetitions), repetitions * period
            start = max(start + 1, stop - period + 1)
    return best


def op_signature(op: Op, types: Mapping[str, TensorType]) -> int:
    """A number that is equal for ops with the same target, literals, and types of operands and results."""
    shape = tuple((types[name].shape, types[name].dtype) for name in (*op.operands, *op.results))
    literals = tuple(repr(arg) for arg in op.args if not any(iter_refs(arg)))
    return hash((op.target, literals, shape))
