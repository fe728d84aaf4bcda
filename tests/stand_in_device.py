"""A device that torch does not know: tensors of type ``"standin"``, whose memory is the host's.

It is registered as a plug-in registers one (Ascend's ``npu``, say): through torch's PrivateUse1 key, with a module
``torch.standin``, kernels for every op, and collectives.  Here all of it is Python: a kernel takes a view of the
memory as a CPU tensor, and runs the CPU's op on it.  So what names "cuda", or asks for an ability that not every device
has, fails on it: it has no timed events, no pinned memory, no count of allocated bytes, no generators but its default
one, and its streams do nothing.

A process can register one such device, for good: call `register` in processes that end with the test.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["BACKEND", "NAME", "register"]

NAME = "standin"
BACKEND = f"cpu:gloo,{NAME}:gloo"
"""For ``init_process_group``: gloo moves this device's tensors too."""

_CPU, _OTHER = 1, 12  # DLPack's numbers for the host's memory and for devices from outside
_HOST = torch.device("cpu")
_KEY = torch._C.DispatchKey
_TENSOR_TO_CAPSULE: Any = torch._C._to_dlpack
_CAPSULE_TO_TENSOR: Any = torch._C._from_dlpack
# Ops that change nothing but what a tensor says of its memory: torch's kernels for the host do.
_OF_METADATA = (
    "as_strided", "view", "_reshape_alias", "unfold", "set_", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "set_.source_Tensor",
)  # fmt: skip
# Copies between devices; and indices may be of the host on any device.
_MIXING = {f"aten::{name}" for name in ("copy_", "_to_copy", "_copy_from", "index", "index_put_", "_index_put_impl_")}
_kept: list[Any] = []  # a library's kernels live as long as it does


class _Module:
    """``torch.standin``: what torch's documentation asks of such a module, and the device's name."""

    def __init__(self, device_name: str) -> None:
        self._device_name = device_name
        self.generator = torch.Generator()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        assert torch.device(NAME, device if isinstance(device, int) else torch.device(device).index).index in (0, None)

    def get_device_name(self, device: Any = None) -> str:
        return self._device_name

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, new_state: Tensor, device: Any = NAME) -> None:
        self.generator.set_state(new_state)


def register(device_name: str) -> None:
    """Make ``torch.device("standin")`` in this process, which calls itself `device_name`."""
    module = _Module(device_name)
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    run = partial(_run, module.generator)
    every = torch.library.Library("_", "IMPL")
    every.fallback(run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in _OF_METADATA:
        aten.impl(name, partial(_op("aten", name).redispatch, torch._C.DispatchKeySet(_KEY.CPU)), "PrivateUse1")
    convolution, backward = (_op("aten", f"convolution{kind}") for kind in ("", "_backward"))
    aten.impl("convolution_overrideable", partial(run, convolution), "PrivateUse1")
    aten.impl("convolution_backward_overrideable", partial(_convolution_backward, run, backward), "PrivateUse1")
    aten.impl("resize_", _resize, "PrivateUse1")
    aten.impl("_copy_from", _copy, "PrivateUse1")
    aten.impl("_copy_from_and_resize", _copy, "PrivateUse1")
    aten.impl("record_stream", lambda *_: None, "PrivateUse1")
    c10d = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they take the place of torch's, which ask the backend for this device
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::"):
                c10d.impl(name[6:], partial(run, _op("c10d", name[6:])), "PrivateUse1")
    torch.accelerator.synchronize = lambda *_: None  # what Python registers can't say that it is never behind
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    _kept.extend((every, aten, c10d))


def _run(generator: torch.Generator, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any op, on the same memory as the host sees it; random ones draw from the device's `generator`."""
    asks = {argument.name: argument.is_out for argument in op._schema.arguments}
    if "generator" in asks and kwargs.get("generator") is None:
        kwargs["generator"] = generator
    outs = {name: kwargs[name] for name, is_out in asks.items() if is_out}
    ours: dict[int, Tensor] = {}

    def to_host(x: Any) -> Any:
        if isinstance(x, torch.device):
            return _HOST
        if not isinstance(x, Tensor) or x.device.type != NAME:
            return x
        made = _as(x, _CPU)
        ours[id(made)] = x
        return made

    if op._schema.name not in _MIXING:
        _check_devices(op, (args, kwargs))
    args, kwargs = pytree.tree_map(to_host, (args, kwargs))
    if outs:  # which the op may resize, and memory that isn't the host's own can't be
        made = {name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for name, x in outs.items()}
        with torch.no_grad():
            op(*args, **{**kwargs, **made})
        for name, x in outs.items():
            x.copy_(made[name]) if x.shape == made[name].shape else x.set_(_as(made[name], _OTHER))
        return tuple(outs.values()) if len(outs) > 1 else next(iter(outs.values()))
    with torch.no_grad():
        results = op(*args, **kwargs)

    def to_device(x: Any) -> Any:
        return ours.get(id(x), _as(x, _OTHER)) if isinstance(x, Tensor) else x

    return pytree.tree_map(to_device, results)


def _convolution_backward(run: Callable[..., Any], op: Any, *args: Any) -> Any:
    """Of other devices than torch's own it does not get the bias."""
    (gradient, x, weight), which = args[:3], args[-1]
    return run(op, gradient, x, weight, list(weight.shape[:1]) if which[2] else None, *args[3:])


def _check_devices(op: Any, arguments: Any) -> None:
    """As kernels of GPUs do: all tensors are on one device, but for numbers of the host."""
    tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    if any(x.device.type != NAME and x.dim() for x in tensors):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices in {op}: "
            + ", ".join(f"{list(x.shape)} on {x.device}" for x in tensors)
        )


def _as(x: Tensor, kind: int) -> Tensor:
    """The same memory as a tensor of the other kind of device, by what DLPack says of it."""
    capsule = _TENSOR_TO_CAPSULE(x.detach())
    device = _DLTensor.from_address(_pointer_in(capsule, b"dltensor"))
    device.type, device.index = kind, 0
    return _CAPSULE_TO_TENSOR(capsule)


class _DLTensor(ctypes.Structure):
    """The beginning of one."""

    _fields_ = (("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("index", ctypes.c_int32))


_pointer_in: Any = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    host = [_as(x, _CPU) if x.device.type == NAME else x for x in (source, target)]
    host[1].copy_(host[0])
    return target


def _resize(x: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    made = torch.empty(size, dtype=x.dtype, memory_format=memory_format or torch.contiguous_format)
    kept = min(made.numel(), x.numel())
    made.view(-1)[:kept].copy_(_as(x, _CPU).reshape(-1)[:kept])
    return x.set_(_as(made, _OTHER))


def _op(namespace: str, name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
