"""Images beside text: rows of the encoder are shared out by lengths of images, rows of the decoder by those of text."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.balance import BatchPlanner
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.plan.prediction import RowCost
from autopar.search import SearchRequest, search
from autopar.verify.rehearsal import keep_double_program, run_single
from tests.balance.assignments import plan_of
from tests.lower.runs import build, loss_of
from tests.zoo import quick_prices

WIDTH, PIXELS, WORDS = 16, 6, 32
PATCHES, TOKENS = 12, 16  # of a row of the encoder, and of the decoder


class Block(nn.Module):
    """Attention within each sequence of a row: `number` says which one a place is in."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        mask = number[:, :, None] == number[:, None, :]
        if self.is_causal:
            place = torch.arange(x.shape[1], device=x.device)
            mask = mask & (place[:, None] >= place[None, :])
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Captioner(nn.Module):
    """Text with images in it, whose patches are in rows of their own, several images of any size in each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.see = nn.Linear(PIXELS, WIDTH), Block(is_causal=False)
        self.word, self.place, self.read = (
            nn.Embedding(WORDS, WIDTH),
            nn.Embedding(TOKENS, WIDTH),
            Block(is_causal=True),
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, patches: Tensor, patch_ids: Tensor, input_ids: Tensor, labels: Tensor, position_ids: Tensor, seen: Tensor
    ) -> Tensor:
        """`seen`: which of all patches of the batch is at a place of the text, 0 where it is a word."""
        images = self.see(self.patch(patches), (patch_ids == 0).cumsum(1)).flatten(0, 1)
        is_word = (input_ids != 0)[:, :, None]
        x = torch.where(is_word, self.word(input_ids), functional.embedding(seen, images)) + self.place(position_ids)
        logits = self.head(self.read(x, (position_ids == 0).cumsum(1)))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class Sample(NamedTuple):
    """Patches of an image (perhaps none), and the words after it."""

    patches: Tensor
    words: Tensor


def samples_of(sizes: list[tuple[int, int]]) -> list[Sample]:
    random = torch.Generator().manual_seed(0)
    return [
        Sample(torch.randn(n, PIXELS, generator=random).double(), torch.randint(1, WORDS, (m,), generator=random))
        for n, m in sizes
    ]


def batch_of(samples: list[Sample], ranks: int) -> dict[str, Tensor]:
    """Rows of patches and rows of text, each shared out among `ranks` by their own lengths."""
    images = BatchPlanner(plan_of(RowCost(ranks, 1, PATCHES, 1.0, 0.1), ranks))
    text = BatchPlanner(plan_of(RowCost(ranks, 1, TOKENS, 1.0, 0.1), ranks))
    own = [number for number, sample in enumerate(samples) if len(sample.patches)]
    of_images = images.assign([len(samples[number].patches) for number in own])
    of_text = text.assign([len(sample.patches) + len(sample.words) for sample in samples])
    patches = torch.zeros(ranks * of_images.rows, PATCHES, PIXELS).double()
    patch_ids = torch.zeros(len(patches), PATCHES, dtype=torch.int64)
    first: dict[int, int] = {}  # of each sample, the number of its first patch
    for number, row in enumerate(row for group in range(ranks) for row in of_images.rows_of(group)):
        start = 0
        for sample in (own[place] for place in row):
            stop = start + len(samples[sample].patches)
            patches[number, start:stop] = samples[sample].patches
            patch_ids[number, start:stop] = torch.arange(stop - start)
            first[sample] = number * PATCHES + start
            start = stop
    rows = ranks * of_text.rows
    ids, positions, seen = (torch.zeros(rows, TOKENS, dtype=torch.int64) for _ in range(3))
    labels = torch.full((rows, TOKENS), -100)
    for number, row in enumerate(row for group in range(ranks) for row in of_text.rows_of(group)):
        start = 0
        for sample in row:
            count, words = len(samples[sample].patches), samples[sample].words
            stop = start + count + len(words)
            positions[number, start:stop] = torch.arange(stop - start)
            seen[number, start : start + count] = first.get(sample, 0) + torch.arange(count)
            ids[number, start + count : stop] = labels[number, start + count : stop] = words
            labels[number, start] = -100  # the model moves labels by a place
            start = stop
    return {"patches": patches, "patch_ids": patch_ids, "input_ids": ids, "labels": labels,
            "position_ids": positions, "seen": seen}  # fmt: skip


class Alone(nn.Module):
    """The mean loss over all predicted words of samples, each of which runs alone."""

    def __init__(self, model: nn.Module, samples: list[Sample]) -> None:
        super().__init__()
        self.model, self.samples = model, samples

    def forward(self, x: Tensor) -> Tensor:
        total, counted = x.sum(), 0
        for sample in self.samples:
            batch = batch_of([sample], 1)
            count = int((batch["labels"][:, 1:] != -100).sum())
            if count:
                total, counted = total + count * self.model(**batch), counted + count
        return total / counted


class Normed(TorchDispatchMode):
    """Notes the shapes that layer norms take."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_layer_norm.default:
            self.shapes.add(args[0].shape)
        return func(*args, **(kwargs or {}))


# A step as they come: images and text of many lengths, so that who has long text does not have large images.
SIZES = [(12, 2), (1, 9), (2, 14), (6, 3), (0, 7), (4, 1), (5, 4), (0, 1), (3, 11), (7, 2)]


@pytest.mark.parametrize("asked", ["data=2", pytest.param("data=2 zero=3", marks=pytest.mark.slow)])
def test_an_encoder_has_rows_of_its_own(asked: str) -> None:
    model, samples = Captioner().double(), samples_of(SIZES)
    batch = batch_of(samples, 2)
    assert len(batch["patches"]) != len(batch["input_ids"])
    traced = keep_double_program(autopar.api.trace_model(model, batch))
    plan = search(traced.program, 2, quick_prices(2), SearchRequest(constraints=tuple(asked.split())))
    alone = run_single(Alone(model, samples), {"x": torch.zeros(1).double()}, 1, in_double=True)

    def rank(talk: Communicator) -> tuple[float, dict[str, Tensor], set[torch.Size]]:
        made: Any = build(model, traced, plan, talk)
        with Normed() as normed:
            loss = loss_of(made(**batch))
        loss.backward()
        return loss.item(), {name: made._whole(name, p.grad) for name, p in made.named_parameters()}, normed.shapes

    largest = max(float(x.abs().max()) for x in alone.gradients.values())
    rows = {torch.Size((len(batch[name]) // 2, *batch[name].shape[1:2], WIDTH)) for name in ("patches", "input_ids")}
    for loss, gradients, shapes in simulate(2, rank):
        assert shapes == rows  # each rank computes its share of the rows of both
        assert loss == pytest.approx(alone.losses[0], rel=1e-12)
        for name, x in alone.gradients.items():
            torch.testing.assert_close(gradients[name.removeprefix("model.")], x, rtol=0, atol=1e-9 * largest)
