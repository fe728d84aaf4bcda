"""What a plan decides: everything that says what runs, as plain data, and whether it fits together.

It names layers, ops and values as the traced graph does, and parameters by their names in the module.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.placement import Layout, format_layout
from autopar.schedules import Shape, schedule_problem, stage_group

__all__ = [
    "GRADIENT_DTYPES",
    "Decisions",
    "LayerStrategy",
    "PlannedLayer",
    "Stage",
    "decision_problems",
    "stages_problem",
]

GRADIENT_DTYPES = ("float32", "bfloat16")
"""What `Decisions.gradients` may be.  Not float16: sums of gradients leave its range."""


@dataclass(frozen=True)
class LayerStrategy:
    """How the layers of one kind run.  Layouts are on `mesh`; positions are those of the `Layer`.

    Args:
        mesh: sizes of the mesh axes, outermost first; their product is the world size.
        assignments: per op, the factor that each axis splits (`Option.factor`).
        time: per op, the factor that microbatches split; ``()`` when there is one microbatch.
        inputs: per layer input, the layout in which it arrives.
        outputs: per layer output, the layout in which it leaves.
        copies: value name (in the first layer of the kind) -> the layout in which its readers find it.  A
            value goes from where it is produced (or stored) to this layout once, and from here to each
            reader.
        storage: per held value, the layout in which it is stored between steps.
        zero: ZeRO level, 0 to 3.  0: whole.  1: storage is sharded, parameters are gathered once a step and
            gradients reduced once a step.  2: as 1, but gradients are reduced after every microbatch.  3: as
            2, and parameters are gathered anew for each use, forward and backward.
        recompute: how it keeps activations (`autopar.step.activation_policies`): ``"none"``, ``"selective"`` (outputs
            of cheap ops are computed again in backward), ``"full"`` (the layer keeps its inputs only), ``"rerun:a,b"``
            (the ops a and b of the first layer of the kind are) ...
        labels: per axis, the usual name of what it does, for people.
        pieces: values whose collective on the way to their copy runs in so many pieces beside the products that read
            or make it (`autopar.step.pieces`); the others run whole.
    """

    mesh: tuple[int, ...]
    assignments: tuple[tuple[str, ...], ...]
    time: tuple[str, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    copies: tuple[tuple[str, Layout], ...]
    storage: tuple[Layout, ...]
    zero: int = 0
    recompute: str = "none"
    labels: tuple[str, ...] = ()
    pieces: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> str:
        """What the mesh axes do, for people: ``"8 data x 4 tensor"``."""
        labels = self.labels or ("?",) * len(self.mesh)
        parts = [f"{size} {label}" for size, label in zip(self.mesh, labels, strict=True) if size > 1]
        return " x ".join(parts) or "one device"

    @property
    def recompute_name(self) -> str:
        """How it keeps activations, for people: ``"full"``, ``"12 ops"``, ``"12 ops+offload"``, ..."""
        if not self.recompute.startswith("rerun:"):
            return self.recompute
        ops, offload, _ = self.recompute.partition("+")
        return f"{len(ops.removeprefix('rerun:').split(','))} ops{offload and '+offload'}"

    @property
    def pieces_name(self) -> str:
        """Which collectives run in pieces, for people: ``"mul_4 in 2, linear_6 in 4"``."""
        return ", ".join(f"{name} in {count}" for name, count in self.pieces)

    @property
    def storage_name(self) -> str:
        """How parameters are stored between steps, for people: ``"whole"``, ``"ZeRO-1"``, ..."""
        return f"ZeRO-{self.zero}" if self.zero else "whole"


@dataclass(frozen=True)
class PlannedLayer:
    """One layer's name, kind, and index of its strategy in `Decisions.strategies`."""

    name: str
    kind: int
    strategy: int


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: the layers ``start`` to ``stop - 1``, run by the device group `group`.

    A group is the ranks ``group * n`` to ``group * n + n - 1``, n being `Decisions.group_size`.
    """

    start: int
    stop: int
    group: int


@dataclass(frozen=True)
class Decisions:
    """Everything that is decided for one program on one number of devices.

    Without stages every layer runs on all devices.  With stages the devices fall into `num_groups` groups of
    consecutive ranks, every layer runs on one group, and all meshes are those of a group.

    Args:
        fingerprint: of the program that it is for.
        world_size: number of devices.
        num_microbatches: passes that the batch is cut into; 1 means none.
        layers: every layer in order.
        strategies: the distinct layer strategies.
        shared_mesh: the mesh of `shared_storage`.
        shared_storage: parameter name -> layout on `shared_mesh`, for parameters that several layers read, or that the
            caller keeps.
        stages: the pipeline stages in order; ``()`` without a pipeline.
        schedule: one of `autopar.schedules.schedule_names()`; "" without a pipeline.
        compiled: whether each distinct layer program is compiled.
        gradients: dtype in which gradients of the copies that layers compute with are added up, over microbatches below
            ZeRO-2, and reduced over devices; "": that in which parameters are stored.
        host_storage: whether parameters as they are stored, their final gradients, and the optimizer's state are in the
            host's memory, and updated there; layers then compute with copies.
        piece_tokens: how many tokens of a device get their logits at a time; 0: all (`autopar.step.logits`).
        late_ops: the ops that run once a step, on sums over all microbatches (`autopar.step.tail`).
        statistics: the ops of whose statistics each microbatch may take its own for the whole batch's
            (`autopar.step.statistics`).
    """

    fingerprint: str
    world_size: int
    num_microbatches: int
    layers: tuple[PlannedLayer, ...]
    strategies: tuple[LayerStrategy, ...]
    shared_mesh: tuple[int, ...]
    shared_storage: tuple[tuple[str, Layout], ...]
    stages: tuple[Stage, ...] = ()
    schedule: str = ""
    compiled: bool = False
    gradients: str = ""
    host_storage: bool = False
    piece_tokens: int = 0
    late_ops: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    @property
    def num_groups(self) -> int:
        """Device groups; 1 without stages."""
        return 1 + max((stage.group for stage in self.stages), default=0)

    @property
    def group_size(self) -> int:
        """Devices of a group: what every mesh of the plan holds."""
        return self.world_size // self.num_groups

    @property
    def ranges(self) -> tuple[range, ...]:
        """The layers of each stage; without stages, of the one that all layers make."""
        return tuple(range(stage.start, stage.stop) for stage in self.stages) or (range(len(self.layers)),)

    @property
    def groups(self) -> tuple[int, ...]:
        """The device group of each stage."""
        return tuple(stage.group for stage in self.stages) or (0,)

    @property
    def shape(self) -> Shape:
        """How its pipeline runs."""
        return Shape(self.schedule, self.num_groups, len(self.stages), self.num_microbatches)

    @property
    def layer_strategies(self) -> tuple[LayerStrategy, ...]:
        """The strategy of every layer."""
        return tuple(self.strategies[layer.strategy] for layer in self.layers)

    def digest(self) -> str:
        """A hash of what runs: of all but labels and the order of `strategies`, the same in every process."""
        texts = [repr(replace(strategy, labels=())) for strategy in self.strategies]
        layers = tuple((layer.name, layer.kind, texts[layer.strategy]) for layer in self.layers)
        text = repr(replace(self, layers=(), strategies=()))
        return hashlib.sha256(f"{text}{layers}".encode()).hexdigest()[:16]


def decision_problems(decisions: Decisions) -> Iterator[str]:
    """What doesn't fit together in decisions, as may happen when a person edits them."""
    for layer in decisions.layers:
        if not 0 <= layer.strategy < len(decisions.strategies):
            yield f"layer {layer.name!r} names strategy {layer.strategy} of {len(decisions.strategies)}"
    for name, layout in decisions.shared_storage:
        if len(layout) != len(decisions.shared_mesh):
            yield f"shared_storage: {name!r} is {format_layout(layout)!r}, but shared_mesh {decisions.shared_mesh}"
    if decisions.gradients not in ("", *GRADIENT_DTYPES):
        yield f"gradients: {decisions.gradients!r:.40} is none of {', '.join(GRADIENT_DTYPES)} and '' (as stored)"
    problem = stages_problem(decisions)
    if problem:
        yield f"stages: {problem}"
    if decisions.piece_tokens < 0:
        yield f"piece_tokens: {decisions.piece_tokens} is no count of tokens: write at least 1, or 0 for all at once"
    yield from _size_problems(decisions)
    for index, strategy in enumerate(decisions.strategies):
        yield from _mesh_problems(decisions, strategy, f"strategies[{index}]")


