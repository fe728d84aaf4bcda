"""How a program is trained: what its parameters, gradients and optimizer state take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.program import Layer, Op, Program, itemsize_bytes

__all__ = ["TrainingSpec", "is_differentiable", "own_training"]


@dataclass(frozen=True)
class TrainingSpec:
    """How the program is trained.

    Args:
        is_training: False: only forward passes, no gradients, no optimizer.
        optimizer_state_bytes_per_element: 8 for Adam with two float32 moments, 0 for plain SGD.
        gradient_itemsize_bytes: bytes of a parameter's gradient element; 0: as the parameter's dtype.
        storage_itemsize_bytes: bytes of a stored parameter element; 0: as the parameter's dtype.  If it
            differs, a copy in the parameter's dtype is kept as well.
        steps_at_once: whether the optimizer's temporaries are those of all parameters at once, as torch's multi-tensor
            optimizers on GPUs have them; else those of one parameter after the other, as on CPUs.
        fuses_attention: whether a fast kernel runs every attention, also with dropout or a trained mask, as on GPUs.
        reruns: False: backward asks for nothing that forward computed or gathered (set for single layers).
    """

    is_training: bool = True
    optimizer_state_bytes_per_element: float = 8.0
    gradient_itemsize_bytes: int = 0
    storage_itemsize_bytes: int = 0
    steps_at_once: bool = True
    fuses_attention: bool = True
    reruns: bool = True

    def on_device(self, name: str) -> TrainingSpec:
        """The same on devices of this name (`Prices.device`)."""
        return replace(self, steps_at_once=name != "cpu", fuses_attention=name != "cpu")

    def gradient_itemsize(self, dtype: str) -> int:
        """Bytes of a gradient element of a parameter of this dtype."""
        return self.gradient_itemsize_bytes or itemsize_bytes(dtype)

    def storage_itemsize(self, dtype: str) -> int:
        """Bytes of a stored element of a parameter of this dtype."""
        return self.storage_itemsize_bytes or itemsize_bytes(dtype)

    def batch_bytes(self, program: Program) -> float:
        """Bytes of the caller's batch, whole on every device, and of what it is cast to where the program computes in
        another dtype than parameters are stored in.
        """
        types = [program.type_of(name) for name in program.inputs]
        wide = self.storage_itemsize_bytes
        cast = [t for t in types if t.is_floating and wide and itemsize_bytes(t.dtype) != wide]
        return float(sum(t.num_bytes for t in types) + sum(t.num_elements * wide for t in cast))

    def optimizer_traffic_bytes(self, dtype: str) -> float:
        """Bytes per element that a step reads and writes: the gradient once, parameter and state twice."""
        stored = self.storage_itemsize(dtype) + self.optimizer_state_bytes_per_element
        return self.gradient_itemsize(dtype) + 2 * stored


def own_training(program: Program, layer: Layer, training: TrainingSpec) -> TrainingSpec:
    """How this layer is trained: one that no gradient reaches runs as outside training, and what keeps no tensor for
    its backward pass (an addition) runs nothing again.
    """
    trained = [op for op in layer.ops if is_differentiable(program, op, training)]
    keeps = any(op.saves or op.saved_extra_bytes for op in trained)
    if trained and keeps:
        return training
    return replace(training, is_training=bool(trained), reruns=keeps)


def is_differentiable(program: Program, op: Op, training: TrainingSpec) -> bool:
    """Whether the op has a backward pass."""
    return training.is_training and any(program.values[name].requires_grad for name in op.results)
