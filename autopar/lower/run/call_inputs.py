"""The inputs of a call as every rank passes them -> the whole batch, or what stands for it (`ShardedRows`).

By default ranks pass the whole batch already, or DTensors.  With local inputs each data rank passes its own rows, and
the batch is those of data rank 0, then those of data rank 1, and so on; ranks may pass different numbers of rows.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import InputShapeError, LossError, MeshError
from autopar.lower.autograd import on_gradient
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.digests import digest_of
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.communication.reshard_ops import reshard_tensor
from autopar.lower.communication.sharded_rows import ShardedRows, Spans, dtensor_spans
from autopar.lower.compat import from_torch_placement, leaves_of
from autopar.lower.observe.balance import Dealt
from autopar.placement import REPLICATE, reshard
from autopar.step.layer.data_split import DataSplit

__all__ = ["Call", "CallInputs", "LocalRows", "OpenCall", "OpenedCall", "check_values"]

_LOGGER = logging.getLogger("autopar")
_TEXT_BYTES = 400
_NO_VALUES: Mapping[str, Sequence[int]] = MappingProxyType({})


class OpenedCall(Protocol):
    """A call taken apart: see `autopar.trace.calls.call_tensors.CallTensors`."""

    @property
    def named(self) -> Mapping[str, Tensor]:
        """Its tensors by name, in order."""
        ...

    def call_with(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Args and kwargs with these tensors instead."""
        ...


Form = tuple[tuple[int, ...], torch.dtype]  # shape and dtype
OpenCall = Callable[[Sequence[Any], Mapping[str, Any]], OpenedCall]
Call = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class LocalRows:
    """A call of this rank.

    Args:
        call: its tensors.
        local: the dim of rows of those of them that hold rows of this rank.
        rows: how many.
        token_dims: of inputs that the example has with rows, the dims that have its number of tokens there.
        pieces: those of `local` that are ``[rows, pieces, ...]``, such as the images of each row, where the example has
            ``[pieces, ...]`` of all rows.
    """

    call: OpenedCall
    local: Mapping[str, int]
    rows: int
    token_dims: Mapping[str, tuple[int, ...]]
    pieces: frozenset[str] = frozenset()

    def form(self) -> str:
        """The part of the inputs that must be equal on all ranks."""
        return ", ".join(self._form_of(name, x) for name, x in self.call.named.items())

    @property
    def row_tokens(self) -> tuple[int, ...]:
        """Of each row: dim 1 of the first input that has rows and another dim; of one without rows what they would
        have, ``(0,)`` without such an input.  A jagged tensor has rows of several lengths.
        """
        named = ((name, x) for name, x in self.call.named.items() if name not in self.pieces)
        x = next((x for name, x in named if self.local.get(name) == 0 and x.dim() > 1), None)
        if x is not None and x.is_nested:
            return tuple(len(row) for row in x.unbind())
        return (0 if x is None else x.shape[1],) * max(1, self.rows)

    @property
    def is_jagged(self) -> bool:
        """Whether rows may have several lengths (`torch.nested` tensors of layout ``torch.jagged``)."""
        return any(x.is_nested for x in self.call.named.values())

    def form_of_rows(self) -> str:
        """The part of the inputs that must be equal on ranks that pass rows of other lengths."""
        tokens = self.row_tokens[0]
        return ", ".join(self._form_of(name, x, tokens) for name, x in self.call.named.items())

    def row(self, number: int) -> Call:
        """The call with one of the rows."""
        dims = self.local
        tensors = (self._one(name, x, number) if name in dims else x for name, x in self.call.named.items())
        return self.call.call_with(list(tensors))

    def _one(self, name: str, x: Tensor, number: int) -> Tensor:
        """The part of an input that is of one of the rows."""
        return x.unbind()[number] if name in self.pieces else _row_of(x, number, self.local[name])

    def row_like(self, tokens: int = 0) -> Call:
        """The call with its first row, or with a row of zeros if there is none; with a number of `tokens` its form, on
        the meta device.
        """
        if self.rows and not tokens:
            return self.row(0)
        named = self.call.named.items()
        return self.call.call_with([self._like(name, x, tokens) if name in self.local else x for name, x in named])

    def _like(self, name: str, x: Tensor, tokens: int) -> Tensor:
        if name in self.pieces:
            return self._one(name, x, 0) if self.rows else x.new_zeros(x.shape[1:])
        row = self._one(name, x, 0) if self.rows else _zero_row(x, self.local[name])
        dims = self._token_dims(name, row, self.row_tokens[0])
        sizes = [tokens if place in dims else size for place, size in enumerate(row.shape)]
        return row.new_empty(sizes, device="meta").requires_grad_(row.requires_grad) if tokens else row

    def _token_dims(self, name: str, x: Tensor, tokens: int) -> tuple[int, ...]:
        """The dims of an input with rows of so many tokens that have these: known, or as long behind the rows."""
        behind = range(self.local[name] + 1, x.dim())
        return self.token_dims.get(name, tuple(dim for dim in behind if x.shape[dim] == tokens))

    def _form_of(self, name: str, x: Tensor, tokens: int = -1) -> str:
        sizes: Sequence[object] = x.shape
        if name in self.pieces:
            sizes = ["rows", "pieces", *x.shape[2:]]
        elif name in self.local and x.is_nested:
            sizes = ["rows", "tokens", *x.shape[2:]]
        elif name in self.local:
            dims = self._token_dims(name, x, tokens)
            sizes = ["tokens" if dim in dims and size == tokens else size for dim, size in enumerate(x.shape)]
            sizes[self.local[name]] = "rows"
        return f"{name} {str(x.dtype).removeprefix('torch.')} [{', '.join(map(str, sizes))}]"


