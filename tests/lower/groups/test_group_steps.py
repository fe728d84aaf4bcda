"""Steps of unlike groups compute what one device computes of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import AutoparError, InputShapeError, PlanFormatError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.groups.group_layout import Group, check_lengths, count_rows, read_groups
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.planning.group_plans import plan_groups, why_no_groups
from autopar.program import Program
from autopar.schedules import find_schedule, rows_schedule
from autopar.search import SearchRequest, search
from autopar.verify.rehearsal import SteadyAdamW, keep_double_program, run_single
from tests.data.test_balanced import Alone, Documents, rows_of_tokens, small_llama
from tests.lower.groups.cases import TOKENS, Family, batches_of, family, nested_batches_of
from tests.lower.runs import loss_of
from tests.ranks import run_ranks
from tests.zoo import quick_prices

# Lengths of the documents of a step, and tokens of the rows of its groups.
FOUR = {
    "mixed": ([1, 16, 3, 7, 8, 2, 4, 4], [16, 8, 4]),
    "a giant and empty groups": ([16], [8, 8, 16]),
    "all equal": ([4] * 6, [16, 8, 8]),
    "no target in some groups": ([12, 1, 1, 1, 1], [16, 8, 4]),
    "single ranks": ([8, 2, 3, 4, 1, 2], [8, 4, 4, 8]),
}
EIGHT = {
    "mixed": ([1, 16, 3, 7, 8, 2, 4, 4, 12, 4, 3], [16, 8, 4, 4]),
    "a giant and empty groups": ([16], [16, 8, 8]),
    "many small ones": ([2, 3, 4, 4, 1, 2, 8], [8, 8, 8, 4, 4]),
}
# Of ranks that are in several groups; each document has a row.
NESTED: dict[str, tuple[list[int], list[int]]] = {
    "mixed": ([1, 16, 3, 7, 8, 2, 4, 4, 12, 4, 3, 5], []),
    "few": ([13, 3, 2], []),
}
STEPS = 2


def gradients_of(found: Family, made: Any) -> dict[str, Tensor]:
    own = {n: p.grad for n, p in made.named_parameters() if p.grad is not None}
    return {n: made._whole(n, own[n]) for n, _ in found.model.named_parameters() if n in own}


def train(found: Family, talk: Communicator, batches: list[list[dict[str, Tensor]]]) -> Any:
    """Loss and gradients of each batch, then losses of steps with the first, and the parameters at the end."""
    made: Any = found.build(talk)
    alone: list[tuple[float, Mapping[str, Tensor]]] = []
    for batch in batches:
        loss = loss_of(made(**batch[talk.rank]))
        loss.backward()
        alone.append((loss.item(), gradients_of(found, made)))
        made.zero_grad()
    optimizer = SteadyAdamW(made.parameters())
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(made(**batches[0][talk.rank]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return alone, losses, made.full_state_dict()


Mixes = Mapping[str, tuple[list[int], list[int]]]


def batches_of_mixes(found: Family, mixes: Mixes) -> list[list[dict[str, Tensor]]]:
    random = np.random.default_rng(0)
    stages = found.plan.num_groups
    return [batches_of(lengths, rooms, found.degrees, random, stages) for lengths, rooms in mixes.values()]


def nested_batches(found: Family) -> list[list[dict[str, Tensor]]]:
    random = np.random.default_rng(1)
    return [nested_batches_of(lengths, found, random) for lengths, _ in NESTED.values()]


def check(
    found: Family, mixes: Mixes, ranks: list[Any] | None = None, batches: list[list[dict[str, Tensor]]] | None = None
) -> None:
    """What `ranks` trained is what one device trains; without any, simulated ranks train."""
    batches = batches or batches_of_mixes(found, mixes)
    ranks = ranks or simulate(found.world, lambda talk: train(found, talk, batches))
    runs = [run_single(Alone(found.model, Documents(lengths)), {"x": torch.zeros(1)}, STEPS if not n else 1,
                       in_double=True) for n, (lengths, _) in enumerate(mixes.values())]  # fmt: skip
    for steps, losses, state in ranks:
        for (loss, gradients), alone in zip(steps, runs, strict=True):
            assert loss == pytest.approx(alone.losses[0], rel=1e-12)
            assert {f"model.{name}" for name in gradients} == alone.gradients.keys()
            check_close(gradients, alone.gradients)
        assert losses == pytest.approx(runs[0].losses, rel=1e-9)
        check_close(state, runs[0].parameters)


def check_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    largest = max(float(x.abs().max()) for x in expected.values())
    assert {f"model.{name}" for name in found} >= expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name.removeprefix("model.")], x, rtol=0, atol=1e-9 * largest)


class Scored(nn.Module):
    """A language model with another output, of which the loss knows nothing: what makes it has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.text = small_llama()
        self.score = nn.Linear(self.text.config.hidden_size, 1, dtype=torch.float64)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.text.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        logits = self.text.lm_head(hidden)[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits, labels[:, 1:].flatten()), self.score(hidden)


