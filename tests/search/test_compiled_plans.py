"""`compile=` of plans: what it changes, what the search chooses, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.errors import CompilerError, InfeasibleError, QuestionError
from autopar.explain.question import Question, change
from autopar.plan import Plan
from autopar.planning.compiling import check_compiler, read_compile, search_compiled
from autopar.program import Program
from autopar.search import SearchRequest
from autopar.step.simulation.actions import LayerPolicy
from autopar.step.training import TrainingSpec
from tests.models import Gated


def planned(device: str, *, compile: bool | None = None, constraints: tuple[str, ...] = ()) -> Plan:
    where = Cluster.of(device, devices_per_node=4)
    return autopar.plan(Gated(512), where, (torch.ones(64, 256, 512),), compile=compile, constraints=constraints)


def test_compiled_plans_are_faster_smaller_and_say_so() -> None:
    forced = ("data=4", "zero=0", "recompute=none")
    eager, compiled = (planned("h100", compile=way, constraints=forced) for way in (False, True))
    assert not eager.compiled
    assert compiled.compiled
    assert compiled.step_time_s < eager.step_time_s
    assert compiled.peak_memory_bytes < eager.peak_memory_bytes
    assert "compiled" in str(compiled).splitlines()[0]
    (note,) = (note for note in compiled.notes if note.startswith("compiled layers"))
    assert f"{eager.step_time_s / compiled.step_time_s:.2f}x as fast" in note
    assert "compiling takes about" in note
    assert not any("compiled layers" in note for note in eager.notes)


def test_on_gpus_the_search_chooses_and_on_cpus_plans_are_eager() -> None:
    assert planned("h100").decisions == planned("h100", compile=True).decisions
    assert planned("h100").compiled
    assert not planned("cpu").compiled
    assert planned("cpu", compile=True).compiled


@pytest.mark.slow
def test_where_memory_is_short_what_is_chosen_is_no_slower_than_either_choice() -> None:
    """Eager layers have more ways to keep less."""
    where, inputs = Cluster.of("h100", devices_per_node=4), (torch.ones(64, 256, 512),)
    for memory in ("145MiB", "100MiB"):
        free, *forced = (
            autopar.plan(Gated(512), where, inputs, compile=way, constraints=("data=4", "pipeline=1"), memory=memory)
            for way in (None, False, True)
        )
        assert free.step_time_s <= 1.0101 * min(plan.step_time_s for plan in forced)


def test_where_eager_layers_do_not_fit_compiled_ones_may() -> None:
    """Without recomputation they keep less."""
    forced = ("data=4", "zero=0", "recompute=none", "offload=none", "microbatches=1", "pipeline=1")
    where, inputs = Cluster.of("h100", devices_per_node=4), (torch.ones(64, 256, 512),)
    sizes = [planned("h100", compile=way, constraints=forced).peak_memory_bytes for way in (False, True)]
    memory = 1.05 * sum(sizes) / 2
    with pytest.raises(InfeasibleError):
        autopar.plan(Gated(512), where, inputs, compile=False, constraints=forced, memory=memory)
    free = autopar.plan(Gated(512), where, inputs, constraints=forced, memory=memory)
    assert free.compiled


def test_a_note_says_what_is_left_to_the_compiler() -> None:
    ask = "recompute=selective"
    said = f"{ask}: in compiled layers the compiler chooses which ops run again"
    assert said in planned("h100", compile=True, constraints=("data=4", ask)).notes
    assert said not in planned("h100", compile=False, constraints=("data=4", ask)).notes


def test_where_compiled_layers_do_not_fit_eager_ones_may() -> None:
    eager = planned("h100", compile=False, constraints=("data=4",))
    prices, program = ClusterPrices(Cluster.of("h100", devices_per_node=4), None), Program({}, (), (), {}, {}, ())

    def find(request: SearchRequest) -> Plan:
        if request.training.compiled:
            raise InfeasibleError("no plan fits")
        return eager

    assert search_compiled(None, find, program, prices, SearchRequest()) is eager
    with pytest.raises(InfeasibleError):
        search_compiled(True, find, program, prices, SearchRequest())


def test_a_saved_plan_keeps_whether_it_is_compiled() -> None:
    plan = planned("h100", constraints=("data=4",))
    assert Plan.from_json(plan.to_json()) == plan
    eager = plan.with_decisions(compiled=False)
    assert eager.decisions.digest() != plan.decisions.digest()
    before = eager.to_json().replace('"compiled": false', '"compiled": true')
    assert Plan.from_json(before).decisions == plan.decisions
    lines = [line for line in eager.to_json().splitlines() if '"compiled"' not in line]
    assert not Plan.from_json("\n".join(lines)).compiled  # a file of a version that did not decide it


def no_program(name: str) -> None:
    """Nothing is installed."""


def test_a_compiler_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_compile(None) is None
    with pytest.raises(CompilerError, match="compile='max-autotune'"):
        read_compile("max-autotune")
    monkeypatch.setattr(shutil, "which", no_program)
    with pytest.raises(CompilerError, match="there is no C\\+\\+ compiler"):
        check_compiler(True, "cpu")
    assert check_compiler(None, "cpu") is False
    assert check_compiler(False, "cpu") is False


def test_a_question_about_compiling() -> None:
    question = Question(Cluster.of("h100"))
    assert change(question, "compile=no") == replace(question, compile=False)
    with pytest.raises(QuestionError, match="compile=yes or compile=no"):
        change(question, "compile=maybe")


def test_a_compiled_backward_is_not_split() -> None:
    own = TrainingSpec()
    strategy = planned("h100", constraints=("zero=0", "recompute=none")).strategies[0]
    assert LayerPolicy.of(strategy, own).splits_backward
    assert not LayerPolicy.of(strategy, own.running(compiled=True)).splits_backward
