"""Loaders of text with images stop in an epoch and go on with another number of ranks, with groups and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset

import autopar
from autopar.data import EncoderRows
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from tests.data.test_groups_with_images import family_of, rows_of
from tests.lower.groups.cases import TOKENS
from tests.models import skip_before_transformers_5
from tests.parity.test_image_text import IMAGE, PLACES, size, small_llava
from tests.ranks import run_ranks

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is optional")

Sample = dict[str, Tensor]
# Images and words of the samples of an epoch: long ones, short ones, and some without an image.
SIZES = [(3, 4), (0, 3), (1, 2), (2, 1), (0, 8), (1, 4), (0, 2), (2, 8)] * 3
BATCH, STOP = 5, 2


class Numbered(Dataset[Sample]):
    """Every word of a sample is its number, as is every pixel of its images; numbers begin at 1."""

    images: ClassVar = [images for images, _ in SIZES]
    lengths: ClassVar = [images * PLACES + words for images, words in SIZES]

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> Sample:
        images, words = SIZES[index]
        ids = torch.tensor([IMAGE] * (images * PLACES) + [index + 1] * words)
        pixels = torch.full((images, 3, 4, 4), index + 1.0, dtype=torch.float64)
        return {"input_ids": ids, "labels": ids, "pixel_values": pixels}


def load(made: Any, state: Any, *, is_indexed: bool) -> tuple[list[Sample], Any]:
    """The batches of this rank: the first `STOP` and the loader's state behind them, or all from `state` on."""
    said: dict[str, Any] = {"length": size, "encoder": "pixel_values"}
    if is_indexed:
        said = {"length_index": Numbered.lengths, "encoder": EncoderRows("pixel_values", lengths=Numbered.images)}
    loader: Any = stateful.StatefulDataLoader(
        Numbered(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    loader = autopar.balanced(loader, made, shifts="labels", **said)
    if state is not None:
        loader.load_state_dict(state)
        return [{name: plain(x) for name, x in batch.items()} for batch in loader], None
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(STOP)]
    return [{name: plain(x) for name, x in batch.items()} for batch in batches], loader.state_dict()


def counted(batches: Sequence[Sample]) -> tuple[Counter[int], Counter[int]]:
    """How many words and images of each sample a step has, in halves; each rank has one of `batches`."""
    words: Counter[int] = Counter()
    images: Counter[int] = Counter()
    in_groups = any(batch["pixel_values"].dim() == 5 for batch in batches)
    for batch in batches:
        texts, pixels = batch["input_ids"].unbind(), batch["pixel_values"]
        # In groups two ranks pass the same rows of 16 places, and images are those of rows; else they are any.
        times = [1 if in_groups and len(text) == TOKENS else 2 for text in texts]
        for text, each in zip(texts, times, strict=True):
            words.update({int(n): each * int((text == n).sum()) for n in text.unique()})
        rows = zip(pixels.unbind(), times, strict=True) if in_groups else [(pixels, 2)]
        for row, each in rows:
            images.update({int(n): each * int((row[:, 0, 0, 0] == n).sum()) for n in row[:, 0, 0, 0].unique()})
    return words, images


def check_epoch(parts: Sequence[tuple[int, Sequence[Sequence[Sample]]]]) -> None:
    """`parts` of an epoch: the number of ranks, and the batches of each."""
    words: Counter[int] = Counter()
    images: Counter[int] = Counter()
    for world, ranks in parts:
        assert len(ranks) == world
        for batches in zip(*ranks, strict=True):
            own = counted(batches)
            words += own[0]
            images += own[1]
    del words[0], words[IMAGE], images[0]  # padding, places of images, and images of zeros
    assert words == {n + 1: 2 * count for n, (_, count) in enumerate(SIZES)}
    assert images == {n + 1: 2 * count for n, (count, _) in enumerate(SIZES) if count}


def plain(x: Any) -> Any:
    """A rank's part of a DTensor."""
    return x.to_local() if hasattr(x, "to_local") else x


ASKED = {2: "data=2 zero=1", 4: "data=4 zero=3"}


@pytest.mark.slow
@pytest.mark.parametrize(("worlds", "is_indexed"), [((2, 4), True), ((4, 2), False)])
def test_an_epoch_goes_on_with_other_ranks(worlds: tuple[int, int], is_indexed: bool) -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")

    def run(world: int, state: Any) -> list[Any]:
        found = family_of(world, ASKED[world], nests=True)

        def rank(talk: Communicator) -> Any:
            return load(found.build(talk), state, is_indexed=is_indexed)

        return simulate(world, rank)

    first = run(worlds[0], None)
    rest = run(worlds[1], first[0][1])
    check_epoch([(worlds[0], [own for own, _ in first]), (worlds[1], [own for own, _ in rest])])


def load_process(path: str, state: Any) -> Any:
    """On this process: what `load` gives, as plain tensors."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    example = rows_of(mesh.size(), TOKENS)
    made = autopar.parallelize(small_llava(), mesh, example, inputs="local", plan=path, profile=False)
    return load(made, state, is_indexed=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("worlds", [(2, 4), (4, 2)])
def test_processes_go_on_with_other_ranks(worlds: tuple[int, int], tmp_path: Path) -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    for world in worlds:
        family_of(world, ASKED[world], nests=True).plan.save(tmp_path / f"{world}.json")
    first = run_ranks(load_process, worlds[0], str(tmp_path / f"{worlds[0]}.json"), None)
    rest = run_ranks(load_process, worlds[1], str(tmp_path / f"{worlds[1]}.json"), first[0][1])
    check_epoch([(worlds[0], [own for own, _ in first]), (worlds[1], [own for own, _ in rest])])
