"""What a parallel module answers where a script takes it for a wrapper for data parallelism, or wraps it in one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from autopar.errors import ModelError

__all__ = ["WithoutWrappers"]

_ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"  # what DistributedDataParallel reads first of a module
_OF_WRAPPERS = {
    "module": "a parallelized model is your model, not a wrapper around it: write model in place of model.module",
    "set_requires_gradient_sync": "gradients add up over calls of backward() without it",
    "join": "ranks may have unlike numbers of rows, or none, with inputs='local'; all make the same number of calls",
}
"""Attributes of DistributedDataParallel and FSDP modules, and what a script does without them."""


class WithoutWrappers(nn.Module):
    """The base of `ParallelModule` that refuses wrappers, and says what to write in place of what they have."""

    def __getattr__(self, name: str) -> Any:
        """As of any module; what scripts ask of wrappers for data parallelism is answered by what to ask instead."""
        try:
            untyped: Any = super()
            return untyped.__getattr__(name)
        except AttributeError as error:
            if name == _ASKED_BY_DDP:
                raise self._wrapper_error("a parallelized model can't be wrapped in DistributedDataParallel") from None
            if name in _OF_WRAPPERS:
                raise AttributeError(f"{error}: {_OF_WRAPPERS[name]}", name=name, obj=self) from None
            raise

    def _wrapper_error(self, refused: str) -> ModelError:
        return ModelError(
            f"{refused} ({type(self).__name__}): its plan has data parallelism, tensor parallelism "
            "and ZeRO where that is fastest. Leave the wrapper out; if each rank has its own rows, pass inputs='local' "
            "to autopar.parallelize"
        )

    def register_forward_pre_hook(self, hook: Callable[..., Any], **kwargs: Any) -> RemovableHandle:
        """As of any module, but for hooks of torch.distributed.

        Raises:
            ModelError: ``fully_shard``, ``replicate`` or ``parallelize_module`` is applied to the module.
        """
        if str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
            raise self._wrapper_error(
                "a parallelized model can't be changed by fully_shard, replicate and others of torch.distributed"
            )
        return super().register_forward_pre_hook(hook, **kwargs)

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """What FullyShardedDataParallel sets of each module that it wraps, before it changes any parameter."""
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> NoReturn:
        raise self._wrapper_error("a parallelized model can't be wrapped in FullyShardedDataParallel")

    def no_sync(self) -> AbstractContextManager[None]:
        """As of DistributedDataParallel, for gradients that are accumulated over calls of ``backward``.

        They are those of one device without it, too; when ranks communicate is up to the plan.
        """
        return nullcontext()
