"""The context of one search: the program on device groups of one size, its demands, and tables that its parts share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.errors import ConstraintError
from autopar.placement import REPLICATE, Axis, Layout, Placement, refine_layout, refine_mesh, shard
from autopar.program import Layer, Program
from autopar.search.layer.layout_choices import boundary_layout, has_whole_boundary, mesh_shapes
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.search.settings.constraints import OPS, Constraints, LayerDemands
from autopar.search.settings.degree_roles import stack_sizes
from autopar.search.settings.request import SearchRequest
from autopar.step.costs.layer_cost import is_layer_rerun
from autopar.step.costs.op_seconds import op_seconds
from autopar.step.costs.rerun_front import rerun_front, spaced_choices
from autopar.step.layer.local_layer import SharedStorage, place_whole
from autopar.step.layer.planned_layers import LayerFacts
from autopar.step.layer_tensors.rerun_forward import surely_run_again
from autopar.step.prices import OpTime, Prices
from autopar.step.training import TrainingSpec, own_training

__all__ = ["SearchContext", "input_rows", "shared_storage_choices"]

Array = npt.NDArray[np.float64]

# If there are more meshes than this (from 1,024 devices on, of two axes), only those are tried whose inner axes span a
# few nodes: each takes some 0.2 s.
_ENOUGH_MESHES = 9
_WIDEST_INNER_NODES = 4
# All of a device's memory at the usual price, as a share of the ideal step time.  It only decides which strategies of a
# layer are candidates in addition to the fastest: a higher price finds more that save memory, fewer that trade little.
_MEMORY_PRICE_SHARE = 0.5


@dataclass(eq=False)
class SearchContext:
    """The search on device groups of one size: a whole search without pipeline stages, or a part of one with them.

    Args:
        program: what is planned.
        num_devices: of one group, which every layer runs on.
        prices: of the cluster.
        request: what the user asks for.
        constraints: those of the request, read.
        demands: what they demand of each layer.
        num_groups: device groups.
        notes: for the user; they grow while the search works.
        settled: for each class of layers the demands that its first candidates could meet.  Later ones must meet as
            much, so that more microbatches never excuse a plan from a constraint.
        facts: of layers, which all parts of a search share.
        known_reruns: by kind of layer, its `reruns` once they are known.
        known_seconds: of whole layers, by whether they are compiled: device groups of any size share them.
        inner_sizes: of meshes with several axes only those are tried whose inner axes have so many devices; of all, if
            there are none.
    """

    program: Program
    num_devices: int
    prices: Prices
    request: SearchRequest
    constraints: Constraints
    demands: tuple[LayerDemands, ...]
    num_groups: int = 1
    notes: list[str] = field(default_factory=list[str])
    settled: dict[int, LayerDemands] = field(default_factory=dict[int, LayerDemands])
    facts: LayerFacts = field(default_factory=LayerFacts)
    known_reruns: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    known_seconds: dict[bool, dict[int, tuple[OpTime, ...]]] = field(
        default_factory=dict[bool, dict[int, tuple[OpTime, ...]]]
    )
    inner_sizes: frozenset[int] = frozenset()

    def reruns(self, kind: int) -> tuple[str, ...]:
        """Of a kind of layer, ways to keep activations that name the ops to run again."""
        training = self.request.training
        if not training.is_training:
            return ()
        if kind not in self.known_reruns:
            front = rerun_front(self.program, self.program.kinds[kind], self.prices, training)
            self.known_reruns[kind] = tuple(choice.policy for choice in spaced_choices(front))
        return self.known_reruns[kind]

    def on_groups(self, num_groups: int, inner_sizes: frozenset[int] = frozenset()) -> SearchContext:
        """The same search with the devices divided into so many groups; `inner_sizes` as above."""
        num_devices = self.num_devices * self.num_groups // num_groups
        return replace(
            self, num_devices=num_devices, num_groups=num_groups, notes=[], settled=dict(self.settled),
            inner_sizes=inner_sizes,
        )  # fmt: skip

    def time_assignment(self, count: int, *, joins_outputs: bool = True) -> TimeAssignment | str:
        """`time_assignment` of the program in so many microbatches."""
        given, joins = self.constraints.per_microbatch, joins_outputs or bool(self.program.loss)
        return self.request.known.get(
            (self.program,), ("time", count, joins, given),
            lambda: time_assignment(self.program, count, joins_outputs=joins, per_microbatch=given),
        )  # fmt: skip

    @property
    def pipeline_axis(self) -> Axis:
        """The axis on which device groups send to each other."""
        return Axis(self.num_groups, self.num_devices)

    @cached_property
    def meshes(self) -> tuple[tuple[int, ...], ...]:
        """The meshes that layers may use."""
        return (*self._usual_meshes, *self._meshes_of_experts)

    def meshes_of(self, layer: Layer) -> tuple[tuple[int, ...], ...]:
        """Those that `layer` may use."""
        if self._meshes_of_experts and not stack_sizes(self.program, layer):
            return self._usual_meshes
        return self.meshes

    @cached_property
    def _usual_meshes(self) -> tuple[tuple[int, ...], ...]:
        mesh = self.constraints.get("mesh")
        if isinstance(mesh, tuple):
            return (tuple(int(size) for size in mesh),)
        # A demanded degree for each of several names, and room for an axis more, takes as many axes.
        demanded = max(sum(degree > 1 for _, degree in demands.degrees) for demands in self.demands)
        max_axes = max(self.request.max_axes, min(3, demanded + 1))
        shapes = mesh_shapes(self.num_devices, self.prices.devices_per_node, max_axes)
        shapes = tuple(dict.fromkeys((*shapes, *_meshes_of_rows(self))))
        if self.inner_sizes:
            return tuple(shape for shape in shapes if len(shape) == 1 or math.prod(shape[1:]) in self.inner_sizes)
        if len(shapes) <= _ENOUGH_MESHES:
            return shapes
        widest = _WIDEST_INNER_NODES * self.prices.devices_per_node
        return tuple(shape for shape in shapes if math.prod(shape[1:]) <= widest)

    @cached_property
    def _meshes_of_experts(self) -> tuple[tuple[int, ...], ...]:
        return _meshes_of_experts(self, self._usual_meshes)

    @cached_property
    def shared_mesh(self) -> tuple[int, ...]:
        """The refinement of all meshes."""
        return refine_mesh(*self.meshes)

    @cached_property
    def shared_names(self) -> tuple[str, ...]:
        """Parameters that several layers read, or whose storage is the caller's."""
        count: dict[str, int] = {}
        for layer in self.program.layers:
            for name in layer.state:
                count[name] = count.get(name, 0) + 1
        return tuple(
            name
            for name, times in count.items()
            if (times > 1 or name in self.stored) and self.program.values[name].role == "parameter"
        )

    @cached_property
    def stored(self) -> dict[str, Layout]:
        """The parameters whose storage is the caller's, by value, with their layout on `shared_mesh`."""
        kept = {name: (mesh, layout) for name, mesh, layout in self.request.stored}
        for mesh in dict.fromkeys(mesh for mesh, _ in kept.values()):
            if not _is_refined(mesh, self.shared_mesh):
                raise ConstraintError(
                    f"parameters are kept on a mesh {'x'.join(map(str, mesh))}, but the axes of plans are merged from "
                    f"{'x'.join(map(str, self.shared_mesh))}: keep them on a mesh with axes of those sizes, in order"
                )
        return {
            value: refine_layout(kept[name][1], kept[name][0], self.shared_mesh)
            for value, name in self.program.parameters.items()
            if name in kept
        }

    @cached_property
    def ideal_s(self) -> float:
        """Seconds of a step if all devices of all groups shared all compute evenly and nothing else took time."""
        return float(self.ideal_layers_s.sum()) / self.num_groups

    @cached_property
    def ideal_layers_s(self) -> Array:
        """Forward and backward seconds of every layer, [2, layers], if the devices of a group shared all compute."""
        of_kind = {
            kind: (sum(each.forward_s for each in times), sum(each.backward_s for each in times))
            for kind, times in self.whole_s.items()
        }
        return np.array([of_kind[layer.kind] for layer in self.program.layers]).T / self.num_devices

    @cached_property
    def run_again(self) -> tuple[frozenset[int], ...]:
        """By layer, the ops that a demand makes backward run again, however the layer is sharded."""
        return tuple(
            self._ops_again(layer.kind) if self._is_rerun(layer, demands.recompute) else frozenset[int]()
            for layer, demands in zip(self.program.layers, self.demands, strict=True)
        )

    def _is_rerun(self, layer: Layer, recompute: str) -> bool:
        own = own_training(self.program, layer, self.request.training)
        return recompute not in ("", OPS) and is_layer_rerun(recompute, own)

    def _ops_again(self, kind: int) -> frozenset[int]:
        """The ops of a kind of layer that run again in backward if its whole forward does."""
        training, layer = self.request.training, self.program.kinds[kind]
        if not training.compiled:
            return frozenset(range(len(layer.ops)))
        return surely_run_again(place_whole(self.program, layer), fuses_attention=training.fuses_attention)

    @cached_property
    def ideal_again_s(self) -> Array:
        """Of every layer, the least seconds of what `run_again` says, if the devices of a group shared all compute."""
        seconds = (
            sum(self.whole_s[layer.kind][index].forward_s for index in again)
            for layer, again in zip(self.program.layers, self.run_again, strict=True)
        )
        return np.array(list(seconds)) / self.num_devices

    @property
    def whole_s(self) -> dict[int, tuple[OpTime, ...]]:
        """Per kind of layers, the seconds of each op on one device."""
        return self._whole_s(self.request.training)

    def _whole_s(self, training: TrainingSpec) -> dict[int, tuple[OpTime, ...]]:
        if training.compiled not in self.known_seconds:
            wholes = {layer.kind: place_whole(self.program, layer) for layer in self.program.kinds}
            self.known_seconds[training.compiled] = {
                kind: op_seconds(whole, self.prices, training) for kind, whole in wholes.items()
            }
        return self.known_seconds[training.compiled]

    @cached_property
    def op_shares(self) -> dict[int, tuple[tuple[float, float], ...]]:
        """Per kind of layers, which part of its seconds alone each op takes compiled on one device, forward and
        backward; {} if layers are not compiled.
        """
        training = self.request.training
        if not training.compiled:
            return {}
        alone = self._whole_s(training.running(compiled=False))
        return {
            kind: tuple(
                (_share(own.forward_s, other.forward_s), _share(own.backward_s, other.backward_s))
                for own, other in zip(times, alone[kind], strict=True)
            )
            for kind, times in self.whole_s.items()
        }

    @cached_property
    def memory_price_s_per_byte(self) -> float:
        """A usual price of memory, at which strategies are sought that save it."""
        price = _MEMORY_PRICE_SHARE * self.ideal_s / self.prices.memory_bytes
        return self.request.known.memory_price((self.program.layers[0], self.prices), self.request.training, price)

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Per layer, the index of the first layer that has the same candidates."""
        first: dict[tuple[object, ...], int] = {}
        return tuple(first.setdefault(self._signature(index), index) for index in range(len(self.program.layers)))

    def _signature(self, index: int) -> tuple[object, ...]:
        layer, (inputs, outputs) = self.program.layers[index], self._crossings(index)
        stored = tuple((name in self.shared_names, self.stored.get(name)) for name in layer.state)
        return layer.kind, self.demands[index], stored, inputs, outputs

    @cached_property
    def _crossing(self) -> frozenset[str]:
        """What some layer gets from another one, or from the caller."""
        return frozenset(name for layer in self.program.layers for name in layer.inputs)

    def _crossings(self, index: int) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """How a layer's inputs and outputs cross its boundaries."""
        layer, program = self.program.layers[index], self.program
        return (
            tuple((name in program.inputs, has_whole_boundary(program, name)) for name in layer.inputs),
            tuple((name in self._crossing, has_whole_boundary(program, name)) for name in layer.outputs),
        )

    def boundary_facts(self, index: int) -> tuple[object, ...]:
        """What the program around a layer says of it: candidates of the same layer in another program with the same
        facts are the same.
        """
        layer, program = self.program.layers[index], self.program
        names = (*layer.inputs, *layer.outputs)
        returned = tuple(
            (name in program.outputs, name in program.loss_terms, name in program.carried) for name in names
        )
        return self._crossings(index), returned, program.training, bool(program.loss), program.num_trainable_elements


