"""What autocast casts on a GPU, compared with torch's own kernels for it: a CPU build has them, for fake tensors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import autopar
from autopar.trace import trace
from autopar.trace.torch_functions.gpu_casts import IN_FLOAT32, IN_LOW_PRECISION, IN_WIDEST, casts_of

BF16 = torch.bfloat16
# On a CPU they have no entry as they are made of ops that have one: products, or ops of other lists.
MADE_OF_OTHERS = {
    "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "chain_matmul", "einsum",
    "linalg_multi_dot", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "_scaled_dot_product_flash_attention",
    "_cudnn_rnn",  # in CUDA builds only; no rule is for it
}  # fmt: skip


@contextmanager
def autocast_on_fake_gpu() -> Iterator[None]:
    """As ``torch.autocast("cuda", bfloat16)``, which refuses where no GPU is."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cuda", before)
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def test_every_op_that_only_a_gpu_casts_is_listed():
    def cast_on(key: str) -> set[str]:
        names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
        return {n.removeprefix("aten::") for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key)}

    only_gpu = cast_on("AutocastCUDA") - cast_on("AutocastCPU") - MADE_OF_OTHERS
    # Before torch 2.13 some have overloads for named dims, which autopar does not trace.
    only_gpu -= {name for name in only_gpu if re.search(r"[Dd]imname|\.names_", name)}
    assert {*IN_FLOAT32, *IN_LOW_PRECISION, *IN_WIDEST} == only_gpu


CALLS: dict[str, Any] = {
    "layer_norm": lambda x, y: torch.layer_norm(x, (8,)),
    "rms_norm": lambda x, y: torch.rms_norm(x, (8,)),
    "group_norm": lambda x, y: torch.group_norm(x, 2),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "softmax of a dtype": lambda x, y: torch.softmax(x, -1, dtype=BF16),
    "log_softmax": lambda x, y: torch.log_softmax(x, -1),
    "exp": lambda x, y: x.exp(),
    "pow": lambda x, y: x.pow(2),
    "sum": lambda x, y: x.sum(),
    "sum of a dim": lambda x, y: x.sum(-1),
    "mean": lambda x, y: x.mean(-1),
    "cumsum": lambda x, y: x.cumsum(-1),
    "norm": lambda x, y: x.norm(),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x),
    "rsqrt": lambda x, y: x.rsqrt(),
    "relu": lambda x, y: x.relu(),
    "gelu": lambda x, y: nn.functional.gelu(x),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addcmul of one dtype": lambda x, y: torch.addcmul(x, x, x),
    "mv": lambda x, y: torch.mv(y, y.sum(0)),
    "matmul": lambda x, y: x @ y.T,
    "einsum": lambda x, y: torch.einsum("ab,cb->ac", y, x),
    "cross_entropy": lambda x, y: nn.functional.cross_entropy(x, x.argmax(-1)),
    "mse_loss": lambda x, y: nn.functional.mse_loss(x, y),
    "interpolate": lambda x, y: nn.functional.interpolate(x.view(1, 1, 8, 8), scale_factor=2.0, mode="bilinear"),
    "cosine_similarity": lambda x, y: nn.functional.cosine_similarity(x, x),
    "scatter_add": lambda x, y: y.scatter_add(0, torch.zeros_like(x, dtype=torch.int64), x),
    "attention": lambda x, y: nn.functional.scaled_dot_product_attention(*[x.view(1, 8, 8)] * 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_dtype_that_a_gpu_gives_them(name: str):
    with FakeTensorMode(), autocast_on_fake_gpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = CALLS[name](torch.ones(8, 8, device="cuda", dtype=BF16), torch.ones(8, 8, device="cuda"))
    with casts_of("cuda"), torch.autocast("cuda", dtype=BF16):
        found = CALLS[name](torch.ones(8, 8, dtype=BF16), torch.ones(8, 8))
    assert found.dtype == wanted.dtype


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x))
        with torch.autocast("cuda", enabled=False):
            h = self.linear(h.float())
        return self.linear(h).softmax(-1).sum()


def dtypes_of(**options: Any) -> list[str]:
    program = trace(Norms(), (torch.zeros(4, 8),), {}, **options).program
    ops = [op for layer in program.layers for op in layer.ops if op.target.split(".")[1] != "_to_copy"]
    return [f"{op.target.split('.')[1]} {program.type_of(op.results[0]).dtype}" for op in ops]


def test_a_program_for_gpus_has_the_casts_of_gpus():
    assert dtypes_of(autocast=BF16, device_type="cuda") == [
        "linear bfloat16", "layer_norm float32", "linear float32", "linear bfloat16", "softmax float32", "sum float32",
    ]  # fmt: skip


def test_a_program_for_a_cpu_has_those_of_a_cpu():
    assert dtypes_of(autocast=BF16)[:2] == ["linear bfloat16", "layer_norm bfloat16"]
    assert dtypes_of()[0] == "linear float32"


def test_regions_name_their_arguments_as_they_like():
    with casts_of("cuda"):
        with torch.autocast(device_type="cuda", dtype=BF16, enabled=True):
            assert torch.is_autocast_enabled("cpu")
        with torch.autocast("cuda", BF16, enabled=False):
            assert not torch.is_autocast_enabled("cpu")


def test_nothing_of_it_stays():
    with casts_of("cuda"):
        pass
    with torch.autocast("cpu", dtype=BF16):
        assert torch.softmax(torch.ones(2, 2, dtype=BF16), -1).dtype == BF16


@pytest.mark.slow
def test_a_plan_for_gpus_of_a_model_with_their_casts_is_verified_on_a_cpu():
    class Trained(Norms):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=BF16):
                return self.norm(self.linear(x)).float().square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of autocast on a machine without a GPU
        plan = autopar.plan(Trained(), autopar.Cluster.of("h100", devices_per_node=2), (torch.randn(8, 8),))
        report = autopar.verify(Trained(), plan, (torch.randn(8, 8),))
    assert report.loss_error < 1e-12
    assert report.worst_gradient[1] < 1e-9
