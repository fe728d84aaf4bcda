"""Between whole tensors, as the original model's state has them, and this rank's parts."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import ModelError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.reshard_ops import whole_copy
from autopar.lower.compat import local_tensor
from autopar.lower.parameters.store import ParameterStore, local_part
from autopar.lower.run.stage_map import StageMap

__all__ = ["SAVE_INSTEAD", "SliceMetadata", "StateDict", "fit_to_store", "whole_tensor"]

SAVE_INSTEAD = (
    "call state = model.full_state_dict() on every rank, and torch.save(state, path) or safetensors' "
    "save_file(state, path) on one; load_state_dict takes it, of the original model and of a parallelized one"
)


class StateDict(OrderedDict[str, Any]):
    """What ``state_dict()`` of a parallel module gives: DTensors, which ``torch.save`` would write without saying that
    the file holds this rank's slices only.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._metadata: Any = getattr(given[0], "_metadata", None) if given else OrderedDict[str, Any]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self)(self)
        made.update({name: copy.deepcopy(value, memo) for name, value in self.items()})
        return made

    def __copy__(self) -> Self:
        return type(self)(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise ModelError: use `ParallelModule.full_state_dict`, or torch.distributed.checkpoint."""
        raise _slices("a parallelized model")


class SliceMetadata(dict[str, Any]):
    """What torch notes of a parallel module in the ``state_dict()`` of a module around it, which it keeps out of files
    for the same reason.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise ModelError, as `StateDict` does."""
        raise _slices("a wrapper around a parallelized model, such as AveragedModel, whose model is its .module,")


def _slices(what: str) -> ModelError:
    return ModelError(
        f"state_dict() of {what} has this rank's slices, so a file of it is no checkpoint: "
        f"{SAVE_INSTEAD}. torch.distributed.checkpoint saves state_dict() itself, from all ranks"
    )


def whole_tensor(
    store: ParameterStore, stages: StageMap, communicator: Communicator, name: str, value: Tensor | None
) -> Tensor:
    """A parameter or buffer whole on every rank; `value` is this rank's, None if other device groups hold it."""
    stored = store.stored.get(name)
    if stored is None:
        assert value is not None
        return value.detach().clone()
    owner = stored.groups[0]
    if isinstance(value, DTensor) and stages.group in stored.groups:
        whole = whole_copy(local_tensor(value), stored.layout, store.mesh, communicator)
    else:
        whole = torch.empty(stored.shape, dtype=stored.dtype, device=communicator.device)
    return communicator.broadcast(whole, stages.axis, owner)


def fit_to_store(store: ParameterStore, communicator: Communicator, name: str, value: Any) -> Any:
    """An entry of a state dict as `load_state_dict` of this rank's parameters takes it."""
    stored = store.stored.get(name)
    if isinstance(value, DTensor) and not value.dim() and stored is not None and value.device_mesh == store.device_mesh:
        return store.wrap(name, local_tensor(value))  # torch copies numbers between equal meshes only
    if stored is None or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if tuple(value.shape) != stored.shape:
        return value  # torch names the parameter and both shapes
    part = local_part(value.detach().to(communicator.device, stored.dtype), stored.layout, store.mesh, communicator)
    return store.wrap(name, store.home(part))
