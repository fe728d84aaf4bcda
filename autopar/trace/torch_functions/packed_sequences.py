"""Recurrent modules on packed sequences, as tracing wants them: an op on padded sequences and their lengths.

How many entries a packed sequence has depends on lengths, so that no graph of fixed shapes has one.  Between
``pack_padded_sequence`` and ``pad_packed_sequence`` a trace keeps the padded tensor and the lengths; the op packs,
runs torch's recurrent kernel, and pads again.  Its backward runs the forward again.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn.utils import rnn

from autopar.errors import TraceError
from autopar.trace.compat import torch_internals
from autopar.trace.compat.foreign_kernels import in_own_memory
from autopar.trace.compat.source_lines import user_line

__all__ = ["traced_packed_sequences"]

_library: Any = torch.library
_aten: Any = torch.ops.aten


@contextmanager
def traced_packed_sequences() -> Generator[None]:
    """Inside, functions that pack sequences keep them padded, and recurrent modules take and give such."""
    # Scripts import these functions by name, so it is their code that is replaced.
    pairs: list[tuple[Any, Any]] = [(rnn.pack_padded_sequence, _pack_code), (rnn.pad_packed_sequence, _pad_code)]
    own = [function.__code__ for function, _ in pairs]
    try:
        for function, other in pairs:
            function.__code__ = other.__code__
        yield
    finally:
        for (function, _), code in zip(pairs, own, strict=True):
            function.__code__ = code


def _pack_code(input: Any, lengths: Any, batch_first: Any = False, enforce_sorted: Any = True) -> Any:
    """Runs with the globals of torch's module."""
    from autopar.trace.torch_functions import packed_sequences  # noqa: PLC0415

    return packed_sequences._pack(input, lengths, batch_first, enforce_sorted)  # pyright: ignore[reportPrivateUsage]


def _pad_code(sequence: Any, batch_first: Any = False, padding_value: Any = 0.0, total_length: Any = None) -> Any:
    """Likewise."""
    from autopar.trace.torch_functions import packed_sequences  # noqa: PLC0415

    return packed_sequences._pad(sequence, batch_first, padding_value, total_length)  # pyright: ignore[reportPrivateUsage]


