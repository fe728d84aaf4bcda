"""``options={"shard": True}``: parameters and optimizer states in slices, trained as on a single device."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from autopar.backend import made_plans
from autopar.backend.options import read_options
from autopar.errors import BackendError, ModelError
from tests.backend import models
from tests.backend.models import Breaking, Mlp, compile_for, make_mesh, vector_batches
from tests.ranks import run_ranks

Optimizer = Callable[..., torch.optim.Optimizer]


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double()


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((whole(a) - whole(b)).abs().max().item() for a, b in zip(found, expected, strict=True))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """For models in which a gradient is 0 but for rounding, by which AdamW divides."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """Has a state before its first step."""
    return torch.optim.Adagrad(parameters, lr=1e-2)


def loss_alone(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Of a model that is compiled without its other outputs."""
    return model(batch["input_ids"], batch["labels"])


class LossOf(nn.Module):
    """Puts out nothing but the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.llama()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(
    make: Callable[[], nn.Module],
    batches: Callable[[], Iterator[Any]],
    loss_of: Callable[[Any, Any], Tensor],
    optimizer: Optimizer,
    *constraints: str,
) -> dict[str, float]:
    """The largest differences from a single device, and the share of elements that this rank keeps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = make()
    model = copy.deepcopy(single)
    mesh = make_mesh()
    runs = {id(model): compile_for(model, mesh, *constraints, shard=True), id(single): single}
    seen: list[list[float]] = []
    for owner in (model, single):
        steps = optimizer(owner.parameters())
        losses: list[float] = []
        for batch in batches():
            loss = loss_of(runs[id(owner)], batch)
            loss.backward()
            losses += [loss.item(), *(p.grad.norm().item() for p in owner.parameters() if p.grad is not None)]
            torch.nn.utils.clip_grad_norm_(owner.parameters(), 1.0)
            steps.step()
            steps.zero_grad()
        seen.append(losses)
        states = [x for state in steps.state.values() for x in state.values() if isinstance(x, Tensor) and x.ndim]
        if owner is model:
            kept = [*model.parameters(), *states]
    assert all(isinstance(x, DTensor) for x in kept)
    assert list(model.state_dict()) == list(single.state_dict())
    members = [[*owner.parameters(), *owner.buffers()] for owner in (model, single)]
    values = largest_difference(*members)
    for owner in (model, single):
        torch.manual_seed(1)
        for parameter in owner.parameters():
            nn.init.normal_(parameter)
            parameter.data[:1].zero_()
    return {
        "loss": max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(*seen, strict=True)),
        "values": values,
        "written": largest_difference(*members),
        "kept": sum(x.to_local().numel() for x in kept) / sum(x.numel() for x in kept),
        "microbatches": float(made_plans(mesh)[-1].num_microbatches),
    }


def train_all() -> dict[str, dict[str, float]]:
    tokens, inside = models.token_batches, models.loss_inside
    return {
        "gpt2, ZeRO-3": train(models.gpt2, tokens, inside, momentum, "data=2", "zero=3"),
        "llama, tensor": train(models.llama, tokens, inside, adamw, "tensor=2"),
        "a state before": train(Mlp, vector_batches, models.loss_outside, adagrad, "data=2", "zero=3"),
        "graph break": train(Breaking, vector_batches, models.loss_outside, momentum, "data=2", "zero=1"),
        "microbatches": train(LossOf, tokens, loss_alone, adamw, "data=2", "zero=2", "microbatches=2"),
    }


