"""Meshes of numpy arrays: lay a whole tensor out, run the steps of `reshard`, join it again.

Written from the table of placements alone, so that it can contradict `autopar.placement`.
"""

import math

import numpy as np

from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Axis, Layout, Step, mesh_axes

__all__ = ["gradient_layout", "join", "run_backward", "run_forward", "scatter"]

Locals = list[np.ndarray]


def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a value laid out as `layout`, by the table in `autopar.placement`."""
    return tuple({PARTIAL: REPLICATE, BROADCAST: PARTIAL}.get(placement, placement) for placement in layout)


def scatter(whole: np.ndarray, layout: Layout, mesh: tuple[int, ...], random: np.random.Generator) -> Locals:
    """What each rank holds of `whole`; the terms of a sum are random."""
    held = [whole] * math.prod(mesh)
    for axis, placement in zip(mesh_axes(mesh), layout, strict=True):
        cut: Locals = list(held)
        for group in _groups(axis, len(held)):
            parts = [held[rank] for rank in group]
            if placement.kind == "S":
                parts = np.split(parts[0], axis.size, axis=placement.dim)
            elif placement.kind == "P":
                terms = [random.standard_normal(parts[0].shape) for _ in group[1:]]
                parts = [parts[0] - sum(terms), *terms]
            for rank, part in zip(group, parts, strict=True):
                cut[rank] = part
        held = _agree_inside(cut, axis, mesh)
    return held


def join(held: Locals, layout: Layout, mesh: tuple[int, ...]) -> np.ndarray:
    """The whole tensor; asserts that ranks which should hold the same do."""
    for axis, placement in reversed(list(zip(mesh_axes(mesh), layout, strict=True))):
        joined: Locals = list(held)
        for group in _groups(axis, len(held)):
            parts = [held[rank] for rank in group]
            if placement.kind == "S":
                whole = np.concatenate(parts, axis=placement.dim)
            elif placement.kind == "P":
                whole = np.sum(parts, axis=0)
            else:
                whole = parts[0]
                for part in parts:
                    np.testing.assert_allclose(part, whole, atol=1e-12, err_msg=f"replicas on {axis} differ")
            for rank in group:
                joined[rank] = whole
        held = joined
    return held[0]


def run_forward(held: Locals, step: Step) -> Locals:
    """Each rank's tensor after the forward of `step`."""
    gathered, cut = step.src.dim, step.dst.dim
    return _run(held, step.axis, step.forward, gathered, cut)


def run_backward(held: Locals, step: Step) -> Locals:
    """Each rank's gradient after the backward of `step`."""
    gathered, cut = step.dst.dim, step.src.dim
    return _run(held, step.axis, step.backward, gathered, cut)


def _run(held: Locals, axis: Axis, movement: str, gathered: int, cut: int) -> Locals:
    """One movement from a placement with dim `gathered` to one with dim `cut` (-1 where it is no shard)."""
    moved: Locals = list(held)
    for group in _groups(axis, len(held)):
        parts = [held[rank] for rank in group]
        for here, rank in enumerate(group):
            moved[rank] = _move(parts, here, movement, gathered, cut)
    return moved


def _move(parts: Locals, here: int, movement: str, gathered: int, cut: int) -> np.ndarray:
    size = len(parts)
    match movement:
        case "none":
            return parts[here]
        case "slice":
            return np.split(parts[here], size, axis=cut)[here]
        case "pad":
            zeros = np.zeros_like(parts[here])
            return np.concatenate([parts[here] if i == here else zeros for i in range(size)], axis=gathered)
        case "mask":
            return parts[here] if here == 0 else np.zeros_like(parts[here])
        case "all_gather":
            return np.concatenate(parts, axis=gathered)
        case "all_reduce":
            return np.sum(parts, axis=0)
        case "reduce_scatter":
            return np.split(np.sum(parts, axis=0), size, axis=cut)[here]
        case "all_to_all":
            return np.split(np.concatenate(parts, axis=gathered), size, axis=cut)[here]
    raise AssertionError(f"unknown movement {movement!r}")


def _groups(axis: Axis, world: int) -> list[tuple[int, ...]]:
    return sorted({axis.group(rank) for rank in range(world)})


def _agree_inside(held: Locals, axis: Axis, mesh: tuple[int, ...]) -> Locals:
    """Copy what the first rank of each inner block drew to the block: inner axes cut it further."""
    return [held[rank - rank % axis.stride] for rank in range(len(held))]
