"""What a compiler makes of a layer, by the rules of `step.fusion`, against what inductor makes of it."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.lower.program.single_layer import SingleLayer
from autopar.plan import LayerStrategy
from autopar.planning.call_traces import trace_model
from autopar.program import Layer, Program
from autopar.search import SearchRequest, search
from autopar.step.costs.op_seconds import op_seconds
from autopar.step.costs.rerun_front import rerun_front
from autopar.step.layer.local_layer import place
from autopar.step.layer_tensors import fusion, liveness
from autopar.step.layer_tensors import tensor_graph as tensor_graphs
from autopar.step.layer_tensors.fusion import FusedLayer, fused_layer
from autopar.step.layer_tensors.liveness import running_memory
from autopar.step.layer_tensors.tensor_graph import tensor_graph
from autopar.step.training import TrainingSpec
from tests.models import Gated
from tests.zoo import subject

ON_CPU = TrainingSpec(fuses_attention=False, steps_at_once=False)


def one_device(program: Program) -> tuple[tuple[Layer, LayerStrategy], ...]:
    """Every kind of layer with its strategy on one device."""
    prices = ClusterPrices(Cluster.of("cpu", devices_per_node=1))
    plan = search(program, 1, prices, SearchRequest(constraints=("recompute=none",)))
    planned = {each.kind: plan.strategies[each.strategy] for each in plan.layers}
    return tuple((layer, planned[layer.kind]) for layer in program.kinds)


def fused_names(program: Program) -> tuple[FusedLayer, list[set[str]], list[set[str]]]:
    ((layer, strategy),) = one_device(program)
    fused = fused_layer(place(program, layer, strategy), fuses_attention=False, is_training=True)
    forward, backward = (
        [{layer.ops[op].target.split(".")[1] for op in kernel.ops} for kernel in kernels]
        for kernels in (fused.forward, fused.backward)
    )
    return fused, forward, backward


def test_a_norm_a_gate_and_a_residual_are_a_kernel_each() -> None:
    program = trace_model(Gated(), {"x": torch.ones(32, 64, requires_grad=True)}).program
    fused, forward, backward = fused_names(program)
    assert forward == [{"pow", "sum", "add", "rsqrt", "mul"}, {"silu", "mul"}, {"add", "sum"}]
    assert {"silu", "mul"} in backward
    x, wide = 32 * 64 * 4, 32 * 128 * 4
    norm, gate, last = fused.forward
    assert (norm.read_bytes, norm.write_bytes) == (x + 64 * 4, x + 32 * 4)  # what is normed; products read it, too
    assert (gate.read_bytes, gate.write_bytes) == (2 * wide, wide)
    assert (last.read_bytes, last.write_bytes) == (2 * x, 4)


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_with_the_same_tensors_on_other_meshes_share_what_follows_from_them(compiled: bool) -> None:
    program = trace_model(Gated(), {"x": torch.ones(32, 64, requires_grad=True)}).program
    training, policies = replace(ON_CPU, compiled=compiled), ("none", "full")
    prices = ClusterPrices(Cluster.of("cpu", devices_per_node=4))
    meshes = [("mesh=4", "data=4"), ("mesh=2x2", "data=4"), ("mesh=4", "data=1")]
    plans = [search(program, 4, prices, SearchRequest(constraints=("recompute=none", *own))) for own in meshes]
    placed = [place(program, program.layers[0], plan.strategies[0]) for plan in plans]
    flat, nested, whole = (tensor_graph(each, fuses_attention=False) for each in placed)
    assert flat is nested
    assert flat is not whole
    found = [running_memory(each, policies, training) for each in placed]
    assert found[0] == found[1] != found[2]
    for cached in (each for module in (fusion, liveness, tensor_graphs) for each in vars(module).values()):
        getattr(cached, "cache_clear", lambda: None)()
    assert running_memory(placed[2], policies, training) == found[2]
    assert running_memory(placed[1], policies, training) == found[1]


def test_compiled_layers_take_less_time_and_memory_and_never_more() -> None:
    program = trace_model(Gated(), {"x": torch.ones(32, 64, requires_grad=True)}).program
    ((layer, strategy),) = one_device(program)
    placed = place(program, layer, strategy)
    prices = ClusterPrices(Cluster.of("h100"))
    eager, compiled = (op_seconds(placed, prices, replace(ON_CPU, compiled=way)) for way in (False, True))
    for way in ("forward_s", "backward_s"):
        total_s = [sum(getattr(time, way) for time in times) for times in (eager, compiled)]
        assert 0 < total_s[1] < total_s[0]
    products = [index for index, op in enumerate(layer.ops) if "linear" in op.target]
    assert [compiled[index].forward_s for index in products] == [eager[index].forward_s for index in products]
    saved = [
        running_memory(placed, ("none",), replace(ON_CPU, compiled=way))["none"].saved_bytes for way in (False, True)
    ]
    x, wide, row = 32 * 64 * 4, 32 * 128 * 4, 32 * 4
    # The statistic, what products read, and what the gate reads; the input is the caller's.
    assert saved[1] == row + x + 3 * wide
    assert saved[1] < saved[0]


@contextmanager
def kernels_counted() -> Generator[list[int]]:
    """Per graph that inductor compiles, how many kernels it makes besides calls of libraries."""
    scheduler: Any = importlib.import_module("torch._inductor.scheduler")
    counts: list[int] = []
    codegen = scheduler.Scheduler.codegen

    def counting(self: Any) -> Any:
        own = (scheduler.FusedSchedulerNode, scheduler.SchedulerNode)
        counts.append(sum(isinstance(node, own) for node in self.nodes))
        return codegen(self)

    scheduler.Scheduler.codegen = counting
    try:
        yield counts
    finally:
        scheduler.Scheduler.codegen = codegen


def forward_and_saved(lone: SingleLayer) -> tuple[Sequence[Tensor], list[Tensor]]:
    """A layer's outputs, and what autograd saves."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        return lone.forward(), saved


