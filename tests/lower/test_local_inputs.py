"""Ranks that pass their own rows of the batch train as one device does on all of them.  Here ranks are threads."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar.cluster import Cluster
from autopar.errors import InputShapeError, LossError
from autopar.lower import ParallelModule
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.compat import make_mesh, to_torch_placements
from autopar.plan import Plan
from autopar.planning.caller_inputs import call_inputs
from autopar.program import Program
from autopar.step.layer.data_split import data_split
from autopar.trace import Traced, trace
from tests.lower.runs import build, loss_of, train_single, whole_gradients
from tests.models import make
from tests.random_plans import random_plan
from tests.zoo import forced_plan

Inputs = Mapping[str, Any]


@cache
def traced_model(name: str) -> tuple[nn.Module, dict[str, Any], Traced]:
    model, inputs = make(name)
    return model, inputs, trace(model, (), inputs)


def data_plan(program: Program, num_microbatches: int = 1) -> Plan:
    """A random plan that splits the rows in two, and something else, too."""
    plans = (random_plan(program, 4, seed, num_microbatches) for seed in range(100))
    return next(plan for plan in plans if data_split(program, plan.decisions).size == 2)


def local(
    model: nn.Module, inputs: Inputs, traced: Traced, plan: Plan, communicator: Communicator, *, is_local: bool = True
) -> ParallelModule:
    made = build(model, traced, plan, communicator)
    made.call_inputs = call_inputs(model, inputs, traced.program, made.data_split, communicator, is_local=is_local)
    return made


def own_rows(made: ParallelModule, x: Any) -> Any:
    return x.tensor_split(made.data_parallel_size)[made.data_rank]


def on_ranks(
    name: str, act: Callable[[ParallelModule, dict[str, Any]], Any], num_microbatches: int = 1, *, is_local: bool = True
) -> list[Any]:
    model, inputs, traced = traced_model(name)
    plan = data_plan(traced.program, num_microbatches)
    assert plan.num_microbatches == num_microbatches

    def rank(communicator: Communicator) -> Any:
        return act(local(model, inputs, traced, plan, communicator, is_local=is_local), dict(inputs))

    return simulate(4, rank)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "num_microbatches"), [("plain_gpt", 2), ("bert", 1), ("unet", 1)])
def test_local_rows_give_the_loss_and_gradients_of_one_device(name: str, num_microbatches: int) -> None:
    model, inputs, _ = traced_model(name)
    expected = train_single(model, inputs, steps=1)

    def act(made: ParallelModule, inputs: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
        assert made.data_parallel_size == 2
        loss = loss_of(made(**{name: own_rows(made, x) for name, x in inputs.items()}))
        loss.backward()
        return loss.item(), whole_gradients(made)

    for loss, gradients in on_ranks(name, act, num_microbatches):
        assert loss == pytest.approx(expected.losses[0], rel=1e-12)
        assert gradients.keys() == expected.gradients.keys()
        largest = max(g.abs().max() for g in expected.gradients.values())
        for parameter, gradient in expected.gradients.items():
            torch.testing.assert_close(gradients[parameter], gradient, rtol=0, atol=1e-9 * largest.item())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("counts", [[5, 3], [0, 8]])
def test_data_ranks_may_pass_different_numbers_of_rows(counts: list[int]) -> None:
    model, inputs, _ = traced_model("plain_gpt")
    expected = train_single(model, inputs, steps=1).losses[0]

    def act(made: ParallelModule, inputs: dict[str, Any]) -> float:
        parts = {name: x.split(counts)[made.data_rank] for name, x in inputs.items()}
        return loss_of(made(**parts)).item()

    assert on_ranks("plain_gpt", act) == pytest.approx([expected] * 4, rel=1e-12)
    assert on_ranks("plain_gpt", act, 2) == pytest.approx([expected] * 4, rel=1e-12)


def test_every_pipeline_stage_is_passed_the_rows_of_its_data_ranks() -> None:
    model, inputs, traced = traced_model("plain_gpt")
    cluster = Cluster.of("cpu", devices_per_node=4)
    plan = autopar.plan(model, cluster, inputs, constraints=["stages=2", "data=2", "microbatches=2"])

    def rank(communicator: Communicator) -> tuple[int, float]:
        made = local(model, inputs, traced, plan, communicator)
        return made.data_rank, loss_of(made(**{name: own_rows(made, x) for name, x in inputs.items()})).item()

    ranks, losses = zip(*simulate(4, rank), strict=True)
    assert ranks == (0, 1, 0, 1)
    assert list(losses) == pytest.approx(list(train_single(model, inputs, steps=1).losses) * 4, rel=1e-12)


def test_inputs_that_hold_no_rows_are_passed_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor, scale: Tensor, *, weights: Tensor) -> Tensor:
            return (self.linear(x) * scale * weights[:, None]).square().mean()

    torch.manual_seed(0)
    model = Scaled()
    inputs = {"x": torch.randn(8, 4).double(), "scale": torch.randn(4).double(), "weights": torch.randn(8).double()}
    traced = trace(model, (), inputs)
    plan = data_plan(traced.program)

    def rank(communicator: Communicator) -> float:
        made = local(model, inputs, traced, plan, communicator)
        # by position and by name, as the caller likes
        return made(own_rows(made, inputs["x"]), inputs["scale"], weights=own_rows(made, inputs["weights"])).item()

    assert simulate(4, rank) == pytest.approx([model(**inputs).item()] * 4, rel=1e-12)


def test_an_input_gets_the_gradient_of_its_rows() -> None:
    model, inputs, _ = traced_model("unet")
    name = next(n for n, x in inputs.items() if x.is_floating_point())
    whole = {n: x.clone().requires_grad_(n == name) for n, x in inputs.items()}
    loss_of(model(**whole)).backward()

    def act(made: ParallelModule, inputs: dict[str, Any]) -> tuple[int, Tensor]:
        own = {n: own_rows(made, x).clone().requires_grad_(n == name) for n, x in inputs.items()}
        loss_of(made(**own)).backward()
        return made.data_rank, own[name].grad

    for rank, gradient in on_ranks("unet", act):
        torch.testing.assert_close(gradient, whole[name].grad.tensor_split(2)[rank])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraints", "dtype", "as_dtensors"),
    [
        (("data=2", "tensor=2"), None, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            (("data=4", "zero=3"), None, True), (("data=2", "recompute=full"), None, False),
            (("data=4", "recompute=selective"), torch.bfloat16, False),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_the_plan_wants_where_they_are_are_not_gathered(
    constraints: tuple[str, ...], dtype: torch.dtype | None, as_dtensors: bool
) -> None:
    model, inputs, _ = traced_model("vit")
    traced = trace(model, (), inputs, dtype=dtype)
    plan = forced_plan(traced.program, 4, *constraints)
    assert data_split(traced.program, plan.decisions).size == int(constraints[0][-1])

    def rank(communicator: Communicator) -> tuple[Tensor, Tensor, list[Any], list[Any]]:
        alone = local(model, inputs, traced, plan, communicator, is_local=False)
        with communicator.recording() as expected:
            whole = loss_of(alone(**inputs))
            whole.backward()
        made = local(model, inputs, traced, plan, communicator, is_local=not as_dtensors)
        size, number = made.data_parallel_size, made.data_rank
        own = {name: x.tensor_split(size)[number] for name, x in inputs.items()}
        if as_dtensors:
            sizes = data_split(traced.program, plan.decisions)
            mesh = make_mesh(sizes.mesh, range(4), "cpu", rank=communicator.rank)
            places = to_torch_placements(sizes.layout)
            own = {name: DTensor.from_local(x, mesh, places, run_check=False) for name, x in own.items()}
        with communicator.recording() as found:
            loss = loss_of(made(**own))
            loss.backward()
        return whole.detach(), loss.detach(), expected, found

    for whole, loss, expected, found in simulate(4, rank):
        torch.testing.assert_close(loss, whole, rtol=0, atol=0)
        assert not Counter(expected) - Counter(found)
        more = [each.num_bytes for each in (Counter(found) - Counter(expected)).elements()]
        assert sum(more) <= 4 * 3 * 8 + 8 * 8  # how many rows each rank passes; labels, which a loss may read whole
        assert not more or not as_dtensors


def failing(act: Callable[[ParallelModule, dict[str, Any]], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        on_ranks("plain_gpt", act)
    return str(caught.value)


def test_inputs_of_unlike_forms_are_refused_on_every_rank() -> None:
    def act(made: ParallelModule, inputs: dict[str, Any]) -> None:
        length = 16 if made.data_rank == 0 else 12
        made(**{name: own_rows(made, x)[:, :length] for name, x in inputs.items()})

    text = failing(act, InputShapeError)
    assert "rank 0 ids int64 [rows, 16], targets int64 [rows, 16]; rank " in text
    assert "ids int64 [rows, 12]" in text


def test_inputs_with_different_numbers_of_rows_are_refused() -> None:
    text = failing(lambda made, inputs: made(inputs["ids"][:4], inputs["targets"]), InputShapeError)
    assert "'targets' has 8 rows and 'ids' has 4" in text


def test_ranks_of_one_data_rank_that_pass_different_numbers_of_rows_are_named() -> None:
    def act(made: ParallelModule, inputs: dict[str, Any]) -> None:
        rows = 3 if made._communicator.rank == 3 else 4
        made(**{name: x[:rows] for name, x in inputs.items()})

    text = failing(act, InputShapeError)
    assert "and 3 have the same data_rank (" in text
    assert "pass 4 and 3 rows of ['ids', 'targets']" in text


def test_the_same_rows_everywhere_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    def act(made: ParallelModule, inputs: dict[str, Any]) -> None:
        for _ in range(2):
            made(**{name: x[:4] for name, x in inputs.items()})

    with caplog.at_level(logging.WARNING, "autopar"):
        on_ranks("plain_gpt", act)
        assert caplog.text.count("all 2 data ranks passed the same 4 rows") == 4  # once on each rank
        caplog.clear()
        on_ranks("plain_gpt", lambda made, inputs: made(**{name: own_rows(made, x) for name, x in inputs.items()}))
    assert "passed the same" not in caplog.text


@pytest.mark.parametrize("is_local", [False, True])
def test_dtensors_are_taken_as_they_lie(monkeypatch: pytest.MonkeyPatch, is_local: bool) -> None:
    model, inputs, _ = traced_model("plain_gpt")
    monkeypatch.setattr(DTensor, "full_tensor", lambda x: inputs["ids"] if x.dim() == 2 else None)

    def act(made: ParallelModule, inputs: dict[str, Any]) -> float:
        mesh = make_mesh((4,), range(4), "cpu", rank=made._communicator.rank)
        ids = DTensor.from_local(inputs["ids"].chunk(4)[made._communicator.rank], mesh, [Shard(0)], run_check=False)
        targets = own_rows(made, inputs["targets"]) if is_local else inputs["targets"]
        return loss_of(made(ids, targets)).item()

    expected = train_single(model, inputs, steps=1).losses[0]
    assert on_ranks("plain_gpt", act, is_local=is_local) == pytest.approx([expected] * 4, rel=1e-12)


class Scores(nn.Module):
    """Scores of each row, of pairs of rows, and along dim 1; the loss too where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, dtype=torch.float64)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.linear(x)
        loss = nn.functional.cross_entropy(scores, labels)
        return {"loss": loss, "scores": scores, "turned": scores.t(), "weight": self.linear.weight * 2}


