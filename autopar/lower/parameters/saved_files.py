"""What a script's files have of a parallel module and its optimizers: whole tensors, as on one device.

``torch.save`` on every rank pickles what ranks have parts of as the whole tensor, on the host.  The states of modules
and optimizers also get the entries of other pipeline stages.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import ModelError, RankError
from autopar.host.memory import available_bytes
from autopar.lower.communication.call_consensus import CallConsensus
from autopar.lower.parameters.known_meshes import calls_of, is_of_stages, is_whole, read_whole, stages_of
from autopar.lower.parameters.optimizer_state import whole_optimizer_state

__all__ = [
    "SAVE_INSTEAD", "OptimizerStateDict", "SliceMetadata", "StateDict", "WholeMetadata", "meet_for_file",
    "reduce_whole", "refuse_storage", "watch_state_dict",
]  # fmt: skip

_SAVES_WITHIN_S = 60.0  # ranks come to a checkpoint within seconds; one that saves alone waits for this long
_MAY_SAVE_WITHIN_S = 1.0  # as no part is missing, a rank that saves alone is right, and waits in vain
_SEEN: weakref.WeakSet[Optimizer] = weakref.WeakSet()
SAVE_INSTEAD = (
    "call state = model.full_state_dict() on every rank, and torch.save(state, path) or safetensors' "
    "save_file(state, path) on one; load_state_dict takes it, of the original model and of a parallelized one"
)


class StateDict(OrderedDict[str, Any]):
    """What ``state_dict()`` of a parallel module gives: DTensors.  In a file, it has whole tensors of all stages."""

    def __init__(self, *given: Any, whole: Callable[[], Any] | None = None, prefix: str = "", part: str = "") -> None:
        """`whole`: a weak reference to ``state -> entries``, those of a file, which every rank calls.

        A name in the module is `part` and what follows `prefix` in its key: that of a submodule is ``"encoder."``.
        """
        super().__init__(*given)
        source: Any = given[0] if given else None
        # Not OrderedDict[str, Any](), which notes its type in an attribute that ``torch.load`` takes for unsafe.
        self._metadata: Any = getattr(source, "_metadata", None) if given else OrderedDict()
        self._whole: Callable[[], Any] | None = getattr(source, "_whole", whole)
        self.prefix: str = getattr(source, "prefix", prefix)
        self.part: str = getattr(source, "part", part)

    @property
    def source(self) -> object:
        """The module that has given it; None: it is gone."""
        whole = None if self._whole is None else self._whole()
        return getattr(whole, "__self__", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self)(self)
        made.update({name: copy.deepcopy(value, memo) for name, value in self.items()})
        return made

    def __copy__(self) -> Self:
        return type(self)(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain dict with the same metadata, as of the original model."""
        whole = None if self._whole is None else self._whole()  # None: the module is gone, and DTensors save themselves
        made: OrderedDict[str, Any] = OrderedDict(self if whole is None else whole(self))
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


class WholeMetadata(dict[str, Any]):
    """What torch notes of a parallel module without stages in the ``state_dict()`` of a module around it: a file of
    that waits for all ranks, as one of the module's own does, also where every rank has all of it.
    """

    def __init__(self, given: Mapping[str, Any], meet: Callable[[], Any]) -> None:
        """`meet`: a weak reference to what returns when all ranks write the file."""
        super().__init__(given)
        self._meet = meet

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(dict(self), memo), self._meet)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """That of a plain dict."""
        meet = self._meet()
        if meet is not None:
            meet()
        return OrderedDict(self).__reduce_ex__(protocol)


class OptimizerStateDict(dict[str, Any]):
    """What ``state_dict()`` of an optimizer of a model with pipeline stages gives: the state of this rank's stages.  In
    a file, it is that of all stages, with whole tensors.
    """

    def __init__(self, given: Mapping[str, Any], optimizer: weakref.ref[Optimizer]) -> None:
        super().__init__(given)
        self._optimizer = optimizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)({name: copy.deepcopy(value, memo) for name, value in self.items()}, self._optimizer)

    def __copy__(self) -> Self:
        return type(self)(self, self._optimizer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """That of an ordered dict, which ``torch.load`` takes for safe; every rank saves it."""
        optimizer = self._optimizer()
        if optimizer is None:
            return OrderedDict(self).__reduce_ex__(protocol)
        parameters = _of_stages(optimizer)
        calls = calls_of(parameters[0]) if parameters else None
        if calls is not None:
            meet_for_file(calls, parameters, is_needed=True)
        return OrderedDict(whole_optimizer_state(optimizer, self, keeps=True, on_host=True)).__reduce_ex__(protocol)


def watch_state_dict(optimizer: Optimizer) -> None:
    """From now on ``optimizer.state_dict()`` is an `OptimizerStateDict`, if parameters are of pipeline stages."""
    if optimizer in _SEEN:
        return
    _SEEN.add(optimizer)  # every step asks
    if _of_stages(optimizer):
        optimizer.register_state_dict_post_hook(lambda own, state: OptimizerStateDict(state, weakref.ref(own)))


def _of_stages(optimizer: Optimizer) -> list[Any]:
    every = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in every if isinstance(p, DTensor) and stages_of(p) is not None]


