"""What a layer keeps for backward is what its strategy says."""

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.program import recompute
from autopar.lower.program.saved_tensors import SavedTensor
from autopar.ops import is_cheap
from autopar.placement import REPLICATE, shard
from autopar.plan import Plan
from autopar.program import Program
from autopar.trace import trace
from autopar.verify import compare
from autopar.verify.rehearsal import run_parallel, run_single
from tests.lower.runs import build, loss_of
from tests.models import make
from tests.random_plans import random_plan, with_stages


class Wide(nn.Module):
    """Large activations between cheap ops; small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(4):
            h = torch.sin(h) * torch.tanh(h)
        return self.second(h).square().mean()


def whole_plan(
    model: nn.Module, inputs: Any, world: int, num_microbatches: int = 1, *, joins_outputs: bool = False, **changes: Any
) -> tuple[Any, Plan]:
    """Every op whole on every device, parameters stored in slices where `changes` say so."""
    traced = trace(model, (), inputs)
    plan = random_plan(traced.program, world, 0, num_microbatches, joins_outputs=joins_outputs)
    strategies = tuple(
        replace(
            strategy, mesh=(world,), assignments=(("-",),) * len(layer.ops), copies=(), recompute="none",
            inputs=((REPLICATE,),) * len(layer.inputs), outputs=((REPLICATE,),) * len(layer.outputs),
            storage=((REPLICATE,),) * len(layer.state), zero=0,
        )
        for strategy, layer in zip(plan.strategies, traced.program.kinds, strict=True)
    )  # fmt: skip
    strategies = tuple(replace(s, **changes) for s in strategies)
    return traced, plan.with_decisions(strategies=strategies, shared_storage=())


def stored_in_slices(program: Program, plan: Plan) -> Plan:
    """`plan` with every parameter that has dims stored in slices and read whole."""
    strategies = tuple(
        replace(
            strategy,
            storage=tuple((shard(0),) if is_parameter(program, n) else (REPLICATE,) for n in layer.state),
            copies=tuple((n, (REPLICATE,)) for n in layer.state),
        )
        for strategy, layer in zip(plan.strategies, program.kinds, strict=True)
    )
    return plan.with_decisions(strategies=strategies)


def is_parameter(program: Program, name: str) -> bool:
    return program.values[name].role == "parameter" and bool(program.type_of(name).shape)


class Kept(SavedTensor):
    """Those that are there."""

    alive: ClassVar[WeakSet[SavedTensor]] = WeakSet()

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.alive.add(self)


@pytest.fixture
def kept_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many bytes boxes keep for backward, each storage once."""
    monkeypatch.setattr(recompute, "SavedTensor", Kept)
    Kept.alive.clear()
    gc.freeze()  # what is there already is not looked through

    def count() -> int:
        gc.collect()
        storages = [box.tensor.untyped_storage() for box in Kept.alive if box.tensor is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return count


def test_selective_recomputation_keeps_less(kept_bytes: Callable[[], int]) -> None:
    model = Wide()
    inputs = {"x": torch.randn(64, 32)}
    traced, plan = whole_plan(model, inputs, 1, recompute="selective")
    own = 64 * 32 * 4

    def run(communicator: Any) -> int:
        parallel = build(model, traced, plan, communicator)
        loss = parallel(**inputs)
        kept = kept_bytes()
        loss.backward()
        return kept

    kept = simulate(1, run)[0]
    # x, two products, what enters the two layers of cheap ops in between, and a weight: none of 12 cheap results
    assert kept == 5 * own + 32 * 32 * 4


@pytest.mark.parametrize(
    ("recompute", "zero"),
    [("selective", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("selective", 0), ("none", 3)))],
)
def test_nothing_stays_when_backward_never_runs(recompute: str, zero: int, kept_bytes: Callable[[], int]) -> None:
    model, inputs = make("flat")
    traced, plan = whole_plan(model, inputs, 2, recompute=recompute, zero=zero)
    simulate(2, lambda c: build(model, traced, plan, c)(**inputs).item())
    assert kept_bytes() == 0


def saved_in_eager(model: nn.Module, inputs: Any) -> int:
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(model(**inputs))
    del loss
    return sum(found.values())


