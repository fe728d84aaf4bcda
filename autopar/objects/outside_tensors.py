"""Tensors that a forward reads and that are not its model's: those of global variables, closures and other objects.

A program has them as constants, with the values that they had when it was traced.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.objects.tensor_versions import version_of

__all__ = ["OutsideTensor"]

_LOOKED_AT = 16  # entries of each: an average of weights changes nearly all of them, and so does an optimizer


@dataclass(frozen=True, eq=False)
class OutsideTensor:
    """One of them, as it was when a program was traced.

    A write to it is known by its version, another tensor in its place (``p.data = x``) by its address, and a write
    that torch counts elsewhere (``p.data.mul_(x)``) by some of its entries.

    Args:
        where: the user's line that reads it.
        dtype: by its name in torch.
        shape: its sizes.
        tensor: the tensor itself, which a script may drop; then nothing changes it.
        version: how often it had been written to, where torch counts that.
        address: of its memory.
        entries: some of its entries, byte by byte.
        requires_grad: whether it did.
        traced_address: of the memory that a trace has in its place.
        is_attribute: whether a module of the model has it as a plain attribute, which is compared in every call.
    """

    where: str
    dtype: str
    shape: tuple[int, ...]
    tensor: weakref.ref[Tensor]
    version: int | None
    address: int
    entries: Tensor
    requires_grad: bool
    traced_address: int
    is_attribute: bool

    @classmethod
    def of(cls, tensor: Tensor, where: str, *, traced: Tensor, is_attribute: bool = False) -> OutsideTensor:
        """As it is now; it has entries, and its memory is its own.  A trace has `traced` in its place."""
        return cls(
            where, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), weakref.ref(tensor),
            version_of(tensor), tensor.data_ptr(), _some_entries(tensor), tensor.requires_grad, traced.data_ptr(),
            is_attribute,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """Dtype and shape."""
        return f"{self.dtype} {list(self.shape)}"

    def is_changed(self, *, reads_entries: bool) -> bool:
        """Whether it is another one now.  Reading entries waits for the device that it is on."""
        tensor = self.tensor()
        if tensor is None:
            return False
        if version_of(tensor) != self.version or tensor.data_ptr() != self.address:
            return True
        return reads_entries and not torch.equal(_some_entries(tensor), self.entries)


def _some_entries(tensor: Tensor) -> Tensor:
    """Some entries of it, on the host, as bytes: NaN is equal to itself."""
    places = torch.arange(_LOOKED_AT, device=tensor.device) * tensor.numel() // _LOOKED_AT
    index = torch.unravel_index(places, tensor.shape)
    entries = tensor.detach()[index] if index else tensor.detach().reshape(1)
    return entries.cpu().view(torch.uint8)
