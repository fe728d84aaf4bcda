"""Memory over a step: what actions allocate is freed, and it is there between the actions that say so."""

from __future__ import annotations

import random

import pytest

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.program import Program
from autopar.search import SearchRequest, TrainingSpec, search
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.simulation.actions import step_actions
from autopar.step.simulation.layer_bytes import layer_bytes
from autopar.step.simulation.step_memory import Moment, step_memory
from autopar.timeline import MEMORY_KINDS
from tests.random_plans import random_pipeline, random_plan
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices

TRAINING = TrainingSpec()
GRADIENTS, SAVED, TRANSIENTS, GATHERED, SENT = (
    MEMORY_KINDS.index(kind)
    for kind in ("gradients", "saved activations", "transients", "gathered parameters", "pipeline buffers")
)


def model() -> Program:
    return decoder_model(4, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2, tied=True)


def planned(*constraints: str) -> PlannedLayers:
    program = model()
    request = SearchRequest(constraints=constraints, schedules=schedule_actions)
    return PlannedLayers(program, search(program, 4, TablePrices(devices_per_node=2), request).decisions)


def memory(layers: PlannedLayers) -> tuple[tuple[Moment, ...], ...]:
    return step_memory(layers, TRAINING, schedule_actions)


@pytest.mark.parametrize("schedule", ["", "gpipe", "1f1b", "interleaved_zero_bubble", "zbv"])
@pytest.mark.parametrize("seed", range(4))
def test_what_actions_allocate_is_freed(schedule: str, seed: int) -> None:
    program = model()
    if schedule:
        plan = random_pipeline(program, 4, seed, 2, schedule, 4)
    else:
        plan = random_plan(program, 4, seed, random.Random(seed).choice([1, 2]))
    layers = PlannedLayers(program, plan.decisions)
    for group, moments in enumerate(memory(layers)):
        ran = [moment for moment in moments if moment.part == "end"]
        assert ran[0].num_bytes[TRANSIENTS] == 0
        assert ran[-1].num_bytes[TRANSIENTS] == ran[-1].num_bytes[GATHERED] == ran[-1].num_bytes[SENT] == 0
        assert ran[-1].num_bytes[SAVED] == moments[0].num_bytes[SAVED], "the caller's batch"
        assert min(min(moment.num_bytes) for moment in moments) >= 0
        own = [index for index, where in enumerate(layers.group_of) if where == group]
        assert ran[-1].num_bytes[GRADIENTS] >= sum(sizes(layers)[index].gradient_bytes for index in own)


def sizes(layers: PlannedLayers):
    return layers.find("bytes", lambda placed: layer_bytes(placed, TRAINING))


def test_a_backward_in_two_parts_keeps_the_gradients_of_a_stage_until_they_are_reduced() -> None:
    layers = planned("pipeline=2", "schedule=zbv", "stages=4", "data=2", "zero=2", "recompute=none", "microbatches=4")
    actions = step_actions(layers.program, layers.decisions, TRAINING, schedule_actions)
    largest = 0.0
    for stage, own in enumerate(actions.ranges):
        assert actions.is_split(stage)
        waiting = sum(sizes(layers)[index].copy_gradient_bytes for index in own)
        found = [m for m in memory(layers)[actions.groups[stage]] if m.layer == own[-1] and m.microbatch == 0]
        assert max(moment.num_bytes[TRANSIENTS] for moment in found) >= waiting
        largest = max(largest, waiting)
    assert largest


def test_parameters_are_gathered_for_a_backward_while_the_layer_behind_it_runs() -> None:
    layers = planned("pipeline=1", "data=4", "zero=3", "recompute=none", "microbatches=1")
    (moments,) = memory(layers)
    found = sizes(layers)
    last = len(found) - 1
    for index in range(2, last + 1):
        running = next(m for m in moments if (m.part, m.layer, m.is_after) == ("backward", index, False))
        assert running.num_bytes[GATHERED] == found[index].copied_bytes + found[index - 1].coming_bytes


def test_copies_that_are_gathered_once_are_freed_in_the_last_backward() -> None:
    layers = planned("pipeline=1", "data=4", "zero=1", "microbatches=2")
    (moments,) = memory(layers)
    copies = [each.copied_bytes for each in sizes(layers)]
    for microbatch, stop in ((0, len(copies)), (1, 3)):
        running = next(m for m in moments if (m.part, m.layer, m.microbatch) == ("backward", 2, microbatch))
        assert running.num_bytes[GATHERED] == sum(copies[:stop]) > 0
