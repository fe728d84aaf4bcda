"""Bad input: an error of its own on every rank, soon, that says what to do; never a hang."""

from __future__ import annotations

import copy
import errno
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autopar
from autopar import api
from autopar.cost import Curve, Point, Profile
from autopar.errors import (
    AutoparError,
    ConstraintError,
    ExampleInputsError,
    InfeasibleError,
    InputShapeError,
    MaterializationError,
    MeshError,
    ModelError,
    OptimizerError,
    OutputError,
    PlanFormatError,
    PlanMismatchError,
    ProfileError,
    TraceError,
)
from autopar.lower.communication.consensus import agree_tensors
from autopar.lower.compat import make_mesh
from autopar.lower.parameters import store
from autopar.planning import mesh_cluster
from tests.end_to_end.harness import (
    OPTIMIZERS,
    assert_near,
    assert_same_step,
    launch,
    make,
    parallelize,
    run_step,
    state_of,
    train,
    whole_mesh,
)

pytestmark = pytest.mark.slow
SOON_S = 120  # on machines that do other things too: 30 were too few once; a hang would last until the launch gives up


@contextmanager
def refused(kind: type[AutoparError], *texts: str) -> Iterator[None]:
    """Inside, an error of exactly this class is raised, soon, and its message says each of `texts` (patterns)."""
    started = time.perf_counter()
    with pytest.raises(kind) as caught:
        yield
    # What planning meets in the user's code is caught as that, too, by a class of the same name (`also_caught_as`).
    assert (caught.type.__module__, caught.type.__qualname__) == (kind.__module__, kind.__qualname__)
    for text in texts:
        assert re.search(text, str(caught.value)), f"{text!r} is not in {str(caught.value)!r}"
    assert time.perf_counter() - started < SOON_S
    dist.barrier()  # and everybody is still there


