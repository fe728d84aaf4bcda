"""Images beside text: rows of the encoder are assigned by lengths of images, rows of the decoder by those of text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar.data import EncoderRows
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.search import SearchRequest
from autopar.verify.rehearsal import keep_double_program, run_single
from tests.lower.runs import build, loss_of
from tests.ranks import run_ranks
from tests.zoo import quick_search

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
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, seen: Tensor, patches: Tensor | None = None,
        patch_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`seen`: which of all patches of the batch is at a place of the text, 0 where it is a word."""
        x = self.word(input_ids)
        if patches is not None and patch_ids is not None:
            images = self.see(self.patch(patches), (patch_ids == 0).cumsum(1)).flatten(0, 1)
            x = torch.where((input_ids != 0)[:, :, None], x, functional.embedding(seen, images))
        x = x + self.place(position_ids)
        logits = self.head(self.read(x, (position_ids == 0).cumsum(1)))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class Captions(Dataset[dict[str, Any]]):
    """Samples of a number of words after images of so many patches each."""

    def __init__(self, sizes: list[tuple[list[int], int]]) -> None:
        self.images = [images for images, _ in sizes]
        self.words = [words for _, words in sizes]
        self.lengths = [sum(images) + words for images, words in sizes]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(index)
        count, words = sum(self.images[index]), self.words[index]
        ids = torch.cat([torch.zeros(count, dtype=torch.int64), torch.randint(1, WORDS, (words,), generator=random)])
        seen = torch.cat([torch.arange(count), torch.zeros(words, dtype=torch.int64)])
        patches = [torch.randn(n, PIXELS, generator=random).double() for n in self.images[index]]
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "seen": seen, "patches": patches}


def alone(sample: dict[str, Any]) -> dict[str, Tensor]:
    """A sample as the only one of a batch, each image in a row of its own; without images the encoder has no inputs."""
    patches = nn.utils.rnn.pad_sequence([*sample["patches"], torch.zeros(PATCHES, PIXELS).double()], batch_first=True)
    patch_ids = torch.zeros(patches.shape[:2], dtype=torch.int64)
    for row, image in zip(patch_ids, sample["patches"], strict=False):
        row[: len(image)] = torch.arange(len(image))
    places = torch.cat([PATCHES * row + torch.arange(len(image)) for row, image in enumerate(sample["patches"])]
                       or [torch.zeros(1, dtype=torch.int64)])  # fmt: skip
    text = {name: sample[name][None] for name in ("input_ids", "labels")}
    text |= {"position_ids": torch.arange(len(sample["seen"]))[None], "seen": places[sample["seen"]][None]}
    return {**text, "patches": patches, "patch_ids": patch_ids} if sample["patches"] else text


class Alone(nn.Module):
    """The mean loss over all predicted words of samples, each of which runs alone."""

    def __init__(self, model: nn.Module, samples: list[dict[str, Any]]) -> None:
        super().__init__()
        self.model, self.samples = model, samples

    def forward(self, x: Tensor) -> Tensor:
        total, counted = x.sum(), 0
        for sample in self.samples:
            batch = alone(sample)
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


# A step as samples come: images and text of many lengths, so that who has long text does not have large images.
SIZES = [([12], 2), ([1], 9), ([2], 14), ([4, 2], 3), ([], 7), ([4], 1), ([1, 3, 1], 4), ([], 1), ([3], 11), ([7], 2)]
# Three batches of five, of which the second has no image, so that the encoder has no gradients in it.
STEPS = [*SIZES[:5], ([], 7), ([], 1), ([], 16), ([], 3), ([], 9), *SIZES[5:]]
ENCODER: dict[str, Any] = {"lookup": "seen", "positions": "patch_ids"}


def example(patch_rows: int = 4, rows: int = 8) -> dict[str, Tensor]:
    zeros = torch.zeros(rows, TOKENS, dtype=torch.int64)
    return {"input_ids": zeros, "labels": zeros, "position_ids": torch.arange(TOKENS).repeat(rows, 1), "seen": zeros,
            "patches": torch.zeros(patch_rows, PATCHES, PIXELS).double(),
            "patch_ids": torch.arange(PATCHES).repeat(patch_rows, 1)}  # fmt: skip


