"""From the candidates that a search chose to a plan's decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.plan import Decisions, LayerStrategy, PlannedLayer, Stage
from autopar.program import Layer, Program
from autopar.search.candidates import Candidate, Scene
from autopar.search.labels import axis_labels

__all__ = ["decide"]


def decide(
    scene: Scene,
    candidates: Sequence[Candidate],
    shared_mesh: tuple[int, ...],
    world_size: int,
    stages: tuple[Stage, ...] = (),
    schedule: str = "",
) -> Decisions:
    """The decisions of one candidate per layer.

    Args:
        scene: what all layers share.
        candidates: one per layer.
        shared_mesh: the mesh of shared parameters' storage.
        world_size: number of all devices.
        stages: see `Decisions`.
        schedule: see `Decisions`.
    """
    program = scene.program
    entries: dict[tuple[int, LayerStrategy], int] = {}
    strategies: list[LayerStrategy] = []
    planned: list[PlannedLayer] = []
    for layer, candidate in zip(program.layers, candidates, strict=True):
        key = (layer.kind, candidate.strategy)
        if key not in entries:
            entries[key] = len(strategies)
            strategies.append(_finish(program, candidate))
        planned.append(PlannedLayer(layer.name, layer.kind, entries[key]))
    return Decisions(
        fingerprint=program.fingerprint,
        world_size=world_size,
        num_microbatches=scene.num_microbatches,
        layers=tuple(planned),
        strategies=tuple(strategies),
        shared_mesh=shared_mesh,
        shared_storage=tuple((program.parameters[name], layout) for name, (_, layout) in scene.shared.items()),
        stages=stages,
        schedule=schedule,
    )


def _finish(program: Program, candidate: Candidate) -> LayerStrategy:
    """The candidate's strategy with its axes' labels, naming values of the first layer of the kind."""
    strategy, layer = candidate.strategy, candidate.layer
    names = dict(zip(_value_names(layer), _value_names(program.kinds[layer.kind]), strict=True))
    copies = tuple((names[name], layout) for name, layout in strategy.copies)
    return replace(strategy, copies=copies, labels=axis_labels(program, layer, strategy))


def _value_names(layer: Layer) -> tuple[str, ...]:
    return (*layer.inputs, *layer.held, *(name for op in layer.ops for name in op.results))
