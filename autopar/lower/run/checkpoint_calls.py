"""torch's ``get_state_dict``, ``set_state_dict`` and their like, of models with pipeline stages.

torch gathers and shares out DTensors over their own mesh, which is that of one stage, so it neither sees nor can fill
what other stages have.  Here every rank gets whole tensors before torch looks at them, and gives torch its own parts to
load.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.lower.communication.consensus import attempt, portable
from autopar.lower.compat import leaves_of, map_leaves, state_calls_by
from autopar.lower.once import once
from autopar.lower.parameters.known_meshes import laid_as, stages_of
from autopar.lower.parameters.optimizer_state import drop_elsewhere, own_optimizer_state, whole_optimizer_state
from autopar.lower.parameters.other_stages import TensorForm, is_elsewhere, share_object
from autopar.lower.run.module_state import ModuleState
from autopar.placement import Axis

__all__ = ["watch_state_calls"]


@once
def watch_state_calls() -> None:
    """From now on torch's calls get and set the state of all pipeline stages."""
    state_calls_by({
        "_get_model_state_dict": _get_model,
        "_load_model_state_dict": _load_model,
        "_get_optim_state_dict": _get_optimizers,
        "_load_optim_state_dict": _load_optimizers,
    })  # fmt: skip


def _parallel(model: nn.Module) -> list[Any]:
    """The parallel modules in `model`, those with stages first."""
    found = [module for module in model.modules() if isinstance(module, ModuleState)]
    return sorted(found, key=lambda module: not _has_stages(module))


def _has_stages(module: Any) -> bool:
    return module._executor.stages.is_pipeline


def _get_model(own: Callable[..., Any], model: nn.Module, info: Any) -> Any:
    with ExitStack() as stack:
        for each in _parallel(model) if info.handle_model else ():
            if _has_stages(each):
                stack.enter_context(each._giving_state(info))
        return own(model, info)


def _get_optimizers(own: Callable[..., Any], model: nn.Module, optimizers: tuple[Optimizer, ...], info: Any) -> Any:
    parallel = _parallel(model)
    with ExitStack() as stack:
        if info.handle_optim and parallel and _has_stages(parallel[0]):
            for optimizer in optimizers:
                stack.enter_context(_giving_state(optimizer, parallel[0], info))
        return own(model, optimizers, info)


@contextmanager
def _giving_state(optimizer: Optimizer, root: Any, info: Any) -> Generator[None]:
    """Inside, ``optimizer.state_dict()`` is what torch makes a state by these options of."""
    before = vars(optimizer).get("state_dict")
    parts = optimizer.state_dict

    def state_dict() -> dict[str, Any]:
        if not info.full_state_dict:
            return own_optimizer_state(optimizer, parts())
        keeps = not info.cpu_offload or root._communicator.rank == 0
        with root._together("get_optimizer_state_dict {}"):
            return whole_optimizer_state(optimizer, parts(), keeps=keeps, on_host=info.cpu_offload)

    vars(optimizer)["state_dict"] = state_dict
    try:
        yield
    finally:
        del vars(optimizer)["state_dict"]
        vars(optimizer).update({} if before is None else {"state_dict": before})


def _load_model(own: Callable[..., Any], model: nn.Module, state: dict[str, Any], info: Any) -> Any:
    parallel = _parallel(model)
    if not parallel or not _has_stages(parallel[0]) or not info.handle_model:
        return own(model, state, info)
    root = parallel[0]
    if info.broadcast_from_rank0:
        state = _from_first(root, state, lambda key: info.fqn_param_mapping.get(key[0]))
    info = replace(info, full_state_dict=False, broadcast_from_rank0=False)
    return _everywhere(root, "set_model_state_dict {}", lambda: own(model, state, info))


