"""Vision models that read the sizes of images in Python: a plan for each set of sizes, exact to one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import autopar
from autopar.errors import MeshError, TraceError
from autopar.planning.call_traces import trace_model
from autopar.verify.rehearsal import keep_double_program, run_single
from tests.lower.runs import (
    assert_batches_train_alone,
    assert_losses_and_gradients,
    loss_of,
    losses_and_gradients,
)
from tests.models import skip_before_transformers_5
from tests.ranks import run_ranks

TOKENS, IMAGE, START = 20, 60, 62
Grids = list[tuple[int, int, int]]
SMALL, WIDE, HIGH = (1, 4, 4), (1, 4, 8), (1, 8, 4)  # frames, height and width in patches, of which 4 are a token


def small(kind: str) -> nn.Module:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    layers = 2 if kind == "qwen3" else 1  # of text: features of several layers go to as many of them
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4,
            "vocab_size": 64, "num_key_value_heads": 2, "use_cache": False, "rope_parameters": rope}  # fmt: skip
    ids = {"image_token_id": IMAGE, "vision_start_token_id": START}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    if kind == "qwen2":
        vision |= {"depth": 1, "embed_dim": 32, "mlp_ratio": 2}
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
    elif kind == "qwen3":  # adds features to what a mask selects, behind several layers
        vision |= {"out_hidden_size": 32, "intermediate_size": 48, "temporal_patch_size": 2,
                   "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}  # fmt: skip
        text |= {"head_dim": 8, "rope_parameters": {**rope, "mrope_interleaved": True}}
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **ids))
    else:
        vision |= {"out_hidden_size": 32, "intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [1]}
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    return model.double()


def batch_of(grids: Grids, seed: int = 0) -> dict[str, Tensor]:
    """Four rows, an image in each of the first ones."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (4, TOKENS), generator=random)
    patches = [frames * height * width for frames, height, width in grids]
    for row, count in zip(ids, patches, strict=False):
        row[1], row[2 : 2 + count // 4] = START, IMAGE
    return {
        "input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100),
        "position_ids": torch.arange(TOKENS).expand(3, 4, TOKENS),
        "pixel_values": torch.randn(sum(patches), 96, generator=random, dtype=torch.float64),
        "image_grid_thw": torch.tensor(grids),
    }  # fmt: skip


BATCHES = [
    batch_of([SMALL, WIDE, HIGH, SMALL], 1), batch_of([WIDE, SMALL, HIGH, SMALL], 2),
    batch_of([SMALL, WIDE, HIGH, SMALL], 3), batch_of([HIGH, (1, 8, 8)], 4),
]  # fmt: skip


@pytest.mark.slow
def test_images_of_several_sizes_train_as_on_one_device() -> None:
    """Qwen3; Qwen2 trains on gloo below, and Qwen2.5 by a loader (`test_image_grid_loaders`)."""
    skip_before_transformers_5("the configuration is another one")
    model = small("qwen3")
    traced = keep_double_program(trace_model(model, BATCHES[0]))
    assert [*traced.read_values] == ["image_grid_thw"]
    # The third batch has the sizes of the first.
    assert_batches_train_alone(model, traced, BATCHES, 2, ["tensor=2"], num_plans=3)


def on_gloo(kind: str) -> list[tuple[float, dict[str, Tensor]]]:
    mesh, rank = init_device_mesh("cpu", (2,)), torch.distributed.get_rank()
    with pytest.raises(TraceError, match="leave inputs='local' out"):
        autopar.parallelize(small(kind), mesh, BATCHES[0], profile=False, inputs="local")
    made: Any = autopar.parallelize(small(kind), mesh, BATCHES[0], profile=False, constraints=["data=2"])
    found = losses_and_gradients(made, BATCHES[:2])
    for grids in ([[WIDE, SMALL], [SMALL, WIDE]], [[SMALL, WIDE, HIGH, SMALL], [HIGH, WIDE, SMALL, SMALL]]):
        # Of equal shapes.  Of the first, no rank has a plan; of the second, rank 0 has one.
        with pytest.raises(MeshError, match=r"'image_grid_thw'.* of rank . differs from that of rank"):
            made(**{**BATCHES[0], "image_grid_thw": torch.tensor(grids[rank])})
    _check_local(kind, mesh, rank)
    return found


def _check_local(kind: str, mesh: Any, rank: int) -> None:
    """Ranks pass their own rows of text, but the sizes of the images of all rows."""
    batch = batch_of([SMALL, WIDE])
    rows = slice(2 * rank, 2 * rank + 2)
    own = {"position_ids": batch["position_ids"][:, rows], **{n: batch[n][rows] for n in ("input_ids", "labels")}}
    made: Any = autopar.parallelize(
        small(kind), mesh, batch, profile=False, inputs="local", constraints=["data=2"]
    )  # fmt: skip
    assert loss_of(made(**{**batch, **own})).item() == pytest.approx(loss_of(small(kind)(**batch)).item(), rel=1e-6)
    with pytest.raises(MeshError, match=r"'image_grid_thw'.* of rank . differs from that of rank"):
        made(**{**batch, **own, "image_grid_thw": torch.tensor([[SMALL, WIDE], [WIDE, SMALL]][rank])})


@pytest.mark.slow
def test_gloo_processes_agree_on_sizes_of_images() -> None:
    skip_before_transformers_5("the configuration is another one")
    alone = [run_single(small("qwen2"), batch, 1) for batch in BATCHES[:2]]
    for steps in run_ranks(on_gloo, 2, "qwen2"):
        # The model casts rotary embeddings and logits to float32.
        assert_losses_and_gradients(steps, alone, loss=1e-6, gradient=1e-6)
