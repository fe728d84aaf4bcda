"""Values that cross from layer to layer or from stage to stage, and the cost of moving them.

A value leaves its producer in the layout that the producer's `LayerStrategy.outputs` says, on the
producer's mesh, and arrives at each layer that reads it in the layout that this layer's
`LayerStrategy.inputs` says, on the reader's mesh: one `reshard` on the common refinement of both meshes per
reading layer, forward, and backward for the gradient.  Layers in between, which don't read it, are not
concerned.  Inputs of the model start whole (``R``) everywhere.

`transfer_parts_s` is the one price of this, for the search and for the plan; it counts towards the reader's
`LayerCost.activation_comm_s`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.placement import Layout, Step, local_shape, refine_layout, refine_mesh, reshard
from autopar.plan import LayerStrategy
from autopar.program import Layer, Program, TensorType, itemsize_bytes
from autopar.step.layer.value_flows import find_flows, time_view
from autopar.step.prices import Prices, reshard_calls

__all__ = [
    "BoundaryValue",
    "MeshLayout",
    "SentValue",
    "boundary_values",
    "sent_values",
    "transfer_matrices",
    "transfer_parts_s",
    "transfer_steps",
]


MeshLayout = tuple[tuple[int, ...], Layout]  # a mesh and a layout on it


@dataclass(frozen=True)
class BoundaryValue:
    """A value that the layer of index `reader` reads from the layer of index `producer`.

    `output` and `input` are its positions in the producer's outputs and the reader's inputs; `tensor` is
    what one microbatch holds of it.
    """

    value: str
    producer: int
    output: int
    reader: int
    input: int
    tensor: TensorType
    requires_grad: bool

    @property
    def signature(self) -> tuple[int, int, TensorType, bool]:
        """What the price of moving it depends on, between two given layers."""
        return self.output, self.input, self.tensor, self.requires_grad


def boundary_values(
    program: Program, time: dict[int, tuple[str, ...]], num_microbatches: int
) -> tuple[BoundaryValue, ...]:
    """Every value that crosses, in the order of its readers; `time` has each layer kind's factors in time."""
    where: dict[str, tuple[int, int]] = {}
    crossings: list[BoundaryValue] = []
    cuts = {layer.kind: _output_cuts(program, layer, time[layer.kind], num_microbatches) for layer in program.kinds}
    for index, layer in enumerate(program.layers):
        for position, name in enumerate(layer.inputs):
            if name in where:
                producer, output = where[name]
                tensor = cuts[program.layers[producer].kind][output]
                has_gradient = program.values[name].requires_grad
                crossings.append(BoundaryValue(name, producer, output, index, position, tensor, has_gradient))
        produced = {name for op in layer.ops for name in op.results}
        where.update({n: (index, position) for position, n in enumerate(layer.outputs) if n in produced})
    return tuple(crossings)


def _output_cuts(
    program: Program, layer: Layer, time: tuple[str, ...], num_microbatches: int
) -> tuple[TensorType, ...]:
    flows = find_flows(program, layer)
    view = time_view(layer, flows, time, num_microbatches)
    return tuple(view.value_type(flows[name]) for name in layer.outputs)


def transfer_steps(source: MeshLayout, target: MeshLayout) -> tuple[Step, ...]:
    """The reshard of a value that leaves as `source` and arrives as `target`."""
    return _steps(source[0], source[1], target[0], target[1])


@lru_cache(maxsize=1 << 16)  # pairs of layouts on two meshes, of all meshes that a search tries
def _steps(mesh: tuple[int, ...], layout: Layout, to_mesh: tuple[int, ...], to_layout: Layout) -> tuple[Step, ...]:
    refined = refine_mesh(mesh, to_mesh)
    return reshard(refine_layout(layout, mesh, refined), refine_layout(to_layout, to_mesh, refined), refined)


def transfer_parts_s(
    prices: Prices,
    tensor: TensorType,
    has_gradient: bool,
    num_microbatches: int,
    source: MeshLayout,
    target: MeshLayout,
) -> tuple[float, float]:
    """Seconds per step to move a value of this (microbatch's) type, and to move its gradient back."""
    ahead_s = back_s = 0.0
    for call in reshard_calls(transfer_steps(source, target), tensor.num_bytes, has_gradient=has_gradient):
        seconds = prices.collective_s(call.kind, call.axis, call.num_bytes)
        if call.phase == "forward":
            ahead_s += seconds
        else:
            back_s += seconds
    return num_microbatches * ahead_s, num_microbatches * back_s


def transfer_matrices(
    prices: Prices,
    tensor: TensorType,
    has_gradient: bool,
    num_microbatches: int,
    sources: Sequence[MeshLayout],
    targets: Sequence[MeshLayout],
) -> npt.NDArray[np.float64]:
    """`transfer_parts_s` from each of `sources` to each of `targets`, [2, sources, targets]; equal ends are priced
    once.
    """
    rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
    parts = np.array(
        [[transfer_parts_s(prices, tensor, has_gradient, num_microbatches, a, b) for b in columns] for a in rows]
    ).reshape(len(rows), len(columns), 2)
    row_of = {end: index for index, end in enumerate(rows)}
    column_of = {end: index for index, end in enumerate(columns)}
    chosen = parts[np.ix_([row_of[end] for end in sources], [column_of[end] for end in targets])]
    return np.moveaxis(chosen, -1, 0)


@dataclass(frozen=True)
class SentValue:
    """A value that a stage sends to the next one.

    Args:
        crossing: the value, as its first reader reads it.
        stage: the stage that sends it.
        num_bytes: what a device sends of one microbatch.
    """

    crossing: BoundaryValue
    stage: int
    num_bytes: float


def sent_values(
    crossings: Sequence[BoundaryValue], bounds: Sequence[int], strategies: Sequence[LayerStrategy]
) -> Iterator[SentValue]:
    """Everything that stages cut at `bounds` send to the next one, value by value in the order of production.

    `strategies` has one per layer.  A value goes from stage to stage as far as it is read, as its producer laid it out.
    """
    by_value: dict[str, list[BoundaryValue]] = {}
    for crossing in crossings:
        by_value.setdefault(crossing.value, []).append(crossing)

    def stage_of(layer: int) -> int:
        return bisect.bisect_right(bounds, layer) - 1

    for each in sorted(by_value.values(), key=lambda each: (each[0].producer, each[0].output)):
        first = each[0]
        producer = strategies[first.producer]
        shape = local_shape(first.tensor.shape, producer.outputs[first.output], producer.mesh)
        num_bytes = float(math.prod(shape) * itemsize_bytes(first.tensor.dtype))
        reading = {stage_of(crossing.reader) for crossing in each}
        made = stage_of(first.producer)
        for stage in range(made, max(reading)):
            yield SentValue(first, stage, num_bytes)
