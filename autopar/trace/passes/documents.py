"""Attention whose mask keeps documents of one row apart becomes an op that knows the documents (`DOCUMENTS`).

A mask is recognized by what it is: it lets tokens see those that have the same number, and with causal attention none
behind them, with a window none far away, for some integers that the model computes for each token (or gets).  Which
integers is found by running the model's own ops on rows packed at random, and on numbers near those that the ops
mention; long rows are shortened, and a long window with them.  Then attention by document must give the results and
gradients of the model's attention, in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ops import family_of
from autopar.ops.attention import DOCUMENTS
from autopar.ops.family import argument
from autopar.program import Arg, Op, Ref, TensorType
from autopar.trace.evaluation import run_op
from autopar.trace.graph import Graph
from autopar.trace.passes.cleanup import drop_dead_ops
from autopar.trace.passes.masks import ATTENTION, visibility

__all__ = ["restore_documents"]

_attend: Any = functional.scaled_dot_product_attention  # whose annotations are incomplete
_MOST_OPS = 200  # packed masks of transformers take about 20; more are looked at for nothing
_SMALL = 64  # literals up to this may be numbers of dims or of a window: they stay as they are
_SHORT = 160  # what long rows are shortened to: more than twice `_SMALL`, so that no small window covers a row
_WINDOW = 37  # what a long window is shortened to: no size, and short enough to be seen in a row of `_SHORT`
_NEAR = 2  # numbers of one window differ by so many: whether it counts the token itself, and where comparisons begin
_LONGEST = 2048  # rows that are not shortened: their masks of 4 million entries take milliseconds an op
_TRIALS = 12  # two of each form of `_drawn`
_TOLERANCE = 1e-10  # relative, in float64; the order of sums differs


def restore_documents(graph: Graph) -> Graph:
    """Let attention know its documents where its mask keeps them apart."""
    known: dict[object, _Documents | None] = {}

    def step(op: Op) -> Iterable[Op] | None:
        mask = argument(op, 3, "attn_mask", None) if op.target == ATTENTION else None
        if not isinstance(mask, Ref) or argument(op, 5, "is_causal", False) or argument(op, 4, "dropout_p", 0.0):
            return None
        query, key, value = (graph.types[name] for name in op.operands[:3])
        if not all(len(kind.shape) == 4 for kind in (query, key, value)) or query.shape[::2] != key.shape[::2]:
            return None
        size = (query.shape[0], query.shape[2])
        place = (mask.name, size)
        if place not in known:
            known[place] = _find(graph, mask.name, *size)
        documents = known[place]
        if documents is None:
            return None
        scale = argument(op, 6, "scale", None)
        args = (*op.args[:3], Ref(documents.ids), scale, documents.is_causal, documents.is_sorted)
        window = (("window", documents.window),) if documents.window else ()
        return [replace(op, target=DOCUMENTS, args=args, kwargs=window)]

    made = graph.rewrite(step)
    return drop_dead_ops(made) if any(known.values()) else graph  # masks may be too big for what follows to look at


@dataclass(frozen=True)
class _Documents:
    """The value that numbers documents, and how the mask uses it."""

    ids: str
    is_causal: bool
    is_sorted: bool
    window: int = 0


@dataclass(frozen=True)
class _MaskSample:
    """What a mask's ops make of one random input, and what the mask lets through: ``[batch or 1, tokens, tokens]``."""

    values: Mapping[str, Tensor]
    visible: Tensor


def _find(graph: Graph, mask: str, batch: int, tokens: int) -> _Documents | None:
    cone = _Cone.of(graph, mask)
    if cone is None:
        return None
    short = cone.shortened(batch, tokens)
    if short is None:
        return None
    shapes = {(tokens,), (1, tokens), (batch, tokens)}
    candidates = [name for name in cone.names if _is_integer(graph.types[name]) and graph.types[name].shape in shapes]
    trials = [trial for seed in range(_TRIALS) if (trial := short.run(seed)) is not None]
    if len(trials) < _TRIALS // 2 or not any(map(_tells_documents, trials)):
        return None
    for name in reversed(candidates):
        for is_causal in (True, False):
            is_sorted = all(bool((trial.values[name].diff(dim=-1) >= 0).all()) for trial in trials)
            # Places of a row are places of a document where documents are in order.
            for window in (0, *([_reach(trials)] if is_sorted else [])):
                documents = _Documents(name, is_causal, is_sorted, window)
                if all(_fits(trial, documents) for trial in trials):
                    is_same = all(_is_same(trial, documents) for trial in trials[:3])
                    return short.at_length(documents) if is_same else None
    return None


