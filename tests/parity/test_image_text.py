"""A language model whose text has images in it, encoded by a vision model: rows with unlike numbers of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import autopar
from autopar.errors import LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.verify.rehearsal import keep_double_program, planner_for, run_single
from tests.balance.assignments import plan_of
from tests.data.sharded import FakeModel
from tests.data.test_balanced import ROW
from tests.lower.runs import build, loss_of
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
@pytest.mark.parametrize("asked", ["", "data=2", "tensor=2"])
def test_rows_with_unlike_numbers_of_images_train_as_on_one_device(asked: str) -> None:
    skip_before_transformers_5("LLaVA counts what a boolean mask selects")
    model, example = small_llava(), batch_of([1, 2])
    traced = keep_double_program(autopar.api.trace_model(model, example))
    plan = forced_plan(traced.program, 2, *asked.split())
    others = [batch_of([2, 0]), batch_of([1, 1])]
    planner = planner_for(model, traced, plan, others, keep_double_program, training=True)
    alone = [run_single(model, batch, 1, in_double=True) for batch in (example, *others)]

    def rank(talk: Communicator) -> list[Any]:
        made: Any = build(model, traced, plan, talk, planner=planner)
        found: list[Any] = []
        for batch in (example, *others):
            loss = loss_of(made(**batch))
            loss.backward()
            found.append((loss.item(), {n: made._whole(n, p.grad) for n, p in made.named_parameters()
                                        if p.grad is not None}))  # fmt: skip
            made.zero_grad()
        return found

    for steps in simulate(2, rank):
        for (loss, gradients), expected in zip(steps, alone, strict=True):
            assert loss == pytest.approx(expected.losses[0], rel=1e-12)
            largest = max(float(x.abs().max()) for x in expected.gradients.values())
            for name, x in expected.gradients.items():
                torch.testing.assert_close(gradients[name], x, rtol=0, atol=1e-9 * largest)


class Captions(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x if name == "pixel_values" else x[0] for name, x in batch_of([index + 1]).items()}


def test_a_balanced_loader_refuses_samples_with_images() -> None:
    def act(talk: Communicator) -> None:
        model: Any = FakeModel(talk)
        model.plan = plan_of(ROW)
        padding = {"pixel_values": 0, "attention_mask": 0}
        loader = autopar.balanced(
            DataLoader(Captions(), batch_size=2), model, length=lambda _: TOKENS, shifts="labels", padding=padding
        )  # fmt: skip
        with pytest.raises(LoaderError, match="the entries of a sample have one length"):
            next(iter(loader))

    simulate(2, act)