def four_ranks() -> Family:
    return family(small_llama(), 4, [(2, "sequence=2"), (1, ""), (1, "")], "data=4 zero=1")


@pytest.fixture(scope="module")
def four() -> Family:
    return four_ranks()


@pytest.mark.slow
def test_groups_of_four_ranks_train_as_one_device(four: Family) -> None:
    check(four, FOUR)


@pytest.mark.slow
def test_groups_of_eight_ranks_train_as_one_device() -> None:
    kinds = [(4, "tensor=2 sequence=2"), (2, "tensor=2"), (1, "")]
    model = small_llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.weight.requires_grad_(False)
    check(family(model, 8, kinds, "data=4 tensor=2 zero=3"), EIGHT)


@pytest.mark.parametrize(
    ("world", "kinds", "asked"),
    [
        pytest.param(2, [(2, "sequence=2"), (1, "")], "data=2 zero=1", marks=pytest.mark.slow),
        pytest.param(4, [(2, "sequence=2"), (1, ""), (1, "")], "data=4 zero=3", marks=pytest.mark.slow),
        pytest.param(4, [(2, "tensor=2"), (1, "")], "pipeline=2 data=2 zero=1", marks=pytest.mark.slow),
    ],
)
def test_ranks_in_several_groups_train_as_one_device(world: int, kinds: list[tuple[int, str]], asked: str) -> None:
    found = family(Scored() if world == 2 else small_llama(), world, kinds, asked)
    batches = nested_batches(found)
    # In the first step a rank is in two groups at least, with rows of several lengths.
    assert any(batch["input_ids"].is_nested for batch in batches[0])
    check(found, NESTED, batches=batches)


# Of two stages with two ranks each.  Rows are microbatches: groups have fewer than there are stages, as many, or more.
TWO_OF_STAGE = {
    "mixed": ([1, 8, 3, 7, 8, 2, 4, 4], [8, 4]),
    "an empty group": ([8, 8, 5], [8, 4]),
    "a single row with targets": ([5, 1, 1], [8, 4]),
}


def staged(world: int, asked: str, *, is_tied: bool) -> Family:
    model = small_llama()
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    found = family(model, world, [(2, "tensor=2"), (1, ""), (1, "")], f"pipeline=2 {asked}")
    assert found.plan.num_groups == 2
    return found


@pytest.mark.slow
def test_groups_with_pipeline_stages_train_as_one_device() -> None:
    check(staged(4, "data=2 zero=0", is_tied=True), TWO_OF_STAGE)


INTERLEAVED = "cuts=1,2,3 schedule=interleaved_1f1b"


