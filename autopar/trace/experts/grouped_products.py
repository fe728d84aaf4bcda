"""Mixtures of experts as ops of torch: products of sorted rows with one matrix a group, and the whole region.

`autopar.ops.experts` says what their arguments are.  The region is nothing but calls of other ops, so that autograd
keeps what it keeps of those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.ops.experts import ENDS, IDS, PRODUCT, read_body
from autopar.trace.evaluation import run_op

__all__ = ["accurate_products", "grouped_product", "run_experts", "run_sorted_experts"]

_library: Any = torch.library
_aten: Any = torch.ops.aten
_NAMESPACE: Any = torch.library.Library("autopar_traced", "FRAGMENT")
_KERNEL_DTYPES = (torch.bfloat16,)  # of aten._grouped_mm, forward and backward, on the devices that it is written for
_ROW_BYTES = 16  # which divides the strides of its operands


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[R, k], [E, k, n], [E] -> [R, n]: each group of rows by its own matrix.

    Rows behind the last end have undefined results and gradients on devices with a kernel, else zeros.
    """
    sizes = (rows.shape[-1], matrices.shape[-1])
    fits = all(size * rows.element_size() % _ROW_BYTES == 0 for size in sizes)
    if rows.is_cuda and rows.dtype in _KERNEL_DTYPES and rows.dtype is matrices.dtype and fits:
        return _aten._grouped_mm(rows, matrices, ends)
    return torch.ops.autopar_traced.plain_grouped_product(rows, matrices, ends)


def _plain(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for group, span in _spans(ends):
        torch.mm(rows[span], matrices[group], out=out[span])
    return out


def _plain_backward(gradient: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    of_rows, of_matrices = torch.zeros_like(rows), torch.zeros_like(matrices)
    for group, span in _spans(ends):
        torch.mm(gradient[span], matrices[group].T, out=of_rows[span])
        torch.mm(rows[span].T, gradient[span], out=of_matrices[group])
    return of_rows, of_matrices


def _spans(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The groups that have rows."""
    start, every = 0, cast("Any", ends).tolist()
    for group, end in enumerate(every):
        if end > start:
            yield group, slice(start, end)
        start = end


def _define(name: str, run: Callable[..., Any], like: Callable[..., Any]) -> Any:
    made = _library.custom_op(f"autopar_traced::{name}", run, mutates_args=())
    made.register_fake(like)
    return made


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    gradients = torch.ops.autopar_traced.plain_grouped_product_backward(gradient.contiguous(), *ctx.saved_tensors)
    return (*gradients, None)


def _like(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


def _like_gradients(gradient: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(matrices)


_define("plain_grouped_product", _plain, _like).register_autograd(_backward, setup_context=_keep)
_define("plain_grouped_product_backward", _plain_backward, _like_gradients)


def run_experts(
    ids: Tensor,
    reads: Sequence[Tensor],
    experts: Sequence[Tensor],
    others: Sequence[Tensor],
    members: Tensor,
    num_experts: int,
    body: str,
) -> Tensor:
    """The op: sort, gather, run the body, put back, and add up the rows of each token.

    Rows whose expert is not below the number of matrices that are there come behind all others, and give zeros.
    """
    parts, num_local = read_body(body), len(experts[0]) if experts else num_experts
    sorted_ids, order = torch.sort(ids, stable=True)
    # A token's rows share what it has.
    rows = [x[order // (len(ids) // len(x))] for x in reads]
    result = run_sorted_experts(sorted_ids, rows, experts, others, body, may_be_elsewhere=num_local < num_experts)
    back = torch.empty_like(order).index_put((order,), torch.arange(len(order), device=order.device))
    result = result[back]
    return result if parts.summed == 1 else result.view(-1, parts.summed, *result.shape[1:]).sum(1)


def run_sorted_experts(
    ids: Tensor,
    rows: Sequence[Tensor],
    experts: Sequence[Tensor],
    others: Sequence[Tensor],
    body: str,
    *,
    may_be_elsewhere: bool,
) -> Tensor:
    """The body on rows that are sorted by expert: results in that order.

    Rows whose expert is not below the number of matrices that are there give zeros, if `may_be_elsewhere`; else there
    must be none.
    """
    parts = read_body(body)
    num_local = len(experts[0]) if experts else int(may_be_elsewhere)
    ends = torch.searchsorted(ids, torch.arange(num_local, device=ids.device), right=True, out_int32=True)
    values = {f"reads{place}": x for place, x in enumerate(rows)}
    mask = None
    if may_be_elsewhere:
        mask = torch.arange(len(ids), device=ids.device) < ends[-1]
        ids = ids.clamp(max=num_local - 1)
        values = {name: _where(mask, x) for name, x in values.items()}
    values |= {f"experts{place}": x for place, x in enumerate(experts)}
    values |= {f"others{place}": x for place, x in enumerate(others)} | {IDS: ids, ENDS: ends}
    for op in parts.ops:
        if op.target == PRODUCT:
            left, right, at = (values[name] for name in op.operands)
            made = grouped_product(left if mask is None else _where(mask, left), right, at)
            results: Sequence[Any] = (made if mask is None else _where(mask, made),)
        else:
            results = run_op(op, values)
        values.update(zip(op.results, results, strict=True))
    return values[parts.result] if mask is None else _where(mask, values[parts.result])


def _where(mask: Tensor, x: Tensor) -> Tensor:
    """`x` where `mask` says of the row, else zero, whatever stands there."""
    return torch.where(mask.view(-1, *(1,) * (x.dim() - 1)), x, 0) if x.is_floating_point() else x


_NAMESPACE.define(
    "experts(Tensor ids, Tensor[] reads, Tensor[] experts, Tensor[] others, Tensor members, int num_experts, str body) "
    "-> Tensor"
)
_NAMESPACE.impl("experts", run_experts, "CompositeImplicitAutograd")
_NAMESPACE.define(
    "sorted_experts(Tensor ids, Tensor[] rows, Tensor[] experts, Tensor[] others, str body, *, bool may_be_elsewhere) "
    "-> Tensor"
)
_NAMESPACE.impl("sorted_experts", run_sorted_experts, "CompositeImplicitAutograd")
_NAMESPACE.define("grouped_product(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_NAMESPACE.impl("grouped_product", grouped_product, "CompositeImplicitAutograd")


class _AccurateProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        is_rows = func in _GROUPED and len(args) == 2 and (args[0].dim(), args[1].dim()) == (2, 3)
        if is_rows and args[0].dtype is torch.float64 and given.get("bias") is None:
            return grouped_product(args[0], args[1], given["offs"])
        return func(*args, **given)


_GROUPED = tuple(
    getattr(place, name)
    for place, name in ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"))
    if hasattr(place, name)
)


def accurate_products() -> contextlib.AbstractContextManager[Any]:
    """Inside, torch's grouped product of rows supports float64 too, which its kernels don't."""
    return _AccurateProducts()
