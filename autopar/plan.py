"""The Plan: everything decided, as plain data that prints, saves, diffs, edits and parses back.

A plan holds no tensor, no module and no process group.  It names layers, ops and values as the traced graph
does, and parameters by their names in the module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from autopar.errors import PlanFormatError
from autopar.json_reading import check_fields, read_json
from autopar.placement import Layout, format_layout, parse_layout
from autopar.schedule import schedule_problem, stage_group

__all__ = ["FORMAT_VERSION", "LayerCost", "LayerStrategy", "Plan", "PlannedLayer", "Stage", "stages_problem"]

FORMAT_VERSION = 4
# Besides the stages' layers and groups.  The memory limit decides how evaluation is planned.
_DECISIONS = (
    "fingerprint", "world_size", "num_microbatches", "memory_limit_bytes", "layers", "strategies", "shared_mesh",
    "shared_storage", "schedule",
)  # fmt: skip


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
        recompute: ``"none"``, ``"selective"`` (outputs of cheap ops are computed again in backward) or
            ``"full"`` (the layer keeps its inputs only).
        labels: per axis, the usual name of what it does, for people.
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

    @property
    def splits_backward(self) -> bool:
        """Whether zero-bubble schedules can run its backward in two parts: nothing is gathered or computed again for
        the second one.
        """
        return self.zero < 3 and self.recompute != "full"


@dataclass(frozen=True)
class LayerCost:
    """Predicted cost of one layer on one device for one whole step (all microbatches).

    The first six fields are seconds and add up to the layer's share of the step.  The last three say when parts of
    them are spent: of the communication, what belongs to the forwards of microbatches (`forward_comm_s`) and what runs
    once a step (`step_comm_s`); of what is left, which all belongs to the backwards, what gives gradients of parameters
    alone (`weight_s`).  Bytes are per device, `saved_bytes` for one microbatch in flight.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    activation_comm_s: float = 0.0
    parameter_comm_s: float = 0.0
    optimizer_s: float = 0.0
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    saved_bytes: float = 0.0
    transient_bytes: float = 0.0
    forward_comm_s: float = 0.0
    step_comm_s: float = 0.0
    weight_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The layer's share of the step time."""
        return (
            self.forward_s + self.backward_s + self.recompute_s
            + self.activation_comm_s + self.parameter_comm_s + self.optimizer_s
        )  # fmt: skip

    @property
    def in_forward_s(self) -> float:
        """The part of `total_s` in the forwards of all microbatches."""
        return self.forward_s + self.forward_comm_s

    @property
    def in_step_s(self) -> float:
        """The part of `total_s` that is spent once per step."""
        return self.step_comm_s + self.optimizer_s

    @property
    def in_backward_s(self) -> float:
        """The part of `total_s` in the backwards of all microbatches."""
        return (
            self.backward_s + self.recompute_s
            + (self.activation_comm_s + self.parameter_comm_s - self.forward_comm_s - self.step_comm_s)
        )  # fmt: skip

    @property
    def static_bytes(self) -> float:
        """What the layer holds all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def persistent_bytes(self) -> float:
        """What the layer holds at the moment of the step's peak, transients apart."""
        return self.static_bytes + self.saved_bytes