class Linear(nn.Module):
    """Something small; `forward` of those below is at fault."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Any:
        """[batch, 8] -> a scalar."""
        return self.linear(x).square().mean()


class Branching(Linear):
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if y.sum() > 0:  # the line at fault
            return y.mean()
        return -y.mean()


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Uncarried(Linear):
    def forward(self, x: Tensor) -> Any:
        return Opaque(self.linear(x))


class FailingOnLastRank(Linear):
    differs_by_rank = True

    def forward(self, x: Tensor) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("the disk of this rank is full")
        return super().forward(x)


X = torch.linspace(-1, 1, 64).view(8, 8)


def check_models_that_cannot_be_traced() -> None:
    line = next(i for i, text in enumerate(Path(__file__).read_text().split("\n"), 1) if "# the line at fault" in text)
    with refused(TraceError, rf"test_bad_input\.py:{line}: ", r"torch\.where"):
        parallelize(Branching(), (X,))
    with refused(OutputError, "Opaque", "Return tensors"):
        parallelize(Uncarried(), (X,))
    with refused(ExampleInputsError, r"Linear\.forward\(x", r"example_inputs="):
        parallelize(Linear(), None)
    with refused(ExampleInputsError, "missing a required argument: 'x'", r"Linear\.forward\(x"):
        parallelize(Linear(), {"y": X})
    with refused(ExampleInputsError, r"test_bad_input\.py:\d+", r"\[4, 4\] float32"):
        parallelize(Linear(), (torch.zeros(4, 4),))
    with refused(ExampleInputsError, "the disk of this rank is full"):
        parallelize(FailingOnLastRank(), (X,))


def check_models_without_values() -> None:
    buffered = Linear()
    buffered.register_buffer("mask", torch.ones(3, device="meta"))
    with refused(MaterializationError, "'mask': on the meta device", "Linear gives none", "initialize="):
        parallelize(buffered, (X,))
    assert autopar.plan(buffered, whole_mesh(), (X,)).world_size == 2


def check_ranks_that_differ() -> None:
    rank = dist.get_rank()
    with refused(MeshError, "different models or example inputs: rank 1 has Linear of 117 .*rank 0 has Linear of 72"):
        parallelize(Linear(8 + 5 * rank), (X,))
    with refused(MeshError, r"different models or example inputs: rank 1 .*\[6, 8\].*rank 0 .*\[8, 8\]"):
        parallelize(Linear(), (X[: 8 - 2 * rank],))
    torch.manual_seed(rank)
    with refused(MeshError, "different initial values", r"torch\.manual_seed"):
        parallelize(Linear(), (X,))
    permuted = Linear()
    nn.init.constant_(permuted.linear.bias, 0.0)
    with torch.no_grad():
        permuted.linear.weight.copy_(torch.arange(64.0).view(8, 8).roll(rank, 0))
    with refused(MeshError, "different initial values of parameters or buffers: linear.weight of rank 1 differ"):
        parallelize(permuted, (X,))
    pair = [("a", X), ("b", X + 1)][:: 1 - 2 * rank]
    with refused(MeshError, "different tensors: b, a of rank 1 stand in another order than rank 0's"):
        agree_tensors(None, lambda: pair, "tensors", "")
    torch.manual_seed(0)
    only = r"different arguments of parallelize: rank 1 has "  # what differs, and nothing else
    with refused(MeshError, only + r"constraints=\['zero=3'\], rank 0 has constraints=\[\]\. Pass"):
        parallelize(Linear(), (X,), constraints=["zero=3"] * rank)
    with refused(MeshError, only + r"memory=2147483648(\.0)?, rank 0 has memory=1073741824(\.0)?\. Pass"):
        parallelize(Linear(), (X,), memory=f"{1 + rank}GiB")
    parallel = parallelize(Linear(), (X,))
    with refused(MeshError, "different batches", "whole batch on every rank"):
        parallel(X + rank)
    with refused(InputShapeError):
        parallel(X[: 8 - 2 * rank])
    parallel(X).backward()


def check_meshes() -> None:
    large = make_mesh((4,), range(4), "cpu", rank=dist.get_rank())
    with refused(MeshError, r"ranks \[0, 1, 2, 3\], but there are 2 processes"):
        autopar.parallelize(Linear(), large, (X,), profile=False)
    with refused(MeshError, "pass a DeviceMesh"):
        autopar.parallelize(Linear(), 2, (X,), profile=False)  # pyright: ignore[reportArgumentType]
    other = make_mesh((1,), [1 - dist.get_rank()], "cpu", rank=dist.get_rank())
    with refused(MeshError, r"process \d is not in the mesh"):
        autopar.parallelize(Linear(), other, (X,), profile=False)
    if not torch.cuda.is_available():
        with refused(MeshError, "'cuda' devices, but torch .* sees none"):
            autopar.parallelize(Linear(), make_mesh((2,), range(2), "cuda", rank=dist.get_rank()), (X,), profile=False)
    if dist.get_rank() == 0:  # a mesh of one device needs nobody else
        alone = make_mesh((1,), [0], "cpu", rank=0)
        autopar.parallelize(Linear(), alone, (X,), profile=False)(X).backward()
    dist.barrier()
    torch.manual_seed(0)
    backward = DeviceMesh("cpu", torch.tensor([1, 0]))
    model = Linear()
    assert_same_step(autopar.parallelize(model, backward, (X,), profile=False), copy.deepcopy(model), {"x": X})


def check_arguments() -> None:
    for arguments, kind, text in (
        ({"precision": "int8"}, ConstraintError, "precision='int8'"),
        ({"memory": "much"}, ConstraintError, "memory='much'"),
        ({"memory": -1}, ConstraintError, "memory=-1"),
        ({"optimizer": "adamv"}, ConstraintError, "optimizer='adamv'"),
        ({"constraints": [2]}, ConstraintError, r"constraints=\[2\]"),
        ({"plan": 5}, PlanFormatError, "plan='5' can't be read"),
        ({"profile": True}, ProfileError, "profile='True' can't be read"),
    ):
        with refused(kind, text):
            parallelize(Linear(), (X,), **arguments)
    with refused(ExampleInputsError, "example_inputs is a set"):
        parallelize(Linear(), {X})  # pyright: ignore[reportArgumentType]
    parallel = parallelize(Linear(), X, constraints="data=2")
    assert parallel.plan.strategies[0].mesh == (2,)
    parallel(X).backward()
    for model in (parallel, nn.parallel.DistributedDataParallel(Linear())):
        with refused(ModelError, "parallel already", "model of one device"):
            parallelize(model, (X,))


def check_optimizer_made_before() -> None:
    model, inputs = make("plain_gpt")
    before = torch.optim.AdamW(model.parameters())
    parallel = parallelize(model, inputs)
    run_step(parallel, inputs)
    with refused(OptimizerError, "Make the optimizer after"):
        before.step()
    torch.optim.AdamW(parallel.parameters()).step()


def check_full_cache(cache: str) -> None:
    """What is measured while planning can't be kept: the plan is made all the same, and the first rank says it once."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    measured = Profile("cpu", 2, "2026", {}, {"optimizer": Curve((Point(1.0, 1e-3), Point(1e9, 10.0)))})
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as caught:
        patched.setattr(api, "_CACHE", Path(cache))
        patched.setattr(mesh_cluster, "measure_profile", lambda *_, **__: measured)
        patched.setattr(Profile, "save", fail)
        warnings.simplefilter("always")
        parallelize(Linear(), (X,), profile=None)(X).backward()
    said = [str(each.message) for each in caught if cache in str(each.message)]
    assert len(said) == (dist.get_rank() == 0), said
    assert all("measurements are not kept" in text and "No space left on device" in text for text in said)


