"""Price what you emit: the collectives that a training step runs are the ones that the plan's price counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ConstraintError
from autopar.lower import ParallelModule
from autopar.lower.communicator import Collective
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.rehearsal import loss_of, run_ranks
from autopar.search import SearchRequest, search
from autopar.search.layer_cost import PricedCollective
from autopar.search.plan_collectives import plan_collectives
from tests.models import WORLDS, ZOO, make_plain_gpt
from tests.random_plans import random_pipeline, random_plan
from tests.zoo import Subject, plan_for, quick_prices, subject, trained_alone

Volume = dict[tuple[str, Axis], float]
Constraints = tuple[str, ...]


def collectives_run(who: Subject, plan: Plan) -> list[list[Collective]]:
    """What the ranks of each device group run in the forward and backward pass of one step."""

    def step(model: ParallelModule) -> list[Collective]:
        with model.recording() as collectives:
            loss_of(model(**who.inputs)).backward()
        return collectives

    ranks = run_ranks(who.model, who.traced, plan, who.inputs, step)
    groups = [ranks[start : start + plan.group_size] for start in range(0, len(ranks), plan.group_size)]
    assert all(run == group[0] for group in groups for run in group), "ranks of a group run different collectives"
    return [group[0] for group in groups]


def assert_run_equals_priced(who: Subject, plan: Plan) -> None:
    """Equal bytes on every axis by every kind; calls may be fewer, as parameters travel together.

    Whatever is no parameter runs exactly as it is priced, call by call.
    """
    for group, run in enumerate(collectives_run(who, plan)):
        priced = plan_collectives(who.traced.program, plan, group=group)
        assert volume_run(run) == pytest.approx(volume_priced(priced), rel=1e-12), f"on device group {group}"
        calls = Counter((each.kind, each.axis, each.num_bytes) for each in run)
        alone: Counter[tuple[str, Axis, float]] = Counter()
        for each in priced:
            if each.purpose != "parameter" or each.phase == "recompute":
                alone[each.kind, each.axis, each.num_bytes] += each.times
        assert not alone - calls, f"priced, but not run as such: {alone - calls}"
        assert len(run) <= sum(each.times for each in priced)


def volume_run(collectives: list[Collective]) -> Volume:
    volume: Volume = {}
    for each in collectives:
        volume[each.kind, each.axis] = volume.get((each.kind, each.axis), 0.0) + each.num_bytes
    return volume


def volume_priced(collectives: tuple[PricedCollective, ...]) -> Volume:
    volume: Volume = {}
    for each in collectives:
        key = each.kind, each.axis
        volume[key] = volume.get(key, 0.0) + each.times * each.num_bytes
    return volume


def forced(world: int) -> Iterator[Constraints]:
    yield from (("zero=3", "recompute=selective"), (f"tensor={world}", "recompute=full"), (f"sequence={world}",))
    yield ("microbatches=2", "zero=3", "recompute=full")
    if world == 4:
        yield from ((f"data={world}", f"zero={zero}") for zero in (0, 1, 2, 3))
        yield from (("data=2", "tensor=2"), ("microbatches=2", "zero=1"), ("microbatches=2", "zero=2"))
        yield ("microbatches=4", "zero=0", "recompute=selective")


CASES = [
    pytest.param(
        model, world, constraints, id=f"{model}-{world}-{'+'.join(constraints) or 'searched'}",
        marks=() if (world, constraints) == (2, ()) and model in ("llama", "unet", "contrastive") else pytest.mark.slow,
    )
    for model in ZOO
    for world in WORLDS[model]
    for constraints in ((), *forced(world))
    if world > 2 or not constraints
]  # fmt: skip
NO_MICROBATCHES = ("unet", "contrastive")


@pytest.mark.parametrize(("model", "world", "constraints"), CASES)
def test_a_step_runs_what_was_priced(model: str, world: int, constraints: Constraints) -> None:
    if model in NO_MICROBATCHES and any(text.startswith("microbatches") for text in constraints):
        with pytest.raises(ConstraintError, match="needs the whole batch"):
            plan_for(model, world, constraints, torch.float32)
        return
    assert_run_equals_priced(subject(model, torch.float32), plan_for(model, world, constraints, torch.float32))


PIPELINES = {
    "deep_gpt2": ("1f1b tensor=2", "zbv data=2 zero=2", "gpipe pipeline=4", "interleaved_1f1b"),
    "deep_llama": ("interleaved_zero_bubble data=2 zero=3", "zbv pipeline=2 data=2 zero=3 recompute=full"),
    "deep_t5": ("1f1b pipeline=4", "interleaved_1f1b data=2 zero=1"),
    "deep_unet": ("zbv data=2", "gpipe pipeline=4"),
    "deep_crossing": ("gpipe pipeline=4", "zbv tensor=2"),
    "deep_half_frozen": ("1f1b pipeline=4", "interleaved_zero_bubble data=2"),
    "deep_batch_normed": ("gpipe pipeline=4 microbatches=1", "zbv data=2 microbatches=1"),
}


@pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param(model, text, id=f"{model}-{text.replace(' ', '+')}",
                     marks=() if (model, text) == ("deep_crossing", "zbv tensor=2") else pytest.mark.slow)
        for model, texts in PIPELINES.items()
        for text in texts
    ],
)  # fmt: skip
def test_stages_run_what_was_priced(model: str, text: str) -> None:
    schedule, *rest = text.split()
    defaults = [given for given in ("pipeline=2", "microbatches=4") if given.split("=")[0] not in text]
    constraints = (f"schedule={schedule}", *defaults, *rest)
    plan = plan_for(model, 4, constraints, torch.float32, stages=True)
    assert_run_equals_priced(subject(model, torch.float32), plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", ["deep_gpt2", "deep_t5", "deep_unet", "deep_half_frozen", "deep_batch_normed"])
def test_even_a_random_pipeline_runs_what_it_would_be_priced(model: str, seed: int) -> None:
    who = subject(model, torch.float32)
    groups, schedule = ((2, "zbv"), (4, "gpipe"))[seed]
    assert_run_equals_priced(who, random_pipeline(who.traced.program, (4, 8)[seed], seed, groups, schedule, 1))


def test_the_law_notices_a_message_left_out() -> None:
    """A value that crosses a cut, or a tied gradient, that is not listed is caught."""
    constraints = ("schedule=1f1b", "pipeline=2", "microbatches=2")
    who, plan = subject("gpt2", torch.float32), plan_for("gpt2", 2, constraints, torch.float32, stages=True)
    run = collectives_run(who, plan)[0]
    priced = plan_collectives(who.traced.program, plan)
    for purpose in ("stage", "tied", "output"):
        rest = tuple(each for each in priced if each.purpose != purpose)
        assert len(rest) < len(priced), purpose
        assert volume_run(run) != pytest.approx(volume_priced(rest)), purpose


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ZOO)
def test_even_a_random_plan_runs_what_it_would_be_priced(model: str, seed: int) -> None:
    """With one microbatch; with more, random plans cut integers where no search would, and gather them for that."""
    who = subject(model, torch.float32)
    assert_run_equals_priced(who, random_plan(who.traced.program, (2, 4, 8)[seed], seed))


def test_what_a_plan_pays_for_collectives_is_the_price_of_that_list() -> None:
    """Layer costs and boundary moves add up to `plan_collectives`, priced one by one."""
    who, prices = subject("llama", torch.float32), quick_prices(4)
    for constraints in ((), ("zero=3", "recompute=full"), ("microbatches=2",)):
        plan = plan_for("llama", 4, constraints, torch.float32)
        listed = [
            (each, each.times * prices.collective_s(each.kind, each.axis, each.num_bytes))
            for each in plan_collectives(who.traced.program, plan)
        ]
        costs = [plan.costs[layer.strategy] for layer in plan.layers]
        again = sum(seconds for each, seconds in listed if each.phase == "recompute")
        assert again <= sum(cost.recompute_s for cost in costs) * (1 + 1e-9)
        paid = sum(cost.activation_comm_s + cost.parameter_comm_s for cost in costs)
        assert sum(seconds for _, seconds in listed) - again == pytest.approx(paid, rel=1e-9)


class ScaledRows(nn.Module):
    """Scales every row of the batch by a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = 1 + torch.arange(8, dtype=x.dtype)[:, None].expand(8, 16)
        return nn.functional.mse_loss(self.last(torch.tanh(self.first(x) * scale.sin())), y)


