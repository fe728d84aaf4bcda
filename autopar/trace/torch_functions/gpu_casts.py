"""The casts that ``torch.autocast("cuda")`` makes, though a trace computes on CPU tensors.

torch has a list of ops for each type of device (``aten/src/ATen/autocast_mode.h``, torch 2.13).  What both lists treat
alike is not repeated here, nor are ops of the CPU's list that a GPU computes from ops of its own list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from autopar.trace.compat import torch_internals

__all__ = ["IN_FLOAT32", "IN_LOW_PRECISION", "IN_WIDEST", "casts_of"]

_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "reciprocal",
    "rsqrt", "sinh", "softplus", "tan",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "sum", "sum.dim_IntList", "cumsum", "cumprod",
    "softmax.int", "log_softmax.int",
    "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "cosine_similarity", "dist", "pdist", "renorm",
    "norm.Scalar", "norm.ScalarOpt_dim", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
IN_FLOAT32 = tuple(filter(torch_internals.is_cast_on_gpus, _FLOAT32))
"""Without ``rms_norm`` before torch 2.12."""
IN_LOW_PRECISION = ("mv", "addmv", "addr")
IN_WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "scatter_add", "tensordot",
)  # fmt: skip

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # float64 stays as it is
_LOCK = threading.RLock()  # what an op does under autocast is a fact of the process


def casts_of(device_type: str) -> AbstractContextManager[None]:
    """Inside, ``torch.autocast("cpu")`` casts as autocast does on devices of this type, and so does theirs."""
    return nullcontext() if device_type == "cpu" else _gpu_casts(device_type)


@contextmanager
def _gpu_casts(planned: str) -> Generator[None]:
    original = torch.autocast.__init__

    # Callers may name the arguments, so they are called as torch calls them.
    def begin(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == planned:
            dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
            device_type = "cpu"
        original(self, device_type, dtype, *args, **kwargs)

    kernels = {
        **{name: _casting(name, lambda _: torch.float32) for name in IN_FLOAT32},
        **{name: _casting(name, lambda _: torch.get_autocast_dtype("cpu")) for name in IN_LOW_PRECISION},
        **{name: _casting(name, _widest) for name in IN_WIDEST},
    }
    with _LOCK, torch_internals.autocast_kernels(kernels), patch.object(torch.autocast, "__init__", begin):
        yield


def _casting(name: str, choose: Callable[[list[torch.dtype]], torch.dtype]) -> Callable[..., Any]:
    """The op of this name on floats of the dtype that autocast chooses for its operands; an explicit dtype stays."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = torch_internals.flatten((args, kwargs))
        dtypes = [x.dtype for x in leaves if _is_cast(x)]
        with torch_internals.below_autocast():
            if dtypes and not any(isinstance(x, torch.dtype) for x in leaves):
                dtype = choose(dtypes)
                leaves = [x.to(dtype) if _is_cast(x) else x for x in leaves]
                args, kwargs = torch_internals.unflatten(leaves, structure)
            return op(*args, **kwargs)

    return run


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    return torch.float32 if len(set(dtypes)) > 1 else dtypes[0]


def _is_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _FLOATS
