"""The decisions of a plan: everything that determines what runs, as plain data, and checks of its consistency.

Layers, ops and values have their names in the traced graph, parameters their names in the module.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.placement import Axis, Layout, format_layout
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
"""Allowed values of `Decisions.gradients`.  Not float16: sums of gradients overflow it."""


@dataclass(frozen=True)
class LayerStrategy:
    """How the layers of one kind run.  Layouts are on `mesh`; positions refer to the tuples of the `Layer`.

    Args:
        mesh: sizes of the mesh axes, outermost first; their product is the world size.
        assignments: for each op, the factor that each axis splits (`Option.factor`).
        time: for each op, the factor that microbatches split; ``()`` with one microbatch.
        inputs: for each layer input, the layout in which it arrives.
        outputs: for each layer output, the layout in which it is passed on.
        copies: value name (in the first layer of the kind) -> the layout of its copy.  A value is resharded once from
            where it is produced or stored to this layout, and from there to each reader.
        storage: for each entry of `Layer.state`, the layout in which it is stored between steps.
        zero: ZeRO level, 0 to 3.  0: parameters are stored whole.  1: storage is sharded; parameters are gathered and
            gradients reduced once a step.  2: as 1, but gradients are reduced after every microbatch.  3: as
            2, and parameters are gathered again for each use, forward and backward.
        recompute: how it keeps activations (`autopar.step.activation_policies`): ``"none"``, ``"selective"`` (outputs
            of cheap ops are recomputed in backward), ``"full"`` (the layer keeps its inputs only), ``"rerun:a,b"``
            (the ops a and b of the first layer of the kind are recomputed) ...
        labels: for each axis, the usual name of what it does, for people.
        pieces: value name -> the number of pieces in which the collective on the way to its copy runs, overlapped with
            the products that read or make the value (`autopar.step.layer.pieces`); the other collectives run whole.
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
        """The degrees of the mesh axes, for people: ``"8 data x 4 tensor"``."""
        return _named_axes(self._labeled_axes())

    @property
    def degrees(self) -> str:
        """As `axes`, with neighboring axes of the same kind joined: ``"64 data"`` instead of ``"8 data x 8 data"``."""
        runs = itertools.groupby(self._labeled_axes(), lambda axis: axis[1])
        return _named_axes([(math.prod(size for size, _ in run), label) for label, run in runs])

    def _labeled_axes(self) -> list[tuple[int, str]]:
        labels = self.labels or ("?",) * len(self.mesh)
        return [(size, label) for size, label in zip(self.mesh, labels, strict=True) if size > 1]

    @property
    def recompute_name(self) -> str:
        """`recompute` for people, with a count in place of op names: ``"full"``, ``"12 ops"``, ``"12 ops+offload"``."""
        if not self.recompute.startswith("rerun:"):
            return self.recompute
        ops, offload, _ = self.recompute.partition("+")
        return f"{len(ops.removeprefix('rerun:').split(','))} ops{offload and '+offload'}"

    @property
    def keeping(self) -> tuple[str, ...]:
        """How it keeps activations, for people, unless it simply saves them: ``("full recompute", "offload")``."""
        name, _, offload = self.recompute_name.partition("+")
        how = () if name == "none" else (name if name == "offload" else f"{name} recompute",)
        return (*how, *((offload,) if offload else ()))

    @property
    def pieces_name(self) -> str:
        """Which collectives run in pieces, for people: ``"mul_4 in 2, linear_6 in 4"``."""
        return ", ".join(f"{name} in {count}" for name, count in self.pieces)

    @property
    def storage_name(self) -> str:
        """How parameters are stored between steps, for people: ``"whole"``, ``"ZeRO-1"``, ..."""
        return f"ZeRO-{self.zero}" if self.zero else "whole"


def _named_axes(axes: Iterable[tuple[int, str]]) -> str:
    return " x ".join(f"{size} {label}" for size, label in axes) or "one device"


