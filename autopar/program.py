"""The Program: a traced model as data.  Layers of ops over values; no device, no mesh, no torch.

``trace`` creates it; ``cost``, ``search``, ``lower`` and ``explain`` read it.  Everything is frozen and
hashable, and values are identified by their names in the traced graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.placement import Placement

__all__ = [
    "Arg",
    "KernelCollective",
    "LateOutput",
    "Layer",
    "Op",
    "Option",
    "Program",
    "Ref",
    "TensorType",
    "Value",
    "itemsize_bytes",
    "iter_refs",
]

_ITEMSIZE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


def itemsize_bytes(dtype: str) -> int:
    """Bytes per element of a dtype, given torch's name without ``torch.``."""
    return _ITEMSIZE_BYTES[dtype]


@dataclass(frozen=True)
class TensorType:
    """A global shape, and a dtype by torch's name without ``torch.``, for instance ``"bfloat16"``."""

    shape: tuple[int, ...]
    dtype: str

    def __hash__(self) -> int:
        """Cached, as prices are looked up by types."""
        return self._hash

    def __reduce__(self) -> tuple[type[TensorType], tuple[tuple[int, ...], str]]:
        """Without what is cached: hashes of strings differ between processes."""
        return TensorType, (self.shape, self.dtype)

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.dtype))

    @cached_property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.num_elements * itemsize_bytes(self.dtype)

    @property
    def is_floating(self) -> bool:
        """Whether the dtype can carry a gradient."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True)
class Value:
    """One tensor of the program.

    `role` is ``"input"`` (a tensor argument of the model), ``"parameter"``, ``"buffer"``, ``"constant"``
    (the same throughout a step, and whole on every device: folded while tracing, or computed by
    `Program.hoisted`) or ``"op"`` (computed by a layer).  `requires_grad` says whether a gradient flows into it.
    """

    name: str
    type: TensorType
    role: str
    requires_grad: bool

    @property
    def can_be_loss(self) -> bool:
        """Whether a caller may begin ``backward()`` with it: it is one number that a gradient flows into."""
        return self.type.shape == () and self.requires_grad


@dataclass(frozen=True)
class Ref:
    """A reference to a value among an op's arguments."""

    name: str


Arg = Ref | None | bool | int | float | complex | str | tuple["Arg", ...]
"""An argument: a Ref, a literal (dtypes and the like as text, such as "torch.float32"), or a tuple of arguments."""


def iter_refs(arg: Arg) -> Iterator[str]:
    """The names of the values that `arg` refers to, in order, with repeats."""
    return iter(_refs((arg,)))


def _refs(args: tuple[Arg, ...]) -> list[str]:
    names: list[str] = []
    for arg in args:
        if type(arg) is Ref:
            names.append(arg.name)
        elif type(arg) is tuple:
            names += _refs(arg)
    return names


@dataclass(frozen=True)
class KernelCollective:
    """A collective that a special kernel runs internally, on the axis that its option is assigned to.

    Args:
        kind: ``"all_reduce"`` or another of `autopar.placement.Step`'s collectives.
        phase: ``"forward"`` or ``"backward"``.
        operand: index of the tensor operand whose local shape, without `drop_dims`, the buffer has; results
            are numbered after the operands.
        drop_dims: dims left out of that shape.
        dtype: dtype of the buffer.
        count: the number of such tensors in one buffer.
        is_ring: it runs once for each other device of the axis, as in a ring, instead of once; on several axes so for
            each step on the axes further out.
        returns: in a ring, what travels takes one step more and comes home.
        piece: it runs for this number of elements of that shape at a time; 0: for all in one call.
        growth: (number of devices that run the kernel together, factor by which the buffer is larger than that shape).
        reached: the same for the devices on its axis and on those further out that run the kernel.
        is_of_gradient: it moves the gradient of `operand`, and runs only if the operand has one.
        pause: if the kernel runs in parts, in which of its pauses it is under way on the outermost axis, 1 or 2; 0: it
            is waited for at once.
    """

    kind: str
    phase: str
    operand: int
    drop_dims: tuple[int, ...] = ()
    dtype: str = "float32"
    count: float = 1
    is_ring: bool = False
    returns: bool = False
    piece: int = 0
    growth: tuple[tuple[int, float], ...] = ()
    reached: tuple[tuple[int, float], ...] = ()
    is_of_gradient: bool = False
    pause: int = 0


