"""``torch.compile(backend="autopar")`` on two ranks against a single device, and what it says when it can't."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.attention.flex_attention import flex_attention

from autopar.backend.dynamo_graph import readable_name
from autopar.backend.options import read_options
from autopar.backend.running import RunningGraph
from autopar.backend.session import session_of
from autopar.errors import AutoparError, BackendError
from autopar.step.costs.plan_collectives import plan_collectives
from tests.backend import models
from tests.backend.models import Breaking, Mlp, compile_for, differences, make_mesh, vector_batches
from tests.ranks import run_program, run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_compiled.py"


def train_everything() -> dict[str, dict[str, float]]:
    mesh = make_mesh()
    found = {
        "gpt2": differences(models.gpt2, models.token_batches, models.loss_inside, mesh, "data=2"),
        "llama": differences(models.llama, models.token_batches, models.loss_inside, mesh, "tensor=2"),
        "vit": differences(models.vit, models.image_batches, models.loss_inside, mesh, "data=2"),
        "graph break, batch norm": differences(Breaking, vector_batches, models.loss_outside, mesh, "data=2"),
    }
    session = session_of(mesh)
    before = session.num_searches
    sizes = (4, 6, 3, 4)  # 3 does not divide: it runs on every rank whole
    found["dynamic batch"] = differences(Mlp, lambda: vector_batches(sizes), models.loss_outside, mesh, "data=2")
    found["searches of 3 sizes"] = {"count": session.num_searches - before}
    torch._dynamo.reset()
    found["compiled again"] = differences(Mlp, lambda: vector_batches(sizes), models.loss_outside, mesh, "data=2")
    found["searches in all"] = {"count": session.num_searches - before}
    return found


@pytest.fixture(scope="module")
def trained() -> dict[str, dict[str, float]]:
    """The worse of the two ranks; only rank 0 searches."""
    first, second = run_ranks(train_everything, 2, timeout_s=400)
    return {name: {key: max(found[key], second[name][key]) for key in found} for name, found in first.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "graph break, batch norm", "dynamic batch", "compiled again"])
def test_trains_as_a_single_device(trained: dict[str, dict[str, float]], name: str) -> None:
    found = trained[name]
    assert found["moved"] > 1e-3, "nothing was trained"
    assert max(found["loss"], found["gradients"], found["parameters"], found["buffers"]) < 2e-6


@pytest.mark.slow
def test_searches_once_for_each_graph_and_size(trained: dict[str, dict[str, float]]) -> None:
    assert trained["searches of 3 sizes"]["count"] == 3
    assert trained["searches in all"]["count"] == 3


def run_in_other_ways() -> dict[str, Any]:
    mesh = make_mesh()
    ways = (_eval, _dropout, _input_gradient, _buffer, _returned_buffer, _autocast, _compiled, _dtensor, _communication)
    return {way.__name__: way(mesh) for way in ways}


def _eval(mesh: Any) -> list[Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Breaking()
    compiled = compile_for(model, mesh, "data=2")
    (x, *_) = vector_batches()
    compiled(x)
    model.eval()
    with torch.no_grad():
        wanted, silent = model(x), compiled(x)
    differentiable = compiled(x)
    return [_apart(silent, wanted), _apart(differentiable, wanted), silent.requires_grad, differentiable.requires_grad]


def _dropout(mesh: Any) -> list[Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.Dropout(0.5)
    weight = torch.ones(64, 64, requires_grad=True)
    compiled = compile_for(lambda x: layer(x * 3) / 3, mesh)
    first, second = compiled(weight), compiled(weight)
    first.sum().backward()
    assert weight.grad is not None
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, first.detach())
    kept = (first != 0).float()
    return [torch.equal(*ranks), torch.equal(first, second), kept.mean().item(), _apart(weight.grad, kept * 2)]


def _input_gradient(mesh: Any) -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp()
    gradients = []
    for run in (compile_for(model, mesh, "data=2"), model):
        (x, *_) = vector_batches()
        run(x.requires_grad_()).square().sum().backward()
        gradients.append(x.grad)
    return _apart(*gradients)


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return self.linear(x) + torch.cos(self.shift), torch.cos(self.shift), x, x.shape[0]


def _buffer(mesh: Any) -> list[float]:
    """A buffer that was written to between calls, although what is computed from it alone is folded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _Shifted()
    compiled = compile_for(model, mesh, "data=2")
    (x, *_) = vector_batches()
    compiled(x)
    model.shift.add_(1.0)
    found, wanted = compiled(x), model(x)
    return [_apart(a, b) for a, b in zip(found[:3], wanted[:3], strict=True)] + [abs(found[3] - wanted[3])]


