"""State-space scans, and where convolutions split: what is next to each other in a sequence or an image."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn

from autopar.planning.call_traces import trace_model
from tests.models import tokens
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone


@cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    if name == "mamba":
        model: nn.Module = transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4, use_cache=False)
        )
    else:
        config = transformers.Mamba2Config(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=8, num_heads=8, head_dim=8, n_groups=1,
            chunk_size=4, use_cache=False,
        )  # fmt: skip
        model = transformers.Mamba2ForCausalLM(config)
    ids = tokens(4, 8, 64)
    return trained_alone(model.double().train(), {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("name", "constraints"),
    [pytest.param(*case, marks=pytest.mark.slow)
     for case in (("mamba", "sequence=2"), ("mamba2", "tensor=2"), ("mamba2", "context=2"))],
)  # fmt: skip
def test_scans_train_as_on_one_device(name: str, constraints: str) -> None:
    """Channels and batches split; projections by the sequence as well, between which it is gathered."""
    who = subject(name)
    plan = forced_plan(who.traced.program, 2, constraints)
    assert_parity(who, plan)


@pytest.mark.slow
def test_a_scan_is_an_op_for_each_token() -> None:
    """As transformers writes Mamba without its CUDA kernels."""
    counts = []
    for length in (8, 16):
        ids = torch.zeros(1, length, dtype=torch.int64)
        program = trace_model(subject("mamba").model, {"input_ids": ids, "labels": ids}).program
        counts.append(sum(op.target == "aten.select.int" for layer in program.layers for op in layer.ops))
    assert counts == [32, 64]


class Blocks(nn.Module):
    """A convolution of each kind that has neighbors along a sequence, an image or a video."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.image, self.video = (
            kind(4, 4, 3, padding=1) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        )  # fmt: skip

    def forward(self, row: Tensor, image: Tensor, video: Tensor) -> Tensor:
        return self.row(row).sum() + self.image(image).sum() + self.video(video).sum()


def test_convolutions_split_by_batch_channels_and_space() -> None:
    inputs = [torch.ones(2, 4, *(8,) * dims) for dims in (1, 2, 3)]
    program = trace_model(Blocks(), tuple(inputs)).program
    found = [op for layer in program.layers for op in layer.ops if "conv" in op.target]
    space = [{f"space{dim}" for dim in range(2, 2 + dims)} for dims in (1, 2, 3)]
    assert [{option.factor for option in op.options} - {"-", "~", "n", "c", "o"} for op in found] == space