def _share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s else 1.0


def _is_refined(mesh: tuple[int, ...], fine: tuple[int, ...]) -> bool:
    """Whether the axes of `mesh` are merged from those of `fine`."""
    try:
        return refine_mesh(mesh, fine) == refine_mesh(fine)
    except ValueError:
        return False


def input_rows(program: Program) -> Iterator[int]:
    """Rows of each input that has any dims."""
    shapes = (program.type_of(name).shape for name in program.inputs)
    return (shape[0] for shape in shapes if shape)


def shared_storage_choices(context: SearchContext) -> Iterator[SharedStorage]:
    """Where shared parameters may be stored: where the caller keeps them, else all whole or all sharded in one dim."""
    mesh = context.shared_mesh
    seen: list[SharedStorage] = []
    for placement in (REPLICATE, shard(0), shard(1)) if context.shared_names else (REPLICATE,):
        shared: SharedStorage = {
            name: (mesh, context.stored.get(name) or _shared_layout(context, name, placement))
            for name in context.shared_names
        }
        if shared not in seen:
            seen.append(shared)
            yield shared


def _shared_layout(context: SearchContext, name: str, placement: Placement) -> Layout:
    mesh = context.shared_mesh
    return boundary_layout((placement,) * len(mesh), context.program.type_of(name), mesh)


