"""Shared by all trainers: parallelize over the running processes, with an example batch from a loader."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.api import parallelize
from autopar.errors import TrainerError
from autopar.lower import ParallelModule
from autopar.lower.kernels.random import generator_state, generators_kept, set_generator_state
from autopar.lower.parameters.known_meshes import read_whole
from autopar.objects.compiled_modules import uncompiled

_DCP: Any = dcp  # incomplete annotations

__all__ = [
    "count_ranks", "draws_kept", "exchange_parameters", "first_batch", "give_back", "inputs_of_call", "load_model",
    "load_optimizer", "own_rank", "parallelize_over_ranks", "save_model", "save_optimizer", "share_draws",
    "wait_for_ranks",
]  # fmt: skip


def count_ranks() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    """This process's place among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def wait_for_ranks() -> None:
    """Return when all processes have come here."""
    if dist.is_initialized():
        untyped: Any = dist
        untyped.barrier()


def parallelize_over_ranks(
    model: nn.Module, device: torch.device, example: Callable[[], Any], options: Mapping[str, Any]
) -> Any:
    """`autopar.parallelize` on a mesh of all ranks; one that is parallel already, or alone, stays as it is.

    Args:
        model: of this rank, equal on all.
        device: of this rank.
        example: makes the example inputs, where `options` have none.
        options: the user's, for `parallelize`; a ``"mesh"`` among them is used.

    Raises:
        TrainerError: `options` have ``inputs="local"``.
    """
    if isinstance(model, ParallelModule) or count_ranks() == 1:
        return model
    known = dict(options)
    if known.get("inputs", "global") != "global":
        raise TrainerError(
            "trainers pass the whole batch on every rank, but the options of parallelize have inputs="
            f"{known['inputs']!r}: leave it out"
        )
    mesh = known.pop("mesh", None)
    if mesh is None:
        mesh = init_device_mesh(device.type, (count_ranks(),))
    inputs = known.pop("example_inputs", None)
    return parallelize(model, mesh, example() if inputs is None else inputs, **known)


class _Arguments(Exception):  # noqa: N818  (stops what made the call)
    """A call's args and kwargs."""


def _give_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise _Arguments(args, kwargs)


def inputs_of_call(module: nn.Module, run: Callable[[], Any], device: torch.device) -> Any:
    """What `run()` calls `module` with first, as example inputs; None if it does not call it.

    `run` ends with that call, and random generators stand where they did before.
    """
    handle = module.register_forward_pre_hook(_give_call, with_kwargs=True)
    try:
        with draws_kept(device), torch.no_grad():
            run()
    except _Arguments as call:
        args, kwargs = call.args
        if args and kwargs:
            return inspect.signature(module.forward).bind(*args, **kwargs).arguments
        return kwargs or args
    finally:
        handle.remove()
    return None