@dataclass(frozen=True)
class Option:
    """One way to run an op on one mesh axis: which factor the axis splits.

    Args:
        factor: the factor's name; ``"-"`` for the whole op on every device; ``"~"`` for the same with
            gradients that are terms of a sum; ``"+"`` for a linear op applied to terms of a sum.
        operands: the placement of each tensor operand, in the order of `Op.operands`.
        results: the placement of each result.
        extent: the number of slices of the factor must divide this (0: any number, as the axis splits nothing).
        kernel: ``""``: the op itself runs on the local tensors; otherwise the name of a special kernel in
            ``lower.kernels``.
        collectives: the collectives of that kernel.
        traveling: operands whose slices the kernel receives one after another (see `autopar.ops.family.Kernel`).
        is_on_one_axis: the kernel runs on one axis only.
    """

    factor: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    extent: int = 0
    kernel: str = ""
    collectives: tuple[KernelCollective, ...] = ()
    traveling: tuple[int, ...] = ()
    is_on_one_axis: bool = False

    def with_gradients_of(self, needs: tuple[bool, ...]) -> Option:
        """The option without collectives of gradients that operands don't have; `needs` says which have one."""
        kept = tuple(each for each in self.collectives if not each.is_of_gradient or needs[each.operand])
        return self if len(kept) == len(self.collectives) else replace(self, collectives=kept)