def _reach(trials: Sequence[_MaskSample]) -> int:
    """The window of a mask, if it is one: no token sees another one as far away; some see one."""
    pairs = [trial.visible.nonzero().T for trial in trials]
    return 1 + max(int((own - seen).abs().max()) for _, own, seen in pairs if len(own))


def _is_integer(kind: TensorType) -> bool:
    return kind.dtype.startswith(("int", "uint"))


def _tells_documents(trial: _MaskSample) -> bool:
    """Whether some token sees another one, and some doesn't see one before it."""
    below = torch.ones_like(trial.visible).tril(-1)
    return bool((trial.visible & below).any()) and bool((~trial.visible & below).any())


def _fits(trial: _MaskSample, documents: _Documents) -> bool:
    expected, visible = _visible(trial.values[documents.ids], documents), trial.visible
    return bool((expected == visible).all())  # one of them may stand for all rows of the batch


def _visible(ids: Tensor, documents: _Documents) -> Tensor:
    ids = ids.view(-1, ids.shape[-1])
    same = ids[:, :, None] == ids[:, None, :]
    same = same.tril(documents.window - 1).triu(1 - documents.window) if documents.window else same
    return same.tril() if documents.is_causal else same


# ---------------------------------------------------------------- what a mask is computed from


@dataclass(frozen=True)
class _Cone:
    """The ops that compute a mask, in order, and what they read of outside."""

    graph: Graph
    mask: str
    ops: tuple[Op, ...]
    leaves: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph, mask: str) -> _Cone | None:
        """None if it is computed from more than integers, or in more ops than masks are."""
        producers, pending, visited = graph.producers, [mask], set[str]()
        while pending:
            name = pending.pop()
            if name in visited:
                continue
            visited.add(name)
            if name in producers:
                pending += producers[name].operands
            if len(visited) > _MOST_OPS:
                return None
        ops = tuple(op for op in graph.ops if not visited.isdisjoint(op.results))
        leaves = tuple(name for name in graph.roles if name in visited)
        is_known = all(
            graph.roles[name] == "constant" or (graph.roles[name] == "input" and not graph.types[name].is_floating)
            for name in leaves
        )
        draws = any(family_of(op.target).draws(op) for op in ops)
        return cls(graph, mask, ops, leaves) if is_known and not draws else None

    @property
    def names(self) -> tuple[str, ...]:
        """Of its values."""
        return (*self.leaves, *(name for op in self.ops for name in op.results))

    def shortened(self, batch: int, tokens: int) -> _ShortCone | None:
        """For rows that are short enough to look at whole masks; None where nothing says what else would change."""
        sizes: dict[int, int] = {}
        shift = 0
        if tokens > _LONGEST or (tokens > _SMALL and batch * tokens * tokens > _LONGEST * _LONGEST):
            # A literal that is no size could be a window, which no short row would show: it becomes a short one.
            sizes = {tokens: _SHORT, batch * tokens: batch * _SHORT}
            every = (abs(n) for op in self.ops if not self._compares(op) for n in _integers(op))
            large = sorted({n for n in every if _SMALL < n < tokens})
            shift = large[0] - _WINDOW if large else 0
            sizes |= {sign * n: sign * (n - shift) for n in large for sign in (1, -1)}
            is_one = not large or large[-1] - large[0] <= _NEAR
            if not is_one or any(tokens in self.graph.constants[name].shape for name in self._constants):
                return None
        return _ShortCone(self, sizes, shift, batch, sizes.get(tokens, tokens))

    @property
    def _constants(self) -> list[str]:
        return [name for name in self.leaves if name in self.graph.constants]

    def _compares(self, op: Op) -> bool:
        """Whether the op compares what the caller gives, such as tokens, with a number."""
        return op.target in ("aten.eq.Scalar", "aten.ne.Scalar") and op.operands[0] in self.leaves


def _integers(op: Op) -> Iterator[int]:
    def walk(arg: Arg) -> Iterator[int]:
        if isinstance(arg, tuple):
            for part in arg:
                yield from walk(part)
        elif isinstance(arg, int) and not isinstance(arg, bool):
            yield arg

    for arg in (*op.args, *(value for _, value in op.kwargs)):
        yield from walk(arg)