@dataclass(frozen=True)
class PlannedLayer:
    """One layer's name, kind, and index of its strategy and cost in `Plan.strategies`."""

    name: str
    kind: int
    strategy: int


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: the layers ``start`` to ``stop - 1``, run by one device group, with what is predicted of it.

    Args:
        start: index of its first layer.
        stop: one more than the index of its last layer.
        group: the device group that runs it: ranks ``group * n`` to ``group * n + n - 1``, n being `Plan.group_size`.
        forward_s: seconds of the forward of one microbatch.
        backward_s: seconds of its whole backward.
        weight_s: the part of `backward_s` that gives gradients of parameters.
        step_s: seconds that the stage takes once per step: gathers and reductions of parameters, the optimizer.
        send_forward_s: seconds to send its outputs to the next stage.
        send_backward_s: seconds to send the gradients of its inputs to the stage before.
        peak_memory_bytes: predicted peak bytes of a device of its group (of all the group's stages together).
        in_flight: the most microbatches that are between forward and backward in it.
    """

    start: int
    stop: int
    group: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    step_s: float = 0.0
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    peak_memory_bytes: float = 0.0
    in_flight: int = 0


@dataclass(frozen=True)
class Plan:
    """A complete decision for one program on one number of devices.

    Without stages every layer runs on all devices.  With stages the devices fall into `num_groups` groups of
    consecutive ranks, every layer runs on one group, and all meshes are those of a group.

    Args:
        fingerprint: of the program that it is for.
        world_size: number of devices.
        device: name of the device that it was priced for.
        num_microbatches: passes that the batch is cut into; 1 means none.
        layers: every layer in order.
        strategies: the distinct layer strategies; `costs` runs parallel to it.
        shared_storage: parameter name -> layout on `shared_mesh`, for parameters that several layers read, or that the
            caller keeps.
        step_time_s: predicted seconds of one training step, optimizer included.
        peak_memory_bytes: predicted peak bytes per device.
        memory_limit_bytes: what the search was allowed.
        samples_per_step: batch rows per step, for throughput.
        optimality_gap: the least ``step_time_s + overlapped_s`` that the search found, which is what it minimises, is
            at most ``1 + optimality_gap`` times that of the best plan in the search space.  Of what it found, the plan
            is the fastest when simulated.
        price_source: share of the step time by where its prices come from ("profile", "measured", ...).
        constraints: what the user asked for.
        notes: what the user should know.
        planning_s: seconds spent, by stage ("trace", "search" ...).
        stages: the pipeline stages in order; ``()`` without a pipeline.
        schedule: one of `autopar.schedule.SCHEDULES`; "" without a pipeline.
        overlapped_s: what simulating the step, with communication beside compute, takes off a sum: without stages that
            of the layers' seconds, with stages that of the schedule's timeline and what is done once per step.  Less
            than 0 where stages wait for each other longer than that sum says.
        memory_error: how far the peak memory can be off, relative to it; 0: unknown.
    """

    fingerprint: str
    world_size: int
    device: str
    num_microbatches: int
    layers: tuple[PlannedLayer, ...]
    strategies: tuple[LayerStrategy, ...]
    costs: tuple[LayerCost, ...]
    shared_mesh: tuple[int, ...]
    shared_storage: tuple[tuple[str, Layout], ...]
    step_time_s: float
    peak_memory_bytes: float
    memory_limit_bytes: float
    samples_per_step: int
    optimality_gap: float
    price_source: tuple[tuple[str, float], ...] = ()
    constraints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    planning_s: tuple[tuple[str, float], ...] = ()
    stages: tuple[Stage, ...] = ()
    schedule: str = ""
    overlapped_s: float = 0.0
    memory_error: float = 0.0

    @property
    def num_groups(self) -> int:
        """Device groups; 1 without stages."""
        return 1 + max((stage.group for stage in self.stages), default=0)

    @property
    def group_size(self) -> int:
        """Devices of a group: what every mesh of the plan holds."""
        return self.world_size // self.num_groups

    def decisions(self) -> dict[str, Any]:
        """What decides how the program runs, as in `to_json`: no predictions, no notes."""
        data = {name: value for name, value in _encode(self).items() if name in _DECISIONS}
        data["stages"] = [{"start": s.start, "stop": s.stop, "group": s.group} for s in self.stages]
        return data

    def __str__(self) -> str:
        """The plan as a table for people."""
        from autopar.plan_table import format_plan  # noqa: PLC0415  (a plan needs no rich until it is printed)

        return format_plan(self)

    def to_json(self) -> str:
        """The plan as readable JSON; `from_json` reads it back to an equal plan."""
        return json.dumps({"autopar_plan": FORMAT_VERSION} | _encode(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse what `to_json` wrote (or a person edited).

        Raises:
            PlanFormatError: not JSON, another format version, or a field is missing, unknown or of the wrong
                form.
        """
        try:
            data = read_json(text)
        except ValueError as error:
            raise PlanFormatError(f"a plan is JSON, but {error}") from error
        if not isinstance(data, dict) or cast("dict[str, Any]", data).get("autopar_plan") != FORMAT_VERSION:
            raise PlanFormatError(
                f"not a plan of format {FORMAT_VERSION}: the file must hold "
                f'"autopar_plan": {FORMAT_VERSION}; plan again with this version of autopar'
            )
        return _decode(cast("dict[str, Any]", data))

    def save(self, path: str | Path) -> None:
        """Write the plan to `path` as readable JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanFormatError: there is no such file, or no plan in it.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:  # no file, no UTF-8, no path
            raise PlanFormatError(
                f"plan={str(path)!r} can't be read: {error}. Pass a Plan, or the path of a file that Plan.save wrote "
                "and that every rank sees"
            ) from error
        return cls.from_json(text)


def _encode(plan: Plan) -> dict[str, Any]:
    data = asdict(plan)
    data["strategies"] = [_encode_strategy(strategy) for strategy in plan.strategies]
    data["shared_storage"] = {name: format_layout(layout) for name, layout in plan.shared_storage}
    for name in ("price_source", "planning_s"):
        data[name] = dict(data[name])
    return data


def _encode_strategy(strategy: LayerStrategy) -> dict[str, Any]:
    data: dict[str, Any] = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    for name in ("inputs", "outputs", "storage"):
        data[name] = [format_layout(layout) for layout in data[name]]
    data["copies"] = {name: format_layout(layout) for name, layout in strategy.copies}
    data["assignments"] = [" ".join(factors) for factors in strategy.assignments]
    return data


def _decode(data: dict[str, Any]) -> Plan:
    _check_form(Plan, {name: value for name, value in data.items() if name != "autopar_plan"}, "plan")
    plan = Plan(
        **{field.name: data[field.name] for field in fields(Plan) if field.type in ("int", "float", "str")},
        layers=tuple(PlannedLayer(**part) for part in _checked_parts(PlannedLayer, data, "layers")),
        strategies=tuple(map(_decode_strategy, _checked_parts(LayerStrategy, data, "strategies"))),
        costs=tuple(LayerCost(**part) for part in _checked_parts(LayerCost, data, "costs")),
        shared_mesh=tuple(data["shared_mesh"]),
        shared_storage=_decode_layouts(data["shared_storage"]),
        price_source=tuple(data["price_source"].items()),
        constraints=tuple(data["constraints"]),
        notes=tuple(data["notes"]),
        planning_s=tuple(data["planning_s"].items()),
        stages=tuple(Stage(**part) for part in _checked_parts(Stage, data, "stages")),
    )
    _check_consistency(plan)
    return plan


def _decode_strategy(data: dict[str, Any]) -> LayerStrategy:
    return LayerStrategy(
        mesh=tuple(data["mesh"]),
        assignments=tuple(tuple(text.split()) for text in data["assignments"]),
        time=tuple(data["time"]),
        inputs=tuple(map(parse_layout, data["inputs"])),
        outputs=tuple(map(parse_layout, data["outputs"])),
        copies=_decode_layouts(data["copies"]),
        storage=tuple(map(parse_layout, data["storage"])),
        zero=data["zero"],
        recompute=data["recompute"],
        labels=tuple(data["labels"]),
    )


def _decode_layouts(data: Mapping[str, str]) -> tuple[tuple[str, Layout], ...]:
    return tuple((name, parse_layout(text)) for name, text in data.items())


def _checked_parts(kind: type[Any], data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = data[name]
    for index, part in enumerate(parts):
        _check_form(kind, part, f"{name}[{index}]")
    return parts


def _check_form(kind: type[Any], data: Mapping[str, Any], where: str) -> None:
    try:
        check_fields(kind, data, where)
    except ValueError as error:
        raise PlanFormatError(str(error)) from error


def _check_consistency(plan: Plan) -> None:
    """Refuse a plan whose parts don't fit together, as may happen when a person edits one."""
    if len(plan.costs) != len(plan.strategies):
        raise PlanFormatError(f"{len(plan.strategies)} strategies but {len(plan.costs)} costs: one each")
    for layer in plan.layers:
        if not 0 <= layer.strategy < len(plan.strategies):
            raise PlanFormatError(f"layer {layer.name!r} names strategy {layer.strategy} of {len(plan.strategies)}")
    for name, layout in plan.shared_storage:
        if len(layout) != len(plan.shared_mesh):
            raise PlanFormatError(
                f"shared_storage: {name!r} is {format_layout(layout)!r}, but shared_mesh {plan.shared_mesh}"
            )
    _check_stages(plan)
    _check_sizes(plan)
    for index, strategy in enumerate(plan.strategies):
        if math.prod(strategy.mesh) != plan.group_size:
            of = f"the {plan.group_size} devices of a stage" if plan.stages else f"world_size {plan.world_size}"
            raise PlanFormatError(f"strategies[{index}]: mesh {strategy.mesh} does not hold {of}")
        layouts = (*strategy.inputs, *strategy.outputs, *strategy.storage, *(x for _, x in strategy.copies))
        for row in (*layouts, *strategy.assignments, *filter(None, [strategy.labels])):
            if len(row) != len(strategy.mesh):
                raise PlanFormatError(
                    f"strategies[{index}]: {' '.join(map(str, row))!r:.80} has {len(row)} parts, "
                    f"but mesh {strategy.mesh} has {len(strategy.mesh)} axes"
                )


def _check_sizes(plan: Plan) -> None:
    counts = (("world_size", plan.world_size), ("num_microbatches", plan.num_microbatches))
    meshes = (("shared_mesh", plan.shared_mesh), *((f"strategies[{n}]", s.mesh) for n, s in enumerate(plan.strategies)))
    sizes = (*counts, *((f"{name}: mesh {mesh}", size) for name, mesh in meshes for size in mesh))
    for name, size in sizes:
        if size < 1:
            raise PlanFormatError(f"{name}: {size} is no count of devices or microbatches: write at least 1")


def _check_stages(plan: Plan) -> None:
    problem = stages_problem(plan)
    if problem:
        raise PlanFormatError(f"stages: {problem}")


def stages_problem(plan: Plan) -> str:
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
