"""The functions of torch that only read a tensor's metadata: its type, shape, layout and device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["QUESTIONS"]

_tensor: Any = Tensor

QUESTIONS: frozenset[Any] = frozenset({
    _tensor.shape.__get__, _tensor.dtype.__get__, _tensor.device.__get__, _tensor.ndim.__get__,
    _tensor.requires_grad.__get__, _tensor.layout.__get__, _tensor.is_cuda.__get__, Tensor.size, Tensor.stride,
    Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex,
    torch.is_floating_point, torch.is_complex, torch.numel,
    Tensor.is_inference, torch.is_inference, Tensor.is_signed, Tensor.element_size, Tensor.get_device,
})  # fmt: skip
"""None of these functions computes anything or adds an op to a graph."""