@cache
def traced_captioner() -> tuple[Captioner, Any]:
    model = Captioner().double()
    return model, keep_double_program(trace_model(model, example()))


def on_ranks(asked: str, world: int, act: Callable[[Any], Any]) -> list[Any]:
    """`act` of the parallel model on each of so many ranks."""
    model, traced = traced_captioner()
    plan = quick_search(traced.program, world, SearchRequest(constraints=tuple(asked.split())))

    def rank(talk: Communicator) -> Any:
        made: Any = build(model, traced, plan, talk)
        made.call_inputs = call_inputs(model, example(), traced.program, made.data_split, talk, is_local=True)
        return act(made)

    return simulate(world, rank)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize(
    "asked", [pytest.param("data=2", id="data"), pytest.param("data=2 zero=3", marks=pytest.mark.slow, id="zero")]
)
def test_an_encoder_has_rows_of_its_own(asked: str, is_indexed: bool) -> None:
    captions = Captions(SIZES)
    single = run_single(Alone(traced_captioner()[0], list(captions)), {"x": torch.zeros(1).double()}, 1, in_double=True)

    def step(made: Any) -> Any:
        loader: Any = DataLoader(captions, batch_size=len(captions))
        if is_indexed:
            encoder = EncoderRows("patches", **ENCODER, lengths=captions.images)
            loader = autopar.balanced(loader, made, length_index=captions.lengths, shifts="labels", encoder=encoder)
        else:
            encoder = EncoderRows("patches", **ENCODER)
            loader = autopar.balanced(
                loader, made, length=lambda sample: len(sample["seen"]), shifts="labels", encoder=encoder
            )
        (batch,) = loader
        with Normed() as normed:
            loss = loss_of(made(**batch))
        loss.backward()
        rows = [len(batch["patches"].to_local()), len(batch["input_ids"])]
        return (
            rows,
            loss.item(),
            {name: made._whole(name, p.grad) for name, p in made.named_parameters()},
            normed.shapes,
        )

    largest = max(float(x.abs().max()) for x in single.gradients.values())
    for rows, loss, gradients, shapes in on_ranks(asked, 2, step):
        assert rows == [2, 4]  # of 40 patches, and 94 tokens
        assert shapes == {torch.Size((2, PATCHES, WIDTH)), torch.Size((4, TOKENS, WIDTH))}  # each computes its own
        assert loss == pytest.approx(single.losses[0], rel=1e-12)
        for name, x in single.gradients.items():
            torch.testing.assert_close(gradients[name.removeprefix("model.")], x, rtol=0, atol=1e-9 * largest)


def train(constraint: str, epochs: int) -> list[float]:
    """The losses of this rank: batches of five samples, and AdamW."""
    made: Any = autopar.parallelize(
        Captioner().double(), init_device_mesh("cpu", (dist.get_world_size(),)), example(), inputs="local",
        constraints=constraint.split(), profile=False,
    )  # fmt: skip
    captions = Captions(STEPS)
    loader = autopar.balanced(
        DataLoader(captions, batch_size=5), made, length_index=captions.lengths, shifts="labels",
        encoder=EncoderRows("patches", **ENCODER, lengths=captions.images),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    losses: list[float] = []
    for batch in (batch for _ in range(epochs) for batch in loader):
        optimizer.zero_grad()
        loss = made(**batch)
        loss.backward()
        has_images = "patches" in batch
        assert all((p.grad is None) != has_images for p in (*made.patch.parameters(), *made.see.parameters()))
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("world", "asked"), [(2, "data=2"), (4, "data=2 tensor=2"), (4, "data=2 pipeline=2")])
def test_processes_train_with_images_apart_from_their_text(world: int, asked: str) -> None:
    model, captions = Captioner().double(), list(Captions(STEPS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected: list[float] = []
    for part in (captions[:5], captions[5:10], captions[10:]) * 2:
        optimizer.zero_grad()
        loss = Alone(model, part)(torch.zeros(1).double())
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in run_ranks(train, world, asked, 2):
        assert losses == pytest.approx(expected, rel=1e-12)
