"""What one layer costs under a strategy: the one formula that search minimises and the plan reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.placement import Axis, Layout
from autopar.plan import LayerCost, LayerStrategy
from autopar.program import Layer, Op, Program
from autopar.search.prices import Prices

__all__ = ["PricedCollective", "SharedStorage", "TrainingSpec", "is_cheap", "layer_collectives", "layer_cost"]

# Value name of a parameter that several layers read -> (mesh, layout on it) of its one storage.
SharedStorage = Mapping[str, tuple[tuple[int, ...], Layout]]


@dataclass(frozen=True)
class TrainingSpec:
    """How the program is trained.

    Args:
        is_training: False: only forward passes, no gradients, no optimizer.
        optimizer_state_bytes_per_element: 8 for Adam with two float32 moments, 0 for plain SGD.
        gradient_itemsize_bytes: bytes of a parameter's gradient element; 0: as the parameter's dtype.
        storage_itemsize_bytes: bytes of a stored parameter element; 0: as the parameter's dtype.  If it differs, a copy
            in the parameter's dtype is held besides.
    """

    is_training: bool = True
    optimizer_state_bytes_per_element: float = 8.0
    gradient_itemsize_bytes: int = 0
    storage_itemsize_bytes: int = 0


@dataclass(frozen=True)
class PricedCollective:
    """One collective that runs `times` per step: of value `value`, on `axis`, a buffer of `num_bytes`.

    `phase` is ``"forward"``, ``"backward"`` or ``"recompute"``; `purpose` is ``"activation"``, ``"parameter"`` or
    ``"kernel"`` (inside a special kernel; `value` is then the op's name).
    """

    value: str
    kind: str
    axis: Axis
    num_bytes: float
    times: int
    phase: str
    purpose: str


def is_cheap(op: Op) -> bool:
    """Whether selective recomputation runs `op` again in backward instead of keeping its result."""
    raise NotImplementedError


def layer_collectives(
    program: Program,
    layer: Layer,
    strategy: LayerStrategy,
    num_microbatches: int = 1,
    training: TrainingSpec | None = None,
    shared_storage: SharedStorage | None = None,
) -> tuple[PricedCollective, ...]:
    """Every collective that one step of this layer runs, in no particular order."""
    raise NotImplementedError


def layer_cost(
    program: Program,
    layer: Layer,
    strategy: LayerStrategy,
    num_microbatches: int,
    prices: Prices,
    training: TrainingSpec,
    shared_storage: SharedStorage | None = None,
) -> LayerCost:
    """Seconds and bytes of this layer for one step on one device.

    The memory of parameters in `shared_storage` is not counted here: they are held once for the whole plan.
    """
    raise NotImplementedError
