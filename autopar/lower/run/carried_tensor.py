"""A value that goes from call to call, such as the keys of tokens: each rank keeps its part of it in between."""

from __future__ import annotations

from torch import Tensor

from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.run.lowering import ValueLayout

__all__ = ["CarriedTensor"]


class CarriedTensor(LateTensor):
    """Stands for a whole tensor that ranks hold in parts; another call takes the parts as they are.

    Attributes:
        part: this rank's.
        value_layout: how it is divided among the ranks.
    """

    part: Tensor
    value_layout: ValueLayout