def check_a_rank_without_memory() -> None:
    """One rank's device is too full for its parameters: no rank waits for it where they open process groups."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(store, "copy_skeleton", fail)
        started = time.perf_counter()
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 20 GiB"):
            parallelize(Linear(), (X,), constraints=("tensor=2", "data=2"))
    assert time.perf_counter() - started < SOON_S
    parallelize(Linear(), (X,), constraints=("tensor=2", "data=2"))(X).backward()


def test_a_rank_without_memory() -> None:
    launch(4, check_a_rank_without_memory, timeout_s=60)


def test_models_ranks_and_meshes(tmp_path: Path) -> None:
    launch(
        2,
        partial(check_models_that_cannot_be_traced),
        partial(check_models_without_values),
        partial(check_ranks_that_differ),
        partial(check_meshes),
        partial(check_arguments),
        partial(check_full_cache, str(tmp_path)),
        partial(check_optimizer_made_before),
    )


def check_batches() -> None:
    """Calls that the model does not take, after which it trains on."""
    model, inputs = make("plain_gpt")
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=("data=2",))
    with refused(ExampleInputsError, "the model fails on the example inputs", r"targets \[8, 8\] int64"):
        parallel(**inputs | {"targets": inputs["targets"][:, :8]})
    assert_same_step(parallel, model, inputs)
    with refused(InputShapeError, "missing a required argument: 'targets'"):
        parallel(inputs["ids"])
    with refused(InputShapeError, "got an unexpected keyword argument 'more'"):
        parallel(**inputs, more=1)
    assert_same_step(parallel, model, inputs)


def check_batch_that_does_not_divide() -> None:
    model, inputs = make("plain_gpt")
    odd = {name: x[:7] for name, x in inputs.items()}
    with refused(ConstraintError, "microbatches=2", "divide"):
        parallelize(model, odd, constraints=("microbatches=2",))
    with refused(ConstraintError, "data=2", "batch of 7 rows", "multiple of 2"):
        parallelize(model, odd, constraints=("data=2",))
    assert_same_step(parallelize(copy.deepcopy(model), odd), model, odd)


def check_constraints() -> None:
    model, inputs = make("plain_gpt")
    for texts, *says in (
        (("tensr=2",), "'tensr=2'", "did you mean 'tensor'"),
        (("recompute=fulll",), "did you mean 'full'"),
        (("haed: replicate",), "matches no", "head.weight"),
        (("tensor=2", "tensor=1"), "'tensor=2' and 'tensor=1' contradict"),
        (("data=2", "tensor=2"), "data=2, tensor=2 need a multiple of 4 devices"),
        (("blocks.*: zero=3", "blocks.0: zero=0"), "contradict"),
        (("tensor=3",), "3 does not divide the 2 devices"),
        (("zero=4",), "ZeRO level is 0, 1, 2 or 3"),
        (("data=two",), "not a whole number"),
        (("mesh=3x1",), "3 devices, but there are 2"),
    ):
        with refused(ConstraintError, *says):
            parallelize(model, inputs, constraints=texts)


def check_memory() -> None:
    """The message names the smallest memory that would do, and that does."""
    model, inputs = make("plain_gpt")
    with pytest.raises(InfeasibleError) as caught:
        parallelize(model, inputs, memory=1000)
    found = re.search(r"the smallest needs ([-0-9.e]+) GiB", str(caught.value))
    assert found, str(caught.value)
    smallest_bytes = float(found[1]) * 2**30
    with refused(InfeasibleError, "parameters", "activations"):
        parallelize(model, inputs, memory=smallest_bytes * 0.999)
    parallel = parallelize(copy.deepcopy(model), inputs, memory=smallest_bytes * 1.001)
    assert parallel.plan.peak_memory_bytes <= smallest_bytes * 1.001
    assert_same_step(parallel, model, inputs)


def check_plans(folder: str) -> None:
    model, inputs = make("contrastive")
    plan = autopar.plan(model, whole_mesh(), inputs)
    good = Path(folder) / "good.json"
    if dist.get_rank() == 0:
        plan.save(good)
        (Path(folder) / "text.json").write_text("a plan")
        (Path(folder) / "other.json").write_text('{"autopar_plan": 0}')
        (Path(folder) / "bytes.json").write_bytes(b"\xff\xfe\x00")
    dist.barrier()
    for name, says in (
        ("none.json", r"none\.json' can't be read"),
        ("text.json", "a plan is JSON, but line 1"),
        ("other.json", "not a plan of format"),
        ("bytes.json", r"bytes\.json' can't be read"),
        ("", "can't be read"),
    ):
        with refused(PlanFormatError, says):
            parallelize(model, inputs, plan=Path(folder) / name)
    only_here = good if dist.get_rank() == 0 else Path(folder) / "none.json"
    with refused(PlanFormatError, "none.json"):
        parallelize(model, inputs, plan=only_here)
    rank = dist.get_rank()
    unlike = plan.with_decisions(strategies=(replace(plan.strategies[0], zero=rank), *plan.strategies[1:]))
    with refused(PlanMismatchError, r"strategies\[0\]\.zero is 1 on rank 1 and 0 on the first rank"):
        parallelize(model, inputs, plan=unlike)
    with refused(
        MeshError, "different arguments of parallelize: rank 1 has a plan searched for.*rank 0 has a plan given"
    ):
        parallelize(model, inputs, plan=None if rank else plan)
    prediction = replace(plan.prediction, step_time_s=1.0 + rank)
    predicted = replace(plan, prediction=prediction, notes=("made on rank 1",) * rank)
    assert parallelize(copy.deepcopy(model), inputs, plan=predicted).plan.step_time_s == 1.0
    other_model, other_inputs = make("flat")
    with refused(PlanMismatchError, "it has layers .* the model has", r"autopar\.plan"):
        parallelize(other_model, other_inputs, plan=plan)
    with refused(PlanMismatchError, "inputs of other shapes"):
        parallelize(model, {name: x[:4] for name, x in inputs.items()}, plan=plan)
    four = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=4), inputs)
    with refused(PlanMismatchError, "for 4 devices, but there are 2"):
        parallelize(model, inputs, plan=four)
    edited = replace(plan.strategies[0], assignments=(("zzz",), *plan.strategies[0].assignments[1:]))
    with refused(PlanMismatchError, "no factor zzz"):
        parallelize(model, inputs, plan=plan.with_decisions(strategies=(edited, *plan.strategies[1:])))
    assert_same_step(parallelize(copy.deepcopy(model), inputs, plan=good), model, inputs)


def test_batches_constraints_and_plans(tmp_path: Path) -> None:
    launch(
        2,
        partial(check_batches),
        partial(check_batch_that_does_not_divide),
        partial(check_constraints),
        partial(check_memory),
        partial(check_plans, str(tmp_path)),
    )


def register_ops() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two ops of a user's own, without rules: one of each element, one that mixes a row in a way nobody knows."""

    @torch.library.custom_op("end_to_end::cubed", mutates_args=())
    def cubed(x: Tensor) -> Tensor:
        return x * x * x

    @torch.library.custom_op("end_to_end::ranked", mutates_args=())
    def ranked(x: Tensor) -> Tensor:
        return x * x.argsort(0).argsort(0).to(x.dtype) * x.flip(1)

    @torch.library.custom_op("end_to_end::ranked_backward", mutates_args=())
    def ranked_backward(gradient: Tensor, x: Tensor) -> Tensor:
        rank = x.argsort(0).argsort(0).to(x.dtype)
        return gradient * rank * x.flip(1) + (gradient * rank * x).flip(1)

    cubed.register_fake(lambda x: torch.empty_like(x))
    ranked.register_fake(lambda x: torch.empty_like(x))
    ranked_backward.register_fake(lambda gradient, x: torch.empty_like(x))
    cubed.register_autograd(
        lambda ctx, gradient: 3 * gradient * ctx.saved_tensors[0].square(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    ranked.register_autograd(
        lambda ctx, gradient: ranked_backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return cubed, ranked


class WithOwnOps(nn.Module):
    """Runs both ops between matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, 8] and [batch] -> a scalar."""
        h = torch.ops.end_to_end.cubed(self.first(x))
        h = torch.ops.end_to_end.ranked(torch.tanh(self.second(h)))
        return functional.cross_entropy(self.third(h), y)


def check_ops_without_rules(constraints: tuple[str, ...]) -> None:
    """Planned by discovery or run whole, with a note; trained as on one device."""
    if not hasattr(torch.ops.end_to_end, "cubed"):
        register_ops()
    model, inputs = WithOwnOps(), {"x": X, "y": torch.arange(8) % 4}
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=constraints)
    notes = " ".join(parallel.plan.notes)
    assert "end_to_end.ranked" in notes, notes
    assert_same_step(parallel, model, inputs)
    for trained in (model, parallel):
        train(trained, inputs, OPTIMIZERS["adamw foreach"])
    assert_near(state_of(parallel), state_of(model), 1e-4, floor=1e-2)


def test_ops_without_rules() -> None:
    launch(2, partial(check_ops_without_rules, ("data=2",)), partial(check_ops_without_rules, ("tensor=2",)))
