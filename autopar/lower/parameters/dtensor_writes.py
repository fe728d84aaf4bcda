"""Functions that change a parameter or gradient in place change it as on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import wraps
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import ModelError
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.compat import local_tensor, map_leaves, set_local_tensor, storage_key
from autopar.lower.once import once
from autopar.lower.parameters.function_calls import FunctionCall, find_tensors, has_no_rule, is_known_dtensor, plain
from autopar.lower.parameters.known_meshes import compare_plain, laid_as, placements_of, read_whole, stages_of
from autopar.lower.parameters.other_stages import are_across_stages
from autopar.lower.parameters.view_writes import GATHERED_VIEW, note_write, refresh, write_through

__all__ = [
    "copy_deeply", "is_across_stages", "is_by_element", "is_write", "refuse_swaps", "set_data", "set_grad", "write",
    "write_arguments", "write_out",
]  # fmt: skip

_AUGMENTED = frozenset({
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
})  # fmt: skip
_NO_WRITES = frozenset({"requires_grad_", "share_memory_", "detach_", "rename_"})
_BY_ELEMENT = frozenset({
    "copy_", "add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_", "pow_", "clamp_",
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "logical_and_", "logical_or_",
})  # fmt: skip
"""An entry of their result follows from the same entries of operands of the same shape."""


def is_by_element(name: str) -> bool:
    """Whether an entry of its result follows from the same entries of operands of the same shape."""
    return f"{name}_" in _BY_ELEMENT or name.replace("__", "__i", 1) in _BY_ELEMENT or name in _BY_ELEMENT


def is_write(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name[3:-2] in _AUGMENTED)
    return name.endswith("_") and name not in _NO_WRITES


@once
def refuse_swaps() -> None:
    """From now on ``torch.utils.swap_tensors`` takes no parameter together with a tensor that lies otherwise."""
    utils: Any = torch.utils
    swap = utils.swap_tensors

    @wraps(swap)
    def checked_swap(t1: Any, t2: Any) -> Any:
        for x, other in ((t1, t2), (t2, t1)):
            if is_known_dtensor(x) and not (isinstance(other, DTensor) and placements_of(other) == placements_of(x)):
                raise ModelError(
                    f"torch.utils.swap_tensors can't exchange a parameter of shape {list(x.shape)} of a parallelized "
                    "model, of which each rank has a part, and a tensor that lies otherwise: copy values, with "
                    "torch.no_grad(): old = p.clone(); p.copy_(x)"
                )
        return swap(t1, t2)

    utils.swap_tensors = checked_swap


def is_across_stages(call: FunctionCall) -> bool:
    """Whether what is computed entry by entry lies on several pipeline stages, so that operands have to be gathered.

    Raises:
        ModelError: it does, but only ranks that hold one of the operands can tell, so that no rank can gather others.
    """
    if len(call.known) < 2:
        return False
    lists: list[Any] = [x for x in call.args if isinstance(x, list | tuple)] if "_foreach_" in call.name else []
    return any(_are_across(call, operands) for operands in (zip(*lists, strict=True) if lists else [call.known]))


def _are_across(call: FunctionCall, operands: Iterable[Any]) -> bool:
    of_stages = [x for x in operands if isinstance(x, DTensor) and stages_of(x) is not None]
    is_across = len(of_stages) > 1 and are_across_stages(of_stages)
    if is_across is None:
        shapes = " and ".join(str(list(x.shape)) for x in of_stages)
        raise ModelError(
            f"{call.name} of what was computed of parameters, of shapes {shapes}, which are in different pipeline "
            "stages: on every rank pass x.full_tensor() of the one that is only read, or keep such parameters together "
            "with constraints='pipeline=1'"
        )
    return is_across


def write(call: FunctionCall) -> Any:
    """A call of a function that changes its first argument, or each of a list."""
    target: Any = call.args[0] if call.args else call.tensors[0]
    if isinstance(target, list | tuple):
        return _write_each(call)
    if not is_known_dtensor(target):
        return call.with_leaves(plain, first=1)
    is_mixed = call.is_mixed()
    if target.requires_grad and torch.is_grad_enabled():
        if is_mixed and not target.is_leaf:
            raise ModelError(
                f"{call.name} changes what was computed of a parameter by a plain tensor, in place and with gradients: "
                "write to x.full_tensor() instead"
            )
        return call.natively()  # torch says that a parameter that requires grad can't be written to
    result = _write_mixed(call, target) if is_mixed else _write_dtensors(call, target)
    write_through(target)
    return result


def _write_dtensors(call: FunctionCall, target: DTensor) -> Any:
    """All operands are on one mesh."""
    if call.name == "__setitem__" or (stages_of(target) is not None and not _stays_in_parts(call, target)):
        return _write_whole(call, target)
    if is_across_stages(call) or any(placements_of(x) != placements_of(target) for x in call.known if x.dim()):
        return _write_laid(call, target)
    try:
        return call.natively()
    except (NotImplementedError, RuntimeError) as error:
        if not has_no_rule(error):
            raise
        return _write_whole(call, target)


def _stays_in_parts(call: FunctionCall, target: DTensor) -> bool:
    """Whether a stage's ranks can do it by themselves, without a look at entries that others have."""
    is_alike = all(x.shape == target.shape or not (x.dim() or isinstance(x, DTensor)) for x in call.tensors)
    return is_alike and (call.name in _BY_ELEMENT or call.name in ("zero_", "fill_"))


def _write_mixed(call: FunctionCall, target: DTensor) -> Any:
    """Plain tensors, or DTensors on other meshes, are among the operands."""
    compare_plain(target, call.plain_tensors())
    return _write_laid(call, target)


