"""Between whole tensors, as the original model's state has them, and this rank's parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.reshard_ops import whole_copy
from autopar.lower.compat import local_tensor
from autopar.lower.parameters.store import ParameterStore, local_part
from autopar.lower.run.stage_map import StageMap

__all__ = ["fit_to_store", "whole_tensor"]


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
