"""Activation offloading: saved tensors of one pass of a layer in host memory, from its forward to its backward.

The step's actions say when copies start and when they are waited for (`simulation.actions`).  On a GPU they run on
a stream of their own, from and to pinned memory; on a CPU the same code copies from one allocation to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.host.accelerators import pins_memory
from autopar.lower.compat import storage_key
from autopar.lower.parameters.host_storage import HostCopies
from autopar.lower.program.saved_tensors import SavedTensor

__all__ = ["OffloadedTensors", "host_buffer"]


class _State(Enum):
    """Where the tensors are.

    HERE: on the device alone.  LEAVING: on both, the copy to the host is under way.  AWAY: on the host alone.
    COMING: on both, the copy back is under way.
    """

    HERE = auto()
    LEAVING = auto()
    AWAY = auto()
    COMING = auto()


@dataclass
class _Storage:
    """One storage, the saved tensors that lie in it with their dtypes, sizes, strides and offsets."""

    device: Tensor | None  # bytes
    host: Tensor | None
    views: list[tuple[ref[SavedTensor], Tensor]]  # of tensors on the meta device


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Room in the host's memory, pinned if it can be for `device`."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pins_memory(device.type), device="cpu")


class OffloadedTensors:
    """See the module.  It holds the tensors on the device only while a copy is under way: else what saved them does."""

    def __init__(self, device: torch.device, stays: Iterable[Tensor]) -> None:
        """Nothing is offloaded; `device` is where layers run, `stays` is what others keep there."""
        self.device = device
        self._kept = {storage_key(x) for x in stays}
        self._state = _State.HERE
        self._storages: list[_Storage] = []
        self._saved: list[SavedTensor] = []
        self._copies = HostCopies(device)

    def take(self, saved: Iterable[SavedTensor], state: Iterable[Tensor] = ()) -> None:
        """Of what a forward `saved`, take what is on the device alone for that, and not in the layer's `state`."""
        kept = self._kept | {storage_key(x) for x in state}
        self._saved = [
            each
            for each in saved
            if each.tensor is not None
            and each.tensor.device.type == self.device.type
            and each.tensor.untyped_storage().nbytes()
            and storage_key(each.tensor) not in kept
        ]

    def take_from(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """The result of `run`, with everything that autograd saves in it collected."""
        saved: list[SavedTensor] = []

        def pack(tensor: Tensor) -> SavedTensor:
            saved.append(SavedTensor(tensor.detach()))
            return saved[-1]

        with saved_tensors_hooks(pack, SavedTensor.open):
            outputs = run()
        self.take(saved)
        saved.clear()  # autograd holds `pack`
        return outputs

    def offload(self) -> None:
        """Start to copy to the host what was taken, each storage once; no forward reads it any more."""
        by_storage: dict[int, _Storage] = {}
        for each in self._saved:
            assert each.tensor is not None
            key = storage_key(each.tensor)
            if key not in by_storage:
                by_storage[key] = _Storage(_bytes_of(each.tensor), None, [])
            by_storage[key].views.append((ref(each), _form_of(each.tensor)))
        self._storages = list(by_storage.values())
        with self._copies.on_stream():
            for storage in self._storages:
                assert storage.device is not None
                storage.host = host_buffer(storage.device.numel(), self.device)
                storage.host.copy_(storage.device, non_blocking=True)
        self._state = _State.LEAVING

    def wait_offload(self) -> None:
        """The copies are made: let go of the tensors on the device."""
        if self._state is not _State.LEAVING:
            return
        self._copies.join()
        for each in self._saved:
            each.tensor, each.recipe = None, _Bring(self, ref(each))
        for storage in self._storages:
            storage.device = None
        self._saved = []
        self._state = _State.AWAY

    def fetch(self) -> None:
        """Start to copy back what a backward may still ask for."""
        if self._state is not _State.AWAY:
            return
        self._storages = [each for each in self._storages if any(saved() is not None for saved, _ in each.views)]
        for storage in self._storages:
            assert storage.host is not None
            storage.device = torch.empty(storage.host.numel(), dtype=torch.uint8, device=self.device)
        with self._copies.on_stream():
            for storage in self._storages:
                assert storage.device is not None
                assert storage.host is not None
                storage.device.copy_(storage.host, non_blocking=True)
        self._state = _State.COMING

    def wait_fetch(self) -> None:
        """The copies are made: autograd has its tensors again, and frees them one by one."""
        if self._state is not _State.COMING:
            return
        self._copies.join()
        for storage in self._storages:
            assert storage.device is not None
            for saved, form in storage.views:
                owner = saved()
                if owner is not None:
                    owner.tensor, owner.recipe = _as(storage.device, form), None
        self._storages = []
        self._state = _State.HERE


@dataclass(frozen=True)
class _Bring:
    """Has tensors back that a backward asks for without its actions: one by `torch.autograd` itself."""

    tensors: OffloadedTensors
    saved: ref[SavedTensor]

    def __call__(self) -> Tensor:
        self.tensors.fetch()
        self.tensors.wait_fetch()
        saved = self.saved()
        assert saved is not None
        assert saved.tensor is not None
        return saved.tensor


def _bytes_of(x: Tensor) -> Tensor:
    """The whole storage of `x`."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _form_of(x: Tensor) -> Tensor:
    """Dtype, size, stride and offset of `x`, without data."""
    return torch.empty(0, dtype=x.dtype, device="meta").as_strided(x.size(), x.stride(), x.storage_offset())


def _as(data: Tensor, form: Tensor) -> Tensor:
    """The part of the bytes `data` that `form` describes."""
    made = torch.empty(0, dtype=form.dtype, device=data.device)
    return made.set_(data.untyped_storage(), form.storage_offset(), form.size(), form.stride())