def test_rounds_of_interleaved_stages_are_filled_up() -> None:
    assert [rows_schedule(2, 4, rows) for rows in (1, 2, 5)] == [("interleaved_1f1b", n) for n in (2, 2, 6)]
    assert [rows_schedule(2, 2, rows) for rows in (1, 2, 5)] == [("gpipe", 1), ("1f1b", 2), ("1f1b", 5)]
    # With more rounds than three no more rows are in flight.
    flights = find_schedule("interleaved_1f1b").in_flight
    for groups, stages in ((2, 4), (2, 8), (4, 8), (4, 12), (8, 16)):
        few, *more = [flights(groups, stages, groups * rounds) for rounds in (3, 4, 5, 8)]
        assert all(list(own) == list(few) for own in more)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [
    f"data=2 zero=1 {INTERLEAVED}", pytest.param(f"tensor=2 zero=0 {INTERLEAVED}", marks=pytest.mark.slow),
])  # fmt: skip
def test_groups_with_interleaved_stages_train_as_one_device(asked: str) -> None:
    found = staged(4, asked, is_tied="zero=1" in asked)
    assert len(found.plan.stages) == 4
    check(found, TWO_OF_STAGE)
    group = found.plan.groups[0]
    stages = [replace(stage, group=other) for stage, other in zip(group.decisions.stages, (0, 1, 1, 0), strict=True)]
    group = replace(group, decisions=replace(group.decisions, stages=tuple(stages)))
    with pytest.raises(PlanFormatError, match=r"stage s on device group s % 2, and one microbatch"):
        Plan.from_json(replace(found.plan, groups=(group,)).to_json())


@pytest.mark.slow
def test_groups_of_several_ranks_of_a_stage_train_as_one_device() -> None:
    asked = "data=2 tensor=2 zero=2 schedule=1f1b microbatches=2"
    check(staged(8, asked, is_tied=False), FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [("pipeline=2",), ("pipeline=2", "stages=4", "schedule=interleaved_1f1b")])
def test_groups_with_stages_that_were_searched_train_as_one_device(asked: tuple[str, ...]) -> None:
    model, prices = small_llama(), quick_prices(8)

    def trace(rows: int, tokens: int) -> Program:
        return keep_double_program(trace_model(model, rows_of_tokens(rows, tokens))).program

    example = rows_of_tokens(8, TOKENS)
    traced = keep_double_program(trace_model(model, example))
    request = SearchRequest(constraints=asked, schedules=schedule_actions)
    plan = search(traced.program, 8, prices, request)
    assert not why_no_groups(traced.program, plan, request)
    batches = [np.array(lengths) for lengths, _ in FOUR.values()]
    planned = plan_groups(traced.program, plan, batches, trace, prices, request)
    kinds = [(each.degree, each.tokens) for each in planned.rows]
    assert planned.nests
    assert kinds[0] == (2, TOKENS)
    assert {(1, 8), (1, 4)} <= {*kinds}
    assert [(each.decisions.group_size, each.tokens) for each in planned.plans] == kinds
    assert {each.decisions.num_groups for each in planned.plans} == {2}
    # To fill and drain the other stage takes about as long as a row.
    assert all(0 < each.fill_s < 3 * each.row_s for each in planned.rows)
    assert planned.rows[0].axes.startswith("ZeRO-0")
    assert not any("PP" in each.axes for each in planned.rows)
    plan = Plan.from_json(replace(plan, groups=planned.plans).to_json())
    found = Family(model, 8, example, traced, plan, {tokens: degree for degree, tokens in kinds})
    check(found, FOUR)
    check(found, NESTED, batches=nested_batches(found))


def train_stages_process() -> Any:
    """On this process: what `train` gives with pipeline stages and a tied parameter."""
    found = staged(4, "data=2 zero=1", is_tied=True)
    return train(found, ProcessGroupCommunicator(), batches_of_mixes(found, TWO_OF_STAGE))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_with_pipeline_stages_train_as_one_device() -> None:
    check(staged(4, "data=2 zero=1", is_tied=True), TWO_OF_STAGE, run_ranks(train_stages_process, 4))