def _meshes_of_rows(context: SearchContext) -> tuple[tuple[int, ...], ...]:
    """Where several nodes share a row of the batch: rows, nodes of a row, and devices of a node.

    Rows then need no collective, heads are exchanged inside a node, and keys and values between nodes.  With two
    axes a decoder with 8 billion parameters, on 4 rows of 1,048,576 tokens and 256 devices, was 1.5 % slower by
    prediction.
    """
    per_node, rows = context.prices.devices_per_node, math.gcd(context.program.batch_size, context.num_devices)
    wanted = rows, context.num_devices // rows // per_node, per_node
    return (wanted,) if min(wanted) > 1 and wanted in mesh_shapes(context.num_devices, per_node, 3) else ()


def _meshes_of_experts(context: SearchContext, usual: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Where experts are demanded of several nodes each time: nodes, and devices of a node, as axes of their own, but
    not the `usual` ones.

    Only then does a token travel once to each node (`autopar.lower.kernels.experts`), not to each device.
    """
    per_node = context.prices.devices_per_node
    demanded = {dict(demands.degrees).get("expert", 1) for demands in context.demands}
    is_given = context.constraints.get("mesh") is not None
    shapes = () if is_given else mesh_shapes(context.num_devices, per_node, 3)
    return tuple(
        shape
        for shape in shapes
        if len(shape) == 3 and shape[2] == per_node and shape[1] * per_node in demanded
        and shape not in usual
    )  # fmt: skip
