"""The bytes that one layer takes on one device.

========  =======================  ==================================  =========
ZeRO      parameters               gradients                           optimizer
========  =======================  ==================================  =========
0         stored                   as the copy                         stored
1         stored and gathered      as the copy, and reduced            stored
2         stored and gathered      reduced (one layer's in transit)    stored
3         stored (a layer gathered in transit)   as 2                  stored
========  =======================  ==================================  =========

Saved activations are what autograd keeps (`Op.saves`), each tensor once: readers that find a value as it lies
share it, and a view shares with what it views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.placement import Step, local_shape
from autopar.program import is_cheap, itemsize_bytes
from autopar.search.flows import Flow, is_alias
from autopar.search.placed import PlacedLayer
from autopar.search.reshard_tables import LOCAL
from autopar.search.training import TrainingSpec

__all__ = ["ParameterMemory", "activation_memory", "held_memory", "parameter_memory"]


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes of parameters, their gradients and optimizer state; `transient_bytes` only while their layer
    runs.
    """

    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    transient_bytes: float = 0.0

    @property
    def persistent_bytes(self) -> float:
        """What is held all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def parameter_memory(
    dtype: str, stored: float, copied: float, zero: int, trainable: bool, training: TrainingSpec
) -> ParameterMemory:
    """Memory of a parameter of which this device stores `stored` elements and computes with `copied`."""
    compute = itemsize_bytes(dtype)
    storage = training.storage_itemsize(dtype)
    needs_copy = copied != stored or storage != compute
    copy_bytes = copied * compute if needs_copy else 0.0
    keeps_copy = zero < 3
    parameter = stored * storage + (copy_bytes if keeps_copy else 0.0)
    transient = 0.0 if keeps_copy else copy_bytes
    if not (trainable and training.is_training):
        return ParameterMemory(parameter, transient_bytes=transient)
    itemsize = training.gradient_itemsize(dtype)
    gradient = stored * itemsize
    if copied != stored:
        if zero >= 2:
            transient += copied * itemsize
        else:
            gradient += copied * itemsize
    return ParameterMemory(parameter, gradient, stored * training.optimizer_state_bytes_per_element, transient)


def held_memory(placed: PlacedLayer, training: TrainingSpec) -> ParameterMemory:
    """The bytes of parameters and what belongs to them; those in shared storage are left out (not their
    transients).
    """
    held = [_held_memory(placed, flow, training) for flow in placed.flows.values() if flow.source == "held"]
    return ParameterMemory(
        sum(memory.parameter_bytes for memory in held),
        sum(memory.gradient_bytes for memory in held),
        sum(memory.optimizer_bytes for memory in held),
        sum(memory.transient_bytes for memory in held),
    )


def activation_memory(
    placed: PlacedLayer, hows: Iterable[str], training: TrainingSpec
) -> dict[str, tuple[float, float]]:
    """For each way to recompute, the saved bytes and the transient ones (those of parameters left out)."""
    working = _largest_working_set(placed)
    if not training.is_training:
        return dict.fromkeys(hows, (0.0, working))
    found: dict[str, tuple[float, float]] = {}
    everything = _saved_bytes(placed, "none")
    for how in hows:
        saved = everything if how == "none" else _saved_bytes(placed, how)
        again = {"none": 0.0, "selective": everything - saved, "full": everything}[how]
        found[how] = saved, working + max(0.0, again)
    return found


def _held_memory(placed: PlacedLayer, flow: Flow, training: TrainingSpec) -> ParameterMemory:
    value = flow.value
    stored = math.prod(local_shape(value.type.shape, placed.storage[flow.producer], placed.mesh))
    if not flow.is_parameter:
        return ParameterMemory(stored * itemsize_bytes(value.type.dtype))
    if not flow.readers:
        copied = stored
    else:
        copied = math.prod(local_shape(value.type.shape, placed.copies[value.name], placed.mesh))
    if value.name in placed.shared:
        mesh, layout = placed.shared[value.name]
        stored = math.prod(local_shape(value.type.shape, layout, mesh))
        gathered = parameter_memory(value.type.dtype, stored, copied, 3, value.requires_grad, training)
        return ParameterMemory(transient_bytes=gathered.transient_bytes)
    return parameter_memory(value.type.dtype, stored, copied, placed.zero, value.requires_grad, training)


def _largest_working_set(placed: PlacedLayer) -> float:
    """Bytes of the op with the largest activations, read and written; backward has their gradients
    instead.
    """
    largest = 0.0
    for op, state in zip(placed.layer.ops, placed.states, strict=True):
        flows = [placed.flows[name] for name in op.operands]
        read = sum(t.num_bytes for f, t in zip(flows, state.operand_types, strict=True) if f.source != "held")
        largest = max(largest, read + sum(tensor.num_bytes for tensor in state.result_types))
    return largest


# A tensor in memory: (value, where on its way it was made, layout as made or ()).
_Key = tuple[str, str, object]


def _saved_bytes(placed: PlacedLayer, recompute: str) -> float:
    """Bytes kept from forward to backward, for one microbatch."""
    kept: dict[_Key, float] = {}
    tensors = {"none": _autograd_saves, "selective": _selective_saves, "full": _input_saves}[recompute]
    for key, num_bytes in tensors(placed):
        if placed.flows[key[0]].source != "held":
            kept[key] = num_bytes
    return sum(kept.values()) + _extra_bytes(placed, recompute)


def _extra_bytes(placed: PlacedLayer, recompute: str) -> float:
    total = 0.0
    for op, state in zip(placed.layer.ops, placed.states, strict=True):
        if op.saved_extra_bytes and (recompute == "none" or (recompute == "selective" and not is_cheap(op))):
            whole = placed.program.type_of(op.results[0]).num_elements
            total += op.saved_extra_bytes * state.result_types[0].num_elements / max(1, whole)
    return total


def _autograd_saves(placed: PlacedLayer) -> Iterator[tuple[_Key, float]]:
    for index, op in enumerate(placed.layer.ops):
        names = op.operands
        for position in op.saves:
            if position < len(names):
                yield _operand(placed, placed.flows[names[position]], index, position)
            else:
                yield _source(placed, placed.flows[op.results[position - len(names)]])


def _input_saves(placed: PlacedLayer) -> Iterator[tuple[_Key, float]]:
    for flow in placed.flows.values():
        if flow.source == "input" and flow.readers and flow.value.name not in placed.program.inputs:
            yield _source(placed, flow)


def _selective_saves(placed: PlacedLayer) -> Iterator[tuple[_Key, float]]:
    """Inputs, results of ops that are not cheap, and whatever a collective brought."""
    yield from _input_saves(placed)
    for flow in placed.read_flows():
        if flow.source == "op":
            is_kept = not is_cheap(placed.layer.ops[flow.producer])
            if is_kept or _communicates(placed.to_copy(flow)):
                yield _copy(placed, flow)
        for op, mention in flow.readers:
            if _communicates(placed.to_reader(flow, op, mention)):
                yield _operand(placed, flow, op, mention)


def _communicates(steps: tuple[Step, ...]) -> bool:
    return any(step.forward not in LOCAL for step in steps)


def _is_in_place(steps: tuple[Step, ...]) -> bool:
    return all(step.forward == "none" for step in steps)


def _operand(placed: PlacedLayer, flow: Flow, op: int, mention: int) -> tuple[_Key, float]:
    """The tensor that an op reads: its own, or the copy if that lies as the op needs it."""
    if _is_in_place(placed.to_reader(flow, op, mention)):
        return _copy(placed, flow)
    state = placed.states[op]
    return (flow.value.name, "operand", state.operands[mention]), state.operand_types[mention].num_bytes


def _copy(placed: PlacedLayer, flow: Flow) -> tuple[_Key, float]:
    if _is_in_place(placed.to_copy(flow)):
        return _source(placed, flow)
    num_bytes = placed.local_bytes(placed.view.value_type(flow), placed.copies[flow.value.name])
    return (flow.value.name, "copy", ()), num_bytes


def _source(placed: PlacedLayer, flow: Flow) -> tuple[_Key, float]:
    """The tensor as it is produced or arrives; for a view, what it views."""
    if flow.source == "op":
        op = placed.layer.ops[flow.producer]
        if is_alias(placed.layer, placed.flows, op):
            return _operand(placed, placed.flows[op.operands[0]], flow.producer, 0)
        num_bytes = placed.states[flow.producer].result_types[flow.result].num_bytes
    else:
        num_bytes = placed.local_bytes(placed.view.value_type(flow), placed.source(flow))
    return (flow.value.name, "source", ()), num_bytes
