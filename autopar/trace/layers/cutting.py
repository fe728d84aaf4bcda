"""Cutting a flat program into layers: contiguous, covering, of a sensible size.

Where modules repeat, each repetition is a layer, and so are the ops between them.  A stretch that is longer than
`MAX_OPS`, or that no module divides, is cut at its narrow places: positions that one value crosses divide it
into atoms; atoms that repeat become layers; what is left is cut where the fewest bytes cross (dynamic
programming).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from autopar.errors import TraceError
from autopar.trace.graph import Graph
from autopar.trace.layers.repetition import MAX_OPS, MIN_OPS, OpSpan, find_period, module_runs, op_signature

__all__ = ["Crossing", "LayerNeeds", "crossings", "cut_layers", "divide_layers"]

_FEWEST_ITERATIONS = 4  # of a loop; what repeats less, as queries, keys and values do, is cut where little crosses
# Layers of a long loop are searched once, but a pipeline may be cut between any two.  With layers of 150 ops, loops
# over LSTM cells took 4 times as long to plan as with layers of 80, for a step 2 % faster.
_LOOP_LAYERS = 4
_TARGET_OPS = 40  # about the ops of a transformer block, which is what a layer is where modules say so


@dataclass(frozen=True)
class LayerNeeds:
    """What layers are needed for.

    Args:
        stages_of: the pipeline stages that hold a parameter, by its name in the module; others may be anywhere.
        count: layers of which each reads a parameter, so that there can be as many stages.
    """

    stages_of: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    count: int = 1


@dataclass(frozen=True)
class Crossing:
    """What crosses a position between two ops: values that are computed before and read at or after it."""

    num_values: int
    num_bytes: int


def cut_layers(graph: Graph, classes: Mapping[str, str]) -> list[OpSpan]:
    """The ops of each layer, as runs that cover all ops in order; `classes` are those of the modules, by path."""
    crossing = crossings(graph)
    signatures = [op_signature(op, graph.types) for op in graph.ops]
    runs = module_runs(graph.ops, classes)
    repeats = any(run.unit for run in runs)
    layers: list[OpSpan] = []
    for run in runs:
        if run.unit or (repeats and len(run) <= MAX_OPS):
            layers.append(run)
        else:
            layers.extend(OpSpan(r.start, r.stop, "") for r in _cut_stretch(run.places, crossing, signatures))
    return _join_crumbs(layers)


def divide_layers(graph: Graph, layers: Sequence[OpSpan], needs: LayerNeeds) -> list[OpSpan]:
    """Cut layers again, until each can run in a pipeline stage that holds all parameters that it reads, and there are
    enough.

    Cuts for stages that hold parameters are where the fewest bytes cross.  Others go by ops alone, since the same model
    must be cut alike for inputs of all shapes.

    Args:
        graph: what the layers are of.
        layers: as `cut_layers` makes them.
        needs: what they are needed for; there are fewer if there is no place to cut.

    Raises:
        TraceError: there is no op to make the layers of that are needed.
    """
    if needs.count and not layers:
        raise TraceError(
            "forward runs no op on a tensor, it returns what it gets: there is nothing to plan or to train"
        )
    stages_of = needs.stages_of
    crossing = crossings(graph) if stages_of or len(layers) < needs.count else []
    made = _divide_for_stages(graph, layers, stages_of, crossing) if stages_of else list(layers)
    while len(made) < needs.count:
        readers = [_readers(graph, layer) for layer in made]
        most = max(range(len(made)), key=lambda i: len(readers[i]))
        if len(readers[most]) < 2:
            break
        place, layer = _middle(readers[most], crossing), made[most]
        made[most : most + 1] = [OpSpan(layer.start, place, ""), OpSpan(place, layer.stop, "")]
    return made


def _readers(graph: Graph, layer: OpSpan) -> list[int]:
    """The places of its ops that read parameters."""
    return [i for i in layer.places if any(graph.roles.get(name) == "parameter" for name in graph.ops[i].operands)]


def _middle(readers: Sequence[int], crossing: Sequence[Crossing]) -> int:
    """Where to cut, such that both sides have at least about a third of the ops that read parameters: of these places
    where the fewest values cross, and then next to the middle.
    """
    third = max(1, len(readers) // 3)
    places = range(third, len(readers) - third + 1)
    middle = len(readers) / 2
    return readers[min(places, key=lambda i: (crossing[readers[i]].num_values, abs(i - middle)))]


def _divide_for_stages(
    graph: Graph, layers: Sequence[OpSpan], stages_of: Mapping[str, frozenset[int]], crossing: Sequence[Crossing]
) -> list[OpSpan]:
    """Cut layers between ops of several stages; an op whose parameters are on more than one, as tied weights are, is on
    the first that is not before the stage of the ops that come before it, so that no stage is left without a layer.
    """
    made: list[OpSpan] = []
    stage = 0
    for layer in layers:
        starts, last_reader = [layer.start], -1
        for place in layer.places:
            names = [graph.parameters.get(operand, "") for operand in graph.ops[place].operands]
            holders = [stages_of[name] for name in names if name in stages_of]
            common = holders[0].intersection(*holders[1:]) if holders else frozenset[int]()
            if not common:
                continue
            own = min(common, key=lambda each: (each < stage, each))
            if own != stage and last_reader >= 0:
                starts.append(min(range(last_reader + 1, place + 1), key=lambda i: crossing[i].num_bytes))
            stage, last_reader = own, place
        edges = pairwise([*starts, layer.stop])
        made += [OpSpan(start, stop, "") for start, stop in edges] if len(starts) > 1 else [layer]
    return made


def crossings(graph: Graph) -> list[Crossing]:
    """``crossings(g)[i]`` is what crosses the position before op i."""
    last_read: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        last_read.update(dict.fromkeys(op.operands, index))
    counts, sizes = [0] * (len(graph.ops) + 2), [0] * (len(graph.ops) + 2)  # by how much they change at each position
    for index, op in enumerate(graph.ops):
        for name in op.results:
            behind = last_read.get(name, index) + 1  # values that only the caller reads cross nothing
            for place, sign in ((index + 1, 1), (behind, -1)):
                counts[place] += sign
                sizes[place] += sign * graph.types[name].num_bytes
    return [Crossing(*both) for both in zip(accumulate(counts[:-1]), accumulate(sizes[:-1]), strict=True)]


def _cut_stretch(stretch: range, crossing: Sequence[Crossing], signatures: Sequence[int]) -> list[range]:
    """Cut ops that no module divides."""
    if len(stretch) <= 2 * MIN_OPS:
        return [stretch] if len(stretch) else []
    atoms = _atoms(stretch, crossing)
    words = [hash(tuple(signatures[atom.start : atom.stop])) for atom in atoms]
    period = find_period(words)
    if period is not None:
        start, length, repetitions = period
        unit = sum(len(atom) for atom in atoms[start : start + length])
        if unit * repetitions >= 2 * MIN_OPS and unit <= MAX_OPS:
            return _cut_period(stretch, atoms, (start, length, repetitions), crossing, signatures)
    return _cut_loop(stretch, crossing, signatures) or _cut_narrow(stretch, crossing)


def _cut_loop(stretch: range, crossing: Sequence[Crossing], signatures: Sequence[int]) -> list[range]:
    """Layers of some iterations of a loop in Python each, all alike; none without such a loop.

    A short loop has layers of about `_TARGET_OPS` ops, a longer one `_LOOP_LAYERS` of them, but of no more than twice
    as many ops.  An iteration begins where the fewest bytes cross.
    """
    period = find_period(signatures[stretch.start : stretch.stop], longest=MAX_OPS)
    if period is None or period[2] < _FEWEST_ITERATIONS:
        return []
    start, unit, repetitions = period
    num_ops = min(2 * _TARGET_OPS, max(_TARGET_OPS, unit * repetitions // _LOOP_LAYERS))
    together = max(1, num_ops // unit)
    first = min(range(stretch.start + start, stretch.start + start + unit), key=lambda place: crossing[place].num_bytes)
    repetitions -= first > stretch.start + start
    count = repetitions // together
    if count < 2 or unit * together * count < 2 * _TARGET_OPS:
        return []
    length = unit * together
    layers = [range(first + i * length, first + (i + 1) * length) for i in range(count)]
    return [
        *_cut_stretch(range(stretch.start, first), crossing, signatures),
        *layers,
        *_cut_stretch(range(layers[-1].stop, stretch.stop), crossing, signatures),
    ]


def _cut_period(
    stretch: range, atoms: Sequence[range], period: tuple[int, int, int], crossing: Sequence[Crossing],
    signatures: Sequence[int],
) -> list[range]:  # fmt: skip
    start, length, repetitions = period
    unit = sum(len(atom) for atom in atoms[start : start + length])
    together = min(-(-MIN_OPS // unit), repetitions // 2)  # tiny repetitions share a layer
    first = atoms[start].start
    layers = [
        range(first + i * unit * together, first + (i + 1) * unit * together) for i in range(repetitions // together)
    ]
    before = _cut_stretch(range(stretch.start, first), crossing, signatures)
    after = _cut_stretch(range(layers[-1].stop, stretch.stop), crossing, signatures)
    return [*before, *layers, *after]


def _atoms(stretch: range, crossing: Sequence[Crossing]) -> list[range]:
    narrow = [i for i in stretch if i > stretch.start and crossing[i].num_values <= 1]
    edges = [stretch.start, *narrow, stretch.stop]
    return [range(a, b) for a, b in pairwise(edges)]


def _cut_narrow(stretch: range, crossing: Sequence[Crossing]) -> list[range]:
    """Cuts that minimize the bytes crossing, for layers of about `_TARGET_OPS` ops and at most `MAX_OPS`."""
    if len(stretch) <= _TARGET_OPS:
        return [stretch]
    typical = sorted(crossing[i].num_bytes for i in stretch)[len(stretch) // 2] or 1
    best: dict[int, tuple[float, int]] = {stretch.start: (0.0, stretch.start)}
    for stop in range(stretch.start + MIN_OPS, stretch.stop + 1):
        if stretch.stop - stop not in range(MIN_OPS) or stop == stretch.stop:
            width = 0.0 if stop == stretch.stop else crossing[stop].num_bytes / typical
            options = [
                (best[start][0] + width + _size_penalty(stop - start), start)
                for start in range(max(stretch.start, stop - MAX_OPS), stop - MIN_OPS + 1)
                if start in best
            ]
            if options:
                best[stop] = min(options)
    cuts = [stretch.stop]
    while cuts[-1] != stretch.start:
        cuts.append(best[cuts[-1]][1])
    cuts.reverse()
    return [range(a, b) for a, b in pairwise(cuts)]


def _size_penalty(num_ops: int) -> float:
    """In typical crossings: a layer of twice the target size is worth two cuts, a tiny one most of a cut."""
    ratio = num_ops / _TARGET_OPS
    return 2 * (ratio - 1) if ratio > 1 else 0.8 * (1 - ratio)


def _join_crumbs(layers: Sequence[OpSpan]) -> list[OpSpan]:
    """Join a layer of one or two ops to the one before, unless either is a module's own."""
    made: list[OpSpan] = []
    for layer in layers:
        is_crumb = len(layer) < 3 and made and not layer.unit and not made[-1].unit
        if is_crumb and len(made[-1]) + len(layer) <= MAX_OPS:
            made[-1] = OpSpan(made[-1].start, layer.stop, "")
        else:
            made.append(layer)
    return made
