"""Layers as data, and the kinds of layers that run the same program.

Two layers are of one kind if, position by position, they have the same ops with the same literals, the same
types, gradients and roles of what they read, the same wiring, and the same sharing: whether a value of its state is
read elsewhere too, whether a forward replaces it, whether an output leaves the program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.program import Arg, Layer, Op, Ref, Value
from autopar.trace.graph import Graph
from autopar.trace.layers.repetition import OpSpan

__all__ = ["assign_kinds", "build_layers", "fingerprint"]

_STATE_ROLES = ("parameter", "buffer", "constant")


def build_layers(graph: Graph, pieces: Sequence[OpSpan]) -> list[Layer]:
    """The layers of `graph` on these runs of ops; kinds are not yet assigned."""
    later = set(graph.read_at_end)
    layers: list[Layer] = []
    for index in reversed(range(len(pieces))):
        ops = graph.ops[pieces[index].start : pieces[index].stop]
        defined = [name for op in ops for name in op.results]
        inside = set(defined)
        read = [name for name in dict.fromkeys(n for op in ops for n in op.operands) if name not in inside]
        layers.append(Layer(
            name=pieces[index].unit or _name(ops, index), kind=0, ops=ops,
            inputs=tuple(n for n in read if graph.roles.get(n) not in _STATE_ROLES),
            state=tuple(n for n in read if graph.roles.get(n) in _STATE_ROLES),
            outputs=tuple(n for n in defined if n in later),
        ))  # fmt: skip
        later.update(read)
    layers.reverse()
    return _distinct_names(layers)


def _name(ops: Sequence[Op], index: int) -> str:
    """The module path that all ops share; else the first modules below it, for instance ``norm+head``."""
    paths = [op.module.split(".") for op in ops if op.module]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    below = list(dict.fromkeys(".".join(path[: len(common) + 1]) for path in paths if len(path) > len(common)))
    if len(below) > 1 and not common:
        return "+".join(below[:2] + ["..."] * (len(below) > 2))
    return ".".join(common) or f"layer{index}"


def _distinct_names(layers: Sequence[Layer]) -> list[Layer]:
    taken: set[str] = set()
    made: list[Layer] = []
    for layer in layers:
        name, count = layer.name, 1
        while name in taken:
            count += 1
            name = f"{layer.name}#{count}"
        taken.add(name)
        made.append(replace(layer, name=name))
    return made


def assign_kinds(layers: Iterable[Layer], values: Mapping[str, Value], graph: Graph) -> tuple[Layer, ...]:
    """Number the layers by kind, in order of first appearance."""
    layers = tuple(layers)
    readers: dict[str, int] = {}
    for layer in layers:
        for name in layer.state:
            readers[name] = readers.get(name, 0) + 1
    replaced_by = {new: old for old, new in graph.updates.items()}
    numbers: dict[str, int] = {}
    made: list[Layer] = []
    for layer in layers:
        key = _structure(layer, values, graph, readers, replaced_by)
        made.append(replace(layer, kind=numbers.setdefault(key, len(numbers))))
    return tuple(made)


def _structure(
    layer: Layer, values: Mapping[str, Value], graph: Graph, readers: Mapping[str, int],
    replaced_by: Mapping[str, str],
) -> str:  # fmt: skip
    """A digest of all that two layers of one kind have in common."""
    names = {name: f"i{k}" for k, name in enumerate(layer.inputs)}
    names |= {name: f"h{k}" for k, name in enumerate(layer.state)}
    for place, op in enumerate(layer.ops):
        names |= {name: f"o{place}.{k}" for k, name in enumerate(op.results)}

    def value_text(name: str) -> str:
        value = values[name]
        return f"{names[name]}:{value.type.shape}:{value.type.dtype}:{value.role}:{value.requires_grad}"

    lines = [value_text(name) for name in names]
    lines += [f"{names[n]} shared={readers[n] > 1} updated={n in graph.updates}" for n in layer.state]
    for op in layer.ops:
        lines.append(" ".join((
            op.target, canonical(op.args, names), canonical(tuple(arg for _, arg in op.kwargs), names),
            str([key for key, _ in op.kwargs]), str(op.saves), str(op.saved_extra_bytes),
            str(op.plain_saves), str(op.plain_saved_extra_bytes), op.rule_source,
        )))  # fmt: skip
    for name in layer.outputs:
        buffer = names.get(replaced_by.get(name, ""), "elsewhere") if name in replaced_by else ""
        lines.append(f"out {names[name]} returned={name in graph.outputs} replaces={buffer}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def canonical(arg: Arg, names: Mapping[str, str]) -> str:
    """`arg` as text, its references by their canonical names."""
    if isinstance(arg, Ref):
        return names[arg.name]
    if isinstance(arg, tuple):
        return "(" + " ".join(canonical(part, names) for part in arg) + ")"
    return f"{type(arg).__name__}:{arg!r}"


def fingerprint(graph: Graph, values: Mapping[str, Value], *, training: bool) -> str:
    """A digest of the whole program: ops, wiring, types, parameter names; the same on every run and machine."""
    names = {name: str(index) for index, name in enumerate(
        [*graph.inputs, *graph.parameters, *(n for n, r in graph.roles.items() if r == "constant"),
         *(n for op in graph.ops for n in op.results)]
    )}  # fmt: skip
    lines = [f"training={training}"]
    for name, short in names.items():
        value = values[name]
        lines.append(
            f"{short}:{value.type.shape}:{value.type.dtype}:{value.role}:{value.requires_grad}:"
            f"{graph.parameters.get(name, '')}"
        )
    for op in (*graph.hoisted, *graph.ops):
        kwargs = " ".join(f"{key}={canonical(arg, names)}" for key, arg in op.kwargs)
        lines.append(f"{op.target} {canonical(op.args, names)} {kwargs} -> {[names[n] for n in op.results]}")
    lines.append(str([names[name] for name in graph.outputs]))
    lines.append(str([(names[b], names[n]) for b, n in graph.updates.items()]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
