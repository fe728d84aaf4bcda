"""Images in text in groups of unlike size: each row has its own images, and is what one device computes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar.data import EncoderRows
from autopar.errors import InputShapeError, LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.plan.prediction import GroupRow, LengthPlan, LengthPrediction
from autopar.planning.length_plans import row_tracer
from autopar.verify.rehearsal import SteadyAdamW, run_single
from tests.lower.groups.cases import TOKENS, Family, family
from tests.lower.runs import loss_of
from tests.models import skip_before_transformers_5
from tests.parity.test_image_text import IMAGE, PLACES, size, small_llava
from tests.ranks import run_ranks

STEPS = 5
Sample = dict[str, Tensor]


class Captions(Dataset[Sample]):
    """Text of so many words after so many images."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.images = [images for images, _ in sizes]
        self.words = [words for _, words in sizes]
        self.lengths = [images * PLACES + words for images, words in sizes]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        random = torch.Generator().manual_seed(index)
        count = self.images[index]
        words = torch.randint(0, IMAGE, (self.words[index],), generator=random)
        ids = torch.cat([torch.full((count * PLACES,), IMAGE), words])
        pixels = torch.randn(count, 3, 4, 4, generator=random, dtype=torch.float64)
        return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": pixels}


# Images and words of the samples of a step, of which some rows are to hold several.
MIXES = {
    "mixed": [(2, 3), (0, 9), (1, 1), (1, 4), (3, 4), (0, 2), (1, 3)],
    "a giant": [(3, 4)],
    "few images": [(0, 16), (0, 5), (1, 1), (0, 8), (0, 7)],
    "no image": [(0, 16), (0, 5), (0, 8), (0, 7)],
}


class Alone(nn.Module):
    """The mean loss over all predicted words of captions, each of which runs alone."""

    def __init__(self, model: nn.Module, captions: Captions) -> None:
        super().__init__()
        self.model, self.captions = model, captions

    def forward(self, x: Tensor) -> Tensor:
        total, counted = x.sum(), 0
        for sample in (self.captions[index] for index in range(len(self.captions))):
            count = int((sample["labels"][1:] != -100).sum())
            batch = {name: x if name == "pixel_values" else x[None] for name, x in sample.items() if len(x)}
            total, counted = total + count * loss_of(self.model(**batch)), counted + count
        return total / counted


