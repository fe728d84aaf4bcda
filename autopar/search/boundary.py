"""Layouts of what crosses a layer boundary.

At a boundary, all activations that cross it take their layouts from one **policy**: per mesh axis ``R``,
``S(0)`` or ``S(1)``.  So the search across layers has a small state however many tensors cross.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from autopar.placement import REPLICATE, Layout, Placement, shard
from autopar.program import Program, TensorType

__all__ = ["Policy", "arrival_layout", "boundary_layout", "boundary_policies", "has_whole_boundary"]

# A wish per mesh axis: R, S(0) or S(1).
Policy = Layout

_WISHES: tuple[Placement, ...] = (REPLICATE, shard(0), shard(1))


def boundary_policies(mesh: tuple[int, ...]) -> tuple[Policy, ...]:
    """Every policy on `mesh`; an axis of one device has only ``R``.  The first is all ``R``."""
    return tuple(itertools.product(*(_WISHES if size > 1 else (REPLICATE,) for size in mesh)))


def boundary_layout(policy: Policy, tensor: TensorType, mesh: tuple[int, ...]) -> Layout:
    """The layout that `policy` gives a tensor: its wish on each axis where that dim exists and divides.

    Axes are served from the outermost; where the tensor can't follow, it is whole (``R``).
    """
    sizes = list(tensor.shape)
    layout: list[Placement] = []
    for wish, size in zip(policy, mesh, strict=True):
        follows = wish.is_shard and wish.dim < len(sizes) and sizes[wish.dim] % size == 0
        if follows:
            sizes[wish.dim] //= size
        layout.append(wish if follows else REPLICATE)
    return tuple(layout)


def has_whole_boundary(program: Program, name: str) -> bool:
    """Whether this value is whole (``R`` on all axes) wherever it crosses a boundary, whatever the policy.

    So are the model's inputs (each rank gets the plain global batch) and what is computed from them without a
    parameter (masks, rotary tables ...: every device computes it, and no layer has to gather it), new values
    of buffers, the loss, and, in a model without a loss inside, all outputs.
    """
    if name in _parameter_free(_Identity(program)) or name in program.updates.values():
        return True
    return name == program.loss if program.loss else name in program.outputs


class _Identity:
    """A program as a key: to compare or hash its contents would cost more than what is looked up."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __hash__(self) -> int:
        return id(self.program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.program is self.program


@lru_cache(maxsize=8)
def _parameter_free(key: _Identity) -> frozenset[str]:
    """The values into which no parameter flows: inputs, constants, and what is computed from those alone."""
    program = key.program
    free = {name for name, value in program.values.items() if value.role in ("constant", "buffer")}
    free.update(program.inputs)
    for layer in program.layers:
        for op in layer.ops:
            if free.issuperset(op.operands):
                free.update(name for name in op.results if not program.values[name].requires_grad)
    return frozenset(free)


def arrival_layout(
    program: Program, name: str, policy: Policy, mesh: tuple[int, ...], tensor: TensorType | None = None
) -> Layout:
    """The layout in which value `name` crosses a boundary of this policy, on either side of it.

    `tensor` is what one microbatch holds of it, if there are several.
    """
    if has_whole_boundary(program, name):
        return (REPLICATE,) * len(mesh)
    return boundary_layout(policy, tensor or program.type_of(name), mesh)
