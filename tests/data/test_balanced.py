"""Balanced loaders: every sample once, in rows that compute what one device computes of each sequence alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.balance import BatchPlanner
from autopar.data.shares import rank_rows
from autopar.errors import LengthError, LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.plan.prediction import LengthPlan, LengthPrediction, RowCost
from autopar.planning.call_plans import stored_as
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.search import SearchRequest, plan_like, search
from autopar.verify.rehearsal import keep_double_program, planner_for, run_single
from tests.balance.assignments import plan_of
from tests.data.sharded import FakeModel
from tests.lower.runs import build, loss_of
from tests.zoo import quick_prices, quick_search

TOKENS = 16
ROW = RowCost(ranks=2, rows=2, tokens=TOKENS, token_s=1.0, pair_s=0.1)


class Documents(Dataset[dict[str, Tensor]]):
    """Document n has token n + 1 in all its places."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.full((self.lengths[index],), index + 1)
        return {"input_ids": ids, "labels": ids}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, documents: Documents) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.documents[index] for index in range(len(self.documents)))


LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, TOKENS + 1, 23)]


def size(sample: Any) -> int:
    return len(sample["input_ids"])


def batches_of(world: int, make: Callable[[int], Any], **arguments: Any) -> list[list[dict[str, Tensor]]]:
    loaders = [make(rank) for rank in range(world)]

    def act(talk: Communicator) -> list[Any]:
        model: Any = FakeModel(talk)
        model.plan = plan_of(RowCost(world, 2, TOKENS, 1.0, 0.1))
        return list(autopar.balanced(loaders[talk.rank], model, **{"shifts": "labels", **arguments}))

    return simulate(world, act)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["length", "index", "stream"])
@pytest.mark.parametrize("packs", [True, False])
def test_every_sample_is_once_in_the_batch_that_one_device_has_it_in(world: int, kind: str, packs: bool) -> None:
    documents = Documents(LENGTHS)
    arguments: dict[str, Any] = {"length_index": LENGTHS} if kind == "index" else {"length": size}
    dataset: Any = Stream(documents) if kind == "stream" else documents
    parts = batches_of(world, lambda _: DataLoader(dataset, batch_size=6), packs=packs, **arguments)
    for number, shares in enumerate(zip(*parts, strict=True)):
        ids = torch.cat([share["input_ids"] for share in shares])
        members = range(6 * number, min(23, 6 * number + 6))
        if packs:
            assert len({share["input_ids"].shape for share in shares}) == 1
        else:  # nothing says that the model's loss counts no empty rows
            assert len(ids) == len(members)
        found = {n: int((ids == n + 1).sum()) for n in members}
        assert found == {n: LENGTHS[n] for n in members}
        assert int((ids > 0).sum()) == sum(found.values())
        labels = torch.cat([share["labels"] for share in shares])
        assert int((labels != -100).sum()) == sum(found.values()) - packs * len(found)
        if packs:
            positions = torch.cat([share["position_ids"] for share in shares])
            assert int(((positions == 0) & (ids > 0)).sum()) == len(found)
    assert len(parts[0]) == 4


def test_shuffles_are_those_of_rank_0() -> None:
    def make(rank: int) -> Any:
        generator = torch.Generator().manual_seed(rank)
        return DataLoader(Documents(LENGTHS), batch_size=5, shuffle=True, generator=generator)

    parts = batches_of(2, make, length_index=LENGTHS)
    ids = torch.cat([share["input_ids"].flatten() for shares in parts for share in shares])
    assert sorted(set(ids.tolist())) == list(range(24))