def rows_of(rows: int, tokens: int) -> Sample:
    """A call: several rows with some images, or a row with as many as it has places for."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    images = tokens // PLACES if rows == 1 else rows + 2
    ids.view(-1)[: images * PLACES] = IMAGE
    pixels = torch.zeros(images, 3, 4, 4, dtype=torch.float64)
    positions = torch.arange(tokens).repeat(rows, 1)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "pixel_values": pixels}


@cache
def family_of(world: int, asked: str, *, nests: bool) -> Family:
    found = family(small_llava(), world, [(2, "tensor=2"), (1, "")], asked, rows_of)
    groups = (GroupRow(2, TOKENS, 2.0, 0.0), GroupRow(1, TOKENS // 2, 1.0, 0.0))
    row = replace(found.plan.prediction.row, step_s=100.0)
    lengths = LengthPrediction(plans=(LengthPlan(row),), groups=groups, coupling_s=0.5, nests=nests)
    found = replace(found, plan=replace(found.plan, prediction=replace(found.plan.prediction, lengths=lengths)))
    text = {name: x for name, x in found.example.items() if name != "pixel_values"}
    found.planner.groups((), text, (world, TOKENS))  # simulated ranks can't trace
    return found


def train(world: int, asked: str, nests: bool, is_indexed: bool, talk: Communicator | None = None) -> Any:
    """Loss and gradients of each mix, losses of steps with the first, parameters after these, and images of rows."""
    found = family_of(world, asked, nests=nests)

    def rank(talk: Communicator) -> Any:
        made: Any = found.build(talk)
        batches: list[Sample] = []
        for sizes in MIXES.values():
            captions = Captions(sizes)
            said: dict[str, Any] = {"length": size, "encoder": "pixel_values"}
            if is_indexed:
                said = {
                    "length_index": captions.lengths,
                    "encoder": EncoderRows("pixel_values", lengths=captions.images),
                }
            loader: Any = DataLoader(captions, batch_size=len(captions))
            batches += autopar.balanced(loader, made, shifts="labels", **said)
        alone: list[Any] = []
        for batch in batches:
            loss = loss_of(made(**batch))
            loss.backward()
            own = {n: p.grad for n, p in made.named_parameters() if p.grad is not None}
            alone.append((loss.item(), {n: made._whole(n, x) for n, x in own.items()}))
            made.zero_grad()
        optimizer = SteadyAdamW(made.parameters())
        losses: list[float] = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(made(**batches[0]))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        rooms = [len(row) for row in batches[0]["pixel_values"].unbind()]
        return alone, losses, made.full_state_dict(), rooms

    return simulate(world, rank) if talk is None else rank(talk)


def check(ranks: list[Any]) -> None:
    """What `ranks` trained is what one device trains of each sample alone."""
    for place, sizes in enumerate(MIXES.values()):
        single = run_single(
            Alone(small_llava(), Captions(sizes)), {"x": torch.zeros(1).double()}, 1 if place else STEPS, in_double=True
        )
        for results, losses, state, _ in ranks:
            loss, gradients = results[place]
            assert loss == pytest.approx(single.losses[0], rel=1e-12)
            assert {f"model.{name}" for name in gradients} == single.gradients.keys()
            check_close(gradients, single.gradients)
            if not place:
                assert losses == pytest.approx(single.losses, rel=1e-9)
                check_close(state, single.parameters)


def check_close(found: dict[str, Tensor], expected: Any) -> None:
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        torch.testing.assert_close(found[name.removeprefix("model.")], x, rtol=0, atol=1e-9 * largest)


@pytest.mark.parametrize(
    ("asked", "nests", "is_indexed"), [("data=4 zero=1", False, False), ("data=4 zero=3", True, True)]
)
def test_rows_with_their_own_images_train_as_one_device(asked: str, nests: bool, is_indexed: bool) -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    ranks = train(4, asked, nests, is_indexed)
    check(ranks)
    assert {room for *_, rooms in ranks for room in rooms} == {TOKENS // PLACES, TOKENS // 2 // PLACES}


@pytest.mark.slow
def test_rows_with_their_own_images_train_on_eight_ranks() -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    check(train(8, "data=4 tensor=2 zero=2", True, False))


def train_process() -> Any:
    """On this process: what `train` gives."""
    return train(4, "data=4 zero=3", True, True, ProcessGroupCommunicator())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_train_rows_with_their_own_images() -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    check(run_ranks(train_process, 4))


class Crowded(Captions):
    """Samples with more images than their text has places for."""

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        return {**sample, "pixel_values": sample["pixel_values"].repeat(TOKENS, 1, 1, 1)}


def test_what_is_wrong_with_images_of_rows_is_named() -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    found = family_of(4, "data=4 zero=1", nests=False)

    def rank(talk: Communicator) -> tuple[str, str]:
        made: Any = found.build(talk)
        said: dict[str, Any] = {"length": size, "encoder": "pixel_values", "shifts": "labels"}
        with pytest.raises(LoaderError) as crowded:
            next(iter(autopar.balanced(DataLoader(Crowded(MIXES["mixed"]), batch_size=7), made, **said)))
        (batch,) = autopar.balanced(DataLoader(Captions(MIXES["mixed"]), batch_size=7), made, **said)
        with pytest.raises(InputShapeError) as evaluated:
            made.eval()(**batch)
        return str(crowded.value), str(evaluated.value)

    for crowded, evaluated in simulate(4, rank):
        assert "as an image takes 4 places of its text" in crowded
        assert "which says which row they belong to" in evaluated


def test_rows_are_traced_with_the_images_that_they_have_places_for() -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    model = small_llava()
    for tokens in (TOKENS, PLACES):  # an image is as high as a row is long
        example = rows_of(4, tokens)
        program = autopar.api.trace_model(model, example).program
        setup: Any = SimpleNamespace(device_type="cpu", num_layers=1, dtype=None, expecting=lambda traced: traced)
        trace = row_tracer(model, example, program, setup)
        for rows, length, images in ((1, tokens, tokens // PLACES), (1, tokens // 2, max(1, tokens // 2 // PLACES)),
                                     (8, tokens // 2, 6)):  # fmt: skip
            made = trace(rows, length)
            assert made.type_of("input_ids").shape == (rows, length)
            assert made.type_of("pixel_values").shape == (images, 3, 4, 4)
