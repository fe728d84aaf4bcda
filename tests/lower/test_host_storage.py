"""Parameters, gradients and optimizer state in the host's memory: numbers, lifetimes, bytes, seconds, errors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.cluster import Cluster, HostLink
from autopar.cost import ClusterPrices
from autopar.errors import BackendError, ConstraintError, InfeasibleError, PlanFormatError
from autopar.lower import ParallelModule
from autopar.lower.compat import local_part_of, storage_key
from autopar.lower.parameters import host_threads
from autopar.lower.parameters.host_storage import HostCopies
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.search import SearchRequest, search
from autopar.search.plan_reuse import check_known
from autopar.step.simulation.simulate import simulate_step
from autopar.step.training import TrainingSpec
from autopar.verify.rehearsal import loss_of, run_ranks
from tests.random_plans import random_plan
from tests.search.inner_programs import TablePrices
from tests.zoo import assert_parity, plan_for, quick_prices, subject

AWAY = "offload=optimizer"
CHOICES = [
    (2, ("data=2", "zero=0")),
    (2, ("data=2", "zero=1", "microbatches=2")),
    (2, ("data=2", "zero=2", "microbatches=2")),
    (2, ("data=2", "zero=3", "recompute=full")),
    (2, ("tensor=2", "offload=activations")),
    (4, ("pipeline=2", "schedule=1f1b", "microbatches=2", "data=2", "zero=3")),
    (2, ("pipeline=2", "schedule=zbv", "stages=4", "microbatches=4")),
]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What goes to the host and to the device: how, and bytes."""
    found: list[tuple[str, int]] = []
    bring, send = HostCopies.bring, HostCopies.send

    def noted(how: str, xs: Sequence[Tensor]) -> None:
        found.extend((how, x.numel() * x.element_size()) for x in xs)

    def noted_bring(self: HostCopies, xs: Sequence[Tensor]) -> list[Tensor]:
        made = bring(self, xs)
        noted("bring", xs)
        assert not {storage_key(x) for x in made} & {storage_key(x) for x in xs}
        return made

    def noted_send(self: HostCopies, xs: Any) -> list[Tensor]:
        given = list(xs)
        noted("send", given)
        return send(self, given)

    monkeypatch.setattr(HostCopies, "bring", noted_bring)
    monkeypatch.setattr(HostCopies, "send", noted_send)
    return found


FAST = (1, 3, 6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("world", "constraints"),
    [pytest.param(*each, marks=() if n in FAST else pytest.mark.slow) for n, each in enumerate(CHOICES)],
    ids=str,
)
def test_training_from_the_hosts_memory_is_one_devices(world: int, constraints: tuple[str, ...]) -> None:
    plan = plan_for("llama", world, (*constraints, AWAY), stages=True)
    assert plan.decisions.host_storage
    assert_parity(subject("llama", torch.float64), plan)


@pytest.mark.slow
def test_tied_parameters_of_several_groups_and_a_random_plan() -> None:
    who = subject("gpt2", torch.float64)
    pipeline = plan_for("gpt2", 2, ("pipeline=2", "schedule=1f1b", "microbatches=2", AWAY), stages=True)
    assert_parity(who, pipeline)
    plan = random_plan(who.traced.program, 2, 1, 2)
    assert_parity(who, plan.with_decisions(host_storage=True), priced=False)


@pytest.mark.parametrize("zero", [1, 3])
def test_what_is_copied_in_a_step_is_what_is_priced(zero: int, copies: list[tuple[str, int]]) -> None:
    who = subject("llama", torch.float32)
    plan = plan_for("llama", 2, ("data=2", f"zero={zero}", "microbatches=2", "recompute=none", AWAY), torch.float32)
    program = who.traced.program

    def step(model: ParallelModule) -> int:
        loss_of(model(**who.inputs)).backward()
        return sum(local_part_of(p).numel() * 4 for p in model.parameters())

    stored = sum(run_ranks(who.model, who.traced, plan, step))
    sent = sum(size for how, size in copies if how == "send")
    brought = sum(size for how, size in copies if how == "bring")
    assert sent == stored, "each gradient once"
    timeline = simulate_step(program, plan, quick_prices(2), TrainingSpec(), None)
    listed = [e for e in timeline.events if e.category == "gather" and "host" in e.detail]
    assert 2 * sum(e.num_bytes for e in listed) == brought == (4 if zero == 3 else 1) * stored


def test_parameters_gradients_and_state_are_no_part_of_the_devices_memory() -> None:
    names = ("data=2", "zero=1", "microbatches=1", "recompute=none")
    here, away = (plan_for("llama", 2, constraints, torch.float32) for constraints in (names, (*names, AWAY)))
    total = sum(p.numel() for p in subject("llama", torch.float32).model.parameters())
    assert away.prediction.host_memory_bytes >= 16 * total / 2 * 0.9
    assert here.peak_memory_bytes - away.peak_memory_bytes > 8 * total / 2
    assert sum(cost.optimizer_bytes for cost in away.costs) == 0
    assert "offload of optimizer" in away.headline
    assert "host memory  " in str(away)
    assert away.step_time_s > here.step_time_s, "the host's cores are slower"


