"""Between whole tensors, as the original model's state has them, and this rank's parts."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
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
    """What ``state_dict()`` of a parallel module gives: DTensors.  In a file, it has whole tensors of all stages."""

    def __init__(self, *given: Any, whole: Callable[[], Any] | None = None, prefix: str = "") -> None:
        """`whole`: a weak reference to ``(state, prefix) -> entries``, those of a file, which every rank calls."""
        super().__init__(*given)
        source: Any = given[0] if given else None
        # Not OrderedDict[str, Any](), which notes its type in an attribute that ``torch.load`` takes for unsafe.
        self._metadata: Any = getattr(source, "_metadata", None) if given else OrderedDict()
        self._whole: Callable[[], Any] | None = getattr(source, "_whole", whole)
        self._prefix: str = getattr(source, "_prefix", prefix)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self)(self)
        made.update({name: copy.deepcopy(value, memo) for name, value in self.items()})
        return made

    def __copy__(self) -> Self:
        return type(self)(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain dict with the same metadata, as of the original model."""
        whole = None if self._whole is None else self._whole()  # None: the module is gone, and DTensors save themselves
        made: OrderedDict[str, Any] = OrderedDict(self if whole is None else whole(self, self._prefix))
        vars(made)["_metadata"] = self._metadata
        return made.__reduce_ex__(protocol)


class SliceMetadata(dict[str, Any]):
    """What torch notes of a parallel module with pipeline stages in the ``state_dict()`` of a module around it, which
    it keeps out of files: the entries of other stages are missing there.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise ModelError: use `ParallelModule.full_state_dict`, or torch.distributed.checkpoint."""
        raise ModelError(
            "state_dict() of a wrapper around a parallelized model with pipeline stages, such as AveragedModel, whose "
            f"model is its .module, has this rank's stages only, so a file of it is no checkpoint: {SAVE_INSTEAD}. "
            "torch.distributed.checkpoint saves state_dict() itself, from all ranks"
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