def _pack(x: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> rnn.PackedSequence:
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    data: Any = _PackedData(x, lengths.to(torch.int64), batch_first, enforce_sorted)
    return rnn.PackedSequence(data, cast("Any", _BatchSizes(data.num_rows)))


def _pad(
    sequence: rnn.PackedSequence, batch_first: bool, padding_value: float, total_length: int | None
) -> tuple[Tensor, Tensor]:
    data: Any = sequence.data
    if not isinstance(data, _PackedData):
        raise TraceError(
            f"{user_line()}: a packed sequence that was not made by pack_padded_sequence in forward can't be padded: "
            "pack padded tensors in forward"
        )
    return data.padded(batch_first, padding_value, total_length), data.lengths


class _InsteadOfTensor:
    """Takes the place of a tensor whose size depends on lengths; torch's recurrent functions take it as an argument."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What torch's recurrent functions give of it; no other function has it as an argument."""
        name = str(getattr(func, "__name__", func))
        if kwargs or name not in _KERNELS or not isinstance(args[0], _PackedData):
            _refuse(f"uses a packed sequence in {name}()")
        return args[0].recurrent(name, *args[2:])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse(f"reads {name!r} of a packed sequence's tensors")


@dataclass(frozen=True)
class _BatchSizes(_InsteadOfTensor):
    """What recurrent modules read of ``PackedSequence.batch_sizes``: the first is the number of rows."""

    num_rows: int

    @property
    def device(self) -> torch.device:
        """That of the lengths."""
        return torch.device("cpu")

    def __getitem__(self, place: int) -> int:
        """The first."""
        return self.num_rows if place == 0 else _refuse("reads batch_sizes of a packed sequence")


@dataclass(frozen=True)
class _PackedData(_InsteadOfTensor):
    """Stands for the data of a packed sequence: the padded tensor that is packed, or what a recurrent module gives.

    Args:
        x: [rows, tokens, features] if `batch_first`, else [tokens, rows, features]; anything behind a row's end.
        lengths: [rows], of the sequences.
        batch_first: whether rows come first.
        is_sorted: whether the user says that the longest comes first, which torch then checks.
        is_result: whether zeros are behind a row's end.
    """

    x: Tensor
    lengths: Tensor
    batch_first: bool
    is_sorted: bool
    is_result: bool = False

    @property
    def num_rows(self) -> int:
        return self.x.shape[0 if self.batch_first else 1]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def dim(self) -> int:
        """As that of entries in a row."""
        return self.x.dim() - 1

    def size(self, dim: int) -> int:
        """Only the last, the features, is known."""
        return self.x.shape[-1] if dim == -1 else _refuse("reads the size of a packed sequence")

    def recurrent(
        self,
        kind: str,
        states: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Any, ...]:
        """As ``torch.lstm`` and the like of packed data, with such data in place of the first result."""
        if train and dropout and num_layers > 1:
            raise TraceError(
                f"{user_line()}: dropout={dropout} between the layers of a recurrent module on a packed sequence draws "
                "numbers in an order that depends on lengths: use modules of one layer each, with nn.Dropout on what "
                "pad_packed_sequence gives in between; or dropout=0"
            )
        held = [states] if isinstance(states, Tensor) else list(states)
        flags = (has_biases, num_layers, bidirectional, self.batch_first, self.is_sorted)
        op: Any = getattr(torch.ops.autopar_traced, f"packed_{kind}")
        result, *final = op(self.x, self.lengths, held, list(weights), *flags)
        return (replace(self, x=result, is_result=True), *final)

    def padded(self, batch_first: bool, padding_value: float, total_length: int | None) -> Tensor:
        """What ``pad_packed_sequence`` gives.

        Without `total_length` it is as long as the longest sequence, which is asked of the lengths.

        Raises:
            ValueError: it is longer than `total_length`.
        """
        x = self.x if batch_first == self.batch_first else self.x.transpose(0, 1)
        tokens = 1 if batch_first else 0
        size = x.shape[tokens]
        longest = size if total_length is not None and total_length >= size else int(self.lengths.max())
        count = longest if total_length is None else total_length
        if count < longest:
            raise ValueError(f"total_length={count} is less than the longest sequence, {longest}")  # as torch does
        if count < size:
            x = x.narrow(tokens, 0, count)
        elif count > size:
            shape = list(x.shape)
            shape[tokens] = count - size
            x = torch.cat([x, x.new_zeros(shape)], tokens)
        if self.is_result and padding_value == 0.0:
            return x
        places = torch.arange(count, device=x.device)
        lengths = self.lengths.to(x.device)
        is_inside = places < lengths[:, None] if batch_first else places[:, None] < lengths
        return torch.where(is_inside.reshape(*is_inside.shape, *[1] * (x.dim() - 2)), x, padding_value)


def _refuse(what: str) -> NoReturn:
    raise TraceError(
        f"{user_line()}: forward {what}, whose size depends on lengths: give packed sequences only to recurrent "
        "modules and pad_packed_sequence(), and compute with the padded tensors"
    )


# ---------------------------------------------------------------- the ops

_KERNELS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_ARGS = (
    "Tensor x, Tensor lengths, Tensor[] states, Tensor[] weights, bool has_biases, int num_layers, bool bidirectional, "
    "bool batch_first, bool is_sorted"
)


@dataclass(frozen=True)
class _Recurrence:
    """What an op does, but for its tensors.

    Args:
        kind: of the kernel.
        has_biases: as in torch, as the next two.
        num_layers: see there.
        bidirectional: see there.
        batch_first: whether rows come first in what is padded.
        is_sorted: whether lengths are said to be sorted.
    """

    kind: str
    has_biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool
    is_sorted: bool

    def run(
        self, x: Tensor, lengths: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The padded result, and the final states."""
        lengths, order, tokens = lengths.cpu(), None, 1 if self.batch_first else 0
        rows = 1 - tokens
        length = x.shape[tokens]
        if not self.is_sorted:
            lengths, order = lengths.sort(descending=True)
            order = order.to(x.device)
            x, states = x.index_select(rows, order), [state.index_select(1, order) for state in states]
        data, sizes = _aten._pack_padded_sequence(x, lengths, self.batch_first)
        given = list(states) if self.kind == "lstm" else states[0]
        flags = (self.has_biases, self.num_layers, 0.0, torch.is_grad_enabled(), self.bidirectional)
        result, *final = getattr(_aten, self.kind).data(data, sizes, given, list(weights), *flags)
        padded = _aten._pad_packed_sequence(result, sizes, self.batch_first, 0.0, length)[0]
        if order is None:
            return padded.contiguous(), *final
        back = order.argsort()
        return padded.index_select(rows, back), *(state.index_select(1, back) for state in final)

    def run_backward(
        self,
        gradients: Sequence[Tensor],
        x: Tensor,
        lengths: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> list[Tensor]:
        """Gradients of `x`, `states` and `weights`, of those of the results."""
        with torch_internals.above_autograd(), torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (x, *states, *weights)]
            count = 1 + len(states)
            results = self.run(leaves[0], lengths, leaves[1:count], leaves[count:])
            return list(torch.autograd.grad(results, leaves, list(gradients), materialize_grads=True))

    def like(self, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors of the shapes of `run`."""
        width = states[0].shape[-1] * (2 if self.bidirectional else 1)
        return x.new_empty((*x.shape[:2], width)), *map(torch.empty_like, states)


def _define(kind: str) -> None:
    def run(x: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], *flags: Any) -> Any:
        operands = (x, lengths, *states, *weights)
        return tuple(in_own_memory(_Recurrence(kind, *flags).run(x, lengths, states, weights), operands))

    def run_backward(gradients: list[Tensor], x: Tensor, lengths: Tensor, *rest: Any) -> list[Tensor]:
        states, weights, *flags = rest
        made = _Recurrence(kind, *flags).run_backward(gradients, x, lengths, states, weights)
        # cuDNN's gradients of weights are views of one buffer.
        return in_own_memory(made, (*gradients, x, lengths, *states, *weights))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, lengths, states, weights, *ctx.flags = inputs
        ctx.num_states = len(states)
        ctx.save_for_backward(x, lengths, *states, *weights)

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, lengths, *others = ctx.saved_tensors
        states, weights = others[: ctx.num_states], others[ctx.num_states :]
        op: Any = getattr(torch.ops.autopar_traced, f"packed_{kind}_backward")
        gradient, *found = op(list(gradients), x, lengths, states, weights, *ctx.flags)
        return gradient, None, found[: ctx.num_states], found[ctx.num_states :], *[None] * len(ctx.flags)

    def like(x: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], *flags: Any) -> Any:
        return _Recurrence(kind, *flags).like(x, states)

    def like_backward(gradients: list[Tensor], x: Tensor, lengths: Tensor, *rest: Any) -> list[Tensor]:
        return [torch.empty_like(tensor) for tensor in (x, *rest[0], *rest[1])]

    results = ", ".join(["Tensor"] * (3 if kind == "lstm" else 2))
    made = _library.custom_op(
        f"autopar_traced::packed_{kind}", run, mutates_args=(), schema=f"({_ARGS}) -> ({results})"
    )
    made.register_fake(like)
    made.register_autograd(backward, setup_context=keep)
    _library.custom_op(
        f"autopar_traced::packed_{kind}_backward",
        run_backward,
        mutates_args=(),
        schema=f"(Tensor[] gradients, {_ARGS}) -> Tensor[]",
    ).register_fake(like_backward)


for _kind in _KERNELS:
    _define(_kind)