def test_a_constant_with_a_row_per_sample_is_cut_in_time_before_it_is_cut_on_devices() -> None:
    torch.manual_seed(0)
    who = trained_alone(ScaledRows(), {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}, in_double=False)
    request = SearchRequest(constraints=("data=2", "microbatches=2"))
    assert_run_equals_priced(who, search(who.traced.program, 2, quick_prices(2), request))


def test_the_law_notices_a_price_left_out() -> None:
    """A plan whose program runs one more collective than is listed is caught."""
    who, plan = subject("flat", torch.float32), plan_for("flat", 2, ("data=2", "zero=0"), torch.float32)
    (run,), priced = collectives_run(who, plan), plan_collectives(who.traced.program, plan)
    assert volume_run(run) == pytest.approx(volume_priced(priced))
    assert priced, "a data-parallel plan reduces gradients"
    assert volume_run(run) != pytest.approx(volume_priced(priced[1:]))
    assert volume_run(run[1:]) != pytest.approx(volume_priced(priced))


def test_only_the_agreement_on_random_numbers_is_not_priced() -> None:
    """A model with dropout runs one broadcast of a seed besides."""
    torch.manual_seed(0)
    who = trained_alone(*make_plain_gpt(dropout=0.1), in_double=False)
    plan = random_plan(who.traced.program, 4, 3)
    (run,) = collectives_run(who, plan)
    seeds = [each for each in run if each.kind == "broadcast"]
    assert len(seeds) == 1
    assert seeds[0].num_bytes == 8
    rest = [each for each in run if each.kind != "broadcast"]
    priced = plan_collectives(who.traced.program, plan)
    assert volume_run(rest) == pytest.approx(volume_priced(priced), rel=1e-12)