def _size_problems(decisions: Decisions) -> Iterator[str]:
    counts = (("world_size", decisions.world_size), ("num_microbatches", decisions.num_microbatches))
    strategies = ((f"strategies[{number}]", each.mesh) for number, each in enumerate(decisions.strategies))
    meshes = (("shared_mesh", decisions.shared_mesh), *strategies)
    for name, size in (*counts, *((f"{name}: mesh {mesh}", size) for name, mesh in meshes for size in mesh)):
        if size < 1:
            yield f"{name}: {size} is no count of devices or microbatches: write at least 1"


def _mesh_problems(decisions: Decisions, strategy: LayerStrategy, where: str) -> Iterator[str]:
    mesh, size = strategy.mesh, decisions.group_size
    if math.prod(mesh) != size:
        devices = f"the {size} devices of a stage" if decisions.stages else f"world_size {size}"
        yield f"{where}: mesh {mesh} does not hold {devices}"
    layouts = (*strategy.inputs, *strategy.outputs, *strategy.storage, *(x for _, x in strategy.copies))
    for row in (*layouts, *strategy.assignments, *filter(None, [strategy.labels])):
        if len(row) != len(mesh):
            text = " ".join(map(str, row))
            yield f"{where}: {text!r:.80} has {len(row)} parts, but mesh {mesh} has {len(mesh)} axes"


def stages_problem(plan: Decisions) -> str:
    """Why the stages of `plan` don't fit its layers, devices and schedule; "" if they do."""
    if not plan.stages:
        without = f"schedule {plan.schedule!r:.40} without stages: give stages, or leave schedule empty"
        return without if plan.schedule else ""
    groups = plan.num_groups
    if groups < 1 or plan.world_size % groups:
        return f"{plan.world_size} devices don't fall into {groups} equal groups"
    problem = schedule_problem(plan.schedule, groups, len(plan.stages), plan.num_microbatches)
    if problem:
        return problem
    start = 0
    for index, stage in enumerate(plan.stages):
        if stage.start != start or stage.stop <= stage.start:
            return (
                f"stages[{index}] has the layers {stage.start} to {stage.stop - 1}, but must start at layer {start}: "
                "stages follow each other without gaps, and each has a layer"
            )
        if stage.group != stage_group(plan.schedule, index, groups):
            return (
                f"stages[{index}] is on group {stage.group}, but {plan.schedule} on {groups} groups runs it on group "
                f"{stage_group(plan.schedule, index, groups)}"
            )
        start = stage.stop
    return "" if start == len(plan.layers) else f"stages end at layer {start - 1} of {len(plan.layers)} layers"
