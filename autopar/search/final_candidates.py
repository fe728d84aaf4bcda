"""What a search may end with, to be simulated: paths without stages, and pipelines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

from autopar.plan import Decisions, Plan
from autopar.schedules import Shape
from autopar.search.chain.single_stage import PathOrder, SingleStagePaths
from autopar.search.pipeline.pipeline_candidates import OVERCOUNTED, PipelineCandidate, PipelineResults
from autopar.search.pipeline.schedule_estimates import is_small
from autopar.search.search_context import SearchContext
from autopar.step.prices import Prices
from autopar.step.pricing import StepPricing

__all__ = ["MemoryFilter", "PlanCandidate", "host_shortage", "with_stages"]

_ROUNDING = 1e-9  # of the step, between its simulation and the sum of its costs
# A search counts up to a tenth less for some device groups than the walk through the step finds: with so much less for
# them, what it chooses mostly fits.
_TIMES_SHRUNK = 2
_WALKED = 12  # of paths that don't fit as they are counted nor otherwise: each walk takes as long as a simulation
# The same of pipelines.  Only small ones (`is_small`) are walked: each takes about 0.02 s (0.3 s for 60 layers), others
# up to a second.
_PIPELINES_WALKED = 24
# Of programs with many layers, whose walks take long, so many walks tell how far counts are above what is found (in 60
# layers of experts not at all).  What is counted as more than that and a tenth above the limit is not walked then.
_MANY_LAYERS = 40
_TELLING_WALKS = 4
_MARGIN = 1.1


@dataclass(frozen=True, eq=False)
class PlanCandidate:
    """What may be the best: it takes `least_s` if all collectives of parameters are overlapped, `visible_s` by
    estimate.  `shape` is that of a pipeline.
    """

    context: SearchContext
    least_s: float
    visible_s: float
    decide: Callable[[], Decisions]
    counted_bytes: float  # as searches count them
    shape: Shape | None = None
    known: dict[PathOrder, Plan] = field(default_factory=dict["PathOrder", "Plan"])
    walked: dict[PathOrder, float] = field(default_factory=dict["PathOrder", float])
    number: PathOrder = (0, 0)  # in `known` and `walked`
    paths: SingleStagePaths | None = None
    pipeline: PipelineCandidate | None = None
    times_shrunk: int = 0

    @classmethod
    def of_path(cls, paths: SingleStagePaths, path: int, order: int = 0) -> PlanCandidate:
        """One without stages."""
        return cls(
            paths.candidates.context, float(paths.least_s[path]), paths.pool.time_s[path],
            partial(paths.decisions, path, order), paths.pool.peak_bytes[path], known=paths.plans,
            walked=paths.walked_bytes, number=(path, order), paths=paths,
        )  # fmt: skip

    @classmethod
    def of_pipeline(cls, pipeline: PipelineCandidate, times_shrunk: int = 0) -> PlanCandidate:
        """One with stages."""
        return cls(
            pipeline.candidates.context, pipeline.least_s, pipeline.step_s, pipeline.decisions, pipeline.peak_bytes,
            pipeline.shape, pipeline=pipeline, times_shrunk=times_shrunk,
        )  # fmt: skip

    @property
    def reordered(self) -> Iterator[PlanCandidate]:
        """Plans without stages that differ only in the order of equal layers; none of one that is such a plan."""
        path, order = self.number
        if self.paths is not None and not order:
            for other in range(1, len(self.paths.orders(path))):
                yield PlanCandidate.of_path(self.paths, path, other)

    @property
    def setting(self) -> tuple[int, int]:
        """Device groups and microbatches of a pipeline."""
        assert self.shape is not None
        return self.shape.num_groups, self.shape.num_microbatches

    @cached_property
    def pricing(self) -> StepPricing:
        """What its step takes."""
        context, request = self.context, self.context.request
        return StepPricing(
            context.program, self.decide(), context.prices, request.training, request.schedules, context.facts
        )

    @property
    def walked_bytes(self) -> float:
        """The most that a device holds at any moment of the step."""
        if self.shape is not None:
            return self.simulate().peak_memory_bytes
        if self.number not in self.walked:
            self.walked[self.number] = self.pricing.peak_memory_bytes
        return self.walked[self.number]

    def simulate(self) -> Plan:
        """The plan with its prediction."""
        if self.number not in self.known:
            plan = Plan(self.pricing.decisions, self.pricing.prediction, memory_error=self.context.request.memory_error)
            self.known[self.number] = plan
        return self.known[self.number]

    def is_slower(self, other_s: float) -> bool:
        """Whether a plan without stages takes longer: memory and costs of such plans are not worked out."""
        if self.shape is not None or self.number in self.known:
            return False
        return self.pricing.step_s > other_s * (1 + _ROUNDING)

    def misfit(self, allowed_bytes: float) -> str | None:
        """Why the plan does not fit: the message about host memory, ``""`` for device memory; None if it fits."""
        plan = self.simulate()
        short = host_shortage(plan, self.context.prices)
        return short if short or plan.peak_memory_bytes > allowed_bytes else None

    def shrunk(self, allowed_bytes: float) -> PlanCandidate | None:
        """The pipeline with smaller device groups where they are too large; None if that is not tried (again)."""
        excess = {
            stage.group: cost.peak_memory_bytes - allowed_bytes
            for stage, cost in zip(self.pricing.decisions.stages, self.simulate().prediction.stages, strict=True)
            if cost.peak_memory_bytes > allowed_bytes
        }
        if self.pipeline is None or not excess or self.times_shrunk == _TIMES_SHRUNK:
            return None
        assert self.context.request.schedules is not None
        smaller = self.pipeline.shrunk(excess, self.context.request.schedules)
        return PlanCandidate.of_pipeline(smaller, self.times_shrunk + 1)


@dataclass(eq=False)
class MemoryFilter:
    """Which candidates may fit, some of which are walked through, and those of them that have no stages."""

    searched: tuple[SingleStagePaths, ...]
    limit_bytes: float
    batch_bytes: float
    _num_walked: Counter[bool] = field(default_factory=Counter[bool])
    _overcounted: list[float] = field(default_factory=list[float])  # of pipelines that were walked: count over finding

    @cached_property
    def without_stages(self) -> tuple[PlanCandidate, ...]:
        """What no other path beats, however much memory it takes: a smaller limit leaves some of the same."""
        return tuple(PlanCandidate.of_path(paths, path) for paths in self.searched for path in paths.front)

    def may_fit(self, candidate: PlanCandidate) -> bool:
        """Whether it fits as it is counted or, of a few that don't, by the walk through the step; of pipelines also
        those that the walk finds too large: they can be made smaller.
        """
        if candidate.counted_bytes <= self.limit_bytes or candidate.times_shrunk:
            return True
        has_stages = candidate.shape is not None
        most = _PIPELINES_WALKED if has_stages else _WALKED
        largest_bytes = self._usual_overcount(has_stages) * self.limit_bytes
        if self._num_walked[has_stages] >= most or candidate.counted_bytes > largest_bytes:
            return False
        is_fitting = candidate.walked_bytes <= self.limit_bytes + self.batch_bytes
        if has_stages and len(candidate.context.program.layers) > _MANY_LAYERS:
            self._overcounted.append(candidate.counted_bytes / max(1.0, candidate.walked_bytes - self.batch_bytes))
        self._num_walked[has_stages] += not is_fitting
        return is_fitting or has_stages

    def _usual_overcount(self, has_stages: bool) -> float:
        """By how much a count may be above the limit, as a factor, so that a walk is worth its time."""
        if not has_stages or len(self._overcounted) < _TELLING_WALKS:
            return OVERCOUNTED
        return min(OVERCOUNTED, _MARGIN * max(self._overcounted))


def with_stages(pipelines: PipelineResults | None) -> Iterator[PlanCandidate]:
    """The pipelines that fit, and small ones that may fit though more is counted, each once."""
    seen: set[tuple[object, ...]] = set()
    if pipelines is None:
        return
    small = [each for each in pipelines.candidates if is_small(each.shape)]
    for pipeline in (*pipelines.fitting, *(each for each in (*small, *pipelines.oversized) if each.has_host_room)):
        # Paths of other candidates that cost the same are no others.
        key = pipeline.shape, pipeline.step_s, pipeline.peak_bytes
        if key not in seen:
            seen.add(key)
            yield PlanCandidate.of_pipeline(pipeline)


def host_shortage(plan: Plan, prices: Prices) -> str:
    """The message for a plan that offloads more than the hosts' memory holds; ``""`` if it fits."""
    needed, there = plan.prediction.host_memory_bytes, prices.host.memory_bytes
    if needed <= there:
        return ""
    stored = plan.decisions.host_storage
    advice = (
        "cut parameters over more devices, such as 'zero=3', or leave 'offload=optimizer' out"
        if stored
        else "offload fewer layers, such as 'model.layers.0: offload=activations', recompute more, such as "
        "'recompute=full', or use more microbatches"
    )
    return (
        f"it offloads {needed / 2**30:.6g} GiB per device to the host's memory, of which a device has "
        f"{there / 2**30:.6g} GiB (Device.host_memory_bytes), and would run out of memory. To fit, {advice}"
    )
