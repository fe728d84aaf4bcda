"""Steps of unlike groups compute what one device computes of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autopar.errors import AutoparError, InputShapeError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.groups.group_layout import Group, read_groups
from autopar.verify.rehearsal import SteadyAdamW, run_single
from tests.data.test_balanced import Alone, Documents, small_llama
from tests.lower.groups.cases import Family, batches_of, family
from tests.lower.runs import loss_of
from tests.ranks import run_ranks

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
STEPS = 3


def gradients_of(made: Any) -> dict[str, Tensor]:
    return {n: made._whole(n, p.grad) for n, p in made.named_parameters() if p.grad is not None}


def train(found: Family, talk: Communicator, batches: list[list[dict[str, Tensor]]]) -> Any:
    """Loss and gradients of each batch, then losses of steps with the first, and the parameters at the end."""
    made: Any = found.build(talk)
    alone: list[tuple[float, Mapping[str, Tensor]]] = []
    for batch in batches:
        loss = loss_of(made(**batch[talk.rank]))
        loss.backward()
        alone.append((loss.item(), gradients_of(made)))
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
    return [batches_of(lengths, rooms, found.degrees, random) for lengths, rooms in mixes.values()]


def check(found: Family, mixes: Mixes, ranks: list[Any] | None = None) -> None:
    """What `ranks` trained is what one device trains; without any, simulated ranks train."""
    batches = batches_of_mixes(found, mixes)
    ranks = ranks or simulate(found.world, lambda talk: train(found, talk, batches))
    runs = [run_single(Alone(found.model, Documents(lengths)), {"x": torch.zeros(1)}, STEPS if not n else 1,
                       in_double=True) for n, (lengths, _) in enumerate(mixes.values())]  # fmt: skip
    for steps, losses, state in ranks:
        for (loss, gradients), alone in zip(steps, runs, strict=True):
            assert loss == pytest.approx(alone.losses[0], rel=1e-12)
            check_close(gradients, alone.gradients)
        assert losses == pytest.approx(runs[0].losses, rel=1e-9)
        check_close(state, runs[0].parameters)


def check_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    largest = max(float(x.abs().max()) for x in expected.values())
    assert {f"model.{name}" for name in found} >= expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name.removeprefix("model.")], x, rtol=0, atol=1e-9 * largest)


def four_ranks() -> Family:
    return family(small_llama(), 4, [(2, "sequence=2"), (1, ""), (1, "")], "data=4 zero=1")


@pytest.fixture(scope="module")
def four() -> Family:
    return four_ranks()


def test_groups_of_four_ranks_train_as_one_device(four: Family) -> None:
    check(four, FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["data=4 tensor=2 zero=3", "data=8 zero=0"])
def test_groups_of_eight_ranks_train_as_one_device(asked: str) -> None:
    kinds = [(4, "tensor=2 sequence=2"), (2, "tensor=2"), (1, "")]
    model = small_llama()
    if "zero=3" in asked:  # tied, and one that is not trained
        model.lm_head.weight = model.model.embed_tokens.weight
        model.model.norm.weight.requires_grad_(False)
    check(family(model, 8, kinds, asked), EIGHT)


def train_process() -> tuple[Any, str]:
    """On this process: what `train` gives, and the error where another rank passes other rows."""
    found = four_ranks()
    talk = ProcessGroupCommunicator()
    batches = batches_of_mixes(found, FOUR)
    made = train(found, talk, batches)
    model = found.build(talk)
    with pytest.raises(InputShapeError) as caught:
        model(**{name: x[: len(x) - (talk.rank == 1)] for name, x in batches[0][talk.rank].items()})
    return made, str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_train_as_one_device_and_raise_together(four: Family) -> None:
    made = run_ranks(train_process, 4)
    check(four, FOUR, [run for run, _ in made])
    assert all("ranks 0 and 1 differ" in error for _, error in made)


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
    assert "ranks 0 and 1 differ" in str(refused(four, fewer))
    assert "ranks 0 and 1 differ" in str(refused(four, other))


def test_lengths_of_rows_say_which_ranks_form_groups() -> None:
    degrees = {16: 4, 8: 2, 4: 1}
    found = read_groups([4, 4, 8, 8, 16, 16, 16, 16], degrees)
    assert found == (Group(0, 1), Group(1, 1), Group(2, 2), Group(4, 4))
    for tokens in ([4, 8, 8, 4], [16] * 3, [8, 8, 16, 16, 16, 16, 4, 4], [8, 4, 4, 4]):
        with pytest.raises(InputShapeError, match="begin at a multiple"):
            read_groups(tokens, degrees)
    with pytest.raises(InputShapeError, match="rank 1 passes rows of 5 tokens, but the plan's groups"):
        read_groups([4, 5], degrees)