@pytest.fixture(scope="module")
def trained() -> dict[str, dict[str, float]]:
    """The worse of the two ranks."""
    first, second = run_ranks(train_all, 2, timeout_s=500)
    return {name: {key: max(found[key], second[name][key]) for key in found} for name, found in first.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2, ZeRO-3", "llama, tensor", "a state before", "graph break", "microbatches"])
def test_trains_as_a_single_device_on_a_part_of_each_parameter(trained: Any, name: str) -> None:
    found = trained[name]
    assert found["loss"] < 1e-5
    assert found["values"] < 1e-5
    assert found["written"] < 1e-5
    assert found["kept"] < 0.6
    assert found["microbatches"] == (2.0 if name == "microbatches" else 1.0)


def step_by_closure() -> float:
    """The largest difference from a single device, where the first call that trains is made by an optimizer's step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = Mlp()
    model = copy.deepcopy(single)
    (batch,) = vector_batches((4,))
    for owner, run in ((model, compile_for(model, make_mesh(), "data=2", "zero=3", shard=True)), (single, single)):
        optimizer = torch.optim.LBFGS(owner.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

        def closure(optimizer: Any = optimizer, run: Any = run) -> Tensor:
            optimizer.zero_grad()
            loss = models.loss_outside(run, batch)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return largest_difference([*model.parameters()], [*single.parameters()])


@pytest.mark.slow
def test_the_step_of_lbfgs_may_be_what_shards() -> None:
    assert max(run_ranks(step_by_closure, 2, timeout_s=200)) < 1e-5


def resume(folder: str, first: int) -> list[float]:
    """Losses of the steps from `first`; 0 saves after two steps, under the original names."""
    torch._dynamo.reset()
    torch.manual_seed(first)  # the values that are loaded are others
    model = Mlp()
    optimizer = adamw(model.parameters())
    compiled = compile_for(model, make_mesh(), "data=2" if dist.get_world_size() == 2 else "data=1", shard=True)
    batches = list(vector_batches((4,) * 4))
    if first:  # a call that trains shards; its gradients are dropped
        models.loss_outside(compiled, batches[0]).backward()
        optimizer.zero_grad()
    state = {"model": model.state_dict()}
    if first:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    losses: list[float] = []
    for number, batch in list(enumerate(batches))[first:]:
        loss = models.loss_outside(compiled, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not first and number == 1:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            assert list(state["model"]) == ["up.weight", "up.bias", "down.weight", "down.bias"]
            dcp.save(state, checkpoint_id=folder)
    return losses


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole_run = run_ranks(resume, 2, str(tmp_path), 0)[0]
    resumed = run_ranks(resume, 1, str(tmp_path), 2)[0]
    assert resumed == pytest.approx(whole_run[2:], rel=1e-5)
    assert whole_run[3] < whole_run[0]


def save_parts() -> None:
    """A rank that saves alone would wait for ever, and nobody knows that it is alone."""
    torch.manual_seed(0)
    model = Mlp()
    compiled = compile_for(model, make_mesh(), "zero=3", shard=True)
    models.loss_outside(compiled, next(iter(vector_batches((4,))))).backward()
    if dist.get_rank() == 0:
        with pytest.raises(ModelError, match=r"has sharded is this rank's part.*full_state_dict=True"):
            torch.save(model.state_dict(), io.BytesIO())
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(type(x) is Tensor and torch.equal(x, whole(model.state_dict()[name])) for name, x in gathered.items())


@pytest.mark.slow
def test_a_file_of_parts_is_refused() -> None:
    run_ranks(save_parts, 2)


def twice(call: Any, x: Tensor) -> None:
    """What is said of the first call may come with the second."""
    call(x)
    call(x)


def left_by_a_loop(mesh: Any, x: Tensor) -> str:
    """What is said where a loop's variable still has the last parameter."""
    torch._dynamo.reset()
    model = Mlp()
    for parameter in model.parameters():
        parameter.requires_grad_()
    with pytest.raises(BackendError) as caught:
        twice(compile_for(model, mesh, "data=2", "zero=3", shard=True), x)
    return str(caught.value)


class Checkpointed(nn.Module):
    """Its first layer is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False).relu())


def checkpoints(mesh: Any, x: Tensor) -> float:
    """Difference of a model with an activation checkpoint to one device after a step, in inference mode."""
    torch._dynamo.reset()
    model = Checkpointed()
    single = copy.deepcopy(model)
    results: list[Tensor] = []
    for trained, call in ((model, compile_for(model, mesh, "data=2", "zero=3", shard=True)), (single, single)):
        call(x).square().mean().backward()
        momentum(trained.parameters()).step()
        with torch.inference_mode():
            results.append(call(x[:2]))
    return largest_difference(results[:1], results[1:])


def other_calls() -> dict[str, Any]:
    """Evaluation before and after training, and what is said of what can't follow."""
    mesh = make_mesh()
    torch.manual_seed(0)
    model = Mlp()
    single = copy.deepcopy(model)
    (x, *_) = vector_batches()
    compiled = compile_for(model, mesh, "data=2", "zero=3", shard=True)
    with torch.no_grad():
        before = compiled(x)
        is_whole = not isinstance(model.up.weight, DTensor)
    compiled(x).square().mean().backward()
    with torch.no_grad():
        after = compiled(x[:2])
    kept: list[nn.Parameter] = []
    found: dict[str, Any] = {
        "apart": max((before - single(x)).abs().max().item(), (after - single(x[:2])).abs().max().item()),
        "sharded": (is_whole, isinstance(model.up.weight, DTensor), type(model.up) is nn.Linear),
    }
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "kept in a list": lambda model: kept.extend(model.parameters()),
        "hooks": lambda model: model.up.weight.register_post_accumulate_grad_hook(lambda _: None),
        "microbatches": lambda model: None,
    }
    for name, prepare in ways.items():
        torch._dynamo.reset()
        other = Mlp()
        prepare(other)
        constraints = ("microbatches=2",) if name == "microbatches" else ("zero=3",)
        again = compile_for(other, mesh, "data=2", *constraints, shard=True)
        with pytest.raises(BackendError) as caught:
            twice(again, x)
        found[name] = str(caught.value)
        kept.clear()
    found["a variable"] = left_by_a_loop(mesh, x)
    found["checkpoints"] = checkpoints(mesh, x)
    return found


@pytest.mark.slow
def test_evaluation_stays_as_it_is_and_what_can_not_follow_is_said() -> None:
    for found in run_ranks(other_calls, 2):
        assert max(found["apart"], found["checkpoints"]) < 1e-6
        assert found["sharded"] == (True, True, False)
        assert "a list" in found["kept in a list"]
        assert "(the variable 'parameter' of left_by_a_loop)" in found["a variable"]
        assert "still has the whole tensors that they were" in found["kept in a list"]
        assert "'up.weight' has hooks, which a sharded one in its place would not have" in found["hooks"]
        assert "need a graph whose only differentiable output is one scalar" in found["microbatches"]


def test_constraints_on_storage_are_for_sharding() -> None:
    class Mesh(DeviceMesh):
        """Not made on any device."""

        device_type = "cpu"

        def __init__(self) -> None:
            pass

    options = {"mesh": Mesh(), "constraints": ["data=2", "zero=3", "microbatches=2"]}
    assert read_options({**options, "shard": True}).shard
    with pytest.raises(BackendError, match=r", say options=\{'shard': True\}"):
        read_options(options)
    with pytest.raises(BackendError, match="'schedule=gpipe' can't be met"):
        read_options({"mesh": Mesh(), "shard": True, "constraints": ["schedule=gpipe"]})
    with pytest.raises(BackendError, match=r"'shard'.* is 'yes': write True or False"):
        read_options({"mesh": Mesh(), "shard": "yes"})
