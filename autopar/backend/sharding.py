"""``options={"shard": True}``: parameters, and what optimizers keep of them, become DTensors in their modules.

Dynamo does not trace a module that computes with a DTensor and a plain tensor.  So a module whose parameters were
sharded gets a class of its own in which Dynamo reads each of them through `whole_parameter`; `read_graph` takes that
for the parameter itself.  Everybody else reads the DTensor, under the name that it always had.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import BackendError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.compat import make_dtensor, module_tables
from autopar.lower.parameters.dtensor_functions import watch_functions
from autopar.lower.parameters.known_meshes import know_mesh
from autopar.lower.parameters.store import local_part
from autopar.lower.parameters.whole_matrices import watch_steps
from autopar.placement import Layout

__all__ = ["Replaced", "check_replaced", "shard_in_place", "whole_parameter"]

# The name of a parameter, and the whole one that was replaced, while something keeps it.
Replaced = list[tuple[str, "weakref.ref[nn.Parameter]"]]

Shard = Callable[[Tensor], DTensor]


_compiler: Any = torch.compiler  # its annotations are incomplete


@_compiler.allow_in_graph
def whole_parameter(parameter: Tensor) -> Tensor:
    """A sharded parameter, whole; one node of Dynamo's graphs."""
    return cast("DTensor", parameter).full_tensor()


def shard_in_place(
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, Layout],
    mesh: DeviceMesh,
    communicator: Communicator,
) -> dict[int, nn.Parameter]:
    """Put a DTensor in place of each of these parameters, in all modules and optimizers of this process.

    Functions of torch on them and on their gradients compute what they compute on whole tensors.

    Args:
        parameters: whole ones, by the names that errors give them.
        layouts: how each is stored on `mesh`.
        mesh: the DeviceMesh.
        communicator: of this rank.

    Returns:
        ``id`` of each whole parameter -> what took its place.

    Raises:
        BackendError: a parameter has hooks, which would not come along.
    """
    for name, parameter in parameters.items():
        if any(getattr(parameter, hooks, None) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")):
            raise BackendError(
                f"parameter {name!r} has hooks, which a sharded one in its place would not have: register them after "
                "the first call that trains, or leave out options={'shard': True}"
            )
    shards: dict[int, Shard] = {
        id(parameter): partial(_shard, layouts[name], mesh, communicator) for name, parameter in parameters.items()
    }
    made = {id(parameter): _shard_parameter(parameter, shards[id(parameter)]) for parameter in parameters.values()}
    know_mesh(mesh, None, None, is_whole_world=True)
    watch_functions()
    watch_steps()
    for owner in gc.get_objects():
        if issubclass(type(owner), nn.Module):
            _replace_in_module(owner, made)
        elif issubclass(type(owner), torch.optim.Optimizer):
            _replace_in_optimizer(owner, made, shards)
    return made


def check_replaced(replaced: Replaced) -> None:
    """Raise BackendError if anything still has a whole parameter that was replaced: it would no longer change."""
    if any(reference() is not None for _, reference in replaced):
        gc.collect()
        problem = _problem(replaced)
        if problem:  # raised here, where no variable has a parameter: whoever catches the error keeps our variables
            raise BackendError(problem)


def _problem(replaced: Replaced) -> str:
    """What to say of parameters that are still held; empty if none is."""
    references = ((name, reference()) for name, reference in replaced)
    left = [(name, parameter) for name, parameter in references if parameter is not None]
    if not left:
        return ""
    name, parameter = left[0]
    return (
        f"{len(left)} parameters were sharded in place, and something ({_holders(parameter)}) still "
        f"has the whole tensors that they were, {name!r} among them: they no longer change and get no gradients. "
        "Modules and torch.optim optimizers follow by themselves; make lists of parameters, names for single ones "
        "and other optimizers after the first call that trains (del p, if a loop left its variable), or leave out "
        "options={'shard': True}"
    )


def _holders(parameter: nn.Parameter) -> str:
    """What has `parameter`, in words: variables of functions under way by name, else the kinds of objects."""
    kinds = sorted({type(holder).__name__ for holder in gc.get_referrers(parameter)} - {"tuple"})
    return ", ".join(_variables_with(parameter)) or f"a {' or a '.join(kinds) or 'frame'}"


def _variables_with(value: object) -> list[str]:
    callers = inspect.stack(context=0)[3:]  # without this function, `_holders` and `_problem`
    return [
        f"the variable {name!r} of {info.function}"
        for info in callers
        for name, local in info.frame.f_locals.items()
        if local is value
    ]


def _shard(layout: Layout, mesh: DeviceMesh, communicator: Communicator, whole: Tensor) -> DTensor:
    part = local_part(whole.detach(), layout, tuple(mesh.shape), communicator).contiguous()
    return make_dtensor(part, mesh, layout, whole.shape)


def _shard_parameter(whole: nn.Parameter, shard: Shard) -> nn.Parameter:
    made = nn.Parameter(shard(whole), requires_grad=whole.requires_grad)
    vars(made).update({name: value for name, value in vars(whole).items() if not name.startswith("_")})
    if whole.grad is not None:
        made.grad = shard(whole.grad)
    return made


def _replace_in_module(module: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    table = module_tables(module).parameters
    names = [name for name, parameter in table.items() if id(parameter) in made]
    for name in names:
        table[name] = made[id(table[name])]
    if names:
        module.__class__ = _reading_whole(type(module), tuple(names))


@cache
def _reading_whole(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """`kind`, with parameters of these names that Dynamo reads whole."""
    members: dict[str, Any] = {name: _reader(name) for name in names}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **members})


def _reader(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]  # pyright: ignore[reportPrivateUsage]  (Dynamo inlines this)
        return whole_parameter(parameter) if torch.compiler.is_compiling() and parameter is not None else parameter

    return property(read)


def _replace_in_optimizer(
    optimizer: torch.optim.Optimizer, made: Mapping[int, nn.Parameter], shards: Mapping[int, Shard]
) -> None:
    """New parameters in its groups, and what it keeps of one element each is sharded as they are.

    Lists and dicts stay the same objects: L-BFGS has a group's list as an attribute, and its state in a variable while
    its step calls the closure.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [made.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in made]:
        state = cast("dict[str, Any]", optimizer.state.pop(parameter))
        optimizer.state[made[id(parameter)]] = state
        for key, x in state.items():
            if isinstance(x, Tensor) and x.ndim and x.shape == parameter.shape:
                state[key] = shards[id(parameter)](x)
