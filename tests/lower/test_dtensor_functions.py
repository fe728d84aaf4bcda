"""What scripts do with parameters and gradients outside of the model is what one device does, however they are cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from autopar.lower.parameters.dtensor_functions import watch_functions
from autopar.lower.parameters.known_meshes import know_mesh, laid_as
from autopar.lower.parameters.whole_matrices import watch_steps
from tests.end_to_end.harness import launch

pytestmark = pytest.mark.slow

READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mixed sum": lambda p, x: x + p,
    "mixed product": lambda p, x: x @ p.T,
    "linear": lambda p, x: functional.linear(x, p),
    "number times plain": lambda p, x: x * p.mean(),
    "plain number and sum": lambda p, x: x.sum() + p.pow(2).sum(),
    "where": lambda p, x: torch.where(x > 0, p, x),
    "concatenate": lambda p, x: torch.cat([p, x]),
    "index by a mask": lambda p, x: p[x > 0],
    "index by numbers": lambda p, x: p[torch.tensor([1, 3])] + 0 * x[:2],
    "embedding": lambda p, x: functional.embedding(torch.tensor([[0, 3], [2, 2]]), p),
    "median": lambda p, x: p.median(),
    "k-th value": lambda p, x: p.abs().flatten().kthvalue(5).values,
    "quantile": lambda p, x: torch.quantile(p.flatten(), 0.3),
    "deviation": lambda p, x: p.std(dim=0),
    "singular values": lambda p, x: torch.linalg.svdvals(p),
    "largest": lambda p, x: p.abs().max(),
    "place of the largest": lambda p, x: p.argmax(),
    "norm of rows": lambda p, x: p.norm(dim=1),
    "norms of columns, added up": lambda p, x: p.norm(dim=0).sum(),
    "largest of columns, added up": lambda p, x: (p.amax(dim=0).sum(), p.detach().min(0).values.mean()),
    "norms of columns, halved": lambda p, x: 0.5 * p.norm(dim=0),
    "norm of norms": lambda p, x: (torch.stack([p.norm(), p.norm(dim=0).sum()]).norm(), p.norm(dim=0).norm(1)),
    "infinite norm": lambda p, x: p.norm(float("inf")),
    "normalize": lambda p, x: functional.normalize(p, dim=1),
    "cosine": lambda p, x: functional.cosine_similarity(p.flatten(), x.flatten(), dim=0),
    "sorted": lambda p, x: p.flatten().sort().values,
    "cumulated": lambda p, x: p.cumsum(1),
    "as numpy": lambda p, x: torch.from_numpy(p.detach().numpy().copy()),
    "as a list": lambda p, x: p.detach().tolist(),
    "as text": lambda p, x: f"{p.norm():.5f} {p[1, 2]:.4f}",
    "numbers": lambda p, x: torch.tensor([[p.norm(), p.mean()], [x.norm(), 1.0]], dtype=p.dtype),
    "equal": lambda p, x: (torch.equal(p, p.clone()), torch.equal(p, x), torch.allclose(p, p * 1)),
    "flag": lambda p, x: bool((p > 5).any()) or bool(torch.isnan(p).any()),
    "rows": lambda p, x: [row.sum().item() for row in p],
    "windows": lambda p, x: p.unfold(1, 2, 2) * 1,
    "shape": lambda p, x: (len(p), *x.view_as(p).shape, *p.view_as(x).shape, x.type_as(p).dtype == p.dtype),
    "vector": lambda p, x: nn.utils.parameters_to_vector([p, p]),
    "histogram": lambda p, x: torch.histc(p.detach(), 4),
    "out": lambda p, x: torch.mul(p.detach(), 2, out=torch.empty_like(x)),
    "gradient in anomaly detection": lambda p, x: looked_at(p),
    "gradient of some": lambda p, x: gradient_of(p, (p * x).sum()),
    "gradient that a hook masks": lambda p, x: (p.register_hook(lambda g, keep=x > 0: g * keep), p * x)[1],
    "a count and more": lambda p, x: ((p > 0).sum() + 1) + (p < 1).sum(),
    "more and a count": lambda p, x: (p < 1).sum() + ((p > 0).sum() + 1),
    "share of counts": lambda p, x: (p > 0).sum() / ((p < 1).sum() + 1),
}
"""Of a parameter and a plain tensor of its shape."""

WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "copy": lambda p, x: p.copy_(x),
    "data copied": lambda p, x: p.data.copy_(x),
    "masked": lambda p, x: p.mul_(x > 0),
    "interpolated": lambda p, x: p.lerp_(x, 0.3),
    "added": lambda p, x: p.add_(x, alpha=0.5),
    "row added": lambda p, x: p.add_(x[0]),
    "augmented": lambda p, x: p.__iadd__(x),
    "data set": lambda p, x: setattr(p, "data", x),
    "data set by own": lambda p, x: setattr(p, "data", p.data * 0.9 + 0.1 * x),
    "data set by own rows": lambda p, x: setattr(p, "data", functional.normalize(p.data, dim=1)),
    "filled where": lambda p, x: p.masked_fill_(x > 0, 7.0),
    "an entry": lambda p, x: p.__setitem__((1, 2), 9.0),
    "a row": lambda p, x: p.__setitem__(0, x[1]),
    "rows": lambda p, x: p.__setitem__(slice(1, 3), 0.0),
    "columns": lambda p, x: p.__setitem__((slice(None), slice(1, 3)), x[:, :2]),
    "by a mask": lambda p, x: p.__setitem__(x > 0, 0.0),
    "by a mask of its own": lambda p, x: p.__setitem__(p > 0, 0.0),
    "view of rows": lambda p, x: p.data[1:3].fill_(1.0),
    "view of a row": lambda p, x: p[0].zero_(),
    "view of columns": lambda p, x: p.data[:, 1:3].mul_(2.0),
    "flat view": lambda p, x: p.view(-1)[3:9].zero_(),
    "flat view by numbers": lambda p, x: p.data.view(-1).__setitem__(torch.tensor([1, 20]), 5.0),
    "transposed view": lambda p, x: p.t()[1].copy_(x[:, 0]),
    "chunk": lambda p, x: p.chunk(2, 0)[1].fill_(3.0),
    "half of columns": lambda p, x: p.data.chunk(2, 1)[0].add_(x[:, :4]),
    "windows": lambda p, x: p.unfold(0, 2, 2)[1].add_(0.5),
    "index": lambda p, x: p.index_fill_(0, torch.tensor([0, 2]), 1.0),
    "triangle": lambda p, x: p.tril_(),
    "clamped": lambda p, x: p.clamp_(-0.1, 0.2),
    "rows of length one": lambda p, x: p.div_(p.norm(dim=1, keepdim=True)),
    "largest norm": lambda p, x: p.renorm_(2, 0, 0.5),
    "vector": lambda p, x: nn.utils.vector_to_parameters(x.flatten(), [p]),
    "own vector": lambda p, x: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p]) * 2, [p]),
    "normal": lambda p, x: nn.init.normal_(p, std=0.02),
    "uniform": lambda p, x: p.data.uniform_(-1, 1),
    "truncated": lambda p, x: nn.init.trunc_normal_(p, std=0.5),
    "kaiming": lambda p, x: nn.init.kaiming_uniform_(p, a=5**0.5),
    "xavier": lambda p, x: nn.init.xavier_normal_(p),
    "orthogonal": lambda p, x: nn.init.orthogonal_(p),
    "identity": lambda p, x: nn.init.eye_(p),
    "noise": lambda p, x: p.add_(torch.randn_like(p) * 0.1),
    "plain noise": lambda p, x: p.add_(torch.randn(p.shape, dtype=p.dtype)),
    "dropped": lambda p, x: p.copy_(functional.dropout(p, 0.5)),
    "each": lambda p, x: torch._foreach_lerp_([p, p.data[:2]], [x, x[:2]], 0.5),
    "out": lambda p, x: torch.mul(x, 2, out=p.data),
    "operator of a package": lambda p, x: torch.ops.autopar_tests.lerp_into(x, y=p.data, weight=0.5),
    "fused SGD": lambda p, x: torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True).step(),
    "fused Adagrad": lambda p, x: torch.optim.Adagrad([p], lr=0.1, fused=True).step(),
}
FOLLOWS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a row": lambda p, x: (p[1], p.zero_())[0],
    "a flat view": lambda p, x: (p.view(-1), p.copy_(x))[0],
    "a column": lambda p, x: (p[:, 2], p.t()[2].fill_(3.0))[0],
    "new data": lambda p, x: (p.data[:2], p.mul_(2))[0],
    "a copy": lambda p, x: (p[1].clone(), p.zero_())[0],
    "deep copies of one memory": lambda p, x: (lambda a, b: (b, a.mul_(2))[0])(
        *copy.deepcopy([p.detach(), p.detach()])
    ),
}
"""A view of a parameter that changes after it was taken."""
INITIALIZES: dict[str, Callable[[Any, Tensor], Any]] = {
    "normal": lambda p, x: nn.init.normal_(p, std=0.02),
    "uniform": lambda p, x: nn.init.uniform_(p, -1, 1),
    "constant": lambda p, x: nn.init.constant_(p, 2.0),
    "kaiming": lambda p, x: nn.init.kaiming_uniform_(p, a=5**0.5),
}
"""Of a parameter that requires a gradient, with gradients enabled."""
LAYOUTS = {"rows": [Shard(0)], "columns": [Shard(1)], "whole": [Replicate()]}


@torch.library.custom_op("autopar_tests::lerp_into", mutates_args=("y",))
def lerp_into(x: Tensor, y: Tensor, weight: float) -> None:
    y.lerp_(x, weight)


def looked_at(p: Tensor) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        (2 * p).sum().backward()
    return p.grad


def gradient_of(p: Tensor, loss: Tensor) -> Any:
    loss.backward(inputs=[p])
    return p.grad


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def cases() -> Iterator[tuple[str, list[Any], Tensor, Tensor]]:
    torch.manual_seed(0)
    start, other = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    for name, placements in LAYOUTS.items():
        yield name, placements, start, other


class Owner(nn.Module):
    call_inputs = None


def check_functions() -> None:
    mesh, owner = init_device_mesh("cpu", (2,)), Owner()
    know_mesh(mesh, owner, None, is_whole_world=True)
    watch_functions()
    watch_steps()
    wrong: list[str] = []
    for layout, placements, start, other in cases():
        like = distribute_tensor(start, mesh, placements)
        kinds = (found_by_reading, READS), (found_by_writing, WRITES), (found_later, FOLLOWS)
        for kind, functions in (*kinds, (found_by_initializing, INITIALIZES)):
            for name, function in functions.items():
                try:
                    found = kind(function, nn.Parameter(laid_as(start, like).clone()), other.clone())
                    expected = kind(function, nn.Parameter(start.clone()), other.clone())
                    for a, b in zip(found, expected, strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
                except Exception as error:  # noqa: BLE001  (all that is wrong, at once)
                    wrong.append(f"{name} of {layout}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    number = nn.Parameter(distribute_tensor(torch.tensor(1.0), mesh, [Replicate()]))
    number.data, number.grad = torch.tensor(2.0), torch.tensor(3.0)
    assert (number.item(), number.grad.item()) == (2.0, 3.0)


def found_by_reading(read: Callable[[Any, Tensor], Any], p: Any, x: Tensor) -> list[Any]:
    """What a function gives, and gradients through it."""
    x.requires_grad_()
    made = read(p, x)
    if isinstance(made, str):
        made = [float(word) for word in made.split()]
    if isinstance(made, Tensor) and made.requires_grad:
        made.square().sum().backward()
    assert p.grad is None or type(p.grad) is type(p.data)
    return [whole(y) for y in (made, p.grad, x.grad)]


def found_by_writing(write: Callable[[Any, Tensor], Any], p: Any, x: Tensor) -> list[Any]:
    """Parameter, gradient and plain tensor after a function that writes to the first two."""
    torch.manual_seed(1)
    p.grad = x.flip(0)
    with torch.no_grad():
        write(p, x)
        write(p.grad, x)
    if isinstance(p, DTensor):
        assert p.placements == p.grad.placements  # pyright: ignore
    return [whole(p.detach()), whole(p.grad), x]


def found_by_initializing(initialize: Callable[[Any, Tensor], Any], p: Any, x: Tensor) -> list[Any]:
    torch.manual_seed(1)
    initialize(p, x)
    return [whole(p.detach()), torch.rand(2)]


@torch.no_grad()
def found_later(function: Callable[[Any, Tensor], Any], p: Any, x: Tensor) -> list[Any]:
    return [whole(function(p, x) + 0)]


def test_functions_of_parameters_are_those_of_one_device() -> None:
    launch(2, check_functions)
