"""How a program is trained: the bytes of its parameters, gradients and optimizer state, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.placement import Layout
from autopar.plan import Decisions
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
        whole_states: for vectors and for matrices, how many states of a parameter's shape the optimizer gathers, with
            the parameter and its gradient, as its step on slices would be another; -1: it gathers none of these.
        gathers_outputs: whether the outputs other than the loss are made whole in every step.
        compiled: whether a compiler makes kernels of each layer's ops, and decides what is kept for backward.
        gradient_dtype: in which gradients of the copies are added up and reduced (`Decisions.gradients`).
        host_storage: whether what the optimizer reads is in the host's memory (`Decisions.host_storage`).
        reruns: False: backward neither recomputes nor gathers anything again (set for single layers).
    """

    is_training: bool = True
    optimizer_state_bytes_per_element: float = 8.0
    gradient_itemsize_bytes: int = 0
    storage_itemsize_bytes: int = 0
    steps_at_once: bool = True
    fuses_attention: bool = True
    whole_states: tuple[int, int] = (-1, -1)
    gathers_outputs: bool = False
    compiled: bool = False
    gradient_dtype: str = ""
    host_storage: bool = False
    reruns: bool = True

    def on_device(self, name: str) -> TrainingSpec:
        """The same on devices of this name (`Prices.device`)."""
        return replace(self, steps_at_once=name != "cpu", fuses_attention=name != "cpu")

    def running(self, *, compiled: bool) -> TrainingSpec:
        """The same with layers compiled or not."""
        return self if self.compiled == compiled else replace(self, compiled=compiled)

    def by(self, decisions: Decisions) -> TrainingSpec:
        """The same with what a plan decides about it."""
        return replace(
            self,
            compiled=decisions.compiled,
            gradient_dtype=decisions.gradients,
            host_storage=decisions.host_storage,
        )

    def sum_itemsize(self, dtype: str) -> int:
        """Bytes of an element of what microbatches add up and collectives reduce, of a parameter of this dtype."""
        return itemsize_bytes(self.gradient_dtype) if self.gradient_dtype else self.gradient_itemsize(dtype)

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

    def takes_whole(self, shape: Sequence[int], mesh: Sequence[int], stored: Layout) -> bool:
        """Whether a parameter of this shape, which is cut as `stored` says, is gathered for the optimizer's step."""
        is_cut = any(placement.is_shard and size > 1 for placement, size in zip(stored, mesh, strict=True))
        return is_cut and self.num_whole_states(shape) >= 0

    def num_whole_states(self, shape: Sequence[int]) -> int:
        """The one of `whole_states` for parameters of this shape."""
        return self.whole_states[len(shape) > 1]

    def optimizer_traffic_bytes(self, dtype: str) -> float:
        """Bytes per element that a step reads and writes: the gradient once, parameter and state twice."""
        stored = self.storage_itemsize(dtype) + self.optimizer_state_bytes_per_element
        return self.gradient_itemsize(dtype) + 2 * stored


def own_training(program: Program, layer: Layer, training: TrainingSpec) -> TrainingSpec:
    """How this layer is trained: one that no gradient reaches runs as outside training, and what keeps no tensor for
    its backward pass (an addition) runs nothing again.
    """
    trained = (op for op in layer.ops if is_differentiable(program, op, training))
    trains = False
    for op in trained:
        if op.saves or op.saved_extra_bytes:
            return training  # mostly the first one: this is called for every strategy
        trains = True
    return replace(training, is_training=trains, reruns=False)


def is_differentiable(program: Program, op: Op, training: TrainingSpec) -> bool:
    """Whether the op has a backward pass."""
    return training.is_training and any(program.values[name].requires_grad for name in op.results)
