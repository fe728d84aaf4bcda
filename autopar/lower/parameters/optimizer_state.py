"""An optimizer's state between whole tensors, as it is on one device and in files, and this rank's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import OptimizerError
from autopar.lower.compat import map_leaves
from autopar.lower.parameters.known_meshes import is_known, laid_as, read_whole, stage_state, stages_of
from autopar.lower.parameters.other_stages import is_elsewhere

__all__ = ["drop_elsewhere", "fit_loaded_state", "own_optimizer_state", "whole_optimizer_state", "wraps_another"]

# The list of groups when the state was looked at: ``load_state_dict`` makes a new one, and it holds no state.
_FITTED: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


def whole_optimizer_state(
    optimizer: Optimizer, given: Mapping[str, Any], *, keeps: bool, on_host: bool
) -> dict[str, Any]:
    """The ``state_dict()`` of an optimizer with whole plain tensors, of all pipeline stages; every rank calls it.

    Args:
        optimizer: any.
        given: its ``state_dict()``.
        keeps: this rank gets it, others tensors without elements in the place of its tensors.
        on_host: its tensors are copied to the CPU, one after the other.
    """

    def whole(x: Any) -> Any:
        if isinstance(x, DTensor) and is_known(x):
            x = read_whole(x)
        if not isinstance(x, Tensor):
            return x
        if not keeps:
            return torch.empty(0, device="cpu")
        return x.detach().to("cpu" if on_host else x.device, copy=True)

    with torch.no_grad():
        states, own = dict(given["state"]), dict[Any, Any]()
        for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            state = states.pop(place, None)
            if isinstance(parameter, DTensor) and stages_of(parameter) is not None:
                state = stage_state(state, parameter)
            own |= {} if state is None else {place: map_leaves(whole, state)}
        rest = {name: map_leaves(whole, x) for name, x in given.items() if name != "state"}
        own |= map_leaves(whole, states)  # what is there of no parameter
    return {"state": own, **rest}


def wraps_another(optimizer: Optimizer) -> bool:
    """Whether it makes its steps by another optimizer, as Lookahead and SAM do.

    That one's steps are watched as well, and functions of parameters outside of them are those of one device.
    """
    own = [x for name, x in vars(optimizer).items() if name not in ("state", "param_groups")]
    inside = [y for x in own if isinstance(x, dict) for y in cast("dict[Any, Any]", x).values()]
    inside += [y for x in own if isinstance(x, list | tuple) for y in cast("list[Any]", x)]
    return any(isinstance(x, Optimizer) for x in (*own, *inside))


def fit_loaded_state(optimizer: Optimizer) -> None:
    """Keep this rank's parts of whole tensors that ``optimizer.load_state_dict`` has loaded for sharded parameters.

    Raises:
        OptimizerError: what was loaded lacks settings of a parameter group.
    """
    if _FITTED.get(optimizer) is optimizer.param_groups:
        return
    _check_settings(optimizer)
    _FITTED[optimizer] = optimizer.param_groups
    known = [(p, own) for p, own in optimizer.state.items() if isinstance(p, DTensor) and is_known(p)]
    # Of a parameter that is a number, an average is one too, and so is a count of steps, which stays a plain tensor.
    by_element = {name for p, own in known if p.dim() for name, x in own.items() if _is_like(x, p)}
    for parameter, own in known:
        for name, x in own.items():
            if type(x) is Tensor and _is_like(x, parameter) and name in by_element:
                own[name] = laid_as(x, parameter)


def _check_settings(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        # torch adds "differentiable" to the defaults when it loads a state, also of optimizers without such a setting.
        missing = [name for name in optimizer.defaults if name not in group and name != "differentiable"]
        is_own = any(isinstance(p, DTensor) for p in group["params"]) and not wraps_another(optimizer)
        if missing and is_own:
            raise OptimizerError(
                f"the loaded state of {type(optimizer).__name__} has no {', '.join(missing)} for "
                f"{len(group['params'])} parameters: it was saved of other groups of parameters. Save and load with "
                "the option StateDictOptions(flatten_optimizer_state_dict=True) of get_optimizer_state_dict and "
                "set_optimizer_state_dict (docs/checkpoints.md)"
            )


def own_optimizer_state(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """The ``state_dict()`` of an optimizer, `given`, without what it has for parameters of other pipeline stages, as
    when a state of all stages was loaded.
    """
    places = enumerate(p for group in optimizer.param_groups for p in group["params"])
    others = {place for place, parameter in places if is_elsewhere(parameter)}
    return {**given, "state": {place: x for place, x in given["state"].items() if place not in others}}


def drop_elsewhere(optimizer: Optimizer) -> None:
    """Forget what was loaded for parameters of other pipeline stages."""
    for parameter in [p for p in optimizer.state if is_elsewhere(p)]:
        del optimizer.state[parameter]


def _is_like(x: Any, parameter: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == parameter.shape