@dataclass(frozen=True)
class PlannedLayer:
    """The name and kind of one layer, and the index of its strategy in `Decisions.strategies`."""

    name: str
    kind: int
    strategy: int


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: the layers ``start`` to ``stop - 1``, run by the device group `group`.

    A group consists of the ranks ``group * n`` to ``group * n + n - 1``, where n is `Decisions.group_size`.
    """

    start: int
    stop: int
    group: int


@dataclass(frozen=True)
class Decisions:
    """Everything that determines how one program runs on a given number of devices.

    Without stages every layer runs on all devices.  With stages the devices form `num_groups` groups of
    consecutive ranks, every layer runs on one group, and all meshes are meshes of a group.

    Args:
        fingerprint: of the program.
        world_size: number of devices.
        num_microbatches: microbatches that the batch is cut into; 1: it isn't cut.
        layers: every layer in order.
        strategies: the distinct layer strategies.
        shared_mesh: the mesh of `shared_storage`.
        shared_storage: parameter name -> layout on `shared_mesh`, for parameters that several layers read, or that the
            caller stores.
        stages: the pipeline stages in order; ``()`` without a pipeline.
        schedule: one of `autopar.schedules.schedule_names()`; "" without a pipeline.
        compiled: whether each distinct layer program is compiled.
        gradients: dtype in which gradients of the copies that layers compute with are accumulated over microbatches
            (below ZeRO-2) and reduced over devices; "": the dtype in which parameters are stored.
        host_storage: whether stored parameters, their final gradients, and the optimizer's state are in the host's
            memory and updated there; layers then compute with copies.
        piece_tokens: for how many tokens of a device logits are computed at a time; 0: for all
            (`autopar.step.variants.logits`).
        late_ops: the ops that run once a step, on sums over all microbatches (`autopar.step.variants.tail`).
        statistics: the ops for which each microbatch may use its own statistics instead of the whole batch's
            (`autopar.step.variants.statistics`).
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
        """The number of device groups; 1 without stages."""
        return 1 + max((stage.group for stage in self.stages), default=0)

    @property
    def group_size(self) -> int:
        """The number of devices of a group, and of every mesh of the plan."""
        return self.world_size // self.num_groups

    @property
    def pipeline_axis(self) -> Axis:
        """The axis on which device groups send to each other."""
        return Axis(self.num_groups, self.group_size)

    @property
    def ranges(self) -> tuple[range, ...]:
        """The indices of each stage's layers; without stages, one range with all layers."""
        return tuple(range(stage.start, stage.stop) for stage in self.stages) or (range(len(self.layers)),)

    @property
    def groups(self) -> tuple[int, ...]:
        """The device group of each stage; ``(0,)`` without stages."""
        return tuple(stage.group for stage in self.stages) or (0,)

    @property
    def shape(self) -> Shape:
        """The shape of its pipeline: schedule, groups, stages and microbatches."""
        return Shape(self.schedule, self.num_groups, len(self.stages), self.num_microbatches)

    @property
    def layer_strategies(self) -> tuple[LayerStrategy, ...]:
        """The strategy of every layer, in the order of `layers`."""
        return tuple(self.strategies[layer.strategy] for layer in self.layers)

    def digest(self) -> str:
        """A hash of what runs: of everything but labels and the order of `strategies`; the same in every process."""
        texts = [repr(replace(strategy, labels=())) for strategy in self.strategies]
        layers = tuple((layer.name, layer.kind, texts[layer.strategy]) for layer in self.layers)
        text = repr(replace(self, layers=(), strategies=()))
        return hashlib.sha256(f"{text}{layers}".encode()).hexdigest()[:16]


def decision_problems(decisions: Decisions) -> Iterator[str]:
    """Yield a message for each inconsistency in `decisions`, as may arise when a person edits them."""
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
        yield f"piece_tokens: {decisions.piece_tokens} is not a number of tokens: write at least 1, or 0 for all"
    yield from _size_problems(decisions)
    for index, strategy in enumerate(decisions.strategies):
        yield from _mesh_problems(decisions, strategy, f"strategies[{index}]")


def _size_problems(decisions: Decisions) -> Iterator[str]:
    counts = (("world_size", decisions.world_size), ("num_microbatches", decisions.num_microbatches))
    strategies = ((f"strategies[{index}]", strategy.mesh) for index, strategy in enumerate(decisions.strategies))
    meshes = (("shared_mesh", decisions.shared_mesh), *strategies)
    for name, size in (*counts, *((f"{name}: mesh {mesh}", size) for name, mesh in meshes for size in mesh)):
        if size < 1:
            yield f"{name}: {size} is not a number of devices or microbatches: write at least 1"


def _mesh_problems(decisions: Decisions, strategy: LayerStrategy, where: str) -> Iterator[str]:
    mesh, size = strategy.mesh, decisions.group_size
    if math.prod(mesh) != size:
        devices = f"the {size} devices of a stage" if decisions.stages else f"world_size {size}"
        yield f"{where}: mesh {mesh} does not hold {devices}"
    layouts = (*strategy.inputs, *strategy.outputs, *strategy.storage, *(layout for _, layout in strategy.copies))
    for row in (*layouts, *strategy.assignments, *filter(None, [strategy.labels])):
        if len(row) != len(mesh):
            text = " ".join(map(str, row))
            yield f"{where}: {text!r:.80} has {len(row)} parts, but mesh {mesh} has {len(mesh)} axes"


def stages_problem(plan: Decisions) -> str:
    """Return why the stages of `plan` don't fit its layers, devices and schedule; "" if they do."""
    if not plan.stages:
        stray_schedule = f"schedule {plan.schedule!r:.40} without stages: give stages, or leave schedule empty"
        return stray_schedule if plan.schedule else ""
    groups = plan.num_groups
    if groups < 1 or plan.world_size % groups:
        return f"{plan.world_size} devices can't be divided into {groups} equal groups"
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