@dataclass(frozen=True)
class _ShortCone:
    """A cone whose rows have `tokens` tokens; `sizes` says what became of the sizes that it had.

    `shift`: by how much a long window is shorter; 0 where none is.
    """

    cone: _Cone
    sizes: Mapping[int, int]
    shift: int
    batch: int
    tokens: int

    def at_length(self, documents: _Documents) -> _Documents | None:
        """`documents` in rows as long as they were; None if nothing says how long a window was."""
        if not self.shift:
            return documents
        is_it = abs(documents.window - _WINDOW) <= _NEAR
        return replace(documents, window=documents.window + self.shift) if is_it else None

    def run(self, seed: int) -> _MaskSample | None:
        """On random inputs; None if they are such that the ops fail."""
        graph = self.cone.graph
        generator = torch.Generator().manual_seed(seed)
        values: dict[str, Tensor] = {
            name: graph.constants[name] for name in self.cone.leaves if name in graph.constants
        }
        mentioned = sorted({n for op in self.cone.ops for n in _integers(op) if abs(n) < 1 << 31} | {0, 1, 2})
        for name in self.cone.leaves:
            if name not in values:
                kind = graph.types[name]
                shape = tuple(self._short(size) for size in kind.shape)
                drawn = _drawn(shape, self.tokens, mentioned, seed, generator)
                values[name] = drawn.to(getattr(torch, kind.dtype))
        try:
            with torch.no_grad():
                for op in self.cone.ops:
                    values.update(zip(op.results, run_op(op.map_args(self._short_arg), values), strict=True))
            visible, hidden = visibility(values[self.cone.mask])
        except (RuntimeError, IndexError, ValueError, TypeError, KeyError):
            return None
        if not bool((visible | hidden).all()):
            return None
        folded = self._folded(visible)
        return None if folded is None else _MaskSample(values, folded)

    def _folded(self, visible: Tensor) -> Tensor | None:
        """``[batch or 1, tokens, tokens]`` of a mask that is the same for all heads."""
        shape = (1,) * (4 - visible.dim()) + tuple(visible.shape)
        every = visible.reshape(shape)
        if len(shape) != 4 or shape[2:] != (self.tokens, self.tokens) or not bool((every == every[:, :1]).all()):
            return None
        return every[:, 0]

    def _short(self, size: int) -> int:
        return self.sizes.get(size, size)

    def _short_arg(self, arg: Arg) -> Arg:
        return self._short(arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg


def _drawn(
    shape: Sequence[int], tokens: int, mentioned: Sequence[int], seed: int, generator: torch.Generator
) -> Tensor:
    """Integers as a caller could give them, in one of six forms by the seed."""

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, tuple(shape), generator=generator)

    form = seed % 6
    if not shape or shape[-1] != tokens or form == 0:  # any, near to the numbers that the ops mention; or ends
        near = torch.tensor(sorted({n + d for n in mentioned for d in (-1, 0, 1)}))
        anything = near[draw(0, len(near))]
        if not shape or shape[-1] == tokens or seed % 2:
            return anything
        return draw(0, tokens + 1).sort(dim=-1).values
    begins = (draw(0, 1 + 4 ** (1 + seed // 6)) == 0).long()  # documents of about 4 or 16 tokens
    begins[..., 0] = 1
    places = torch.arange(tokens).expand(tuple(shape))
    ids = begins.cumsum(-1)
    if form == 1:
        return ids
    if form == 2:  # places in documents
        return places - (places * begins).cummax(-1).values
    if form == 3:  # documents that go on after others
        return ids % 3
    return places if form == 4 else draw(0, 3)


# ---------------------------------------------------------------- whether both forms are the same function


def _is_same(trial: _MaskSample, documents: _Documents) -> bool:
    """Whether each document on its own gives what attention with the mask gives, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    ids = trial.values[documents.ids].view(-1, trial.visible.shape[-1])
    ids = ids.expand(len(trial.visible), -1)[:1]
    shape = (1, 2, ids.shape[-1], 4)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    incoming = torch.randn(shape, generator=generator, dtype=torch.float64)
    with torch.enable_grad():
        expected = _attend(*leaves, trial.visible[:1, None])
        computed = torch.zeros_like(expected)
        every: Any = ids[0]
        for document in set(every.tolist()):
            tokens: Tensor = (every == document).nonzero().view(-1)
            parts = [leaf[:, :, tokens] for leaf in leaves]
            seen = _visible(torch.zeros_like(tokens), documents)
            computed = computed.index_copy(2, tokens, _attend(*parts, seen))
        pairs = [(expected, computed)]
        ways = [torch.autograd.grad(result, leaves, incoming) for result in (expected, computed)]
    pairs += zip(*ways, strict=True)
    return all(bool(((one - other).abs() <= _TOLERANCE * one.abs().max().clamp(min=1.0)).all()) for one, other in pairs)