@dataclass(frozen=True)
class Op:
    """One op of the graph.

    `target` is the op's qualified name: ``"aten.linear.default"``, or ``"autopar.<name>"`` for ops that trace
    introduced (they are implemented in ``lower.kernels``).  `results` are the names of the values it defines.
    `options` are the ways it can be split, from its factor rule; `rule_source` is ``"rule"``, ``"discovered"`` or
    ``"whole"`` (there is no rule, and none was discovered).  `saves` are the tensors that autograd saves for backward,
    as indices into operands, then results; `saved_extra_bytes` are the other bytes that it saves (statistics, masks),
    for the whole op, proportional to its largest tensor.  `temporary_bytes` are what else the whole op has in memory
    while it runs, forward and backward, if it runs as other ops or is none of torch's; of all others the record says
    it.  `plain_saves`, `plain_saved_extra_bytes` and `plain_temporary_bytes` are the same where no fast kernel supports
    the call and it runs as plain products, such as attention with dropout or a trained mask on CPUs; they are empty if
    that never happens.  `size_args` lists the positions of arguments that repeat the result's
    global sizes and become local when lowered.  `is_random` marks ops that draw random numbers, `is_view` those whose
    result may alias the first operand.  `source` is the user's ``file:line``, `module` the path of the module that ran
    the op.
    """

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[str, ...]
    options: tuple[Option, ...] = ()
    rule_source: str = "rule"
    size_args: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    saved_extra_bytes: int = 0
    temporary_bytes: tuple[int, int] = (0, 0)
    plain_saves: tuple[int, ...] = ()
    plain_saved_extra_bytes: int = 0
    plain_temporary_bytes: tuple[int, int] = (0, 0)
    is_random: bool = False
    is_view: bool = False
    source: str = ""
    module: str = ""

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the values it reads, one entry for each occurrence, positional arguments first."""
        return (*_refs(self.args), *(_refs(tuple(arg for _, arg in self.kwargs)) if self.kwargs else ()))

    @cached_property
    def has_collectives(self) -> bool:
        """Whether the special kernel of an option communicates."""
        return any(option.collectives for option in self.options)

    def map_args(self, change: Callable[[Arg], Arg], **fields: Any) -> Op:
        """The op with ``change(arg)`` instead of each argument, and of each entry of arguments that are tuples; and
        with other `fields`.
        """

        args, kwargs = self.mapped_args(change)
        return replace(self, args=args, kwargs=kwargs, **fields)

    def mapped_args(self, change: Callable[[Arg], Arg]) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """The ``args, kwargs`` of `map_args`, for those who compare arguments and need no op."""

        def visit(arg: Arg) -> Arg:
            return tuple(map(visit, arg)) if isinstance(arg, tuple) else change(arg)

        return tuple(map(visit, self.args)), tuple((name, visit(arg)) for name, arg in self.kwargs)

    def reading(self, names: Mapping[str, str]) -> Op:
        """The op reading ``names[n]`` instead of n, for each n that is a key; other operands stay."""
        if names.keys().isdisjoint(self.operands):
            return self
        return self.map_args(lambda arg: Ref(names.get(arg.name, arg.name)) if isinstance(arg, Ref) else arg)

    def with_numbered_operands(self) -> Op:
        """The op with its operands renamed to ``"0"``, ``"1"``, ..., one name for each occurrence."""
        count = itertools.count()
        return self.map_args(lambda arg: Ref(str(next(count))) if isinstance(arg, Ref) else arg)


@dataclass(frozen=True)
class Layer:
    """A contiguous piece of the graph between narrow cuts.

    `inputs` are the activations of earlier layers and the model inputs that it reads, `state` the parameters, buffers
    and constants that it reads, `outputs` the values that later layers or the caller read.  The `ops`, `inputs`,
    `state` and `outputs` of all layers of one `kind` correspond by position.
    """

    name: str
    kind: int
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    state: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class LateOutput:
    """An output that is computed when the caller reads it, from another value that layers compute.

    Args:
        place: its index in `Program.outputs`, which has the value that it is computed from there.
        ops: the ops that compute it from that value and from parameters.
        result: the name of the output.
    """

    place: int
    ops: tuple[Op, ...]
    result: str


@dataclass(frozen=True)
class Program:
    """A whole traced model.

    Args:
        values: every value by name.
        layers: in execution order.
        inputs: names of the tensor inputs, in the flattened order of the call's arguments.
        parameters: value name -> the parameter's name in the module, for every parameter and buffer that is read.
        aliases: further module names of the same tensor (tied weights) -> the name in `parameters`.
        outputs: names of the values that the model returns, in flattened order (repeats allowed).
        loss: name of the output that is the scalar loss; "": the caller makes a loss of the outputs, in which several
            may be scalars.
        updates: buffer value name -> name of the value that replaces it after a forward.
        hoisted: the ops that read only constants and buffers, and no buffer that a forward updates.  Every
            device runs them whole when a step begins, as buffers can be written to between steps.
        notes: what a user should know about this trace (dropped outputs, ops that run whole ...).
        fingerprint: identifies model structure and input shapes; plans refer to it.
        training: whether the model was traced in training mode.
        late: outputs that no layer computes; they are computed when the caller reads them.
        piece_tokens: for how many tokens logits are computed at a time; 0: for all (`autopar.step.variants.logits`).
        carried: the entries of `inputs` and `outputs` that are passed from call to call (keys and values of tokens);
            devices keep their parts of them between calls.
        tail: the ops that run after all layers, once a step, whole on every device: they read sums over the whole
            batch (`autopar.step.variants.tail`).
        statistics: the ops for which each microbatch may use its own statistics instead of the whole batch's
            (`autopar.step.variants.statistics`).
    """

    values: Mapping[str, Value] = field(hash=False)
    layers: tuple[Layer, ...]
    inputs: tuple[str, ...]
    parameters: Mapping[str, str] = field(hash=False)
    aliases: Mapping[str, str] = field(hash=False)
    outputs: tuple[str, ...]
    loss: str = ""
    updates: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    hoisted: tuple[Op, ...] = ()
    notes: tuple[str, ...] = ()
    fingerprint: str = ""
    training: bool = True
    late: tuple[LateOutput, ...] = ()
    piece_tokens: int = 0
    carried: frozenset[str] = frozenset()
    tail: tuple[Op, ...] = ()
    statistics: tuple[str, ...] = ()

    @cached_property
    def tail_reads(self) -> tuple[str, ...]:
        """What layers compute and `tail` reads, in the order in which it does."""
        made = {name for op in self.tail for name in op.results}
        read = dict.fromkeys(name for op in self.tail for name in op.operands)
        return tuple(name for name in read if name not in made and self.values[name].role == "op")

    @cached_property
    def is_loss_late(self) -> bool:
        """Whether `tail` makes the loss, so that no backward begins before all forwards have ended."""
        return any(self.loss in op.results for op in self.tail)

    @property
    def has_loss_in_layers(self) -> bool:
        """Whether each microbatch makes a term of the loss, with which its backward may begin."""
        return bool(self.loss) and not self.is_loss_late

    @cached_property
    def loss_terms(self) -> tuple[str, ...]:
        """What layers make of the loss: the loss, or what `tail` makes it of; nothing without a loss."""
        if self.is_loss_late:
            return self.tail_reads
        return (self.loss,) if self.loss else ()

    @cached_property
    def whole_results(self) -> tuple[str, ...]:
        """What layers give whole to every device: what they make of the loss, what `tail` reads, new values of buffers.

        Without a loss also all outputs.
        """
        late = {name for op in self.tail for name in op.results}
        returned = self.loss_terms if self.loss else self.outputs
        names = dict.fromkeys((*returned, *self.tail_reads, *self.updates.values()))
        return tuple(name for name in names if name not in late)

    @cached_property
    def with_gradient(self) -> frozenset[str]:
        """The values whose gradient is computed: not those of which only what has none is made, a comparison or an
        integer.
        """
        made = {*self.outputs, *self.tail_reads, *self.updates.values()}
        for op in reversed([*(op for layer in self.layers for op in layer.ops), *self.tail]):
            if any(name in made and self.values[name].requires_grad for name in op.results):
                made.update(op.operands)
        return frozenset(name for name in made if self.values[name].requires_grad)

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The first layer of each kind, by kind number."""
        first: dict[int, Layer] = {}
        for layer in self.layers:
            first.setdefault(layer.kind, layer)
        return tuple(first[kind] for kind in sorted(first))

    @cached_property
    def num_trainable_elements(self) -> int:
        """The number of elements of all parameters that a gradient flows into."""
        values = map(self.values.__getitem__, self.parameters)
        return sum(value.type.num_elements for value in values if value.role == "parameter" and value.requires_grad)

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """The names in the module of the parameters that no gradient flows into."""
        named = ((name, self.values[value]) for value, name in self.parameters.items())
        return tuple(name for name, value in named if value.role == "parameter" and not value.requires_grad)

    @cached_property
    def batch_size(self) -> int:
        """The number of rows of the global batch, from the first input that has rows."""
        shapes = (self.type_of(name).shape for name in self.inputs)
        return next((shape[0] for shape in shapes if shape), 1)

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens of the global batch, if the first input with rows is ids ``[rows, length]``; else 0."""
        first = next((kind for kind in map(self.type_of, self.inputs) if kind.shape), None)
        is_ids = first is not None and len(first.shape) == 2 and first.dtype in ("int64", "int32")
        return first.num_elements if first is not None and is_ids else 0

    @cached_property
    def output_sources(self) -> Mapping[str, frozenset[str]]:
        """For each output, the other outputs that it is computed from with a gradient."""
        outputs = frozenset(name for name in self.outputs if self.values[name].requires_grad)
        behind: dict[str, frozenset[str]] = {}
        for op in (op for layer in self.layers for op in layer.ops):
            operands = [name for name in op.operands if self.values[name].requires_grad]
            found = outputs.intersection(operands).union(*(behind.get(name, frozenset()) for name in operands))
            behind.update((name, found) for name in op.results if self.values[name].requires_grad)
        return {name: behind.get(name, frozenset()) for name in self.outputs}

    def type_of(self, name: str) -> TensorType:
        """The type of the value `name`."""
        return self.values[name].type
