"""Images in text in groups of unlike size: each row has its own images, and is what one device computes of it."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import autopar
from autopar.data import EncoderRows
from autopar.errors import InputShapeError, LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.call_traces import trace_model
from autopar.planning.length_plans import row_tracer
from autopar.verify.rehearsal import run_single
from tests.data.unlike_groups import STEPS, check_trained, trained, with_groups
from tests.lower.groups.cases import TOKENS, Family, family
from tests.models import skip_before_transformers_5
from tests.parity.test_image_text import IMAGE, PLACES, Alone, Captions, size, small_llava
from tests.ranks import run_ranks

Sample = dict[str, Tensor]


# Images and words of the samples of a step, of which some rows are to hold several.
MIXES = {
    "mixed": [(2, 3), (0, 9), (1, 1), (1, 4), (3, 4), (0, 2), (1, 3)],
    "a giant": [(3, 4)],
    "few images": [(0, 16), (0, 5), (1, 1), (0, 8), (0, 7)],
    "no image": [(0, 16), (0, 5), (0, 8), (0, 7)],
}


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
    found = with_groups(family(small_llava(), world, [(2, "tensor=2"), (1, "")], asked, rows_of), nests=nests)
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
        rooms = [len(row) for row in batches[0]["pixel_values"].unbind()]
        return *trained(made, batches), rooms

    return simulate(world, rank) if talk is None else rank(talk)


def check(ranks: list[Any]) -> None:
    """What `ranks` trained is what one device trains of each sample alone."""
    x = {"x": torch.zeros(1).double()}
    singles = [
        run_single(Alone(small_llava(), Captions(sizes)), x, 1 if place else STEPS, in_double=True)
        for place, sizes in enumerate(MIXES.values())
    ]
    check_trained(ranks, singles)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_rows_are_traced_with_the_images_that_they_have_places_for() -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    model = small_llava()
    for tokens in (TOKENS, PLACES):  # an image is as high as a row is long
        example = rows_of(4, tokens)
        program = trace_model(model, example).program
        setup: Any = SimpleNamespace(device_type="cpu", num_layers=1, dtype=None, expecting=lambda traced: traced)
        trace = row_tracer(model, example, program, setup)
        for rows, length, images in ((1, tokens, tokens // PLACES), (1, tokens // 2, max(1, tokens // 2 // PLACES)),
                                     (8, tokens // 2, 6)):  # fmt: skip
            made = trace(rows, length)
            assert made.type_of("input_ids").shape == (rows, length)
            assert made.type_of("pixel_values").shape == (images, 3, 4, 4)
