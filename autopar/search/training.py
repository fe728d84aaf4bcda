"""How a program is trained: what its parameters, gradients and optimizer state take."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.program import itemsize_bytes

__all__ = ["TrainingSpec"]


@dataclass(frozen=True)
class TrainingSpec:
    """How the program is trained.

    Args:
        is_training: False: only forward passes, no gradients, no optimizer.
        optimizer_state_bytes_per_element: 8 for Adam with two float32 moments, 0 for plain SGD.
        gradient_itemsize_bytes: bytes of a parameter's gradient element; 0: as the parameter's dtype.
        storage_itemsize_bytes: bytes of a stored parameter element; 0: as the parameter's dtype.  If it
            differs, a copy in the parameter's dtype is held besides.
        steps_at_once: whether the optimizer's temporaries are those of all parameters at once, as torch's multi-tensor
            optimizers on GPUs have them; else those of one parameter after the other, as on CPUs.
        reruns: False: backward asks for nothing that forward computed or gathered (set for single layers).
    """

    is_training: bool = True
    optimizer_state_bytes_per_element: float = 8.0
    gradient_itemsize_bytes: int = 0
    storage_itemsize_bytes: int = 0
    steps_at_once: bool = True
    reruns: bool = True

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