def scores_on_ranks(act: Callable[[Any, Tensor, Tensor], Any]) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = Scores()
    inputs = {"x": torch.randn(8, 4).double(), "labels": torch.arange(8) % 6}
    traced = trace(model, (), inputs)
    plan = data_plan(traced.program)

    def rank(communicator: Communicator) -> Any:
        made: Any = local(model, inputs, traced, plan, communicator)
        return made.data_rank, act(made, inputs["x"], inputs["labels"])

    return model(**inputs), simulate(4, rank)


@pytest.mark.parametrize("whole_outputs", [True, None])
def test_outputs_are_those_of_the_ranks_rows(whole_outputs: bool | None) -> None:
    def act(made: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        made.whole_outputs = whole_outputs
        found = made(x.split([5, 3])[made.data_rank], labels.split([5, 3])[made.data_rank])
        return {name: output + 0 for name, output in found.items()}

    expected, found = scores_on_ranks(act)
    for rank, outputs in found:
        torch.testing.assert_close(outputs["loss"], expected["loss"])
        torch.testing.assert_close(outputs["scores"], expected["scores"].split([5, 3])[rank])
        torch.testing.assert_close(outputs["turned"], expected["turned"].split([5, 3], 1)[rank])
        torch.testing.assert_close(outputs["weight"], expected["weight"])


def test_all_ranks_may_pass_the_whole_batch_for_a_while() -> None:
    def act(made: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        made.whole_outputs = True
        with made.global_inputs():
            whole = made(x, labels)["scores"]
        return whole, made(own_rows(made, x), own_rows(made, labels))["scores"]

    expected, found = scores_on_ranks(act)
    for rank, (whole, own) in found:
        torch.testing.assert_close(whole, expected["scores"])
        torch.testing.assert_close(own, expected["scores"].split(4)[rank])


def test_gradients_of_a_loss_of_own_rows_are_refused() -> None:
    def act(made: ParallelModule, inputs: dict[str, Any]) -> None:
        logits, _ = made(**{name: own_rows(made, x) for name, x in inputs.items()})
        logits.square().mean().backward()

    with pytest.raises(LossError, match="return the loss, or pass it"):
        on_ranks("plain_gpt", act)
