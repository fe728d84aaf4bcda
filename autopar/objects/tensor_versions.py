"""How often a tensor has been written to, as torch counts it for all tensors that share memory.

A write through ``x.data`` is not counted there, and a tensor made in ``torch.inference_mode()`` counts none.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["is_unwritten", "version_of"]


def version_of(x: Tensor) -> int | None:
    """The count; None where torch keeps none, so that nothing is known of writes."""
    return None if x.is_inference() else x._version


def is_unwritten(x: Tensor, version: int | None) -> bool:
    """Whether `x`, whose count was `version`, has not been written to since for all that torch counts."""
    return version is not None and version_of(x) == version