def test_eager_keeps_more_than_selective() -> None:
    assert saved_in_eager(Wide(), {"x": torch.randn(64, 32)}) > 12 * 64 * 32 * 4


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_zero_3_gathers_twice_and_keeps_no_gathered_parameter(recompute: str) -> None:
    model, inputs = make("flat")
    traced, plan = whole_plan(model, inputs, 2, zero=3, recompute=recompute)
    plan = stored_in_slices(traced.program, plan)

    def run(communicator: Any) -> tuple[int, int, int]:
        parallel = build(model, traced, plan, communicator)
        with parallel.recording() as forward:
            loss = parallel(**inputs)
        with parallel.recording() as backward:
            loss.backward()
        bytes_of = [sum(c.num_bytes for c in part if c.kind == "all_gather") for part in (forward, backward)]
        return bytes_of[0], bytes_of[1], sum(p.numel() for p in model.parameters())

    for forward, backward, elements in simulate(2, run):
        assert forward == backward
        assert forward == (elements - 1) * 8


def test_products_attention_and_random_ops_are_not_cheap() -> None:
    model, inputs = make("plain_gpt")
    cheap: dict[str, bool] = {}
    for layer in trace(model, (), inputs).program.layers:
        cheap |= {op.target: is_cheap(op) for op in layer.ops}
    assert cheap["aten.layer_norm.default"]
    assert cheap["aten.gelu.default"]
    assert not cheap["aten.linear.default"]
    assert not cheap["aten.scaled_dot_product_attention.default"]


class Block(nn.Module):
    """Reads what the step before left in a buffer, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("level", torch.zeros(6))

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        gated = hidden * torch.sigmoid(hidden * (1 + self.level))
        self.level.mul_(0.5).add_(x.sum(0))
        return gated


class Tracked(nn.Module):
    """Returns a loss, or what a loss is computed from."""

    def __init__(self, *, has_loss: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block(), Block()])
        self.has_loss = has_loss

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for block in self.blocks:
            hidden = block(hidden, x)
        return hidden.square().mean() if self.has_loss else hidden


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("recompute", "zero", "schedule", "num_microbatches", "has_loss"),
    [
        ("none", 3, "", 1, True),
        ("selective", 3, "", 1, True),
        ("full", 0, "", 1, True),
        ("full", 3, "", 1, True),
        ("full", 3, "", 2, True),
        ("full", 3, "gpipe", 2, True),
        ("full", 3, "gpipe", 2, False),
    ],
)
def test_backward_reads_the_buffer_that_forward_read(
    recompute: str, zero: int, schedule: str, num_microbatches: int, has_loss: bool
) -> None:
    torch.manual_seed(0)
    model = Tracked(has_loss=has_loss).double()
    inputs = {"x": torch.randn(8, 6, dtype=torch.float64)}
    traced, plan = whole_plan(
        model, inputs, 2, num_microbatches, joins_outputs=bool(schedule), zero=zero, recompute=recompute
    )
    if zero:
        plan = stored_in_slices(traced.program, plan)
    if schedule:
        plan = with_stages(plan, 2, schedule, 2, random.Random(0))
    found = compare(run_single(model, inputs, 2), run_parallel(model, traced, plan, inputs, 2), plan.world_size)
    assert max(found.loss_error, found.worst_gradient[1], found.parameter_error) < 1e-12


class NormedByBatches(nn.Module):
    """A batch norm that keeps no statistics, whose results are missing in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.first(x))).square().mean()


def test_a_norm_without_statistics_runs_again() -> None:
    model, inputs = NormedByBatches().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}
    traced, plan = whole_plan(model, inputs, 2)
    again = [op.name for op in traced.program.layers[0].ops if op.target in ("autopar.batch_norm", "aten.tanh.default")]
    assert len(again) == 2
    strategies = tuple(replace(s, recompute=f"rerun:{','.join(again)}") for s in plan.strategies)
    found = run_parallel(model, traced, plan.with_decisions(strategies=strategies), inputs, 2)
    report = compare(run_single(model, inputs, 2), found, 2)
    assert report.loss_error <= 1e-12
    assert report.worst_gradient[1] <= 1e-9