@contextmanager
def draws_kept(device: torch.device, *generators: torch.Generator | None) -> Generator[None]:
    """A context after which random generators stand where they did before: Python's, NumPy's, torch's and these."""
    known = [each for each in generators if each is not None]
    states = [each.get_state() for each in known]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with generators_kept(device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for each, state in zip(known, states, strict=True):
            each.set_state(state)


def first_batch(loader: Iterable[Any], device: torch.device) -> Any:
    """The first batch of `loader`, of which later nothing is to be seen."""
    samplers = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers.append(getattr(samplers[-1], "sampler", None))
    with draws_kept(device, *{getattr(each, "generator", None) for each in samplers}):
        for batch in loader:
            return batch
    raise TrainerError("the loader gives no batch, so there are no example inputs to plan with")


def exchange_parameters(
    optimizer: torch.optim.Optimizer, *pairs: tuple[nn.Module, nn.Module], others: bool = False
) -> None:
    """Have an optimizer of the parameters of original models, that has not stepped yet, train those of parallel ones.

    Args:
        optimizer: of these parameters.
        pairs: each original, and the module that was made of it.
        others: there may be parameters of something else, such as a loss's own.  They get groups of their own, as
            functions of lists of tensors take DTensors or plain ones.

    Raises:
        TrainerError: the optimizer has state, or, without `others`, parameters of something else.
    """
    if optimizer.state:
        raise TrainerError(
            f"the {type(optimizer).__name__} has stepped before its model was parallelized: pass it to prepare(), or "
            "to the trainer, before its first step"
        )
    own: dict[int, nn.Parameter] = {}
    for original, parallel in pairs:
        made = dict(parallel.named_parameters(remove_duplicate=False))
        named = uncompiled(original).named_parameters(remove_duplicate=False)
        own.update((id(p), made[name]) for name, p in named)
    for group in tuple(optimizer.param_groups):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in own]
        if unknown and not others:
            raise TrainerError(
                f"the {type(optimizer).__name__} has parameters that are not the model's, of shapes {unknown[:3]}: "
                "make it of model.parameters() of what is passed with it"
            )
        known: list[Any] = [own.get(id(p), p) for p in group["params"]]
        plain = [p for p in known if not isinstance(p, DTensor)]
        is_mixed = bool(unknown) and 0 < len(plain) < len(known)
        # In place, as L-BFGS has the list as an attribute, too.
        group["params"][:] = [p for p in known if isinstance(p, DTensor)] if is_mixed else known
        if is_mixed:
            optimizer.add_param_group({**group, "params": plain})


def give_back(parallel: nn.Module, original: nn.Module | None) -> None:
    """Give `original`, where a rank still has it, the values that `parallel`, which was made of it, has now.

    Every rank calls it.  Tensors are gathered one at a time, as those of the whole model may not fit twice.
    """
    mine = uncompiled(original) if original is not None else None
    tensors: dict[str, torch.Tensor] = {} if mine is None else {**_named_tensors(mine)}
    is_needed: list[bool] = [False] * count_ranks()
    untyped: Any = dist
    untyped.all_gather_object(is_needed, any(not x.is_meta for x in tensors.values()))
    if not any(is_needed):
        return
    with torch.no_grad():
        for name, x in _named_tensors(parallel).items():
            whole = read_whole(x) if isinstance(x, DTensor) else x
            if name in tensors and not tensors[name].is_meta:
                tensors[name].copy_(whole)


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def share_draws(device: torch.device) -> None:
    """Have random generators stand where rank 0's do: Python's, NumPy's, and torch's of the host and of `device`."""
    if count_ranks() > 1:
        states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state(), generator_state(device)]
        untyped: Any = dist
        untyped.broadcast_object_list(states, 0)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        set_generator_state(states[3], device)


def save_model(model: nn.Module, folder: str) -> None:
    """Save parameters and buffers, of all ranks, to load them on any number of ranks."""
    _DCP.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=count_ranks() == 1)


def load_model(model: nn.Module, folder: str) -> None:
    """Load what `save_model` saved, by whatever plan and number of ranks."""
    state: dict[str, Any] = {"model": model.state_dict()}
    _DCP.load(state, checkpoint_id=folder, no_dist=count_ranks() == 1)
    model.load_state_dict(state["model"])


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Save the optimizer's state by names of parameters, of all ranks, to load it on any number of ranks."""
    state, _ = _optimizer_state(model, optimizer)
    _DCP.save({"optimizer": state}, checkpoint_id=folder, no_dist=count_ranks() == 1)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load what `save_optimizer` saved, by whatever plan and number of ranks."""
    own, options = _optimizer_state(model, optimizer)
    state = {"optimizer": own}
    _DCP.load(state, checkpoint_id=folder, no_dist=count_ranks() == 1)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], StateDictOptions]:
    """The optimizer's state, and how it was read: with an entry for each parameter, settings of its group included, as
    with pipeline stages a rank's optimizer has states of its own parameters only.

    torch flattens states of tensors and numbers; others are nested.
    """
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    try:
        return get_optimizer_state_dict(model, optimizer, options=by_name), by_name
    except NotImplementedError:
        return get_optimizer_state_dict(model, optimizer), StateDictOptions()
