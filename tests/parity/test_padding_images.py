"""Vision models that leave out images of zeros: which there are follows from the pixels, and is part of a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

import autopar
from autopar.errors import InputShapeError
from autopar.planning.call_traces import trace_model
from autopar.verify.rehearsal import keep_double_program, run_single
from tests.lower.runs import assert_batches_train_alone, assert_losses_and_gradients, losses_and_gradients
from tests.models import skip_before_transformers_5
from tests.ranks import run_ranks

IMAGE, TOKENS_OF_IMAGE = 60, 4


def small(kind: str) -> nn.Module:
    torch.manual_seed(0)
    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 4}  # fmt: skip
    how: dict[str, Any] = {"text_config": text, "vision_config": vision, "image_token_id": IMAGE, "scale_factor": 2,
                           "use_cache": False, "pad_token_id": 0}  # fmt: skip
    if kind == "smolvlm":
        return SmolVLMForConditionalGeneration(SmolVLMConfig(**how)).double()
    return Idefics3ForConditionalGeneration(Idefics3Config(**how)).double()


def batch_of(counts: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    """Rows with so many images, of two that there is room for."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (len(counts), 16), generator=random)
    pixels = torch.randn(len(counts), 2, 3, 16, 16, generator=random, dtype=torch.float64)
    for row, count in enumerate(counts):
        pixels[row, count:] = 0
        ids[row, 1 : 1 + TOKENS_OF_IMAGE * count] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "labels": labels}


BATCHES = [batch_of((2, 2, 2, 2), 1), batch_of((2, 1, 2, 1), 2), batch_of((2, 2, 2, 2), 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "constraints"),
    [
        ("smolvlm", 2, "data=2"),
        ("smolvlm", 4, "data=2 tensor=2"),
        ("smolvlm", 2, "data=2 zero=3"),
        ("idefics3", 2, "tensor=2"),
        ("idefics3", 4, "data=4"),
    ],
)
def test_padding_images_are_left_out_as_on_one_device(kind: str, ranks: int, constraints: str) -> None:
    skip_before_transformers_5("the model merges images otherwise")
    model = small(kind)
    traced = keep_double_program(trace_model(model, BATCHES[0]))
    assert {read.inputs for read in traced.computed_values} == {("pixel_values",)}
    # The third batch has the images of the first.
    assert_batches_train_alone(model, traced, BATCHES, ranks, constraints.split(), num_plans=2)


def on_gloo(inputs: str) -> list[tuple[float, dict[str, Tensor]]]:
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    made: Any = autopar.parallelize(
        small("smolvlm"), mesh, BATCHES[0], profile=False, inputs=inputs, constraints=["data=2"]
    )  # fmt: skip
    if inputs == "global":
        found = losses_and_gradients(made, BATCHES)
        others = [BATCHES[0], batch_of((1, 1, 2, 2), 4)][rank]  # rank 0 has a plan
        with pytest.raises(InputShapeError, match="values of an input that forward reads in Python"):
            made(**{**BATCHES[0], "pixel_values": others["pixel_values"]})
        return found
    return losses_and_gradients(made, [{n: x[2 * rank : 2 * rank + 2] for n, x in b.items()} for b in BATCHES])


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["global", "local"])
def test_gloo_processes_agree_on_padding_images(inputs: str) -> None:
    skip_before_transformers_5("the model merges images otherwise")
    alone = [run_single(small("smolvlm"), batch, 1) for batch in BATCHES]
    for steps in run_ranks(on_gloo, 2, inputs):
        assert_losses_and_gradients(steps, alone, loss=1e-6, gradient=1e-6)