def _write_laid(call: FunctionCall, target: DTensor) -> Any:
    if call.name in _BY_ELEMENT and all(x.shape == target.shape for x in call.tensors if x.dim()):
        return call.with_leaves(lambda x: _laid(x, target))
    return _write_whole(call, target)


def _laid(x: Any, target: DTensor) -> Any:
    if x is target or not isinstance(x, Tensor) or not x.dim():
        return x
    return laid_as(x.whole() if isinstance(x, LateTensor) else x, target)


def _write_whole(call: FunctionCall, target: DTensor) -> Any:
    """Change the whole tensor, and keep this rank's part."""
    with torch.no_grad():
        whole = read_whole(target).clone()
        result = call.with_leaves(lambda x: whole if x is target else plain(x))
        local_tensor(target).copy_(local_tensor(laid_as(whole, target)))
    return target if result is whole else result


def _write_each(call: FunctionCall) -> None:
    """``torch._foreach_...``: each tensor of the list by its own operands."""
    if not call.is_mixed() and not is_across_stages(call):
        try:
            call.natively()
        except NotImplementedError:
            pass
        else:
            note_write()
            return
    targets: list[Any] = call.args[0]
    for place, target in enumerate(targets):
        own: list[Any] = [[x[place]] if type(x) in (list, tuple) and len(x) == len(targets) else x for x in call.args]
        if not is_known_dtensor(target):
            call.function(own[0], *map_leaves(plain, own[1:]), **call.kwargs)
            continue
        if GATHERED_VIEW in vars(target):
            refresh(target)
        compare_plain(target, [x for x in find_tensors(own) if not isinstance(x, DTensor)])
        laid = map_leaves(lambda x, target=target: _local(_laid(x, target) if x is not target else x, target), own)
        call.function(*laid, **call.kwargs)
        write_through(target)


def _local(x: Any, target: DTensor) -> Any:
    """An operand of `target`, laid out as that is or a number, for this rank's part of it."""
    return local_tensor(x) if isinstance(x, DTensor) and (x is target or x.dim()) else plain(x)


def write_arguments(call: FunctionCall, written: Iterable[DTensor]) -> Any:
    """Call an operator on whole tensors, and keep this rank's parts of those that it writes to, which are `written`.

    torch's DTensor has no rule for the operators of packages, such as the optimizer kernels of bitsandbytes.
    """
    with torch.no_grad():
        wholes = {id(x): read_whole(x).clone() for x in written}
        result = call.with_leaves(lambda x: wholes[id(x)] if id(x) in wholes else plain(x))
        for x in written:
            local_tensor(x).copy_(local_tensor(laid_as(wholes[id(x)], x)))
            write_through(x)
    return result


def write_out(call: FunctionCall) -> Any:
    """A call with ``out=``."""
    out = call.kwargs["out"]
    kwargs = {name: plain(x) for name, x in call.kwargs.items() if name != "out"}
    result = call.function(*map_leaves(plain, call.args), **kwargs)
    with torch.no_grad():
        tensors = [x for x in (out, result) if isinstance(x, Tensor)]
        known = [x for x in tensors if isinstance(x, DTensor)]
        if known:
            write(FunctionCall(Tensor.copy_, (out, result), {}, tensors, known))
        else:
            out.copy_(result)
    return out


def set_data(call: FunctionCall) -> None:
    """``p.data = x``: torch changes the wrapper, and leaves the part that functions read as it was.

    Raises:
        ModelError: `x` is of another shape or dtype.
    """
    target, value = call.args
    if not is_known_dtensor(target):
        call.function(target, plain(value).detach())
        return
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ModelError(
            f"a parameter of shape {list(target.shape)} and dtype {target.dtype} was given data of shape "
            f"{list(value.shape)} and dtype {value.dtype}: the program of a parallelized model has the shapes of its "
            "parameters. Change the original model, and call autopar.parallelize after it"
        )
    set_local_tensor(target, local_tensor(_given(value, target)).detach())
    write_through(target)


def set_grad(call: FunctionCall) -> None:
    """``p.grad = x``."""
    target, value = call.args
    if isinstance(value, Tensor) and value.shape == target.shape:  # else torch names both shapes
        value = _given(value, target) if is_known_dtensor(target) else plain(value).detach()
    call.function(target, value)


def _given(value: Tensor, target: DTensor) -> DTensor:
    """A tensor that takes the place of `target`, or becomes its gradient."""
    return laid_as(value.whole() if isinstance(value, LateTensor) else value, target)


def copy_deeply(call: FunctionCall) -> Any:
    """``copy.deepcopy``, also where the part begins within other memory: torch takes its place there for a pointer.

    Copies of tensors that share memory (tied parameters in a state dict) share memory, as on one device.
    """
    x, memo = call.args
    return call.natively() if id(x) in memo or not _has_part(x) else _copy_part(x, memo)


def _has_part(x: Tensor) -> TypeGuard[DTensor]:
    return type(x) is DTensor and x.is_leaf


def _copy_part(x: DTensor, memo: dict[Any, Any]) -> DTensor:
    part = local_tensor(x)
    same = (storage_key(part), part.storage_offset(), tuple(x.shape), placements_of(x))
    copied: DTensor = memo.setdefault(same, x.detach().clone())
    made: Any = copied.detach().requires_grad_(x.requires_grad)
    memo[id(x)] = made
    gradient = x.grad
    if gradient is not None:  # copied here, as functions are torch's own inside of a rule
        made.grad = _copy_part(gradient, memo) if _has_part(gradient) else copy.deepcopy(gradient, memo)
    copies = {name: copy.deepcopy(value, memo) for name, value in vars(x).items() if name != GATHERED_VIEW}
    made.__dict__ |= copies
    return made
