"""Configuration files of text, image and joint models: the model, what it is called with, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.errors import QuestionError
from autopar.explain.plan_command import main
from autopar.explain.question import Question
from autopar.explain.targets import ModelTarget, load_target

NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {"image_size": 32, "patch_size": 8}
TEXT = {"vocab_size": 96, "max_position_embeddings": 24, **NARROW}
PAIR = {"model_type": "clip", "text_config": TEXT, "vision_config": NARROW | IMAGES, "projection_dim": 32}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 96}


def load(folder: Path, config: dict[str, Any], batch: int | None = 4, sequence: int | None = None) -> ModelTarget:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    found = load_target(str(path), batch, sequence)
    assert isinstance(found, ModelTarget)
    return found


@pytest.mark.parametrize(
    ("config", "can_pack"), [({"model_type": "bert", **TEXT}, True), ({"model_type": "t5", **T5}, False)]
)
def test_rows_pack_sequences_of_many_lengths_if_the_model_can_tell_them_apart(
    tmp_path: Path, config: dict[str, Any], can_pack: bool
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    cluster = Cluster.of("h100", devices_per_node=2)
    found = load_target(str(path), *Question(cluster, batch=4, sequence=8, lengths="lengths.txt").shapes)
    assert isinstance(found, ModelTarget)
    assert ("position_ids" in found.example_inputs) == can_pack
    demanded = Question(cluster, batch=4, sequence=8, documents="4").shapes
    with contextlib.nullcontext() if can_pack else pytest.raises(QuestionError, match="no position_ids to tell"):
        load_target(str(path), *demanded)


@pytest.mark.parametrize(
    ("config", "sequence", "kind", "shapes"),
    [
        ({"model_type": "bert", **TEXT}, None, "BertForMaskedLM", {"input_ids": [4, 24], "labels": [4, 24]}),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"], **TEXT}, 8,
         "BertForSequenceClassification", {"input_ids": [4, 8], "labels": [4]}),
        ({"model_type": "bert", "architectures": ["BertModel"], **TEXT}, 8, "BertModel", {"input_ids": [4, 8]}),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 2, "n_layer": 1}, 8,
         "GPT2LMHeadModel", {"input_ids": [4, 8], "labels": [4, 8]}),
        ({"model_type": "t5", **T5}, 8, "T5ForConditionalGeneration", {"input_ids": [4, 8], "labels": [4, 8]}),
        ({"model_type": "vit", **NARROW, **IMAGES}, None, "ViTForImageClassification",
         {"pixel_values": [4, 3, 32, 32], "labels": [4]}),
        (PAIR, None, "CLIPModel", {"input_ids": [4, 24], "pixel_values": [4, 3, 32, 32], "return_loss": True}),
    ],
)  # fmt: skip
def test_a_config_is_a_model_and_its_batch(
    tmp_path: Path, config: dict[str, Any], sequence: int | None, kind: str, shapes: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    target = load(tmp_path, config, 4, sequence)
    assert type(target.model).__name__ == kind
    found = {name: list(x.shape) if torch.is_tensor(x) else x for name, x in target.example_inputs.items()}
    assert found == shapes
    assert all(parameter.is_meta for parameter in target.model.parameters())
    # The line that the command prints makes the same.
    made: dict[str, Any] = {"torch": torch}
    made |= {name: getattr(transformers, name) for name in re.findall(r"Auto\w+", target.recipe)}
    exec(target.recipe, made)
    assert type(made["model"]).__name__ == kind
    assert {name: list(x.shape) if torch.is_tensor(x) else x for name, x in made["inputs"].items()} == shapes


@pytest.mark.parametrize(
    "config",
    [{"model_type": "vit", **NARROW, **IMAGES}, pytest.param(PAIR, marks=pytest.mark.slow)],
    ids=["images", "pairs"],
)
def test_images_and_pairs_are_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    load(tmp_path, config)
    asked = ("--cluster", "2xh100", "--batch", "8", "--constraint", "data=2", "--seconds", "0")
    assert main([str(tmp_path / "config.json"), *asked]) == 0, capsys.readouterr().err
    headline = capsys.readouterr().out.splitlines()[0]
    assert "DP 2" in headline
    assert ("tokens/s" if config is PAIR else "samples/s") in headline


@pytest.mark.parametrize(
    ("config", "sequence", "told"),
    [
        ({"model_type": "vit", **NARROW, **IMAGES}, 8, "leave --seq out"),
        ({"model_type": "t5", **T5}, None, "add --seq"),
        (
            {
                "model_type": "whisper",
                "d_model": 32,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
            },
            8,
            "input_features",
        ),
        ({"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}, None, "size of images"),
    ],
)
def test_what_a_config_does_not_say_is_asked_for(
    tmp_path: Path, config: dict[str, Any], sequence: int | None, told: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(QuestionError, match=told):
        load(tmp_path, config, 4, sequence)


class Denoiser(nn.Module):
    """What a denoiser of diffusers is to us: a configuration, a dtype and a `forward` with such arguments."""

    dtype = torch.float32

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**fields)
        self.convolution = nn.Conv2d(3, 3, 3, padding=1)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Denoiser:
        return cls(**config)

    def forward(
        self, sample: Any, timestep: Any, encoder_hidden_states: Any, class_labels: Any = None, **_: Any
    ) -> Any:
        """Nothing runs it."""


class Controlled(Denoiser):
    """One that needs something which no configuration describes."""

    def forward(self, sample: Any, timestep: Any, control: Any) -> Any:
        """Nothing runs it."""


def test_denoisers_are_called_with_what_their_fields_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(Denoiser=Denoiser, Controlled=Controlled, __version__="0")
    monkeypatch.setitem(sys.modules, "diffusers", package)
    config = {"_class_name": "Denoiser", "in_channels": 3, "sample_size": [16, 8], "cross_attention_dim": 24}
    shapes = {name: list(x.shape) for name, x in load(tmp_path, config).example_inputs.items()}
    assert shapes == {"sample": [4, 3, 16, 8], "timestep": [4], "encoder_hidden_states": [4, 77, 24]}
    labeled = load(tmp_path, config | {"num_embeds_ada_norm": 10}, sequence=5).example_inputs
    assert list(labeled["class_labels"].shape) == [4]
    assert list(labeled["encoder_hidden_states"].shape) == [4, 5, 24]
    with pytest.raises(QuestionError, match="'control' of Controlled"):
        load(tmp_path, config | {"_class_name": "Controlled"})
    with pytest.raises(QuestionError, match="'encoder_hidden_states'"):
        load(tmp_path, {key: value for key, value in config.items() if key != "cross_attention_dim"})
    with pytest.raises(QuestionError, match="no model that diffusers 0 builds"):
        load(tmp_path, config | {"_class_name": "Absent"})
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(QuestionError, match="pip install diffusers"):
        load(tmp_path, config)


def test_real_denoisers_of_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    unet = {
        "_class_name": "UNet2DConditionModel", "sample_size": 8, "in_channels": 4, "out_channels": 4,
        "block_out_channels": [8, 16], "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "cross_attention_dim": 8, "attention_head_dim": 4,
        "norm_num_groups": 4,
    }  # fmt: skip
    transformer = {
        "_class_name": "DiTTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4,
        "num_layers": 1, "sample_size": 8, "num_embeds_ada_norm": 10, "norm_num_groups": 4,
    }  # fmt: skip
    assert set(load(tmp_path, unet).example_inputs) == {"sample", "timestep", "encoder_hidden_states"}
    assert set(load(tmp_path, transformer).example_inputs) == {"hidden_states", "timestep", "class_labels"}