def meet_for_file(calls: CallConsensus, tensors: Iterable[Tensor], *, is_needed: bool) -> None:
    """Wait until all ranks write a file, so that none has done before all have opened it, as they may write one path.

    Args:
        calls: of this rank.
        tensors: those that become whole on every rank, in the host's memory.
        is_needed: ranks have parts of what is written.

    Raises:
        RankError: some ranks don't write it, and have parts.
        ModelError: the host has too little memory.
    """
    with calls.failing():
        if not calls.meets("torch.save", _SAVES_WITHIN_S if is_needed else _MAY_SAVE_WITHIN_S) and is_needed:
            raise RankError(
                "torch.save on one rank needs parts of tensors that other ranks have, but these don't save them now: "
                "call torch.save on every rank (all may write one path), or state = model.full_state_dict() on every "
                "rank and torch.save(state, path) on one"
            )
        if is_needed:
            _check_memory(tensors)


def _check_memory(tensors: Iterable[Tensor]) -> None:
    """Raise ModelError if the ranks of this host can't hold these whole: a process that takes more is killed."""
    every = list(tensors)
    num_ranks = torch.accelerator.device_count() if every and every[0].device.type != "cpu" else 1
    needed, available = num_ranks * sum(x.numel() * x.element_size() for x in every), available_bytes()
    if needed > available:
        raise ModelError(
            f"torch.save on every rank needs {needed / 2**30:.3g} GiB of the host's memory, {num_ranks} times the "
            f"size of what is saved, and {available / 2**30:.3g} GiB are available: call model.full_state_dict(rank=0) "
            "on every rank, which only rank 0 holds, or torch.distributed.checkpoint, which saves parts"
        )


def refuse_storage(x: DTensor) -> NoReturn:
    """Raise ModelError: what asks for the storage of `x`, as safetensors does, wants the memory of a whole tensor."""
    raise ModelError(
        f"a parameter, gradient or optimizer state of shape {list(x.shape)} of a parallelized model has no storage: "
        f"each rank has a part of it, x.to_local(). To save weights with safetensors, {SAVE_INSTEAD}"
    )


def reduce_whole(x: DTensor, protocol: Any) -> Any:
    """What pickle, and so ``torch.save``, is given of a parameter, gradient or state: the whole tensor, on the host.

    Every rank saves it, unless ranks have whole ones.

    Raises:
        ModelError: it is of pipeline stages, so that the state that it is in lacks those of other stages; or of no
            parallel module.
    """
    if is_of_stages(x):
        raise ModelError(
            "a parameter, gradient or optimizer state of a parallelized model with pipeline stages is about to be "
            f"saved, but what it is in has those of this rank's stages only. For weights, {SAVE_INSTEAD}. For an "
            "optimizer, save model.full_optimizer_state_dict(optimizer), which every rank calls; "
            "optimizer.load_state_dict takes it. For other tensors save x.full_tensor(). torch.distributed.checkpoint "
            "saves the parts themselves, from all ranks"
        )
    if not is_whole(x):
        calls = calls_of(x)
        if calls is None:
            raise ModelError(
                "a parameter, gradient or optimizer state that torch.compile(backend='autopar') has sharded is this "
                "rank's part of a whole tensor, and ranks are not compared there: save x.full_tensor(), or what "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) gives, on every rank. "
                "torch.distributed.checkpoint saves the parts themselves"
            )
        meet_for_file(calls, [x], is_needed=True)
    whole = read_whole(cast("DTensor", x.detach())).cpu()
    made: Any = nn.Parameter(whole, x.requires_grad) if isinstance(x, nn.Parameter) else whole
    return made.__reduce_ex__(protocol)
