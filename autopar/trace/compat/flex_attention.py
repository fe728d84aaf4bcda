"""``flex_attention`` by the math of attention, in ops that can be traced, split and differentiated on any device.

A `score_mod` or `mask_mod` is written for one score.  It is called once, with indices of shape [batch, 1, 1, 1],
[1, heads, 1, 1], [1, 1, rows, 1] and [1, 1, 1, columns], so that arithmetic broadcasts, and what it reads of other
tensors (``slopes[head]``) is read for all indices at once.  Anything else in it is refused.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.trace.compat.source_lines import user_line
from autopar.trace.compat.torch_internals import flatten

__all__ = ["BlockMaskForm", "dense_flex_attention", "open_block_mask"]

_flex: Any = torch_flex
# What makes a single value, or none, from a score or an index.
_SINGLE = ("new_ones", "new_zeros", "new_full", "new_tensor", "new_empty")


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def dense_flex_attention(report: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, ``flex_attention`` computes all scores, with gradients on CPUs too, and of a block mask only the
    `mask_mod` counts; `report` is called in each call.

    Raises:
        TraceError: in a call, if a `score_mod` or `mask_mod` can't be computed for all scores at once.
    """

    def attend(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        report()
        return _attend(*args)

    replacements = {
        "_validate_device": lambda *_: None,  # refuses gradients on CPUs
        "_apply_kernel_options": lambda *_, **__: {},  # refuses statistics on CPUs
        "flex_attention_hop": attend,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        "create_mask": lambda *_: None,
        "_convert_mask_to_block_mask": lambda *_, **__: (None, None),
        "_create_sparse_block_from_block_mask": lambda _, *form: BlockMaskForm(*form).build(()),
        "_compute_dq_write_order_from_block_mask": lambda *_, **__: (None, None),
    }
    with contextlib.ExitStack() as patches:
        patches.enter_context(torch.compiler.set_stance("force_eager"))
        for name, replacement in replacements.items():
            if not hasattr(_flex, name):  # not in every version of torch
                continue
            patches.enter_context(patch.object(_flex, name, replacement))
        yield


@dataclass(frozen=True)
class BlockMaskForm:
    """What of a block mask is no tensor.

    Args:
        mask_mod: the function, or what is left of it without the tensors and numbers that it captures.
        lengths: of queries and keys.
        rows: of a block.
        columns: of a block.
        captured: where in `mask_mod` its captured values belong, if they are given.
    """

    mask_mod: Any = field(repr=False)
    lengths: tuple[int, int]
    rows: int
    columns: int
    captured: Any = field(default=None, repr=False)

    def build(self, captured: Sequence[Any]) -> BlockMask:
        """A block mask whose `mask_mod` is right, and whose lists of blocks are not."""
        whole = self.captured is not None
        mask_mod = (
            _flex._reconstruct_closure_fn(self.mask_mod, tuple(captured), self.captured) if whole else self.mask_mod
        )
        num_rows, num_columns = -(-self.lengths[0] // self.rows), -(-self.lengths[1] // self.columns)
        count = torch.zeros(1, 1, num_rows, dtype=torch.int32)
        indices = torch.zeros(1, 1, num_rows, num_columns, dtype=torch.int32)
        none: Any = None
        return BlockMask(
            self.lengths, count, indices, *[none] * 6, BLOCK_SIZE=(self.rows, self.columns), mask_mod=mask_mod
        )


def open_block_mask(value: Any) -> tuple[tuple[Any, ...], BlockMaskForm] | None:
    """What the `mask_mod` of a block mask captures, and the rest of it; None for anything else."""
    if not isinstance(value, BlockMask):
        return None
    if not hasattr(_flex, "_extract_callable_pytree"):
        raise TraceError(
            f"an argument is a BlockMask, which autopar can't open with torch {torch.__version__}: make it in the "
            "model's forward, or use torch 2.13 or later"
        )
    captured, structure, mask_mod = _flex._extract_callable_pytree(value.mask_mod)
    return tuple(captured), BlockMaskForm(mask_mod, value.seq_lengths, *value.BLOCK_SIZE, structure)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Sequence[Any], scale: float, _: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The attention, and to base 2 the logarithm of the sum of exponentials and the maximum of the scores."""
    key, value = (x.expand(len(query), -1, -1, -1) for x in (key, value))
    sizes = (*query.shape[:3], key.shape[2])
    grids = [torch.arange(n, device=query.device).view(_only(dim, n)) for dim, n in enumerate(sizes)]
    mask = _mask(block_mask, grids)
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    accurate = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(accurate) @ keys.to(accurate).transpose(-2, -1) * scale
    modified = scores if score_mod is _flex._identity else _call("score_mod", score_mod, [scores, *grids])
    visible = modified if mask is None else modified.masked_fill(~mask, -math.inf)
    if modified is scores:  # which nobody reads then, but for statistics
        out = functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups > 1)
    else:
        out = torch._safe_softmax(visible, -1).to(query.dtype) @ values
    return out, visible.logsumexp(-1) / math.log(2), visible.amax(-1) / math.log(2)


def _only(dim: int, size: int) -> list[int]:
    return [size if place == dim else 1 for place in range(4)]


def _mask(block_mask: Sequence[Any], grids: Sequence[Tensor]) -> Tensor | None:
    *_, columns, mask_mod = block_mask
    if mask_mod is not _flex.noop_mask:
        return _call("mask_mod", mask_mod, grids)
    if columns != _flex._LARGE_SPARSE_BLOCK_SIZE:
        raise TraceError(
            "flex_attention gets a BlockMask without a mask_mod, which tells nothing of single scores: make it with "
            "create_block_mask(mask_mod, ...), or leave it out if it hides nothing"
        )
    return None


def _call(name: str, function: Callable[..., Any], grids: Sequence[Tensor]) -> Tensor:
    with _AllAtOnce(name, grids) as mode:
        result = function(*grids)
    if not mode.is_grid(result):
        raise mode.refusal("returns what does not depend on its arguments")
    return result


class _AllAtOnce(TorchFunctionMode):
    """Inside, a function of single scores and indices computes those of all: `grids`, and what is made of them."""

    def __init__(self, name: str, grids: Sequence[Tensor]) -> None:
        super().__init__()
        self._name = name
        self._grids = {id(x): x for x in grids}  # holds them, so that no other tensor gets their ids

    def is_grid(self, x: Any) -> bool:
        """Whether it holds something for every score, by broadcasting."""
        return id(x) in self._grids

    def refusal(self, what: str) -> TraceError:
        """The error for a function that does `what`."""
        return TraceError(
            f"{user_line()}: the {self._name} of flex_attention {what}, which is not computed for all scores at once: "
            "use only arithmetic, comparisons, torch.where and the like on its arguments, and index other tensors "
            "with them, as in bias[head, q_idx - kv_idx]"
        )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Only what works element by element is computed."""
        if func is Tensor.__getitem__:
            return self.read(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        name = getattr(func, "__name__", str(func))
        if not any(map(self.is_grid, tensors)) or name in _SINGLE or isinstance(result, torch.device | torch.dtype):
            return result
        shapes = [x.shape for x in tensors if self.is_grid(x) or x.dim()]
        if not isinstance(result, Tensor) or not all(map(self.is_grid, (x for x in tensors if x.dim()))):
            raise self.refusal(f"calls {name}")
        if result.shape != torch.broadcast_shapes(*shapes):
            raise self.refusal(f"calls {name}")
        self._grids[id(result)] = result
        return result

    def read(self, x: Tensor, index: tuple[Any, ...]) -> Any:
        """``x[index]``, for all indices at once."""
        if self.is_grid(x):
            raise self.refusal("indexes its arguments")
        if not any(map(self.is_grid, index)):
            return x[index]
        if not all(self.is_grid(each) or isinstance(each, int) for each in index):
            raise self.refusal("mixes its arguments with others in an index")
        if len(index) < x.dim():
            return _IndexedRow(self, x, index)
        result = x[index]
        self._grids[id(result)] = result
        return result


@dataclass(frozen=True)
class _IndexedRow:
    """``x[index]`` with fewer indices than dims; the remaining dims are kept whole."""

    mode: _AllAtOnce
    x: Tensor
    index: tuple[Any, ...]

    def __getitem__(self, index: Any) -> Any:
        rest = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
        return self.mode.read(self.x, (*self.index, *rest))

    def __getattr__(self, name: str) -> Any:
        raise self.mode.refusal(f"calls {name} of a row of a tensor")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        row = next(x for x in flatten((args, kwargs))[0] if isinstance(x, cls))
        raise row.mode.refusal(f"calls {func.__name__} of a row of a tensor")
