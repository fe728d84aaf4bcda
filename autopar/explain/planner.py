"""Plans for any question about one target: the model is traced once per shape, and searched as often as needed."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from autopar.balance import Lengths
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Profile
from autopar.errors import QuestionError
from autopar.explain.question import Question
from autopar.explain.targets import ModelTarget, load_target
from autopar.plan import Plan
from autopar.planning.arguments import layers_demanded, read_bytes, read_dtype, training_spec
from autopar.planning.call_traces import example_call, trace_model
from autopar.planning.expectations import Expectations
from autopar.planning.length_plans import check_rows, read_distribution, row_tracer
from autopar.planning.searching import find_plan, request_of, search_setup
from autopar.planning.setup import Setup
from autopar.program import Program
from autopar.search import ConsideredPlan, TrainingSpec
from autopar.search.settings.known_layers import KnownLayers
from autopar.step.variants.planned_program import as_decided
from autopar.user_text.progress import phase

__all__ = ["Answer", "Planner"]


@dataclass(frozen=True, eq=False)
class Answer:
    """A plan with what it was made from, and what else the search looked at."""

    question: Question
    plan: Plan
    program: Program
    prices: ClusterPrices
    training: TrainingSpec
    considered: tuple[ConsideredPlan, ...] = ()


@dataclass
class Planner:
    """Answers questions about one target; those about the same cluster share prices and candidates of layers.

    Args:
        target: see `autopar.explain.targets.load_target`.
        profile: what was measured of one kind of device; clusters of others are priced by presets.
    """

    target: str
    profile: Profile | None = None
    _traced: dict[tuple[object, ...], tuple[Program, float, Expectations]] = field(
        default_factory=dict[tuple[object, ...], tuple[Program, float, Expectations]]
    )
    _priced: dict[tuple[object, ...], Program] = field(default_factory=dict[tuple[object, ...], Program])
    _models: dict[tuple[int | None, int | None, bool | None], ModelTarget] = field(
        default_factory=dict[tuple["int | None", "int | None", "bool | None"], ModelTarget]
    )
    _prices: list[ClusterPrices] = field(default_factory=list[ClusterPrices])
    _known: KnownLayers = field(default_factory=KnownLayers)

    def answer(
        self,
        question: Question,
        *,
        is_alternative: bool = False,
        seeks_gap: bool = True,
        deadline: float = math.inf,
    ) -> Answer:
        """The fastest plan.  Of an alternative to another one the plan is all: its search looks at less, and nothing is
        said of other plans, of another precision or of other lengths; without `seeks_gap` neither of how far it may be
        from the best.

        Raises:
            DeadlineError: the search had not ended at `deadline` (of `time.perf_counter`).
            InfeasibleError: nothing fits.
            AutoparError: the target or the question can't be used.
        """
        program = self.program(question)
        setup = replace(self._setup(question), trace_s=self._traced_program(question)[1])
        request = replace(request_of(setup), known=self._known.for_other_constraints(), deadline=deadline)
        size = question.cluster.world_size
        if is_alternative:
            plan = find_plan(program, size, setup, request, seeks_gap=seeks_gap)
            return self._answer(question, plan, program, setup)
        considered: list[ConsideredPlan] = []
        lengths = self._lengths(question, program)
        if lengths is not None:
            target = self.model(question)
            trace = row_tracer(target.model, target.example_inputs, program, setup)
            setup = replace(setup, lengths=lengths, trace_rows=trace)
        request = replace(request, on_considered=considered.append)
        plan = search_setup(program, size, setup, request)
        if lengths is not None:
            cut = 1 - lengths.mean / Lengths.read(str(question.lengths)).mean
            note = f"{cut:.1%} of the tokens of --lengths are beyond a row's {lengths.longest:,}, and count as cut"
            plan = replace(plan, notes=(*plan.notes, note) if cut > 0 else plan.notes)
        return replace(self._answer(question, plan, program, setup), considered=tuple(considered))

    def _answer(self, question: Question, plan: Plan, program: Program, setup: Setup) -> Answer:
        training = setup.training.running(compiled=plan.compiled)
        prices = self._prices_on(question.cluster)
        return Answer(question, plan, as_decided(program, plan.decisions), prices, training)

    def _lengths(self, question: Question, program: Program) -> Lengths | None:
        """The distribution of lengths in the question, cut to the length of a row."""
        given = read_distribution(question.lengths)
        return None if given is None else given.clipped(check_rows(program))

    def model(self, question: Question) -> ModelTarget:
        """The target, loaded once per shape.

        Raises:
            QuestionError: it names no model.
        """
        if question.shapes not in self._models:
            result = load_target(self.target, *question.shapes)
            if isinstance(result, Plan):
                raise QuestionError(
                    f"{self.target!r} is a saved plan, which knows no model to plan again for: name the model as "
                    "package.module:factory, file.py:factory or config.json"
                )
            self._models[question.shapes] = result
        return self._models[question.shapes]

    def program(self, question: Question) -> Program:
        """The target, traced once per shape, with what is expected of the data: the same program for equal questions.

        Raises:
            AutoparError: it can't be loaded or traced, or the question makes no sense.
        """
        self._setup(question)  # what is wrong with it is said before a long trace
        expected = question.expected
        program, _, seen = self._traced_program(question)
        if question.documents is None and question.lengths is None:
            expected = replace(expected, documents=seen.documents)
        key = id(program), expected  # traced programs are kept, so no two have one identity
        if key not in self._priced:
            self._priced[key] = expected.priced(program)  # once, as searches know layers by identity
        return self._priced[key]

    def _setup(self, question: Question) -> Setup:
        """The arguments of `autopar.plan` that ask the same, without lengths."""
        setup = Setup(
            read_dtype(question.precision), None if question.memory is None else read_bytes(question.memory),
            training_spec(self.model(question).model, question.optimizer), question.constraints,
            compile=question.compile, device_type=question.cluster.device.type, expected=question.expected,
        )  # fmt: skip
        return setup.priced(self._prices_on(question.cluster))

    def _prices_on(self, cluster: Cluster) -> ClusterPrices:
        known = next((each for each in self._prices if each.cluster == cluster), None)
        if known is None:
            measured = self.profile if self.profile is not None and cluster.has(self.profile.device) else None
            known = ClusterPrices(cluster, measured)
            self._prices.append(known)
        return known

    def _traced_program(self, question: Question) -> tuple[Program, float, Expectations]:
        num_layers = layers_demanded(question.constraints, question.cluster.world_size)
        same = (*question.shapes, question.precision, question.cluster.device.type)
        # A model with enough layers is not cut again: the same layers, of which a search may know the candidates.
        uncut = self._traced.get((*same, 1))
        key = (*same, 1 if uncut is not None and len(uncut[0].layers) >= num_layers else num_layers)
        if key not in self._traced:
            target = self.model(question)
            started = time.perf_counter()
            with phase("tracing the model"):
                traced = trace_model(
                    target.model, target.example_inputs, dtype=read_dtype(question.precision),
                    device_type=question.cluster.device.type, num_layers=num_layers,
                )  # fmt: skip
            seen = Expectations().seeing(traced, example_call(target.model, target.example_inputs))
            self._traced[key] = traced.program, time.perf_counter() - started, seen
        return self._traced[key]