def test_workers_make_rows() -> None:
    def make(_: int) -> Any:
        return DataLoader(Documents(LENGTHS), batch_size=5, num_workers=1)

    for arguments in ({"length": size}, {"length_index": LENGTHS}):
        with_workers = batches_of(1, make, **arguments)
        alone = batches_of(1, lambda _: DataLoader(Documents(LENGTHS), batch_size=5), **arguments)
        for one, other in zip(with_workers[0], alone[0], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("worlds", [(2, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("indexed", [True, False])
def test_stateful_loaders_resume_on_any_number_of_ranks(worlds: tuple[int, int], indexed: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is optional")
    arguments: dict[str, Any] = {"length_index": LENGTHS} if indexed else {"length": size}

    def run(world: int, begin: Callable[[Any], Any]) -> list[Any]:
        def act(talk: Communicator) -> Any:
            model: Any = FakeModel(talk)
            model.plan = plan_of(RowCost(world, 2, TOKENS, 1.0, 0.1))
            loader = stateful.StatefulDataLoader(Documents(LENGTHS), batch_size=5)
            return begin(autopar.balanced(loader, model, shifts="labels", **arguments))

        return simulate(world, act)

    def start(loader: Any) -> Any:
        iterator = iter(loader)
        return [next(iterator) for _ in range(2)], loader.state_dict()

    def resume(loader: Any) -> Any:
        loader.load_state_dict(state)
        return list(loader)

    state = run(worlds[0], start)[0][1]
    for number, shares in enumerate(zip(*run(worlds[1], resume), strict=True)):
        ids = torch.cat([share["input_ids"] for share in shares])
        expected = range(11 + 5 * number, min(24, 16 + 5 * number))
        assert sorted(set(ids[ids > 0].tolist())) == list(expected)


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("is_shuffled", [True, False])
def test_steps_of_like_work_resume_between_batches_dealt_out_together(stop: int, is_shuffled: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is optional")

    def run(world: int, begin: Callable[[Any], Any]) -> list[Any]:
        def act(talk: Communicator) -> Any:
            model: Any = FakeModel(talk)
            model.plan = plan_of(RowCost(world, 2, TOKENS, 1.0, 0.1))
            if is_shuffled:
                generator = torch.Generator().manual_seed(world)
                given = {"batch_size": 5, "shuffle": True, "generator": generator}
            else:  # without a state of its own
                given = {"batch_sampler": [list(range(first, min(23, first + 5))) for first in range(0, 23, 5)]}
            loader = stateful.StatefulDataLoader(Documents(LENGTHS), **given)
            return begin(autopar.balanced(loader, model, length_index=LENGTHS, shifts=(), across_steps=2))

        return simulate(world, act)

    def start(loader: Any) -> Any:
        iterator = iter(loader)
        return [next(iterator) for _ in range(stop)], loader.state_dict()

    def resume(loader: Any) -> Any:
        loader.load_state_dict(state)
        return list(loader)

    begun = run(2, start)
    state = begun[0][1]
    shares = [share for own, _ in begun for share in own] + [share for own in run(4, resume) for share in own]
    ids = torch.cat([share["input_ids"].flatten() for share in shares])
    assert [int((ids == n + 1).sum()) for n in range(23)] == LENGTHS


def test_ranks_without_rows_pass_none() -> None:
    def act(talk: Communicator) -> Any:
        model: Any = FakeModel(talk)
        model.plan = plan_of(RowCost(1, 2, TOKENS, 1.0, 0.1))
        arguments: dict[str, Any] = {"shifts": (), "length_index": [3, 4, 5]}
        return next(iter(autopar.balanced(DataLoader(Documents([3, 4, 5]), batch_size=3), model, **arguments)))

    parts = [batch["input_ids"] for batch in simulate(2, act)]
    assert [len(part) for part in parts] == [1, 0]
    assert int((torch.cat(parts) > 0).sum()) == 12


class _SomeWithKinds(Documents):
    """The first half has an entry that the second lacks."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "kinds": sample["input_ids"] % 2} if 2 * index < len(self) else sample


def test_batches_have_the_entries_of_their_samples_also_on_ranks_without_rows() -> None:
    def act(talk: Communicator) -> Any:
        model: Any = FakeModel(talk)
        model.plan = plan_of(RowCost(1, 2, TOKENS, 1.0, 0.1))
        arguments: dict[str, Any] = {"shifts": (), "length_index": [3, 4, 5, 6], "padding": {"kinds": 0}}
        return list(autopar.balanced(DataLoader(_SomeWithKinds([3, 4, 5, 6]), batch_size=2), model, **arguments))

    for batches in simulate(2, act):
        assert ["kinds" in batch for batch in batches] == [True, False]


def test_a_rank_passes_rows_that_others_compute_in_microbatches() -> None:
    assignment = BatchPlanner(plan_of(replace(ROW, microbatches=2))).assign([TOKENS] * 7)
    assert assignment.rows == 4  # two microbatches of two rows on each of two ranks
    passed = [row for rank in range(2) for row in rank_rows(assignment, rank, 2)]
    computed = {group: assignment.rows_of(group) for group in range(2)}
    assert passed == [*computed[0][:2], *computed[1][:2], *computed[0][2:], *computed[1][2:]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "say how long samples are"),
        ({"length": size, "length_index": LENGTHS}, "in one way"),
        ({"length": size, "shifts": None}, "shifts='labels'"),
        ({"length_index": LENGTHS[:-1]}, "22 lengths, but the dataset has 23"),
        ({"length_index": [*LENGTHS[:-1], 17]}, "sample 22 of length_index has 17 tokens, more than a row"),
        ({"length": lambda _: 0}, "batch 1 of a balanced loader: sequence 0 of the batch has length 0"),
        ({"length": lambda _: 40}, "40 tokens, more than a row of the plan holds \\(16\\)"),
        ({"length": lambda _: 1}, "doesn't fit"),
    ],
)
def test_what_can_not_be_shared_out(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((LoaderError, LengthError), match=message):
        batches_of(2, lambda _: DataLoader(Documents(LENGTHS), batch_size=23), **arguments)


def test_ranks_with_other_lengths_are_an_error_on_all() -> None:
    with pytest.raises(LengthError, match="in batch 1 rank 1 has other samples or lengths than rank 0"):
        batches_of(2, lambda rank: DataLoader(Documents([3 + rank, 4]), batch_size=2), length=size)


def test_a_loader_that_ends_first_is_an_error_on_all() -> None:
    with pytest.raises(LoaderError, match=r"ranks \[1\] ended before batch 2, which ranks \[0\] have"):
        batches_of(2, lambda rank: DataLoader(Documents([3] * (4 - 2 * rank)), batch_size=2), length=size)


def test_samples_say_what_they_lack() -> None:
    class Others(Documents):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "weights": torch.ones(self.lengths[index])}

    with pytest.raises(LoaderError, match="nothing says what \\['weights'\\] have"):
        batches_of(1, lambda _: DataLoader(Others([2]), batch_size=1), length=size)
    (((batch,),)) = batches_of(1, lambda _: DataLoader(Others([2]), batch_size=1), length=size, padding={"weights": 0})
    assert batch["weights"].sum() == 2


class Alone(nn.Module):
    """The mean loss over all predicted tokens of documents, each of which runs alone."""

    def __init__(self, model: nn.Module, documents: Documents) -> None:
        super().__init__()
        self.model, self.documents = model, documents

    def forward(self, x: Tensor) -> Tensor:
        total, count = x.double().sum(), 0
        for sample in (self.documents[index] for index in range(len(self.documents))):
            predicted = size(sample) - 1
            if predicted:
                total = total + predicted * loss_of(self.model(**{name: x[None] for name, x in sample.items()}))
                count += predicted
        return total / count


MIXES = {"mixed": [1, 16, 3, 7, 9, 2], "a giant and an empty share": [16], "all equal": [8, 8, 8, 8], "small": [2, 3]}


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=2, vocab_size=32, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config).double()


def rows_of_tokens(rows: int, tokens: int, packs: bool = True) -> dict[str, Tensor]:
    whole = torch.ones(rows, tokens, dtype=torch.int64)
    extra = {"position_ids": torch.arange(tokens).expand(rows, -1).clone()} if packs else {"attention_mask": whole}
    return {"input_ids": whole, "labels": whole, **extra}


def check_equal_to_alone(model: nn.Module, documents: Documents, begin: Callable[[Communicator], Any], world: int,
                         packs: bool = True, *, by_index: bool = False) -> list[Any]:  # fmt: skip
    """The batch of all documents gives the loss and gradients of each alone; returns what ranks loaded."""
    alone = run_single(Alone(model, documents), {"x": torch.zeros(1)}, 1, in_double=True)

    def rank(talk: Communicator) -> Any:
        made = begin(talk)
        loader = DataLoader(documents, batch_size=len(documents))
        said: dict[str, Any] = {"length_index": documents.lengths} if by_index else {"length": size}
        (batch,) = autopar.balanced(loader, made, packs=packs, shifts="labels", **said)
        loss = loss_of(made(**batch))
        loss.backward()
        return loss.item(), {n: made._whole(n, p.grad) for n, p in made.named_parameters()}, batch

    ranks = simulate(world, rank)
    for loss, gradients, _ in ranks:
        assert loss == pytest.approx(alone.losses[0], rel=1e-12)
        largest = max(float(x.abs().max()) for x in alone.gradients.values())
        for name, expected in alone.gradients.items():
            found = gradients[name.removeprefix("model.")]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * largest)
    return [batch for _, _, batch in ranks]


@pytest.mark.parametrize(
    ("world", "packs"),
    [(2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, False), (4, True)))],
)
def test_loss_and_gradients_are_those_of_each_sequence_alone(world: int, packs: bool) -> None:
    model, example = small_llama(), rows_of_tokens(world, TOKENS, packs)
    traced = keep_double_program(trace_model(model, example))
    plan = quick_search(traced.program, world, SearchRequest(constraints=(f"data={world}",)))
    row = plan.prediction.row
    assert (row.ranks, row.rows, row.tokens) == (world, 1, TOKENS)
    # An example's step is predicted to take what its rows and the rest do.
    row_s = row.tokens * row.place_s + row.tokens**2 * row.pair_s
    assert row_s + row.fixed_s(1, 1) == pytest.approx(plan.step_time_s)
    more = [{name: torch.cat([x] * k) for name, x in example.items()} for k in (2, 3)]
    planner = planner_for(model, traced, plan, more, keep_double_program, training=True)

    def begin(talk: Communicator) -> Any:
        made: Any = build(model, traced, plan, talk, planner=planner)
        made.call_inputs = call_inputs(model, example, traced.program, made.data_split, talk, is_local=True)
        return made

    for lengths in MIXES.values():
        check_equal_to_alone(model, Documents(lengths), begin, world, packs)


class Embedded(TorchDispatchMode):
    """Notes the ids of which a rank looks up embeddings, by call."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default:
            self.ids.append(sorted(set(args[1].flatten().tolist()) - {0}))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("has_room", [True, False])
def test_each_rank_computes_what_it_was_assigned(has_room: bool) -> None:
    model, example = small_llama(), rows_of_tokens(2, TOKENS)
    traced = keep_double_program(trace_model(model, example))
    plan = quick_search(traced.program, 2, SearchRequest(constraints=("data=2",)))
    row = plan.prediction.row
    if not has_room:  # for two rows of a rank at once
        plan = replace(plan, memory_limit_bytes=row.fixed_bytes + 1.5 * row.row_bytes)
    lengths = [TOKENS, 9, 7, 5, 4]
    assignment = BatchPlanner(plan).assign(lengths)
    assert (assignment.rows, assignment.at_once) == (2, 2 if has_room else 1)
    planner = planner_for(model, traced, plan, [rows_of_tokens(4, TOKENS)], keep_double_program, training=True)

    alone = run_single(Alone(model, Documents(lengths)), {"x": torch.zeros(1)}, 1, in_double=True)

    def rank(talk: Communicator) -> tuple[int, list[list[int]]]:
        made: Any = build(model, traced, plan, talk, planner=planner)
        made.call_inputs = call_inputs(model, example, traced.program, made.data_split, talk, is_local=True)
        loader = DataLoader(Documents(lengths), batch_size=len(lengths))
        (batch,) = autopar.balanced(loader, made, length=size, shifts="labels")
        with Embedded() as embedded:
            loss = loss_of(made(**batch))
        assert loss.item() == pytest.approx(alone.losses[0], rel=1e-12)
        return next(call.plan.num_microbatches for call in made.plans if call.calls), embedded.ids

    for number, (microbatches, ids) in enumerate(simulate(2, rank)):
        rows = [sorted(index + 1 for index in row) for row in assignment.rows_of(number)]
        assert microbatches == (1 if has_room else 2)
        assert ids[:microbatches] == ([sorted(rows[0] + rows[1])] if has_room else rows)


@pytest.mark.slow
def test_each_batch_runs_by_the_plan_that_is_fastest_for_it() -> None:
    model, world = small_llama(), 4
    example, short = rows_of_tokens(2, TOKENS), rows_of_tokens(4, TOKENS // 2)
    traced, other = (keep_double_program(trace_model(model, each)) for each in (example, short))
    prices = quick_prices(world)
    plan = search(traced.program, world, prices, SearchRequest(constraints=("data=2", "tensor=2", "zero=3")))
    request = SearchRequest(constraints=("data=4",), stored=stored_as(traced.program, plan))
    member = plan_like(other.program, traced.program, plan, prices, request)
    rows = [each.prediction.row for each in (plan, member)]
    assert [(row.ranks, row.tokens) for row in rows] == [(2, TOKENS), (4, TOKENS // 2)]
    # One row each of four ranks is faster than one twice as long of two: prices of so small a model don't say so.
    rows = [replace(row, step_s=0.0, microbatch_s=0.0, token_s=1.0) for row in rows]
    expected = LengthPrediction(plans=tuple(map(LengthPlan, rows)))
    family = replace(
        plan, other_calls=(member.decisions,), prediction=replace(plan.prediction, lengths=expected)
    )  # fmt: skip
    more = rows_of_tokens(8, TOKENS // 2)  # than any plan is for
    planner = planner_for(model, traced, family, [example, short, more], keep_double_program, training=True)
    ran: list[Any] = []

    def begin(talk: Communicator) -> Any:
        made: Any = build(model, traced, family, talk, planner=planner)
        made.call_inputs = call_inputs(model, example, traced.program, made.data_split, talk, is_local=True)
        ran.append(made)
        return made

    # The batches have four rows, eight, and two; two ranks pass them.
    for lengths, tokens, chosen in (([8, 3, 2, 7, 5, 1], 8, member), ([8] * 5, 8, member), ([9, 3, 2], 16, plan)):
        batches = check_equal_to_alone(model, Documents(lengths), begin, world)
        assert {batch["input_ids"].shape[1] for batch in batches} == {tokens}
        assert next(call.plan.strategies for call in ran[-1].plans if call.calls) == chosen.strategies
