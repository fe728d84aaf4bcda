"""How a program is trained: what its parameters, gradients and optimizer state take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar.program import Op, itemsize_bytes

__all__ = ["TrainingSpec", "is_cheap"]


@dataclass(frozen=True)
class TrainingSpec:
    """How the program is trained.

    Args:
        is_training: False: only forward passes, no gradients, no optimizer.
        optimizer_state_bytes_per_element: 8 for Adam with two float32 moments, 0 for plain SGD.
        gradient_itemsize_bytes: bytes of a parameter's gradient element; 0: as the parameter's dtype.
        storage_itemsize_bytes: bytes of a stored parameter element; 0: as the parameter's dtype.  If it
            differs, a copy in the parameter's dtype is held besides.
    """

    is_training: bool = True
    optimizer_state_bytes_per_element: float = 8.0
    gradient_itemsize_bytes: int = 0
    storage_itemsize_bytes: int = 0

    def gradient_itemsize(self, dtype: str) -> int:
        """Bytes of a gradient element of a parameter of this dtype."""
        return self.gradient_itemsize_bytes or itemsize_bytes(dtype)

    def storage_itemsize(self, dtype: str) -> int:
        """Bytes of a stored element of a parameter of this dtype."""
        return self.storage_itemsize_bytes or itemsize_bytes(dtype)

    def optimizer_traffic_bytes(self, dtype: str) -> float:
        """Bytes per element that a step reads and writes: the gradient once, parameter and state twice."""
        stored = self.storage_itemsize(dtype) + self.optimizer_state_bytes_per_element
        return self.gradient_itemsize(dtype) + 2 * stored


_PRODUCTS = frozenset(
    {
        "linear",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "matmul",
        "mv",
        "addmv",
        "dot",
        "einsum",
        "bilinear",
    }
)
_RECURRENT = frozenset({"lstm", "gru", "rnn"})


def is_cheap(op: Op) -> bool:
    """Whether selective recomputation runs `op` again in backward instead of keeping its result.

    Not cheap: products, convolutions, attention and recurrent ops (they compute much per byte); ops with a
    kernel that communicates; random ops (to draw again takes the generator's state); ops of other libraries.
    """
    return _computes_little(op.target) and not (op.is_random or any(o.collectives for o in op.options))


@lru_cache(maxsize=1024)
def _computes_little(target: str) -> bool:
    namespace, _, name = target.partition(".")
    words = name.split(".")[0].split("_")
    is_convolution = any(word.startswith("conv") and word != "convert" for word in words)
    is_heavy = is_convolution or "attention" in words or not _PRODUCTS.union(_RECURRENT).isdisjoint(words)
    return namespace in ("aten", "autopar", "prims") and not is_heavy