def _load_optimizers(
    own: Callable[..., Any], model: nn.Module, optimizers: tuple[Optimizer, ...], state: dict[str, Any], info: Any
) -> None:
    parallel = _parallel(model)
    if not parallel or not info.handle_optim:
        return own(model, optimizers, state, info)
    root = parallel[0]
    if info.broadcast_from_rank0:
        # torch takes a rank that passes {} for one that loads no model, and others wait for it.
        info.handle_model = _share(root, info.handle_model)
    if not _has_stages(root):
        return own(model, optimizers, state, info)
    if info.broadcast_from_rank0:
        state = _from_first(root, state, _finder(info.fqn_param_mapping))
    if not info.full_state_dict and state.get("state"):
        # Parts, of this rank's stages: torch is to miss no others.
        trained = (p for each in optimizers for group in each.param_groups for p in group["params"])
        others = {name for p in trained if is_elsewhere(p) for name in info.fqn_param_mapping[p]}
        state = {**state, "state": {name: {} for name in others} | state["state"]}
    as_parts = replace(info, full_state_dict=False, broadcast_from_rank0=False)
    _everywhere(root, "set_optimizer_state_dict {}", lambda: own(model, optimizers, state, as_parts))
    for optimizer in () if info.full_state_dict else optimizers:
        drop_elsewhere(optimizer)
    return None


def _finder(parameters: Mapping[Any, Any]) -> Callable[[tuple[str, ...]], Tensor | None]:
    """What finds the parameter of an entry of an optimizer's state by the keys that lead to it, whether they are
    ``("state", name, ...)`` or flattened, as ``("state.NAME.exp_avg",)``.
    """

    def find(keys: tuple[str, ...]) -> Tensor | None:
        first, *others = keys
        if first == "state" and others:
            return parameters.get(others[0])
        rest = first.removeprefix("state.")
        while rest and rest not in parameters:
            rest = rest.rpartition(".")[0]
        return parameters.get(rest)

    return find


def _world(root: Any) -> Axis:
    return Axis(root._communicator.world_size, 1)


def _share(root: Any, own: Any) -> Any:
    """What the first rank has; every rank calls it."""
    with root._together("set_state_dict {}"):
        return share_object(own, _world(root), 0, root._communicator)


def _from_first(
    root: Any, state: dict[str, Any], parameter_of: Callable[[tuple[str, ...]], Tensor | None]
) -> dict[str, Any]:
    """The state that the first rank has, of which each rank keeps its parts of what has a parameter's shape."""
    is_first = root._communicator.rank == 0
    with root._together("set_state_dict {}"):
        forms = share_object(
            map_leaves(TensorForm.of, state) if is_first else None, _world(root), 0, root._communicator
        )
        tensors = iter([x for x in leaves_of(state) if isinstance(x, Tensor)] if is_first else ())

        def fill(form: Any, keys: tuple[str, ...]) -> Any:
            if isinstance(form, dict):
                return {key: fill(value, (*keys, key)) for key, value in cast("dict[str, Any]", form).items()}
            return map_leaves(lambda x: _filled(root, x, tensors, parameter_of(keys)), form)

        return fill(forms, ())


def _filled(root: Any, form: Any, tensors: Iterator[Tensor], parameter: Tensor | None) -> Any:
    """The next tensor of the first rank; what is no tensor as it is."""
    if not isinstance(form, TensorForm):
        return form
    talk, own = root._communicator, next(tensors, None)
    empty = torch.empty(form.shape, dtype=form.dtype, device=talk.device) if own is None else own.to(talk.device)
    whole = talk.broadcast(empty.contiguous(), _world(root), 0)
    if isinstance(parameter, DTensor) and stages_of(parameter) is not None and parameter.dim():
        return laid_as(whole, parameter) if whole.shape == parameter.shape else whole
    return whole.cpu() if form.is_on_host else whole


def _everywhere(root: Any, kind: str, action: Callable[[], Any]) -> Any:
    """The result of `action`, whose error is raised on every rank."""
    result, error = attempt(action)
    talk = root._communicator
    with root._together(kind):
        number = torch.tensor(0.0 if error is None else talk.rank + 1.0, device=talk.device)
        failed = int(talk.all_reduce(number, _world(root), "max"))
        foreign = share_object(portable(error), _world(root), failed - 1, talk) if failed else None
    if error is not None:
        raise error
    if foreign is not None:
        raise type(foreign)(f"rank {failed - 1} failed: {foreign}")
    return result
