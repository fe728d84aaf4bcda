"""A layer with a strategy applied: which tensors exist where, and which reshards run between them.

`layer_cost` prices this, and so does the search: both get layouts, types and reshards from here alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.placement import REPLICATE, Layout, Step, local_shape, refine_layout, refine_mesh, reshard
from autopar.plan import LayerStrategy
from autopar.program import Layer, Program, TensorType, itemsize_bytes
from autopar.step.layer.op_states import OpState, assigned_state
from autopar.step.layer.value_flows import Flow, TimeView, find_flows, time_view

__all__ = ["PlacedLayer", "SharedStorage", "place", "place_whole", "stored_steps", "whole_strategy"]

# Value name of a parameter that several layers read, or that the caller keeps -> (mesh, layout) of its one storage.
SharedStorage = Mapping[str, tuple[tuple[int, ...], Layout]]


@dataclass(frozen=True, eq=False)
class PlacedLayer:
    """Everything about a layer under a strategy that its cost depends on.

    `copies` has the copy layout of every value that is read; `arrivals` and `departures` are the layouts of
    inputs and outputs by position; `storage` those of parameters, buffers and constants.
    """

    program: Program
    layer: Layer
    mesh: tuple[int, ...]
    flows: Mapping[str, Flow]
    view: TimeView
    states: tuple[OpState, ...]
    copies: Mapping[str, Layout]
    arrivals: tuple[Layout, ...]
    departures: tuple[Layout, ...]
    storage: tuple[Layout, ...]
    zero: int
    recompute: str
    shared: SharedStorage
    pieces: tuple[tuple[str, int], ...] = ()

    def source(self, flow: Flow) -> Layout:
        """The layout in which a value is produced, arrives or is stored."""
        if flow.source == "op":
            return self.states[flow.producer].results[flow.result]
        return (self.arrivals if flow.source == "input" else self.storage)[flow.producer]

    def to_copy(self, flow: Flow) -> tuple[Step, ...]:
        """The reshard from where the value comes from to its copy layout."""
        copy = self.copies[flow.value.name]
        if flow.is_parameter:
            return stored_steps(flow.value.name, self.source(flow), copy, self.mesh, self.shared)
        return reshard(self.source(flow), copy, self.mesh)

    def read_flows(self) -> Iterator[Flow]:
        """The flows of all values that are read or leave."""
        return (flow for flow in self.flows.values() if flow.num_readers)

    def local_bytes(self, tensor: TensorType, layout: Layout) -> float:
        """Bytes that one device holds of `tensor` (of one microbatch) in this layout."""
        return math.prod(self.local_shape(tensor, layout)) * itemsize_bytes(tensor.dtype)

    def local_shape(self, tensor: TensorType, layout: Layout) -> tuple[int, ...]:
        """The shape of what one device holds of `tensor` (of one microbatch) in this layout."""
        return local_shape(tensor.shape, layout, self.mesh)


def stored_steps(
    name: str, stored: Layout, copy: Layout, mesh: tuple[int, ...], shared: SharedStorage
) -> tuple[Step, ...]:
    """The reshard from a parameter's storage, this layer's or the plan's shared one, to its copy."""
    if name not in shared:
        return reshard(stored, copy, mesh)
    shared_mesh, shared_layout = shared[name]
    refined = refine_mesh(shared_mesh, mesh)
    return reshard(refine_layout(shared_layout, shared_mesh, refined), refine_layout(copy, mesh, refined), refined)


def place(
    program: Program,
    layer: Layer,
    strategy: LayerStrategy,
    num_microbatches: int = 1,
    shared: SharedStorage | None = None,
) -> PlacedLayer:
    """Apply `strategy` to `layer`, the first of its kind (by its values the strategy's copies are named).

    Raises:
        PlanMismatchError: a factor does not divide, or an op lacks it.
    """
    flows = find_flows(program, layer)
    view = time_view(layer, flows, strategy.time, num_microbatches)
    states = tuple(
        assigned_state(program, op, index, factors, strategy.mesh, view)
        for index, (op, factors) in enumerate(zip(layer.ops, strategy.assignments, strict=True))
    )
    known = dict(strategy.copies)
    placed = PlacedLayer(
        program, layer, strategy.mesh, flows, view, states, known, strategy.inputs, strategy.outputs,
        strategy.storage, strategy.zero, strategy.recompute, shared or {}, strategy.pieces,
    )  # fmt: skip
    known.update({flow.value.name: placed.source(flow) for flow in placed.read_flows() if flow.value.name not in known})
    return placed


def place_whole(program: Program, layer: Layer) -> PlacedLayer:
    """The layer on one device, in one microbatch."""
    return place(program, layer, whole_strategy(layer))


def whole_strategy(layer: Layer) -> LayerStrategy:
    """The strategy of a layer that runs on one device, or on every device on whole values."""
    whole: Layout = (REPLICATE,)
    return LayerStrategy(
        mesh=(1,), assignments=(("-",),) * len(layer.ops), time=(), inputs=(whole,) * len(layer.inputs),
        outputs=(whole,) * len(layer.outputs), copies=(), storage=(whole,) * len(layer.state),
    )  # fmt: skip