def bytes_but_parameters(saved: list[Tensor], lone: SingleLayer) -> int:
    """Of these tensors, with each storage once."""
    held = {x.untyped_storage().data_ptr() for x in lone._state}  # pyright: ignore[reportPrivateUsage]
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    return sum(size for key, size in sizes.items() if key not in held)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_inductor_computes_named_ops_again(name: str) -> None:
    """It keeps as many bytes less as predicted, for a point of the front that reruns cheap ops and for one that reruns
    products, and the gradients are those of a layer that keeps everything.
    """
    traced = subject(name).traced
    program = traced.program
    layer, strategy = max(one_device(program), key=lambda each: len(each[0].ops))
    training = replace(ON_CPU, compiled=True)
    front = rerun_front(program, layer, ClusterPrices(Cluster.of("h100")), training)
    policies = ["none", front[2].policy, front[-3].policy]
    memory = running_memory(place(program, layer, strategy), policies, training)
    gradients: list[list[Tensor | None]] = []
    measured: list[int] = []
    for policy in policies:
        torch.manual_seed(0)
        lone = SingleLayer(
            program, layer, replace(strategy, recompute=policy), compiled=True, constants=traced.constants
        )
        outputs, saved = forward_and_saved(lone)
        gradients.append(list(lone.backward(outputs)))
        measured.append(bytes_but_parameters(saved, lone))
    predicted = [memory[policy].saved_bytes for policy in policies]
    for size, saved_bytes in zip(predicted[1:], measured[1:], strict=True):
        assert predicted[0] - size == pytest.approx(measured[0] - saved_bytes, rel=0.01)
    assert predicted[0] > 1.1 * predicted[1] > 1.5 * predicted[2]
    for again in gradients[1:]:
        for one, other in zip(gradients[0], again, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.parametrize(("name", "more"), [("llama", (5, 2)), ("gpt2", (0, 6))])
def test_kernels_and_saved_bytes_are_those_of_inductor(name: str, more: tuple[int, int]) -> None:
    """On CPUs inductor makes kernels of concatenations (of rotary embeddings), of sums for a bias, and of copies around
    attention, which are calls of libraries, fused or free on GPUs: so many `more`, forward and backward.
    """
    traced = subject(name).traced
    program = traced.program
    layer, strategy = max(one_device(program), key=lambda each: len(each[0].ops))
    placed = place(program, layer, strategy)
    fused = fused_layer(placed, fuses_attention=False, is_training=True)
    with kernels_counted() as counts:
        lone = SingleLayer(program, layer, strategy, compiled=True, constants=traced.constants)
        outputs, saved = forward_and_saved(lone)
        lone.backward(outputs)
    measured = bytes_but_parameters(saved, lone)
    predicted = running_memory(placed, ("none",), replace(ON_CPU, compiled=True))["none"].saved_bytes
    assert predicted == pytest.approx(measured, rel=0.02)
    for kernels, count, most in zip((fused.forward, fused.backward), counts, more, strict=True):
        assert len(kernels) <= count <= len(kernels) + most


class Capped(nn.Module):
    """Logits that are capped by tanh are an output, and the loss reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.tanh(self.head(x) / 30) * 30
        return logits, logits.logsumexp(-1).sum()


def test_an_output_that_backward_reads_is_kept() -> None:
    program = trace_model(Capped(), {"x": torch.ones(32, 64)}).program
    ((layer, strategy),) = one_device(program)
    memory = running_memory(place(program, layer, strategy), ("none",), replace(ON_CPU, compiled=True))
    logits, row = 32 * 128 * 4, 32 * 4
    # What tanh is computed from again, the output, and the statistic of rows; x is the caller's.
    assert memory["none"].saved_bytes == pytest.approx(2 * logits + row, abs=2 * row)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
def test_inductor_keeps_an_output_that_backward_reads() -> None:
    program = trace_model(Capped(), {"x": torch.ones(32, 64)}).program
    ((layer, strategy),) = one_device(program)
    lone = SingleLayer(program, layer, strategy, compiled=True)
    _, saved = forward_and_saved(lone)
    x, logits, row = 32 * 64 * 4, 32 * 128 * 4, 32 * 4
    assert bytes_but_parameters(saved, lone) == pytest.approx(x + 2 * logits + row, abs=2 * row)


class Selected(nn.Module):
    """The largest of each row is taken away, as eager attention with sinks does."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x.sin()
        return (scores - scores.max(-1, keepdim=True).values).exp().sum()


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(256, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).logsumexp(-1).sum()


def compiled_bytes(model: nn.Module, x: Tensor, *, on_gpus: bool) -> tuple[float, float]:
    """The most in forward and in backward of a compiled layer in bfloat16."""
    program = trace_model(model, {"x": x}, dtype=torch.bfloat16).program
    ((layer, strategy),) = one_device(program)
    training = TrainingSpec(compiled=True, fuses_attention=on_gpus)
    memory = running_memory(place(program, layer, strategy), ("none",), training)["none"]
    return memory.forward_bytes, memory.backward_bytes


def test_products_of_odd_sizes_are_padded_on_gpus() -> None:
    x, rows = torch.ones(512, 256), 512
    for width in (1000, 1001):
        gpu, cpu = (compiled_bytes(Wide(width), x, on_gpus=way) for way in (True, False))
        matrix, logits = (2 * n * width for n in (256, rows))
        more = (matrix + 2 * logits, logits + matrix) if width % 8 else (0, 0)
        assert [a - b for a, b in zip(gpu, cpu, strict=True)] == pytest.approx(more, rel=0.35)
        assert (gpu > cpu) == bool(width % 8)


def test_what_a_selection_gives_back_is_scattered() -> None:
    x = torch.ones(64, 128, requires_grad=True)
    _, backward = compiled_bytes(Selected(), x, on_gpus=True)
    assert backward >= x.numel() * (2 + 4)  # zeros, and a sum in float32