def test_the_users_loop(copies: list[tuple[str, int]]) -> None:
    """Clipping, accumulation, eval, checkpoints."""
    who = subject("llama", torch.float64)
    plans = [plan_for("llama", 2, ("data=2", "zero=3", *more)) for more in ((), (AWAY,))]

    def rank(model: ParallelModule) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):  # of one step
                loss_of(model(**who.inputs)).backward()
            model.clip_grad_norm_(0.5)
            optimizer.step()
        state = copy.deepcopy(model.full_state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                local_part_of(parameter).zero_()
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            state["loss"] = model(**who.inputs)["loss"].clone()
        return state

    here, away = (run_ranks(who.model, who.traced, plan, rank)[0] for plan in plans)
    assert {how for how, _ in copies} == {"bring", "send"}
    for name, value in here.items():
        torch.testing.assert_close(away[name], value, rtol=1e-10, atol=1e-10)


def test_a_step_on_the_host_has_the_threads_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    who = subject("llama", torch.float64)
    monkeypatch.setattr(host_threads, "host_threads", lambda: torch.get_num_threads() + 1)

    def rank(model: ParallelModule) -> tuple[int, ...]:
        optimizer = torch.optim.SGD(model.parameters())
        seen = [torch.get_num_threads()]
        optimizer.register_step_pre_hook(host_threads._widen)
        optimizer.register_step_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
        optimizer.register_step_post_hook(host_threads._narrow)
        loss_of(model(**who.inputs)).backward()
        optimizer.step()
        return (*seen, torch.get_num_threads())

    ((before, inside, after),) = run_ranks(who.model, who.traced, plan_for("llama", 1, (AWAY,)), rank)
    assert (inside, after) == (before + 1, before)


@pytest.mark.slow
def test_an_optimizer_that_needs_whole_matrices_has_them() -> None:
    who = subject("llama", torch.float64)

    def train(constraints: tuple[str, ...]) -> dict[str, Tensor]:
        def rank(model: ParallelModule) -> dict[str, Tensor]:
            matrices = [p for p in model.parameters() if p.dim() == 2]
            muon = torch.optim.Muon(matrices, lr=1e-2)
            for _ in range(2):
                muon.zero_grad()
                loss_of(model(**who.inputs)).backward()
                muon.step()
            return model.full_state_dict()

        return run_ranks(who.model, who.traced, plan_for("llama", 2, constraints), rank)[0]

    here, away = (train(("data=2", "zero=3", *more)) for more in ((), (AWAY,)))
    for name, value in here.items():
        torch.testing.assert_close(away[name], value, rtol=1e-9, atol=1e-9)


def with_host(**host: float) -> ClusterPrices:
    cluster = Cluster.of("h100", devices_per_node=2)
    return ClusterPrices(replace(cluster, device=replace(cluster.device, **host)))


def test_a_host_without_room_or_link_is_named() -> None:
    program = subject("llama", torch.float32).traced.program
    request = SearchRequest(constraints=("data=2", "zero=0", AWAY), schedules=schedule_actions)
    with pytest.raises(InfeasibleError, match=r"host's memory, of which a device has .* 'zero=3'"):
        search(program, 2, with_host(host_memory_bytes=1e5), request)
    with pytest.raises(ConstraintError, match="offload=optimizer needs a link to the host's memory"):
        search(program, 2, with_host(host_bytes_per_s=0.0), request)
    plan = search(program, 2, with_host(), request)
    with pytest.raises(InfeasibleError, match="leave 'offload=optimizer' out"):
        check_known(plan, program, with_host(host_memory_bytes=1e5), request)


def test_it_holds_for_the_whole_plan_and_goes_with_activations() -> None:
    with pytest.raises(ConstraintError, match="holds for the whole plan"):
        plan_for("llama", 2, ("model.layers.*: offload=optimizer",))
    plan = plan_for("llama", 2, ("data=2", AWAY, "offload=activations", "recompute=none"))
    assert plan.decisions.host_storage
    assert any("fused=True" in note for note in plan.notes)
    assert any("offload" in strategy.recompute for strategy in plan.strategies)
    assert Plan.from_json(plan.to_json()) == plan
    other = replace(plan, other_calls=(replace(plan.decisions, host_storage=False),))
    with pytest.raises(PlanFormatError, match=r"other_calls\[0\]: host_storage"):
        Plan.from_json(other.to_json())


def test_the_backend_refuses_it() -> None:
    from autopar.backend.options import read_options
    from autopar.lower.compat import make_mesh

    mesh = make_mesh((1,), range(1), "cpu", rank=0)
    for text in (AWAY, "gradients=bf16"):
        with pytest.raises(BackendError, match="can't be met by backend='autopar'"):
            read_options({"mesh": mesh, "constraints": [text]})
    read_options({"mesh": mesh, "constraints": ["offload=activations"]})


def test_the_hosts_cores_price_the_update() -> None:
    program = subject("llama", torch.float32).traced.program
    seconds: list[float] = []
    for rate in (1e9, 2e9):
        host = HostLink(5e10, 0.0, 1e12, 0.02, update_bytes_per_s=rate)
        prices: Any = type("Hosted", (TablePrices,), {"host": host})(devices_per_node=2)
        plan = search(program, 2, prices, SearchRequest(constraints=("data=2", "zero=0", "microbatches=1", AWAY)))
        seconds.append(sum(cost.optimizer_s for cost in plan.costs))
    elements = program.num_trainable_elements
    assert seconds[0] - seconds[1] == pytest.approx(elements * 28 * (1e-9 - 0.5e-9), rel=1e-6)