def train_process() -> tuple[Any, Any, str]:
    """On this process: what `train` gives, also in several groups, and the error where a rank passes other rows."""
    found = four_ranks()
    talk = ProcessGroupCommunicator()
    batches = batches_of_mixes(found, FOUR)
    made = train(found, talk, batches)
    nested = train(found, talk, nested_batches(found))
    model = found.build(talk)
    with pytest.raises(InputShapeError) as caught:
        model(**{name: x[: len(x) - (talk.rank == 1)] for name, x in batches[0][talk.rank].items()})
    return made, nested, str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_train_as_one_device_and_raise_together(four: Family) -> None:
    made = run_ranks(train_process, 4)
    check(four, FOUR, [run for run, _, _ in made])
    check(four, NESTED, [run for _, run, _ in made], nested_batches(four))
    assert all("begin at a multiple of 2 and pass the same rows, but ranks 0 to 1 pass [" in e for _, _, e in made)


def refused(four: Family, change: Callable[[int, dict[str, Tensor]], dict[str, Tensor]]) -> AutoparError:
    batch = batches_of(*FOUR["all equal"], four.degrees, np.random.default_rng(0))

    def rank(talk: Communicator) -> AutoparError:
        made = four.build(talk)
        with pytest.raises(AutoparError) as caught:
            made(**change(talk.rank, batch[talk.rank]))
        return caught.value

    errors = simulate(4, rank)
    assert len({str(error) for error in errors}) == 1
    return errors[0]


def test_what_ranks_pass_in_another_way_is_an_error_on_all(four: Family) -> None:
    def longer(rank: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.cat([x, x], 1) if rank == 3 else x for name, x in batch.items()}

    def fewer(rank: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x[1:] if rank == 1 else x for name, x in batch.items()}

    def other(rank: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch | {"input_ids": batch["input_ids"] + (rank == 1)}

    assert "begin at a multiple of 2" in str(refused(four, longer))
    assert "ranks 0 to 1 pass [1, 0] of them" in str(refused(four, fewer))
    assert "ranks 0 and 1 differ" in str(refused(four, other))


def test_rows_of_several_lengths_are_for_training_steps(four: Family) -> None:
    batches = nested_batches(four)[0]

    def rank(talk: Communicator) -> str:
        made = four.build(talk).eval()
        with pytest.raises(InputShapeError) as caught:
            made(**next(batch for batch in batches if batch["input_ids"].is_nested))
        return str(caught.value)

    assert all("which only training steps run" in text for text in simulate(4, rank))


def test_lengths_of_rows_say_which_ranks_form_groups() -> None:
    degrees = {16: 4, 8: 2, 4: 1}

    def read(tokens: list[int], stages: int = 1) -> list[tuple[int, int]]:
        found = read_groups([count_rows([each], degrees) for each in tokens], degrees, stages)
        return [(group.start, group.degree) for own in found.values() for group in own]

    assert read([4, 4, 8, 8, 16, 16, 16, 16]) == [(4, 4), (2, 2), (0, 1), (1, 1)]
    assert Group(2, 2, 2, 4).ranks == (2, 3, 6, 7)
    assert read([8, 8, 8, 8], 2) == [(0, 2)]
    with pytest.raises(InputShapeError, match="ranks 0 and 2 have the same place"):
        read([8, 8, 4, 4], 2)
    for tokens in ([4, 8, 8, 4], [16] * 3, [8, 8, 16, 16, 16, 16, 4, 4], [8, 4, 4, 4]):
        with pytest.raises(InputShapeError, match="begin at a multiple"):
            read(tokens)
    with pytest.raises(InputShapeError, match="rank 1 passes rows of 5 tokens, but the plan's groups"):
        check_lengths([4, 5], degrees)
    # Ranks 2 and 3 are in three groups each.
    rows = [count_rows(own, degrees) for own in ([16], [16], [16, 8, 8, 4], [16, 8, 8])]
    found = {tokens: [group.start for group in own] for tokens, own in read_groups(rows, degrees).items()}
    assert found == {16: [0], 8: [2], 4: [2]}
