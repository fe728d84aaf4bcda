"""Plans for whatever is asked: the model is traced once per shape, and searched as often as needed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from autopar.api import trace_model
from autopar.cost import ClusterPrices, Profile
from autopar.errors import QuestionError
from autopar.explain.asked import Asked
from autopar.explain.targets import ModelTarget, load_target
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.arguments import read_bytes, read_dtype, training_spec
from autopar.program import Program
from autopar.search import MEMORY_ERROR, ConsideredPlan, SearchRequest, TrainingSpec, search
from autopar.search.considered_plans import describe_plan

__all__ = ["Answer", "Planner"]


@dataclass(frozen=True, eq=False)
class Answer:
    """A plan with what it was made from, and what else the search looked at."""

    asked: Asked
    plan: Plan
    program: Program
    prices: ClusterPrices
    training: TrainingSpec
    considered: tuple[ConsideredPlan, ...] = ()


@dataclass
class Planner:
    """Answers questions about one target.

    Args:
        target: see `autopar.explain.targets.load_target`.
        profile: what was measured of one kind of device; clusters of others are priced by presets.
    """

    target: str
    profile: Profile | None = None
    _traced: dict[tuple[object, ...], tuple[Program, float]] = field(
        default_factory=dict[tuple[object, ...], tuple[Program, float]]
    )
    _models: dict[tuple[int | None, int | None], ModelTarget] = field(
        default_factory=dict[tuple["int | None", "int | None"], ModelTarget]
    )

    def answer(self, asked: Asked) -> Answer:
        """The fastest plan.

        Raises:
            InfeasibleError: nothing fits.
            AutoparError: the target, or what is asked of it, can't be used.
        """
        prices, request = self._request(asked)
        program, trace_s = self._traced_program(asked)
        considered: list[ConsideredPlan] = []

        def keep(final: Plan) -> None:
            considered.append(describe_plan(final))

        request = replace(request, on_considered=considered.append, on_final=keep)
        plan = search(program, asked.cluster.world_size, prices, request)
        plan = replace(plan, planning_s=(("trace", trace_s), *plan.planning_s))
        return Answer(asked, plan, program, prices, request.training, tuple(considered))

    def model(self, asked: Asked) -> ModelTarget:
        """The target, loaded once per shape.

        Raises:
            QuestionError: it names no model.
        """
        if asked.shapes not in self._models:
            found = load_target(self.target, *asked.shapes)
            if isinstance(found, Plan):
                raise QuestionError(
                    f"{self.target!r} is a saved plan, which knows no model to plan again for: name the model as "
                    "package.module:factory, file.py:factory or config.json"
                )
            self._models[asked.shapes] = found
        return self._models[asked.shapes]

    def program(self, asked: Asked) -> Program:
        """The target, traced once per shape.

        Raises:
            AutoparError: it can't be loaded or traced, or what is asked makes no sense.
        """
        self._request(asked)  # what is wrong with it is said before a long trace
        return self._traced_program(asked)[0]

    def _request(self, asked: Asked) -> tuple[ClusterPrices, SearchRequest]:
        memory = None if asked.memory is None else read_bytes(asked.memory)
        training = training_spec(self.model(asked).model, asked.optimizer).on_device(asked.cluster.device.name)
        request = SearchRequest(
            memory, training, asked.constraints, schedules=schedule_actions, memory_error=MEMORY_ERROR
        )
        measured = self.profile if self.profile is not None and asked.cluster.has(self.profile.device) else None
        return ClusterPrices(asked.cluster, measured), request

    def _traced_program(self, asked: Asked) -> tuple[Program, float]:
        key = (*asked.shapes, asked.precision)
        if key not in self._traced:
            target = self.model(asked)
            started = time.perf_counter()
            traced = trace_model(target.model, target.example_inputs, dtype=read_dtype(asked.precision))
            self._traced[key] = traced.program, time.perf_counter() - started
        return self._traced[key]
