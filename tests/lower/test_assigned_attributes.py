"""What `forward` sets on its modules is there after a call, with one device's values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import TraceError
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run.parallel_module import ParallelModule
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.planning.building import call_planner
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from tests.lower.runs import build
from tests.zoo import quick, quick_search

INPUTS = {"x": torch.randn(8, 8).double(), "y": torch.randint(0, 4, (8,))}


class Block(nn.Module):
    """Sets a tensor, adds to a list and a dict, counts its calls, keeps a shape, makes a mask of a buffer once,
    and asks whether there was a call."""

    aux: Tensor
    mask: Tensor | None
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.maps: list[Tensor] = []
        self.kept: dict[str, Tensor] = {}
        self.calls, self.mask, self.last = 0, None, None
        self.register_buffer("limit", torch.tensor(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.mask is None:
            self.mask = torch.arange(8) < self.limit
        if self.training or self.last is None:
            self.last = x.detach().mean()
        h = self.linear(self.norm(x)) * self.mask[None]
        self.aux, self.width = h.square().mean(), x.shape[-1]
        self.maps.append(h)
        self.kept["size"] = h.square().sum()
        return x + functional.gelu(h)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x), y)


def train(model: Any) -> list[Tensor]:
    """Two steps of a loss of what the blocks keep; all losses, and the parts of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[Tensor] = []
    for _ in range(2):
        for block in model.blocks:
            block.maps.clear()
        loss = model(**INPUTS) + sum(0.1 * block.aux for block in model.blocks)
        loss = loss + 0.01 * model.blocks[1].maps[0].square().sum() + 0.01 * model.blocks[3].kept["size"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    assert [(block.width, len(block.maps)) for block in model.blocks] == [(8, 1)] * 4
    return [*found, *(block.aux.detach() for block in model.blocks), *(x.detach() for x in model.blocks[2].maps)]


@pytest.mark.parametrize(
    "constraints",
    [
        ("data=2",),
        ("data=2", "microbatches=2"),
        pytest.param(("tensor=2", "recompute=full"), marks=pytest.mark.slow),
        pytest.param(("pipeline=2", "microbatches=2"), marks=pytest.mark.slow),
    ],
)
def test_losses_of_what_modules_keep_are_those_of_one_device(constraints: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Net().double().train()
    traced = trace_model(copy.deepcopy(model), INPUTS)
    plan = quick_search(traced.program, 2, SearchRequest(constraints=quick(constraints), schedules=schedule_actions))
    planner = call_planner(model, traced, plan)
    planner((), INPUTS, True, any_output=True)  # ranks are threads, and tracing is for one at a time
    assert not any(block.maps or block.kept or block.calls or hasattr(block, "aux") for block in model.blocks)
    single = copy.deepcopy(model)
    expected = train(single)

    def rank(communicator: Any) -> None:
        parallel: ParallelModule = build(model, traced, plan, communicator, planner=planner).train()
        for x, y in zip(expected, train(parallel), strict=True):
            torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)
        state = parallel.full_state_dict()
        for name, x in single.state_dict().items():
            torch.testing.assert_close(state[name], x, rtol=1e-12, atol=1e-12)

    simulate(2, rank)
    assert any("reads and changes 'blocks.0.calls' from 0 to 1" in note for note in traced.program.notes)


class First(nn.Module):
    """Keeps what a buffer holds in the first call, which moves it if `moves`."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.linear, self.moves, self.first = nn.Linear(8, 4), moves, None
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.first is None:
            self.first = self.mean * 2
        if self.moves:
            self.mean.mul_(0.5)
        return functional.cross_entropy(self.linear(x) * self.first, y)


@pytest.mark.parametrize("moves", [False, True])
def test_what_is_made_once_of_a_buffer_is_a_table_unless_forward_moves_it(moves: bool) -> None:
    program = trace_model(First(moves=moves).double(), INPUTS).program
    assert len(program.outputs) == 1 + moves


def test_a_table_of_a_buffer_may_be_made_in_inference_mode() -> None:
    with torch.inference_mode():
        assert trace_model(First(moves=False).double().eval(), INPUTS).program.outputs


class Cooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(8, 4), 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.temperature *= 0.9
        return functional.cross_entropy(self.linear(x) / self.temperature, y)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(8, 4), torch.zeros(4).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(x) + self.state
        self.state = h.detach().mean(0)
        return functional.cross_entropy(h, y)


class FirstBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.mean = x.mean(0)
        return functional.cross_entropy(self.linear(x - self.mean), y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Cooling, "'temperature' from 1.0 to 0.9, and computes something else then"),
        (Recurrent, "reads 'state', and sets it to a tensor that depends on the call"),
        (FirstBatch, "reads 'mean', and sets it to a tensor that depends on the call"),
    ],
)
def test_what_later_calls_would_find_is_refused(model: type[nn.Module], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        autopar.plan(model().double(), autopar.Cluster.of("cpu", devices_per_node=2), INPUTS)


class Tables(nn.Module):
    """Makes tables when the length changes, as rotary embeddings do; or of something else, in the first call."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear, self.length = way, nn.Linear(8, 8), -1
        self.register_buffer("frequency", torch.rand(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(x)
        if self.length != len(x):
            self.length = len(x)
            of = {"buffer": self.frequency, "input": x[0], "result": h[0], "parameter": self.linear.bias}[self.way]
            self.table = torch.outer(torch.arange(len(x)), of.detach()).cos()
        return functional.cross_entropy(h * self.table, y)


def test_tables_of_a_length_are_made_in_every_call() -> None:
    torch.manual_seed(0)
    model = Tables("buffer").double()
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), INPUTS, constraints=["data=2"])
    assert "tables that are the same in every call" in plan.notes[0]
    report = autopar.verify(model, plan, INPUTS)  # with other frequencies, too
    assert report.worst_output[1] < 1e-12


@pytest.mark.parametrize("way", ["input", "result", "parameter"])
def test_what_a_call_makes_of_its_own_for_later_ones_is_refused(way: str) -> None:
    with pytest.raises(TraceError, match="reads and changes 'length' from -1 to 8, and computes something else"):
        trace_model(Tables(way).double(), INPUTS)


class WrittenTables(Tables):
    """Writes its table to a buffer, of the largest length, and looks there in later calls."""

    table: Tensor

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.register_buffer("table", torch.zeros(32, 8))
        self.length = 0

    def _rows(self, length: int, h: Tensor, x: Tensor) -> Tensor:
        if self.length >= length:
            return self.table[:length].detach()
        of = {"buffer": self.frequency, "input": x[0], "result": h[0], "parameter": self.linear.bias}[self.way]
        rows = torch.outer(torch.arange(length), of).cos()
        self.table[:length] = rows.detach()
        self.length = length
        return rows

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(x)
        return functional.cross_entropy(h * self._rows(len(x), h, x) + self._rows(len(x), h, x), y)


def test_tables_in_buffers_are_made_in_every_call_and_read_in_the_same_one() -> None:
    torch.manual_seed(0)
    model = WrittenTables("buffer").double()
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), INPUTS, constraints=["data=2"])
    assert "tables that are the same in every call" in plan.notes[0]
    report = autopar.verify(model, plan, INPUTS)
    assert report.parameter_error < 1e-12
    assert report.worst_output[1] < 1e-12


@pytest.mark.parametrize("way", ["input", "result", "parameter"])
def test_tables_in_buffers_that_follow_from_a_call_are_refused(way: str) -> None:
    with pytest.raises(TraceError, match="reads and changes 'length' from 0 to 8, and computes something else"):
        trace_model(WrittenTables(way).double(), INPUTS)


class Remembered(nn.Module):
    """Has the first batch in a buffer, whole, for all later calls."""

    first: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_set = nn.Linear(8, 4), False
        self.register_buffer("first", torch.zeros(8, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.is_set:
            self.first.copy_(x)
            self.is_set = True
        return functional.cross_entropy(self.linear(x - self.first), y)


def test_what_the_first_call_leaves_in_a_buffer_is_no_table() -> None:
    with pytest.raises(TraceError, match="reads and changes 'is_set' from False to True"):
        trace_model(Remembered().double(), INPUTS)
