"""Images and clips of many sizes in groups of unlike size: loss, gradients and training of each sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autopar
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.verify.rehearsal import run_single
from tests.data.test_balanced_models import CASES, TOKENS, Alone, Sample, Samples, size
from tests.data.unlike_groups import STEPS, check_trained, trained, with_groups
from tests.lower.groups.cases import Family, family
from tests.lower.runs import loss_of
from tests.ranks import run_ranks

# Of images and clips of several resolutions, one alone, so that most ranks have none, and many small ones.
MIXES = {"mixed": [4, 6, 16, 1, 9, 2, 8], "a giant": [16], "small ones": [8, 8, 8, 3, 1, 8, 8, 8, 2]}


def family_of(case: str, world: int, asked: str, *, nests: bool) -> Family:
    """A plan with groups of two ranks for rows of 16 places, and of one for rows of 8, which every batch is to use."""
    make, names, packs = CASES[case]
    torch.manual_seed(0)
    model = make().double()

    def rows_of(rows: int, tokens: int) -> Sample:
        form = Samples([tokens], names)[0]
        example = {name: x.expand(rows, *x.shape).clone() for name, x in form.items()}
        places = torch.arange(tokens).expand(rows, -1).clone()
        return example | ({"position_ids": places} if packs else {"attention_mask": torch.ones_like(places)})

    found = family(model, world, [(2, "sequence=2" if packs else "tensor=2"), (1, "")], asked, rows_of)
    return with_groups(found, nests=nests)


def batch_of(found: Family, case: str, talk: Communicator, made: Any, lengths: Sequence[int]) -> Sample:
    """What the loader gives this rank of a batch of samples with so many places each."""
    _, names, packs = CASES[case]
    samples = Samples(lengths, names)
    padding = {name: -100 if name in ("kind", "labels") else 0 for name in names}
    arguments: dict[str, Any] = {"length": size, "packs": packs, "shifts": (), "padding": padding}
    (batch,) = autopar.balanced(DataLoader(samples, batch_size=len(samples)), made, **arguments)
    return batch


def train(case: str, world: int, asked: str, nests: bool, talk: Communicator | None = None) -> Any:
    """Loss and gradients of each mix, losses of steps with the first, parameters after these, and rows of each mix."""
    found = family_of(case, world, asked, nests=nests)
    found.planner  # noqa: B018  (simulated ranks can't trace)

    def rank(talk: Communicator) -> Any:
        made: Any = found.build(talk)
        batches = [batch_of(found, case, talk, made, mix) for mix in MIXES.values()]
        rows = [[len(row) for row in next(iter(batch.values())).unbind()] for batch in batches]
        return *trained(made, batches), rows

    return simulate(world, rank) if talk is None else rank(talk)


def check(case: str, ranks: list[Any]) -> list[list[list[int]]]:
    """What `ranks` trained is what one device trains of each sample alone; returns the rows of each."""
    make, names, packs = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    singles = [
        run_single(
            Alone(model, Samples(mix, names), packs=packs), {"x": torch.zeros(1).double()}, 1 if place else STEPS,
            in_double=True,
        )
        for place, mix in enumerate(MIXES.values())
    ]  # fmt: skip
    check_trained(ranks, singles)
    return [rows for *_, rows in ranks]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("case", "world", "asked", "nests"),
    [
        ("dit", 4, "data=4 zero=1", False),
        ("classes", 4, "data=4 zero=3", True),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in (
                ("vit", 4, "data=4 zero=3", True),
                ("dit", 8, "data=4 tensor=2 zero=2", True),
                ("classes", 2, "data=2 zero=1", True),
                ("bert", 4, "data=4 zero=1", False),
                ("bert", 8, "data=4 tensor=2 zero=3", True),
                ("t5", 4, "data=2 tensor=2 zero=1", True),
            )
        ),
    ],
)
def test_groups_train_as_one_device(case: str, world: int, asked: str, nests: bool) -> None:
    rows = check(case, train(case, world, asked, nests))
    mixed = [own[0] for own in rows]
    assert {length for own in mixed for length in own} == {TOKENS, TOKENS // 2}


class Narrow(nn.Module):
    """Reads as many numbers of a place as rows of the smaller groups have places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = nn.Linear(TOKENS // 2, 12), nn.Linear(12, TOKENS // 2)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        errors = (self.head(self.up(x).relu()) - x).square().mean(-1)
        return (errors * counts).sum() / counts.sum().clamp(min=1)


def test_rows_may_be_as_long_as_another_dim() -> None:
    model = Narrow().double()

    def rows_of(rows: int, tokens: int) -> Sample:
        torch.manual_seed(tokens + rows)
        counts = (torch.rand(rows, tokens) < 0.5).double()
        return {"x": torch.randn(rows, tokens, TOKENS // 2).double(), "counts": counts}

    found = family(model, 4, [(2, "tensor=2"), (1, "")], "data=4 zero=1", rows_of)
    found.planner  # noqa: B018  (simulated ranks can't trace)
    long, short, two = rows_of(1, TOKENS), rows_of(1, TOKENS // 2), rows_of(2, TOKENS // 2)

    def rank(talk: Communicator) -> tuple[float, Tensor]:
        made: Any = found.build(talk)
        loss = loss_of(made(**[long, long, short, two][talk.rank]))
        loss.backward()
        return loss.item(), made._whole("up.weight", made.up.weight.grad)

    flat = {name: torch.cat([each[name].flatten(0, 1) for each in (long, short, two)])[None] for name in long}
    expected = loss_of(model(**flat))
    expected.backward()
    for loss, gradient in simulate(4, rank):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, model.up.weight.grad, rtol=0, atol=1e-12)


def train_process(case: str, asked: str, nests: bool) -> Any:
    """On this process: what `train` gives."""
    return train(case, 4, asked, nests, ProcessGroupCommunicator())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("case", "asked", "nests"), [("dit", "data=4 zero=3", True), ("classes", "data=4 zero=1", False)]
)
def test_processes_train_as_one_device(case: str, asked: str, nests: bool) -> None:
    check(case, run_ranks(train_process, 4, case, asked, nests))
