"""Passes that write means and losses as sums of terms and a division, so that a sharded mean is a sum.

Also dropout and batch norm in their `autopar` form (see docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.ops.family import argument
from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.compat.torch_internals import argument_names
from autopar.trace.evaluation import run_op
from autopar.trace.graph import Graph, Names

__all__ = [
    "LOG_SOFTMAXES",
    "Writer",
    "make_gradients_dense",
    "rewrite",
    "rewrite_batch_norm",
    "rewrite_cross_entropy",
    "rewrite_dropout",
    "rewrite_losses",
    "rewrite_means",
]

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers for `reduction`


@dataclass
class Writer:
    """Appends ops in the place of one op; `types` are those of the values that a pass has made."""

    graph: Graph
    names: Names
    types: dict[str, TensorType]
    around: Op
    ops: list[Op] = field(default_factory=list[Op])

    def type_of(self, arg: Arg) -> TensorType:
        """The type of the value that `arg` refers to."""
        assert isinstance(arg, Ref)
        return self.types.get(arg.name) or self.graph.types[arg.name]

    def add(
        self, target: str, args: Sequence[Arg], result: TensorType | str, kwargs: tuple[tuple[str, Arg], ...] = ()
    ) -> Ref:
        """Append an op; `result` is the type of its one result, or the name of a value that exists already."""
        name = result if isinstance(result, str) else self.names.fresh(target.split(".")[1])
        if isinstance(result, TensorType):
            self.types[name] = result
        around = self.around
        self.ops.append(Op(name, target, tuple(args), kwargs, (name,), source=around.source, module=around.module))
        return Ref(name)


def rewrite(graph: Graph, write: Callable[[Writer, Op], None]) -> Graph:
    """Replace each op by what `write` appends for it; nothing appended keeps it."""
    names = Names(graph)
    types: dict[str, TensorType] = {}

    def step(op: Op) -> list[Op] | None:
        writer = Writer(graph, names, types, op)
        write(writer, op)
        return writer.ops or None

    return graph.rewrite(step).with_types(types)


def rewrite_dropout(graph: Graph) -> Graph:
    """``native_dropout`` and ``dropout`` become ``autopar.dropout``, or nothing where they do nothing."""
    readers = graph.count_readers()

    def write(writer: Writer, op: Op) -> None:
        if op.target not in ("aten.native_dropout.default", "aten.dropout.default"):
            return
        if any(readers[mask] for mask in op.results[1:]):
            return  # the mask is read; then the op stays as it is
        trains = argument(op, 2, "train", True) is not False and op.args[1] != 0
        target, args = ("autopar.dropout", op.args[:2]) if trains else ("aten.alias.default", op.args[:1])
        writer.add(target, args, op.results[0])

    return rewrite(graph, write)


_TRAINING_NORMS = (
    "aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.no_stats",
)  # fmt: skip


def rewrite_batch_norm(graph: Graph) -> Graph:
    """Batch norm on batch statistics becomes ``autopar.batch_norm``, on running ones ``aten.batch_norm``."""
    readers = graph.count_readers()
    names = Names(graph)
    types: dict[str, TensorType] = {}

    def step(op: Op) -> list[Op] | None:
        if any(readers[name] for name in op.results[1:3]):
            return None  # the saved statistics are read
        if op.target == "aten._native_batch_norm_legit_no_training.default":
            x, weight, bias, mean, var, momentum, eps = op.args
            args = (x, weight, bias, mean, var, False, momentum, eps, True)
            return [replace(op, target="aten.batch_norm.default", args=args, results=op.results[:1])]
        if op.target not in _TRAINING_NORMS:
            return None
        args = op.args if len(op.args) == 8 else (*op.args[:3], None, None, *op.args[3:])
        x, weight, bias, mean, var, _, momentum, eps = args
        new = op.results[3:] or tuple(names.fresh(f"{op.results[0]}_{stem}") for stem in ("mean", "var"))
        channels = TensorType((graph.types[op.operands[0]].shape[1],), "float32")
        types.update({name: graph.types.get(name, channels) for name in new})
        args = (x, weight, bias, mean, var, momentum, eps)
        return [replace(op, target="autopar.batch_norm", args=args, kwargs=(), results=(op.results[0], *new))]

    return graph.rewrite(step).with_types(types)


def rewrite_means(graph: Graph) -> Graph:
    """``mean`` becomes a sum and a division by the global count."""

    def write(writer: Writer, op: Op) -> None:
        if op.target not in ("aten.mean.dim", "aten.mean.default"):
            return
        source, result = writer.type_of(op.args[0]), graph.types[op.results[0]]
        if not source.is_floating and not dict(op.kwargs).get("dtype"):
            return
        target = "aten.sum.dim_IntList" if op.target == "aten.mean.dim" else "aten.sum.default"
        dims = argument(op, 1, "dim", None) if op.target == "aten.mean.dim" else None
        if op.target == "aten.mean.dim" and not dims:  # no dims named: all of them
            dims = tuple(range(len(source.shape)))
            op = replace(op, args=(op.args[0], dims, *op.args[2:]))
        total = writer.add(target, op.args, result, op.kwargs)
        writer.add("aten.div.Tensor", (total, _count(source, result)), op.results[0])

    return rewrite(graph, write)


def _count(source: TensorType, result: TensorType) -> int:
    return source.num_elements // max(result.num_elements, 1)


# Their mean is not a plain mean over positions: it divides by what counts, or by target lengths.
_NOT_ELEMENTWISE = (
    "aten.nll_loss",
    "aten.cross_entropy_loss",
    "aten.ctc_loss",
    "aten._ctc_loss",
    "aten.embedding_bag",
)


def rewrite_losses(graph: Graph) -> Graph:
    """Losses with a reduction become the loss of each position, a sum, and for "mean" a division."""

    def write(writer: Writer, op: Op) -> None:
        reduction = _named_argument(op, "reduction", _MEAN)
        if reduction is None or op.target.startswith(_NOT_ELEMENTWISE):
            return
        if reduction == _NONE or len(op.results) != 1:
            return
        each = _with_argument(op, "reduction", _NONE)
        each_type = infer_type(each, writer)
        terms = writer.add(op.target, each.args, each_type, each.kwargs)
        if reduction == _SUM:
            writer.add("aten.sum.default", (terms,), op.results[0])
            return
        total = writer.add("aten.sum.default", (terms,), graph.types[op.results[0]])
        writer.add("aten.div.Tensor", (total, each_type.num_elements), op.results[0])

    return rewrite(graph, write)


def make_gradients_dense(graph: Graph) -> Graph:
    """Embeddings with ``sparse=True`` become ordinary ones, whose gradients can be reduced and cut like all others.

    Their values are the same. Optimizers for sparse gradients alone say that they got dense ones.
    """

    def step(op: Op) -> list[Op] | None:
        return [_with_argument(op, "sparse", False)] if _named_argument(op, "sparse", False) else None

    return graph.rewrite(step)


def _named_argument(op: Op, name: str, default: Arg) -> Arg:
    """What it gets as `name`; None if there is no such argument."""
    names = argument_names(op.target)
    return argument(op, names.index(name), name, default) if name in names else None


def _with_argument(op: Op, name: str, value: Arg) -> Op:
    place = argument_names(op.target).index(name)
    if len(op.args) > place:
        return replace(op, args=(*op.args[:place], value, *op.args[place + 1 :]))
    return replace(op, kwargs=(*((k, v) for k, v in op.kwargs if k != name), (name, value)))


def infer_type(op: Op, writer: Writer) -> TensorType:
    """The type of the one result of `op`, by running it on meta tensors."""
    result = run_op(op, {name: meta_tensor(writer.type_of(Ref(name))) for name in op.operands})
    return TensorType(tuple(result[0].shape), str(result[0].dtype).removeprefix("torch."))


def meta_tensor(kind: TensorType) -> torch.Tensor:
    """A meta tensor of this type."""
    return torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device="meta")


_CROSS_ENTROPIES = ("aten.cross_entropy_loss.default",)
_NLLS = ("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default")
_FLATTENINGS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.flatten.using_ints")
LOG_SOFTMAXES = ("aten.log_softmax.int", "aten._log_softmax.default")


def rewrite_cross_entropy(graph: Graph) -> Graph:
    """Cross entropy, and negative log likelihood of a log-softmax, become ``autopar.cross_entropy``."""
    producers = graph.producers
    readers = graph.count_readers()

    def write_unflattened(writer: Writer, call: _LossCall) -> None:
        call = _with_last_classes(writer, call, producers)
        unflattened = _unflattened(writer, call, producers, readers)
        if unflattened is call or call.reduction != _NONE:
            _write_cross_entropy(writer, unflattened)
            return
        logits, target = (writer.type_of(arg) for arg in (unflattened.logits, unflattened.target))
        args = (
            unflattened.logits,
            unflattened.target,
            unflattened.weight,
            unflattened.class_dim,
            *_settings(unflattened),
            "none",
        )
        each = writer.add("autopar.cross_entropy", args, TensorType(target.shape, logits.dtype))
        writer.add("aten.reshape.default", (each, graph.types[call.result].shape), call.result)

    def write(writer: Writer, op: Op) -> None:
        if op.target not in (*_CROSS_ENTROPIES, *_NLLS):
            return
        call = _LossCall(
            op.args[0], op.args[1], argument(op, 2, "weight", None), argument(op, 3, "reduction", _MEAN),
            argument(op, 4, "ignore_index", -100), argument(op, 5, "label_smoothing", 0.0), op.results[0],
        )  # fmt: skip
        if op.target in _CROSS_ENTROPIES:
            if writer.type_of(call.target).is_floating:
                _write_class_probabilities(writer, call)
            else:
                write_unflattened(writer, call)
        else:
            softmax = producers.get(op.operands[0])
            dim = 1 if len(writer.type_of(op.args[0]).shape) > 1 else 0
            if softmax is not None and softmax.target in LOG_SOFTMAXES and _same_dim(softmax, dim, writer):
                write_unflattened(writer, replace(call, logits=softmax.args[0]))
            else:
                _write_likelihood(writer, call, dim)

    return rewrite(graph, write)


def _same_dim(softmax: Op, dim: int, writer: Writer) -> bool:
    given = softmax.args[1]
    source, result = writer.type_of(softmax.args[0]), writer.graph.types[softmax.results[0]]
    return isinstance(given, int) and given % len(source.shape) == dim and source.dtype == result.dtype


@dataclass(frozen=True)
class _LossCall:
    logits: Arg
    target: Arg
    weight: Arg
    reduction: Arg
    ignore_index: Arg
    label_smoothing: Arg
    result: str
    class_dim: int = 1


def _unflattened(writer: Writer, call: _LossCall, producers: Mapping[str, Op], readers: Mapping[str, int]) -> _LossCall:
    """The call without views that only join the dims of positions, so that these can be split one by one.

    A sum over positions is the same in any shape, and the loss of each position gets the shape back. Between view and
    loss there may be a cast of the logits, as mixed precision makes it.
    """
    view, target_view = (producers.get(arg.name) for arg in (call.logits, call.target) if isinstance(arg, Ref))
    cast = None
    if view is not None and view.target == "aten._to_copy.default" and readers[view.results[0]] == 1:
        cast, view = view, producers.get(view.operands[0])
    if view is None or target_view is None:
        return call
    if view.target not in _FLATTENINGS or target_view.target not in _FLATTENINGS:
        return call
    logits, target = writer.type_of(Ref(view.operands[0])), writer.type_of(Ref(target_view.operands[0]))
    flat = writer.type_of(call.logits)
    if logits.shape != (*target.shape, flat.shape[-1]) or len(flat.shape) != 2:
        return call
    if view.operands[0] in writer.graph.strided:
        return call  # the view copies, as rows don't follow each other in memory, which is priced as a copy
    source = Ref(view.operands[0])
    if cast is not None:
        source = writer.add(cast.target, (source,), replace(flat, shape=logits.shape), cast.kwargs)
    return replace(call, logits=source, target=Ref(target_view.operands[0]), class_dim=len(target.shape))


def _with_last_classes(writer: Writer, call: _LossCall, producers: Mapping[str, Op]) -> _LossCall:
    """The call without a move of the classes from the last dim to the second."""
    move = producers.get(call.logits.name) if isinstance(call.logits, Ref) else None
    rank = len(writer.type_of(call.logits).shape)
    if move is None or rank < 3 or call.class_dim != 1:
        return call
    order = list(range(rank))
    if move.target == "aten.transpose.int":
        first, second = (dim % rank for dim in move.args[1:3] if isinstance(dim, int))
        order[first], order[second] = second, first
    elif move.target == "aten.permute.default" and isinstance(move.args[1], tuple):
        order = [dim % rank for dim in move.args[1] if isinstance(dim, int)]
    if order != [0, rank - 1, *range(1, rank - 1)]:
        return call
    return replace(call, logits=Ref(move.operands[0]), class_dim=rank - 1)


def _settings(call: _LossCall) -> tuple[Arg, Arg]:
    return call.ignore_index, call.label_smoothing


def _write_cross_entropy(writer: Writer, call: _LossCall) -> None:
    logits, target = writer.type_of(call.logits), writer.type_of(call.target)
    class_dim = call.class_dim if len(logits.shape) > 1 else 0
    each = call.reduction == _NONE
    # Thousands of terms don't add up in 16 bits.
    sum_dtype = "float64" if logits.dtype == "float64" else "float32"
    kind = TensorType(target.shape, logits.dtype) if each else TensorType((), sum_dtype)
    reduction = "none" if each else "sum"
    args = (call.logits, call.target, call.weight, class_dim, *_settings(call), reduction)
    if call.reduction == _NONE or (call.reduction != _MEAN and logits.dtype == sum_dtype):
        writer.add("autopar.cross_entropy", args, call.result)
        return
    total = writer.add("autopar.cross_entropy", args, kind)
    if call.reduction == _MEAN:
        _divide_by_what_counts(writer, call, total, logits.shape[class_dim])
    else:
        writer.add("aten._to_copy.default", (total,), call.result, (("dtype", f"torch.{logits.dtype}"),))


def _divide_by_what_counts(writer: Writer, call: _LossCall, total: Ref, num_classes: int) -> None:
    args = (call.target, call.weight, call.ignore_index, num_classes)
    # As precise as the weights are, and at least float32: a count in half precision would be wrong.
    dtype = "float64" if call.weight is not None and writer.type_of(call.weight).dtype == "float64" else "float32"
    count = writer.add("autopar.cross_entropy_denominator", args, TensorType((), dtype))
    result = writer.graph.types[call.result]
    if result.dtype in ("float32", "float64"):
        writer.add("aten.div.Tensor", (total, count), call.result)
        return
    quotient = writer.add("aten.div.Tensor", (total, count), TensorType((), dtype))
    writer.add("aten._to_copy.default", (quotient,), call.result, (("dtype", f"torch.{result.dtype}"),))


def _write_class_probabilities(writer: Writer, call: _LossCall) -> None:
    """Targets that are probabilities: minus the sum over classes of weight * target * log_softmax(logits)."""
    logits, target = writer.type_of(call.logits), writer.type_of(call.target)
    dim = 1 if len(logits.shape) > 1 else 0
    classes = logits.shape[dim]
    goal, kind = call.target, replace(target, dtype=logits.dtype)
    smoothing = call.label_smoothing
    assert isinstance(smoothing, float | int)
    if smoothing:
        goal = writer.add("aten.mul.Tensor", (goal, 1.0 - smoothing), target)
        goal = writer.add("aten.add.Tensor", (goal, smoothing / classes), target)
    scores = writer.add("aten.log_softmax.int", (call.logits, dim), logits)
    terms = writer.add("aten.mul.Tensor", (scores, goal), kind)
    if call.weight is not None:
        shape = tuple(classes if d == dim else 1 for d in range(len(logits.shape)))
        weight_type = replace(writer.type_of(call.weight), shape=shape)
        weight = writer.add("aten.reshape.default", (call.weight, shape), weight_type)
        terms = writer.add("aten.mul.Tensor", (terms, weight), kind)
    result = writer.graph.types[call.result]
    if call.reduction == _NONE:
        total = writer.add("aten.sum.dim_IntList", (terms, (dim,)), result)
        writer.add("aten.neg.default", (total,), call.result)
        return
    total = writer.add("aten.sum.default", (terms,), result)
    count = logits.num_elements // classes if call.reduction == _MEAN else 1
    writer.add("aten.div.Tensor", (total, -count), call.result)


def _write_likelihood(writer: Writer, call: _LossCall, dim: int) -> None:
    """Negative log likelihood of scores that come from anywhere: gather, mask, sum."""
    scores, target = writer.type_of(call.logits), writer.type_of(call.target)
    mask_type = TensorType(target.shape, "bool")
    counts = writer.add("aten.ne.Scalar", (call.target, call.ignore_index), mask_type)
    safe = writer.add("aten.mul.Tensor", (call.target, counts), target)
    column_shape = (*target.shape[:dim], 1, *target.shape[dim:])
    index = writer.add("aten.unsqueeze.default", (safe, dim), replace(target, shape=column_shape))
    column = writer.add("aten.gather.default", (call.logits, dim, index), replace(scores, shape=column_shape))
    each_type = replace(scores, shape=target.shape)
    each = writer.add("aten.squeeze.dim", (column, dim), each_type)
    each = writer.add("aten.neg.default", (each,), each_type)
    if call.weight is not None:
        weights = writer.add(
            "aten.embedding.default",
            (_as_table(writer, call.weight), safe),
            replace(writer.type_of(call.weight), shape=(*target.shape, 1)),
        )
        weights = writer.add("aten.squeeze.dim", (weights, len(target.shape)), each_type)
        each = writer.add("aten.mul.Tensor", (each, weights), each_type)
    final = call.result if call.reduction == _NONE else each_type
    zero = writer.add("aten.logical_not.default", (counts,), mask_type)
    each = writer.add("aten.masked_fill.Scalar", (each, zero, 0.0), final)
    if call.reduction == _NONE:
        return
    result = writer.graph.types[call.result]
    total = writer.add("aten.sum.default", (each,), call.result if call.reduction == _SUM else result)
    if call.reduction == _MEAN:
        _divide_by_what_counts(writer, call, total, scores.shape[dim])


def _as_table(writer: Writer, weight: Arg) -> Ref:
    kind = writer.type_of(weight)
    return writer.add("aten.unsqueeze.default", (weight, 1), replace(kind, shape=(*kind.shape, 1)))
