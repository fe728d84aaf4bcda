"""A language model whose text has images in it, encoded by a vision model: rows with unlike numbers of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import autopar
from autopar.data import EncoderRows
from autopar.errors import InfeasibleError, LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.verify.rehearsal import keep_double_program, planner_for, run_single
from tests.balance.assignments import plan_of
from tests.data.sharded import FakeModel
from tests.data.test_balanced import ROW
from tests.lower.runs import assert_losses_and_gradients, build, loss_of, losses_and_gradients, whole_gradients
from tests.models import skip_before_transformers_5
from tests.zoo import forced_plan

TOKENS, IMAGE, PLACES = 12, 31, 4  # of a row, the id of a place in an image, and how many places an image has


def small_llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    text = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                       num_key_value_heads=2, vocab_size=32, use_cache=False)  # fmt: skip
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                              image_size=4, patch_size=2, projection_dim=16)  # fmt: skip
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    ).double()


def batch_of(images: list[int]) -> dict[str, Tensor]:
    """A row for each number of images."""
    random = torch.Generator().manual_seed(sum(images))
    ids = torch.randint(0, IMAGE, (len(images), TOKENS), generator=random)
    for row, count in zip(ids, images, strict=True):
        row[1 : 1 + count * PLACES] = IMAGE
    pixels = torch.randn(sum(images), 3, 4, 4, generator=random, dtype=torch.float64)
    labels = ids.masked_fill(ids == IMAGE, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["data=2", "tensor=2"])
def test_rows_with_unlike_numbers_of_images_train_as_on_one_device(asked: str) -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    model, example = small_llava(), batch_of([1, 2])
    traced = keep_double_program(trace_model(model, example))
    plan = forced_plan(traced.program, 2, *asked.split())
    others = [batch_of([2, 0]), batch_of([1, 1])]
    planner = planner_for(model, traced, plan, others, keep_double_program, training=True)
    alone = [run_single(model, batch, 1, in_double=True) for batch in (example, *others)]

    def rank(talk: Communicator) -> list[Any]:
        made: Any = build(model, traced, plan, talk, planner=planner)
        return losses_and_gradients(made, (example, *others))

    for steps in simulate(2, rank):
        assert_losses_and_gradients(steps, alone)


@pytest.mark.slow
def test_more_images_than_fit_are_refused_before_they_are_computed() -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    model, example = small_llava(), batch_of([1, 2])
    traced = trace_model(model, example)
    plan = forced_plan(traced.program, 2, "data=2")
    planner = planner_for(model, traced, replace(plan, memory_limit_bytes=2 * plan.peak_memory_bytes), [])
    more = {**example, "pixel_values": torch.zeros(1024, 3, 4, 4, dtype=torch.float64)}
    with pytest.raises(InfeasibleError, match=r"a call with .*pixel_values \[1024, 3, 4, 4\].*: no plan fits into"):
        planner((), more, True)


SIZES = ((2, 3), (0, 9), (1, 1), (1, 7))  # images and words of captions


class Captions(Dataset[dict[str, Tensor]]):
    """Text of so many words after so many images."""

    def __init__(self, sizes: Sequence[tuple[int, int]] = SIZES) -> None:
        self.images = [images for images, _ in sizes]
        self.words = [words for _, words in sizes]
        self.lengths = [images * PLACES + words for images, words in sizes]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        count = self.images[index]
        words = torch.randint(0, IMAGE, (self.words[index],), generator=random)
        ids = torch.cat([torch.full((count * PLACES,), IMAGE), words])
        pixels = torch.randn(count, 3, 4, 4, generator=random, dtype=torch.float64)
        return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": pixels}


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


def size(sample: dict[str, Tensor]) -> int:
    return len(sample["input_ids"])


@pytest.mark.slow
def test_a_balanced_loader_distributes_images_apart_from_their_text() -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    model = small_llava()
    example = {**batch_of([1, 2, 1, 2]), "position_ids": torch.arange(TOKENS).repeat(4, 1)}
    del example["attention_mask"]
    traced = keep_double_program(trace_model(model, example))
    plan = forced_plan(traced.program, 2, "data=2")
    fewer = {**example, "pixel_values": torch.zeros(4, 3, 4, 4, dtype=torch.float64)}
    planner = planner_for(model, traced, plan, [fewer], keep_double_program, training=True)
    single = run_single(Alone(model, Captions()), {"x": torch.zeros(1).double()}, 1, in_double=True)

    def rank(talk: Communicator) -> Any:
        made: Any = build(model, traced, plan, talk, planner=planner)
        made.call_inputs = call_inputs(model, example, traced.program, made.data_split, talk, is_local=True)
        (batch,) = autopar.balanced(
            DataLoader(Captions(), batch_size=4), made, length=size, shifts="labels", encoder="pixel_values"
        )
        loss = loss_of(made(**batch))
        loss.backward()
        gradients = whole_gradients(made)
        return len(batch["pixel_values"].to_local()) * made.data_parallel_size, loss.item(), gradients

    largest = max(float(x.abs().max()) for x in single.gradients.values())
    for images, loss, gradients in simulate(2, rank):
        assert images == 4
        assert loss == pytest.approx(single.losses[0], rel=1e-12)
        for name, x in gradients.items():
            torch.testing.assert_close(x, single.gradients[f"model.{name}"], rtol=0, atol=1e-9 * largest)


def loaded(captions: Any = None, forward: Any = FakeModel.forward, **arguments: Any) -> Any:
    """The first batch of captions on two ranks, for a model with this forward that takes images of this shape."""

    def act(talk: Communicator) -> Any:
        model: Any = FakeModel(talk)
        model.plan, model.forward = plan_of(ROW), forward
        model.call_inputs.example_forms = {
            "input_ids": ((2, TOKENS), torch.int64), "pixel_values": ((2, 3, 4, 4), torch.float64)
        }  # fmt: skip
        given: dict[str, Any] = {"length": size, "shifts": "labels", **arguments}
        return next(iter(autopar.balanced(DataLoader(captions or Captions(), batch_size=4), model, **given)))

    return simulate(2, act)


def takes_images(input_ids: Tensor, pixel_values: Tensor | None = None) -> None: ...


def takes_any(input_ids: Tensor, **entries: Tensor) -> None: ...


def needs_images(input_ids: Tensor, pixel_values: Tensor) -> None: ...


@pytest.mark.parametrize(("forward", "has_images"), [(takes_images, False), (takes_any, False), (needs_images, True)])
def test_batches_without_images_leave_out_what_forward_does_not_need(forward: Any, has_images: bool) -> None:
    words = Captions([(0, count) for _, count in SIZES])
    for batch in loaded(words, forward, encoder="pixel_values"):
        assert ("pixel_values" in batch) == has_images


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"pass balanced\(..., encoder='pixel_values'\) if an encoder reads it"),
        ({"padding": {"pixel_values": 0}}, "the entries of a sample have one length"),
        ({"encoder": "pixels"}, r"reads \['pixels'\], but the example inputs of the model are \['input_ids', 'pixel_"),
        ({"encoder": "input_ids"}, "let forward take an input of the text first"),
        ({"encoder": "pixel_values", "length": None, "length_index": [9] * 4}, r"pass EncoderRows\(..., lengths=\)"),
        (
            {"encoder": EncoderRows("pixel_values", lengths=(2, 0, 1, 2)), "length": None,
             "length_index": [11, 9, 5, 11]},
            r"has images of \[1, 1\] places, but they are \[1\]",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_images_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        loaded(**arguments)