def _returned_buffer(mesh: Any) -> list[float]:
    """A buffer that the graph writes to and gives back, as spectral norm does, in two calls before a backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))
    single = copy.deepcopy(model)
    (x, *_) = vector_batches()
    for run in (compile_for(model, mesh, "data=2"), single):
        (run(x).square().mean() - run(x + 1).square().mean()).backward()
    found, wanted = ([*(p.grad for p in m.parameters()), *m.buffers()] for m in (model, single))
    return [_apart(a, b) for a, b in zip(found, wanted, strict=True)]


def _autocast(mesh: Any) -> list[Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp()
    (x, *_) = vector_batches()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = compile_for(model, mesh, "data=2")(x), model(x)
    found.float().sum().backward()
    return [str(found.dtype), _apart(found, wanted), str(model.up.weight.grad.dtype)]


def _compiled(mesh: Any) -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp()
    (x, *_) = vector_batches()
    return _apart(compile_for(model, mesh, "data=2", compile=True)(x), model(x))


def _dtensor(mesh: Any) -> list[Any]:
    """Parameters that are distributed already keep their slices, and so do their gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    whole = Mlp()
    torch.manual_seed(0)

    def cut(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    model = distribute_module(Mlp(), mesh, cut)
    (x, *_) = vector_batches()
    whole(x).square().mean().backward()
    output = compile_for(model, mesh, "data=2")(distribute_tensor(x, mesh, [Replicate()]))
    output.full_tensor().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(isinstance(g, DTensor) and g.placements == (Shard(0),) for g in gradients)
    return [_apart(g.full_tensor(), p.grad) for g, p in zip(gradients, whole.parameters(), strict=True)]


def _communication(mesh: Any) -> list[Any]:
    """Bytes by kind of collective that a step runs, and that its plan was priced for."""
    made: list[RunningGraph] = []

    class Spy(RunningGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    found: list[Any] = []
    for constraint in ("data=2", "tensor=2"):
        torch._dynamo.reset()
        made.clear()
        (x, *_) = vector_batches()
        step = compile_for(Mlp(), mesh, constraint)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("autopar.backend.compiled_graph.RunningGraph", Spy)
            step(x)
        with session_of(mesh).communicator.recording() as run:
            step(x).sum().backward()
        (graph,) = made
        priced = plan_collectives(graph.program, graph.plan)
        run_bytes = _volume((each.kind, each.num_bytes) for each in run)
        found.append((run_bytes, _volume((each.kind, each.times * each.num_bytes) for each in priced)))
    return found


def _volume(collectives: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, num_bytes in collectives:
        found[kind] = found.get(kind, 0.0) + num_bytes
    return found


def _apart(a: Tensor, b: Tensor) -> float:
    return (a.detach().double() - b.detach().double()).abs().max().item()


@pytest.mark.slow
def test_runs_in_other_ways_as_a_single_device() -> None:
    found, other = run_ranks(run_in_other_ways, 2, timeout_s=400)
    assert found == other
    silent, differentiable, *grads = found["_eval"]
    assert max(silent, differentiable) < 1e-6
    assert grads == [False, True]
    is_same_on_ranks, is_repeated, share, apart = found["_dropout"]
    assert is_same_on_ranks
    assert not is_repeated
    assert 0.4 < share < 0.6
    assert apart < 1e-6
    assert found["_input_gradient"] < 1e-6
    assert max(found["_buffer"] + found["_returned_buffer"]) < 1e-6
    dtype, apart, gradient_dtype = found["_autocast"]
    assert (dtype, gradient_dtype) == ("torch.bfloat16", "torch.float32")
    assert apart < 1e-2
    assert found["_compiled"] < 1e-6
    assert max(found["_dtensor"]) < 1e-6
    for run, priced in found["_communication"]:
        assert run == pytest.approx(priced)
        assert sum(run.values()) > 0


def fail_in_many_ways() -> dict[str, str]:
    mesh, rank = make_mesh(), dist.get_rank()
    model = Mlp()

    def more_on_rank_0(x: Tensor) -> Tensor:
        return model(x) if rank else model(model.up(x)[:, :8])

    def write(x: Tensor) -> Tensor:
        return model(x.add_(1.0))

    def flexible(x: Tensor) -> Tensor:
        with torch.no_grad():  # torch has no backward of it on CPUs
            heads = x.view(1, 2, 128, 16)
            return flex_attention(heads, heads, heads)

    ways = {
        "flex_attention": lambda: compile_for(flexible, mesh)(torch.ones(128, 32)),
        "graphs": lambda: compile_for(more_on_rank_0, mesh)(torch.ones(4, 8)),
        "batches": lambda: compile_for(model, mesh)(torch.full((4, 8), float(rank))),
        "options": lambda: compile_for(model, mesh, shard=rank == 0)(torch.ones(4, 8)),
        "a misspelled option": lambda: compile_for(model, mesh, **({} if rank else {"memroy": 1}))(torch.ones(4, 8)),
        "writes": lambda: compile_for(write, mesh)(torch.ones(4, 8)),
        "memory": lambda: compile_for(model, mesh, memory="1KiB")(torch.ones(4, 8)),
        "no mesh": lambda: torch.compile(model, backend="autopar")(torch.ones(4, 8)),
    }
    texts: dict[str, str] = {}
    for name, way in ways.items():
        torch._dynamo.reset()
        with pytest.raises(AutoparError) as caught:
            way()
        texts[name] = f"{type(caught.value).__name__}: {caught.value}"
    return texts


@pytest.mark.slow
def test_what_cannot_be_done_is_said_on_every_rank() -> None:
    for said in run_ranks(fail_in_many_ways, 2):
        assert said["graphs"].startswith("MeshError: ranks were given different graphs")
        assert "let no Python value that differs by rank" in said["graphs"]
        assert said["batches"].startswith("MeshError: ranks were given different batches")
        assert "options of torch.compile: rank 1 has shard=False, rank 0 has shard=True" in said["options"]
        assert "option 'memroy' is none of mesh" in said["a misspelled option"]
        assert "writes to 'x'" in said["writes"]
        assert "takes functions as arguments" in said["flex_attention"]
        assert said["memory"].startswith("InfeasibleError")
        assert said["no mesh"].startswith("BackendError: no mesh is given")


def keep_plans(folder: str, edit: bool) -> tuple[int, str]:
    torch._dynamo.reset()
    mesh = make_mesh()
    path = Path(folder)
    if edit and dist.get_rank() == 0:
        (file,) = path.iterdir()
        file.write_text(file.read_text().replace('"up.weight": "R"', '"up.weight": "S(0)"'))
    dist.barrier()
    try:
        compile_for(Mlp(), mesh, plans=folder)(torch.ones(4, 8))
    except BackendError as error:
        return session_of(mesh).num_searches, str(error)
    return session_of(mesh).num_searches, ""


@pytest.mark.slow
def test_plans_are_kept_in_a_folder_and_may_not_move_parameters(tmp_path: Path) -> None:
    assert run_ranks(keep_plans, 2, str(tmp_path), False) == [(1, ""), (0, "")]
    assert run_ranks(keep_plans, 2, str(tmp_path), False) == [(0, ""), (0, "")]
    for _, said in run_ranks(keep_plans, 2, str(tmp_path), True):
        assert "stores 'up.weight' elsewhere" in said


@pytest.mark.slow
def test_torch_finds_the_backend_by_its_name() -> None:
    """In a fresh process that never imports autopar, and torch alone says what is missing."""
    program = """if True:
        import sys, torch
        assert "autopar" in torch._dynamo.list_backends() and "autopar" not in sys.modules
        try:
            torch.compile(torch.nn.Linear(2, 2), backend="autopar")(torch.ones(2, 2))
        except Exception as error:
            print(type(error).__name__, error)
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert ended.stdout.startswith("BackendError no mesh is given")


@pytest.mark.slow
def test_the_example_trains_as_a_single_device() -> None:
    printed = run_program(EXAMPLE, 2, ["--steps", "4", "--sequence-length", "32"], timeout_s=400)
    assert "Largest difference of all 4 steps" in printed
    assert float(printed.rsplit("steps: ", 1)[1].split()[0]) < 1e-4


class _Mesh:
    """Not a mesh."""


@pytest.mark.parametrize(
    ("options", "mode", "said"),
    [
        (None, "", r"init_device_mesh\('cuda'"),
        ({"mesh": _Mesh()}, "", r"options\['mesh'\] is a _Mesh"),
        ({"memroy": 1}, "", r"none of mesh, memory, .* did you mean 'memory'\?"),
        ({}, "max-autotune", r"mode='max-autotune' is for backend='inductor'"),
    ],
)
def test_wrong_options_say_what_to_type(options: Any, mode: str, said: str) -> None:
    with pytest.raises(BackendError, match=said):
        read_options(options, mode)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['h']._modules['0']._parameters['weight']", "h.0.weight"),
        ("L['self'].transformer.h.0", "transformer.h.0"),
        ("L['self']", ""),
        ("G['model']._modules['up']._buffers['scale']", "model.up.scale"),
        ("L['self'].__dict__['_modules']['base']._modules['0'].__dict__['_buffers']['scale']", "base.0.scale"),
        ("L['input_ids']", "input_ids"),
        ("L['inputs'][0]", "inputs.0"),
    ],
)
def test_names_are_those_of_the_module(source: str, name: str) -> None:
    assert readable_name(source) == name
