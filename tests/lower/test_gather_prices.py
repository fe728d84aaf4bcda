"""What a caller's script causes is priced: the collectives that an optimizer and the reading of outputs run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.explain.explanation import kind_rows
from autopar.lower.communication.collectives import Collective
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.arguments import training_spec
from autopar.planning.optimizer_state import whole_states
from autopar.search import SearchRequest, search
from tests.lower.runs import build
from tests.lower.test_outputs import traced_model
from tests.lower.test_whole_matrices import MAKE, Lion, Shampoo, Soap, traced
from tests.zoo import quick, quick_prices, quick_search


def planned(optimizer: Any, *constraints: str, **training: Any) -> Plan:
    model, _, result = traced()
    spec = replace(training_spec(model, optimizer), **training)
    return quick_search(result.program, 2, SearchRequest(training=spec, constraints=constraints))


def seconds_run(plan: Plan, step: Callable[[Any, Tensor], Callable[[], None]]) -> float:
    """The price of the collectives that `step(model, x)()` runs on rank 0."""
    model, x, result = traced()

    def rank(communicator: Communicator) -> list[Collective]:
        made: Any = build(model, result, plan, communicator)
        act = step(made, x)
        with made.recording() as collectives:
            act()
        return list(collectives)

    run = simulate(2, rank)[0]
    return sum(quick_prices(2).collective_s(each.kind, each.axis, each.num_bytes) for each in run)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["torch's Adafactor", "torch's Muon", "LAMB", "SOAP", "Lion"])
def test_what_an_optimizer_gathers_is_in_the_step(name: str) -> None:
    make, plain = MAKE[name], planned("sgd", "zero=3", "data=2")
    plan = planned(make, "zero=3", "data=2")

    def second_step(model: Any, x: Tensor) -> Callable[[], None]:
        optimizer = make(model.parameters())
        model(x=x).backward()
        optimizer.step()
        return optimizer.step

    gathers_s = plan.prediction.optimizer_gathers_s
    assert gathers_s == pytest.approx(seconds_run(plan, second_step), rel=1e-9)
    assert (gathers_s > 0) == (name != "Lion") == ("optimizer gathers" in str(plan))
    assert plan.step_time_s - gathers_s >= 0.99 * plain.step_time_s
    assert sum(dict(row.seconds)["optimizer"] for row in kind_rows(plan)) >= gathers_s
    assert Plan.from_json(plan.to_json()) == plan


def test_the_memory_of_whole_parameters_is_counted() -> None:
    parameter_bytes = sum(p.numel() * p.element_size() for p in traced()[0].parameters())
    peaks = [planned("sgd", "zero=3", "data=2", whole_states=n).peak_memory_bytes for n in ((-1, -1), (2, 2))]
    needed_bytes = (1 + 2 + 2) * parameter_bytes  # stored with gradients; whole with gradients; whole states
    assert peaks[0] < needed_bytes <= peaks[1]


def test_which_parameters_an_optimizer_needs_whole() -> None:
    expected = {
        "adamw": (-1, -1), "adamw8bit": (-1, -1), torch.optim.SGD: (-1, -1), Lion: (-1, -1), "adafactor": (1, 0),
        torch.optim.Muon: (-1, 1), "lamb": (2, 2), Shampoo: (-1, 1), Soap: (-1, 2), MAKE["torch's Adafactor"]: (1, 0),
    }  # fmt: skip
    assert {optimizer: whole_states(optimizer) for optimizer in expected} == expected


@pytest.mark.parametrize("constraints", [("data=2",), ("pipeline=2", "microbatches=2")], ids=str)
def test_what_reading_outputs_takes_is_told(constraints: tuple[str, ...]) -> None:
    model, inputs, result = traced_model("plain_gpt")
    request = SearchRequest(constraints=quick(constraints), schedules=schedule_actions)
    plan = quick_search(result.program, 2, request)

    def rank(communicator: Communicator) -> list[Collective]:
        logits, _ = build(model, result, plan, communicator)(**inputs)
        with communicator.recording() as collectives:
            logits.sum()
        return list(collectives)

    run = simulate(2, rank)[0]
    seconds = sum(quick_prices(2).collective_s(each.kind, each.axis, each.num_bytes) for each in run)
    assert seconds > 0
    assert plan.prediction.output_reads_s == pytest.approx(seconds, rel=1e-9)
    assert "output reads" in str(plan)
    whole = replace(request, training=replace(request.training, gathers_outputs=True))
    given = search(result.program, 2, quick_prices(2), whole)
    assert given.decisions == plan.decisions
    assert plan.step_time_s < given.step_time_s <= (plan.step_time_s + seconds) * (1 + 1e-9)
    assert "output gathers" in str(given)
