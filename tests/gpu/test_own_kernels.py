"""Kernels that a model launches itself, recurrent kernels of cuDNN, and files of whole modules, on one GPU."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autopar
from autopar.planning.call_traces import trace_model
from autopar.verify.rehearsal import join_runs, run_ranks, run_single, train
from tests.gpu.test_parity import planned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def norm_function() -> Any:
    """A root mean square norm whose forward and backward are Triton kernels that compute in float32, as Liger's are."""
    import triton
    from triton import language as tl

    globals().update(tl=tl)  # where a kernel looks for it

    @triton.jit
    def forward_kernel(x, w, y, inverse, width, size: tl.constexpr):
        row, at = tl.program_id(0), tl.arange(0, size)
        inside = at < width
        values = tl.load(x + row * width + at, inside, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(values * values, 0) / width + 1e-6)
        tl.store(inverse + row, r)
        tl.store(y + row * width + at, values * r * tl.load(w + at, inside, other=0.0).to(tl.float32), inside)

    @triton.jit
    def backward_kernel(g, x, w, inverse, dx, dw, width, size: tl.constexpr):
        row, at = tl.program_id(0), tl.arange(0, size)
        inside, r = at < width, tl.load(inverse + row)
        values = tl.load(x + row * width + at, inside, other=0.0).to(tl.float32)
        given = tl.load(g + row * width + at, inside, other=0.0).to(tl.float32)
        scaled = given * tl.load(w + at, inside, other=0.0).to(tl.float32)
        inner = tl.sum(scaled * values, 0) / width
        tl.store(dx + row * width + at, r * scaled - values * r * r * r * inner, inside)
        tl.store(dw + row * width + at, given * values * r, inside)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            rows, width = x.numel() // x.shape[-1], x.shape[-1]
            x = x.contiguous()
            y, inverse = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
            forward_kernel[(rows,)](x, w, y, inverse, width, triton.next_power_of_2(width))
            ctx.save_for_backward(x, w, inverse)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w, inverse = ctx.saved_tensors
            dx = torch.empty_like(x)
            terms = torch.empty(inverse.numel(), x.shape[-1], dtype=torch.float32, device=x.device)
            size = triton.next_power_of_2(x.shape[-1])
            backward_kernel[(inverse.numel(),)](g.contiguous(), x, w, inverse, dx, terms, x.shape[-1], size)
            return dx, terms.sum(0).to(w.dtype)

    return Norm


class Blocks(nn.Module):
    """Blocks with a norm that is a kernel of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.function = norm_function()
        self.scales = nn.ParameterList(torch.ones(64) for _ in range(3))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for scale, layer in zip(self.scales, self.layers, strict=True):
            x = x + layer(self.function.apply(x, scale))
        return functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Tagger(nn.Module):
    """A recurrent module on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 10)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        rows = pad_packed_sequence(self.cell(packed)[0], batch_first=True, total_length=x.shape[1])[0]
        return functional.cross_entropy(self.out(rows).flatten(0, 1), y.flatten())


def batch_of(width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 12, width, generator=generator)
    return {"x": x.cuda(), "y": torch.randint(10, (8, 12), generator=generator).cuda()}


@pytest.mark.parametrize("kind", [Blocks, Tagger])
@pytest.mark.parametrize(
    "constraints", [("data=2",), ("data=2", "zero=3"), ("microbatches=2", "data=2"), ("tensor=2",)]
)
def test_ranks_train_as_one_device(kind: type[nn.Module], constraints: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, inputs = kind().cuda(), batch_of(64 if kind is Blocks else 16)
    if kind is Tagger:
        inputs = {"x": inputs["x"], "lengths": torch.tensor([12, 3, 7, 7, 1, 12, 5, 9]), "y": inputs["y"]}
    traced = trace_model(copy.deepcopy(model), inputs, device_type="cuda")
    own = [op for layer in traced.program.layers for op in layer.ops if op.target.startswith("autopar_launching")]
    assert [any(option.factor not in "-~" for option in op.options) for op in own] == [True] * len(own)
    assert len(own) == (3 if kind is Blocks else 0)
    alone = run_single(model, inputs, 2)
    plan = planned(traced, 2, *constraints)
    found = join_runs(run_ranks(model, traced, plan, lambda each: train(each, inputs, 2)), plan.num_groups)
    torch.testing.assert_close(found.losses, alone.losses, rtol=1e-5, atol=0)
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(found.gradients[name].to(gradient), gradient, rtol=2e-3, atol=1e-5)


@pytest.fixture
def one_process() -> Any:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", [Blocks, Tagger])
def test_compiled_layers(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs = kind().cuda(), batch_of(64 if kind is Blocks else 16)
    if kind is Tagger:
        inputs = {"x": inputs["x"], "lengths": torch.tensor([12, 3, 7, 7, 1, 12, 5, 9]), "y": inputs["y"]}
    single = copy.deepcopy(model)
    parallel = autopar.parallelize(model, init_device_mesh("cuda", (1,)), inputs, profile=False, compile=True)
    for each in (single, parallel):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        each.losses = []
        for batch in (inputs, {key: x[:5] for key, x in inputs.items()}, inputs):
            loss = each(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            each.losses.append(loss.item())
    torch.testing.assert_close(parallel.losses, single.losses, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("one_process")
def test_a_file_of_a_whole_module_is_loaded_on_the_gpu() -> None:
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda(), torch.randn(4, 8)
    parallel = autopar.parallelize(model, init_device_mesh("cuda", (1,)), (inputs.cuda(),), profile=False)
    expected = parallel(inputs)  # copied to the GPU
    file = io.BytesIO()
    torch.save(parallel.eval(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert {x.device.type for x in (*loaded.parameters(), *loaded.buffers())} == {"cuda"}
    torch.testing.assert_close(loaded.train()(inputs.cuda()), expected)


@pytest.mark.usefixtures("one_process")
def test_tensors_are_made_on_the_gpu_by_default() -> None:
    torch.set_default_device("cuda")
    try:
        model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 1)), torch.randn(4, 8)
        single = copy.deepcopy(model)
        parallel = autopar.parallelize(model, init_device_mesh("cuda", (1,)), (inputs,), profile=False)
        for each in (single, parallel):
            optimizer = torch.optim.AdamW(each.parameters())
            for _ in range(2):
                each(inputs).square().mean().backward()
                nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                optimizer.step()
        torch.testing.assert_close(parallel(inputs), single(inputs))
    finally:
        torch.set_default_device("cpu")
