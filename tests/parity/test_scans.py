"""State-space scans, and where convolutions split: what is next to each other in a sequence or an image."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
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
        ops = [op for layer in program.layers for op in layer.ops]
        counts.append(sum(len(op.results) for op in ops if op.target == "aten.unbind.int"))
    assert counts == [24, 48]


class DeltaRule(nn.Module):
    """Linear attention in chunks, with a state that a loop in Python carries from one to the next."""

    def __init__(self, width: int = 16, heads: int = 2, chunk: int = 4) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.embed = nn.Embedding(32, width)
        self.qkv, self.gate = (nn.ModuleList(nn.Linear(width, n) for _ in range(2)) for n in (3 * width, heads))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 32)

    def scan(self, x: Tensor, layer: int) -> Tensor:
        rows, length, width = x.shape
        cut = (rows, length // self.chunk, self.chunk, self.heads, -1)
        q, k, v = (each.reshape(cut).permute(0, 3, 1, 2, 4) for each in self.qkv[layer](x).chunk(3, -1))
        decay = self.gate[layer](x).sigmoid().reshape(cut).permute(0, 3, 1, 2, 4)
        state = torch.zeros(rows, self.heads, q.shape[-1], v.shape[-1], dtype=x.dtype)
        made = torch.zeros_like(v)
        for i in range(q.shape[2]):
            q_i, k_i, v_i = q[:, :, i], k[:, :, i], v[:, :, i]
            new = v_i - k_i @ state
            made[:, :, i] = q_i @ state + (q_i @ k_i.transpose(-1, -2)).tril() @ new
            state = state * decay[:, :, i, -1, :, None] + k_i.transpose(-1, -2) @ new * 0.1
        return self.out[layer](made.permute(0, 2, 3, 1, 4).reshape(rows, length, width))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in range(2):
            x = x + self.scan(x, layer)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "constraints",
    ["tensor=2", "data=2 zero=3", "data=2 microbatches=2", "context=2", "recompute=full"],
)
def test_loops_over_chunks_train_as_on_one_device(constraints: str) -> None:
    torch.manual_seed(0)
    ids = tokens(4, 32, 32)
    who = trained_alone(DeltaRule().double().train(), {"ids": ids, "labels": ids})
    targets = [op.target for layer in who.traced.program.layers for op in layer.ops]
    assert (targets.count("aten.stack.default"), targets.count("aten.unbind.int")) == (2, 8)
    assert_parity(who, forced_plan(who.traced.program, 2, *constraints.split()))


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


@pytest.mark.slow
def test_loops_over_chunks_train_in_stages() -> None:
    torch.manual_seed(0)
    ids = tokens(4, 32, 32)
    model, inputs = DeltaRule().double().train(), {"ids": ids, "labels": ids}
    cluster = autopar.Cluster.of("h100", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=["pipeline=2", "microbatches=2"])
    assert autopar.verify(model, plan, inputs, steps=2).loss_error < 1e-14