def _row_of(x: Tensor, number: int, dim: int) -> Tensor:
    """``[1, tokens, ...]``: one of the rows, which are along `dim`."""
    return x.unbind()[number][None] if x.is_nested else x.narrow(dim, number, 1)


def _zero_row(x: Tensor, dim: int) -> Tensor:
    """A row like those that `x` has along `dim`, of which there are none."""
    return x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))


def _row_dims(forms: Mapping[str, Form], rows: int) -> dict[str, int]:
    """Where the rows of a batch of so many are in inputs of these forms: dim 0 where it has their number, or dim 1 of
    ``[..., rows, tokens]``, as in positions of several kinds, next to a first ``[rows, tokens]``; -1: nowhere.
    """
    first = next((shape[:2] for shape, _ in forms.values() if shape[:1] == (rows,) and len(shape) > 1), ())
    return {
        name: 0 if shape[:1] == (rows,) else 1 if len(shape) == 3 and shape[1:] == first else -1
        for name, (shape, _) in forms.items()
    }


class CallInputs:
    """Makes the inputs of calls whole on one rank.

    Attributes:
        is_local: whether ranks pass their own rows.
        dealt: the batch that a balanced loader gave last; None: there was none.
        example_forms: where inputs are local, the shape and dtype of each tensor of the example, a whole batch.
        example_tokens: where inputs are local, of a row of the example; 0: it has no rows of tokens.
        read_values: inputs whose values forward reads in Python, with those of the example.
    """

    def __init__(
        self,
        open_call: OpenCall,
        communicator: Communicator,
        split: DataSplit,
        example: Call | None = None,
        rows: int = 0,
        read_values: Mapping[str, Sequence[int]] = _NO_VALUES,
    ) -> None:
        """`example` is a call with a whole batch of that many `rows`, where inputs are local; None: they are not."""
        self._open_call = open_call
        self._communicator = communicator
        self._split = split
        self.is_local = example is not None
        named: Mapping[str, Tensor] = {} if example is None else open_call(*example).named
        self.example_forms: dict[str, Form] = {name: (tuple(x.shape), x.dtype) for name, x in named.items()}
        self.read_values = read_values
        self._row_dims = _row_dims(self.example_forms, rows)
        forms = self.example_forms.items()
        self.example_tokens = next((f[1] for name, (f, _) in forms if not self._row_dims[name] and len(f) > 1), 0)
        self._token_dims = {
            name: tuple(dim for dim in range(rows_at + 1, len(shape)) if shape[dim] == self.example_tokens)
            for name, (shape, _) in forms
            if (rows_at := self._row_dims[name]) >= 0
        }
        self._has_compared = False
        self.dealt: Dealt | None = None
        self._counts: list[int] = []  # in the last call, the rows of each data rank
        if self.is_local and communicator.calls is not None:
            communicator.calls.records.compares_draws = False  # whoever augments other rows draws other numbers

    @property
    def rank(self) -> int:
        """This rank among all that make the calls."""
        return self._communicator.rank

    def shared_seed(self, state: Tensor) -> int | None:
        """Where `state` of a random generator (uint8) is alike on all ranks, None; else a seed that all may use
        instead.  Every rank calls it.
        """
        crc = zlib.crc32(state.numpy().data)
        known = self.numbers_of_ranks("the draws {} of a sharded loader", lambda: (crc,))
        return None if all(each == known[0] for each in known) else known[0][0]

    def numbers_of_ranks(self, what: str, find: Callable[[], Sequence[int]]) -> list[list[int]]:
        """The numbers that `find` gives on each rank; every rank calls it.  Where it raises, all ranks do.

        `what` says in errors what all ranks do, with a place for its number.
        """
        calls = self._communicator.calls
        if calls is None:
            return self._communicator.gather_numbers(find())
        own = calls.enter(what, lambda: (find(), ()))
        with calls.failing():
            return self._communicator.gather_numbers(own)

    def whole(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, holds_rows: bool = False) -> Call:
        """The call with the whole batch, which all ranks make.

        Args:
            kind: what the call is, with a place for its number.
            args: of this rank.
            kwargs: likewise.
            holds_rows: give rows that need no gradient as `ShardedRows`.

        Raises:
            InputShapeError: the inputs of this rank don't fit together, or those of another rank have other forms.
            MeshError: ranks of one data rank passed different rows; on an accelerator of the call before.
        """
        self._counts = []
        if not self.is_local and not any(isinstance(x, DTensor) for x in leaves_of((args, kwargs))):
            return args, kwargs
        calls = self._communicator.calls
        if calls is None:
            return self._join(self._open_even(args, kwargs), holds_rows)

        def prepare() -> tuple[LocalRows, list[tuple[str, Tensor]]]:
            opened = self._open_even(args, kwargs)
            return opened, [(name, x) for name, x in opened.call.named.items() if name in opened.local]

        opened = calls.enter(f"the inputs of {kind}", prepare, peers=f"/{self._split.rank_of(self._communicator.rank)}")
        with calls.failing():
            return self._join(opened, holds_rows)

    def own_rows(self, output: Tensor | None, dim: int) -> Tensor | None:
        """Of an output of the last call that is whole and has the rows of all ranks along `dim`, those of this rank."""
        rows = sum(self._counts)
        if output is None or isinstance(output, DTensor) or self._split.size == 1 or output.shape[dim] != rows:
            return output
        rank = self._split.rank_of(self._communicator.rank)
        start, length = sum(self._counts[:rank]), self._counts[rank]

        def cut(x: Tensor) -> Tensor:
            own = x.narrow(dim, start, length)
            if own.requires_grad:
                on_gradient(own, _refuse_gradient)
            return own

        return output.then(cut) if isinstance(output, LateTensor) else cut(output)

    def open(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LocalRows:
        """A call of this rank taken apart; raises InputShapeError if its inputs don't fit together."""
        call = self._open_call(args, kwargs)
        check_values((name, x) for name, x in call.named.items() if not isinstance(x, DTensor))
        plain = {name: x for name, x in call.named.items() if self.is_local and not isinstance(x, DTensor) and x.dim()}
        rows = next((len(x) for name, x in plain.items() if self._row_dims.get(name) == 0), -1)
        pieces = frozenset(name for name, x in plain.items() if self._are_pieces(name, x))
        dims = {name: self._row_dims.get(name, 0 if len(x) == rows else -1) for name, x in plain.items()}
        dims |= dict.fromkeys(pieces, 0)
        local = {name: dim for name, dim in dims.items() if 0 <= dim < plain[name].dim()}
        for name, dim in local.items():
            if plain[name].shape[dim] != rows:
                first = next(iter(local))
                raise InputShapeError(
                    f"with inputs='local' every rank passes its own rows of {list(local)}, whose first dim in the "
                    f"example is the batch's (or the dim before that of tokens), but {name!r} has "
                    f"{plain[name].shape[dim]} rows and {first!r} has {rows}. Pass equally many rows of all of them; "
                    "where the size of another dim only happens to be the batch size, make the example with another "
                    "batch size"
                )
        return LocalRows(call, local, rows, self._token_dims, pieces)

    def _are_pieces(self, name: str, x: Tensor) -> bool:
        """Whether an input that has no rows in the example says which of it belongs to which row."""
        return self._row_dims.get(name) == -1 and x.dim() == len(self.example_forms[name][0]) + 1

    def _open_even(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LocalRows:
        opened = self.open(args, kwargs)
        if opened.pieces:
            raise InputShapeError(
                f"{sorted(opened.pieces)} have a dim more than in the example, which says which row they belong to, as "
                "autopar.balanced gives where ranks are in groups of unlike size. Only training steps run such "
                "groups: pass those of all rows in one dim, in the order of the text"
            )
        if opened.is_jagged:
            raise InputShapeError(
                "the call has rows of several lengths (jagged tensors, as autopar.balanced gives where ranks are in "
                "several groups), which only training steps run, with gradients and without torch.autocast: call the "
                "model so, or pad the rows to one length"
            )
        return opened

    def _join(self, opened: LocalRows, holds_rows: bool) -> Call:
        self._counts = counts = self._compare(opened) if opened.local else []
        spans = self._spans(counts) if counts else ()
        tensors: list[Tensor] = []
        for name, x in opened.call.named.items():
            holds = holds_rows and not x.requires_grad
            if isinstance(x, DTensor):
                own = dtensor_spans(x, self._communicator.world_size) if holds else ()
                tensors.append(
                    ShardedRows.of_rows(x.to_local(), own, _gather_of(x, self._communicator))
                    if own
                    else x.full_tensor()
                )
            elif opened.local.get(name) == 0 and holds and self._split.size > 1:
                gather = partial(self._gather, counts=counts)
                tensors.append(ShardedRows.of_rows(x.to(self._communicator.device), spans, gather))
            else:
                dim = opened.local.get(name, -1)
                tensors.append(x if dim < 0 else self._gather_along(dim, x.to(self._communicator.device), counts))
        return opened.call.call_with(tensors)

    def _spans(self, counts: Sequence[int]) -> Spans:
        stops = list(accumulate(counts))
        own = map(self._split.rank_of, range(self._communicator.world_size))
        return tuple((stops[rank] - counts[rank], stops[rank]) for rank in own)

    def _compare(self, opened: LocalRows) -> list[int]:
        """How many rows each data rank passes."""
        talk, split, form = self._communicator, self._split, opened.form()
        read = [zlib.crc32(repr(x.tolist()).encode()) for x in self._read(opened).values()]
        known = talk.gather_numbers((zlib.crc32(form.encode()), opened.rows, self._content(opened), *read))
        if any(crc != known[0][0] for crc, *_ in known):
            _raise_unlike(form, self._communicator)
        for rank, (_, _, _, *values) in enumerate(known):
            self._check_read(opened, rank, [one == other for one, other in zip(values, known[0][3:], strict=True)])
        counts: dict[int, tuple[int, int]] = {}
        for rank, (_, rows, *_) in enumerate(known):
            first, expected = counts.setdefault(split.rank_of(rank), (rank, rows))
            if rows != expected:
                raise InputShapeError(
                    f"ranks {first} and {rank} have the same data_rank ({split.rank_of(rank)}), but pass {expected} "
                    f"and {rows} rows of {sorted(opened.local)}: give both the same rows"
                )
        if not self._has_compared:
            self._has_compared = True
            if split.size > 1 and len({content for _, _, content, *_ in known}) == 1:
                _LOGGER.warning(
                    "with inputs='local' all %d data ranks passed the same %d rows, which count %d times: pass each "
                    "its own, by model.data_rank", split.size, opened.rows, split.size,
                )  # fmt: skip
        return [rows for _, (_, rows) in sorted(counts.items())]

    def _read(self, opened: LocalRows) -> dict[str, Any]:
        """The inputs whose values forward reads in Python."""
        named = opened.call.named
        return {name: named[name] for name in self.read_values if name in named and name not in opened.local}

    def _check_read(self, opened: LocalRows, rank: int, are_equal: Sequence[bool]) -> None:
        for name, is_equal in zip(self._read(opened), are_equal, strict=True):
            if not is_equal:
                raise MeshError(
                    f"input {name!r} of rank {rank} differs from that of rank 0 (on rank {self.rank}: "
                    f"{self._read(opened)[name].tolist()}): forward reads its values in Python, so all ranks pass "
                    "those of the whole batch, also with inputs='local', as autopar.balanced(..., "
                    "encoder=EncoderRows(..., grids=)) does"
                )

    def _content(self, opened: LocalRows) -> int:
        """Something that tells different rows apart, in the first call only: reading it waits for the device."""
        if self._has_compared:
            return 0
        return zlib.crc32(repr([int(digest_of(opened.call.named[name])) for name in sorted(opened.local)]).encode())

    def _gather_along(self, dim: int, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The same with rows along `dim`."""
        return (
            self._gather(x.movedim(dim, 0).contiguous(), counts).movedim(0, dim).contiguous()
            if dim
            else (self._gather(x, counts))
        )

    def _gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """``[rows, ...]`` of each data rank -> those of all; differentiable."""
        split = self._split
        if split.size == 1:
            return x
        most = max(counts)
        if len(x) < most:
            x = torch.cat([x, x.new_zeros((most - len(x), *x.shape[1:]))])
        steps = reshard(split.layout, (REPLICATE,) * len(split.mesh), split.mesh)
        whole = reshard_tensor(x, steps, self._communicator)
        if min(counts) == most:
            return whole
        return torch.cat([whole[i * most : i * most + count] for i, count in enumerate(counts)])


def check_values(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise InputShapeError for a tensor that has no values, or has them in another form than all places in turn."""
    for name, x in named:
        if x.is_meta:
            raise InputShapeError(
                f"input {name!r} is on the meta device, and has no values to compute with: pass one that has, or call "
                "model.plan_for(...) to plan for its shape"
            )
        if x.layout != torch.strided and not x.is_nested:
            raise InputShapeError(f"input {name!r} is sparse ({x.layout}): pass {name}.to_dense()")


def _refuse_gradient(_: Tensor) -> NoReturn:
    """Raise LossError: gradients of each rank's own loss would add up to those of no loss that one device computes."""
    raise LossError(
        "backward() came from a loss that this rank computed of its own rows (inputs='local'). The loss of one device "
        "is that of the rows of all data ranks, which only the model's program knows: let forward() return the loss, "
        "or pass it to autopar.parallelize(..., loss_fn=criterion, example_target=target) and call "
        "loss = model(x, target=target)"
    )


def _gather_of(x: DTensor, communicator: Communicator) -> Callable[[Tensor], Tensor]:
    """What gathers a DTensor that has `dtensor_spans`: by `communicator`, if it knows the order of
    ranks, since that also works on simulated ranks.
    """
    mesh = tuple(x.device_mesh.shape)
    layout = tuple(from_torch_placement(placement, x.dim()) for placement in x.placements)
    ranks: list[int] = cast("Any", x.device_mesh.mesh).flatten().tolist()
    if ranks != list(range(communicator.world_size)):
        return lambda _: x.full_tensor()
    steps = reshard(layout, (REPLICATE,) * len(mesh), mesh)
    return lambda local: reshard_tensor(local, steps, communicator)


def _raise_unlike(form: str, communicator: Communicator) -> None:
    sent = form.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    forms = [bytes(each).decode(errors="replace").strip() for each in communicator.gather_numbers(tuple(sent))]
    rank = next((rank for rank, other in enumerate(forms) if other != forms[0]), 0)
    raise InputShapeError(
        f"ranks passed inputs of different forms: rank 0 {forms[0]}; rank {rank} {forms[rank]}. All but the "
        "number of rows must be alike: pad what has other lengths to one that all ranks share"
    )
