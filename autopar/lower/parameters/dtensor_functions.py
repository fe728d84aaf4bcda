"""Functions of torch on parameters and gradients do what they do on one device.

torch's own DTensor refuses a plain tensor as another operand, gives each rank random numbers of its own for its part,
loses what is written to a view that had to be gathered, and ignores ``p.data = x``.  Scripts do all of this:
``h @ model.head.weight.T``, ``nn.init.normal_(p)``, ``p[0] = 0``, an average of weights put in place.  So for DTensors of
parallel modules (`known_meshes`)

- an op with plain tensors gets whole tensors, and gives one;
- a change in place by plain tensors changes this rank's part by its part of them, or the whole tensor where the op is not
  one for each element;
- random numbers are drawn for the whole tensor, and are those of the first rank;
- what torch has no rule for runs on whole tensors.

Plain tensors are taken to be the same on every rank, as everything is that a script computes alike on all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import MeshError, ModelError
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.compat import functions_by, local_tensor, map_leaves, set_local_tensor
from autopar.lower.parameters.known_meshes import (
    compare_plain,
    has_local_inputs,
    is_known,
    laid_as,
    read_whole,
    share_whole,
)
from autopar.lower.parameters.optimizer_state import refuse_file
from autopar.lower.parameters.view_writes import GATHERED_VIEW, note_views, note_write, refresh, write_through
from autopar.tensor_questions import QUESTIONS

__all__ = ["watch_functions"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_tensor: Any = Tensor
_FACTS = QUESTIONS | {
    _tensor.grad.__get__, _tensor.requires_grad.__set__, _tensor.is_leaf.__get__, _tensor.grad_fn.__get__,
    _tensor.requires_grad_, _tensor.is_contiguous, _tensor.register_hook, _tensor.__hash__, _tensor.__repr__,
    _tensor.register_post_accumulate_grad_hook, _tensor.retain_grad,
}  # fmt: skip
"""What asks or sets facts that are alike for a part and for the whole; optimizers call these most often."""
_READS = frozenset({Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.equal, torch.equal})
_VIEWS = frozenset({
    "view", "reshape", "flatten", "ravel", "unflatten", "select", "narrow", "t", "transpose", "permute", "movedim",
    "moveaxis", "swapaxes", "swapdims", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "reshape_as",
    "diagonal", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "unbind", "detach",
    "__getitem__", "__iter__", "as_strided", "unfold", "broadcast_to", "adjoint", "contiguous",
})  # fmt: skip
_VIEW_GETTERS = frozenset(
    getter.__get__ for getter in (_tensor.data, _tensor.T, _tensor.mT, _tensor.H, _tensor.mH, _tensor.real)
)
_FOR_SHAPE = frozenset({"view_as", "reshape_as", "expand_as", "type_as", "is_same_size", "to"})
"""Of their other operand they read the shape or the type only."""
_BY_ELEMENT = frozenset({
    "copy_", "add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_", "pow_", "clamp_",
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "logical_and_", "logical_or_",
})  # fmt: skip
"""An entry of their result follows from the same entries of operands of the same shape."""
_NO_WRITES = frozenset({"requires_grad_", "share_memory_", "detach_", "rename_"})
_DRAWS_IN_PLACE = frozenset({
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_",
})  # fmt: skip
_DRAWS_LIKE = frozenset({"randn_like", "rand_like", "randint_like", "bernoulli", "normal", "poisson"})
_DROPS = frozenset({"dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "native_dropout"})
_NEW = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"})
"""Tensors of any shape, to compute with: plain ones."""
_NO_RULE = ("DTensor", "sharding", "Sharding", "placement", "tensor subclass", "redistribut")
"""What torch's errors say where a function has no rule for DTensors, or none for how these lie."""


def watch_functions() -> None:
    """From now on functions of torch on DTensors of parallel modules go through this module."""
    functions_by(_run)


def _run(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if func in _FACTS:
        return func(*args, **kwargs)
    found: list[Tensor] = []
    _find_tensors(args, found)
    if kwargs:
        _find_tensors(kwargs.values(), found)
    ours = [x for x in found if isinstance(x, DTensor) and is_known(x)]
    if not ours:
        return func(*args, **kwargs)
    for x in ours:
        if GATHERED_VIEW in vars(x):
            refresh(x)
    rule = _RULES.get(func)
    if rule is not None:
        return rule(func, args, kwargs)
    name = getattr(func, "__name__", "")
    if func in _READS or name in _NEW:
        return _on_whole(func, args, kwargs)
    if getattr(func, "__module__", "") == "torch.nn.init" or name in _DRAWS_IN_PLACE:
        return _draw_in_place(func, ours[0], args, kwargs)
    if name in _DRAWS_LIKE or name in _DROPS:
        return _draw_like(func, name, ours[0], args, kwargs)
    if kwargs.get("out") is not None:
        return _write_out(func, args, kwargs)
    if _is_write(name):
        return _write(func, name, found, ours, args, kwargs)
    if name not in _FOR_SHAPE and _is_mixed(found, ours):
        return _on_whole(func, args, kwargs)
    return _natively(func, name, args, kwargs)


def _find_tensors(values: Iterable[Any], found: list[Tensor]) -> None:
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            _find_tensors(x, found)


def _has_tensor(values: Iterable[Any]) -> bool:
    found: list[Tensor] = []
    _find_tensors(values, found)
    return bool(found)


def _is_write(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name[3:-2] in _AUGMENTED)
    return name.endswith("_") and name not in _NO_WRITES


_AUGMENTED = frozenset("add sub mul truediv floordiv mod pow and or xor lshift rshift".split())


def _is_mixed(found: Sequence[Tensor], ours: Sequence[DTensor]) -> bool:
    """Whether torch has no rule for these together: a plain tensor that is more than a number, or another mesh."""
    mesh = id(ours[0].device_mesh)
    return any(id(x.device_mesh) != mesh for x in ours[1:]) or any(_is_foreign(x) for x in found)


def _is_foreign(x: Tensor) -> bool:
    if isinstance(x, DTensor):
        return False
    return isinstance(x, LateTensor) or x.dim() > 0 or (x.requires_grad and torch.is_grad_enabled())


# --- reading


def _plain(x: Any) -> Any:
    if isinstance(x, LateTensor):
        return x.whole()
    return read_whole(x) if isinstance(x, DTensor) and is_known(x) else x


def _on_whole(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`func` of whole plain tensors."""
    if torch.is_grad_enabled():
        found: list[Tensor] = []
        _find_tensors((*args, *kwargs.values()), found)
        local = [x for x in found if isinstance(x, DTensor) and x.requires_grad and has_local_inputs(x)]
        if local and any(_is_foreign(x) and x.dim() for x in found):
            raise MeshError(
                f"{getattr(func, '__name__', func)} got a parameter of shape {list(local[0].shape)} and a plain tensor, "
                "and each rank has other rows (inputs='local'), so that the parameter's gradient would be that of this "
                "rank's rows only: compute it in forward() or in the loss_fn of autopar.parallelize"
            )
    plain = map_leaves(_plain, (args, kwargs))
    result = func(*plain[0], **plain[1])
    if func is Tensor.numpy:
        result.setflags(write=False)  # it is a copy, and who writes to it means the parameter
    return result


def _natively(func: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    """What torch's DTensor does, or, where it has no rule, `func` of whole tensors."""
    is_view = name in _VIEWS or func in _VIEW_GETTERS
    try:
        result = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not _has_no_rule(error):
            raise
        if not is_view:
            return _on_whole(func, args, kwargs)
        everywhere = map_leaves(_replicated, (args, kwargs))
        result = func(*everywhere[0], **everywhere[1])
    if is_view and args and isinstance(args[0], DTensor) and not _has_tensor(args[1:]):
        note_views(args[0], lambda whole: func(whole, *args[1:], **kwargs), result)
    return result


def _has_no_rule(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or any(word in str(error) for word in _NO_RULE)


def _replicated(x: Any) -> Any:
    if not (isinstance(x, DTensor) and is_known(x)):
        return x
    return x.redistribute(x.device_mesh, [Replicate()] * x.device_mesh.ndim)


# --- writing


def _write(func: Any, name: str, found: list[Tensor], ours: list[DTensor], args: Args, kwargs: Kwargs) -> Any:
    target = args[0] if args else found[0]
    if isinstance(target, list | tuple):
        return _write_each(func, found, ours, args, kwargs)
    if not (isinstance(target, DTensor) and is_known(target)):
        return _on_whole_but_first(func, args, kwargs)
    others = [x for x in found if x is not target and x.dim()]
    is_mixed = _is_mixed([x for x in found if x is not target], [target, *ours])
    if target.requires_grad and torch.is_grad_enabled():
        if is_mixed and not target.is_leaf:
            raise ModelError(
                f"{name} changes what was computed of a parameter by a plain tensor, in place and with gradients: "
                "write to x.full_tensor() instead"
            )
        return func(*args, **kwargs)  # torch says that a parameter that requires grad can't be written to
    is_apart = is_mixed or any(tuple(x.placements) != tuple(target.placements) for x in ours if x.dim())
    compare_plain(target, [_whole_output(x) for x in others if not isinstance(x, DTensor)])
    if name in _BY_ELEMENT and is_apart and all(x.shape == target.shape for x in others):
        laid = map_leaves(lambda x: _laid(x, target), (args, kwargs))
        result = func(*laid[0], **laid[1])
    elif is_apart or name == "__setitem__":
        result = _write_whole(func, target, args, kwargs)
    else:
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not _has_no_rule(error):
                raise
            result = _write_whole(func, target, args, kwargs)
    write_through(target)
    return result


def _laid(x: Any, target: DTensor) -> Any:
    if x is target or not isinstance(x, Tensor) or not x.dim():
        return x
    return laid_as(_plain(x) if isinstance(x, LateTensor) else x, target)


def _write_whole(func: Any, target: DTensor, args: Args, kwargs: Kwargs) -> Any:
    """Change the whole tensor, and keep this rank's part."""
    with torch.no_grad():
        whole = read_whole(target).clone()
        rest = map_leaves(_plain, (args[1:], kwargs))
        result = func(whole, *rest[0], **rest[1])
        local_tensor(target).copy_(local_tensor(laid_as(whole, target)))
    return target if result is whole else result


def _on_whole_but_first(func: Any, args: Args, kwargs: Kwargs) -> Any:
    plain = map_leaves(_plain, (args[1:], kwargs))
    return func(args[0], *plain[0], **plain[1])


def _write_each(func: Any, found: list[Tensor], ours: list[DTensor], args: Args, kwargs: Kwargs) -> Any:
    """Of functions that change a list of tensors (``torch._foreach_...``): each by its own operands."""
    if not _is_mixed(found, ours):
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:
            pass
        else:
            note_write()
            return result
    count = len(args[0])
    for place in range(count):
        own = [[x[place]] if isinstance(x, list | tuple) and len(x) == count else x for x in args]
        _write_one(func, own[0][0], own, kwargs)
    return None


def _write_one(func: Any, target: Tensor, args: list[Any], kwargs: Kwargs) -> None:
    """`func` of lists of one tensor each, of which it changes `target`."""
    operands = [x for operand in args for x in (operand if isinstance(operand, list) else ())]
    if isinstance(target, DTensor) and is_known(target):
        if GATHERED_VIEW in vars(target):
            refresh(target)
        compare_plain(target, [x for x in operands if isinstance(x, Tensor) and not isinstance(x, DTensor)])
        laid = [local_tensor(_laid(x, target)) if isinstance(x, Tensor) and x.dim() else x for x in operands]
        lists = iter(laid)
        func(*([next(lists) for _ in operand] if isinstance(operand, list) else operand for operand in args), **kwargs)
        write_through(target)
    else:
        func(args[0], *map_leaves(_plain, args[1:]), **kwargs)


def _write_out(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`func` with ``out=``."""
    out = kwargs["out"]
    result = _run(func, args, {name: x for name, x in kwargs.items() if name != "out"})
    with torch.no_grad():
        _run(Tensor.copy_, (out, result), {})
    return out


# --- random numbers


def _draw_in_place(func: Any, target: DTensor, args: Args, kwargs: Kwargs) -> Any:
    """Give `target` the random numbers of one device, those of the first rank."""
    if target.requires_grad and torch.is_grad_enabled() and getattr(func, "__module__", "") != "torch.nn.init":
        return func(*args, **kwargs)  # torch says that a parameter that requires grad can't be written to
    with torch.no_grad():
        whole = torch.empty(target.shape, dtype=target.dtype, device=local_tensor(target).device)
        drawn = map_leaves(lambda x: whole if x is target else _plain(x), (args, kwargs))
        func(*drawn[0], **drawn[1])
        local_tensor(target).copy_(local_tensor(share_whole(whole, target)))
    write_through(target)
    return target


def _draw_like(func: Any, name: str, like: DTensor, args: Args, kwargs: Kwargs) -> Any:
    """`func`, which draws, of whole tensors: a number for each entry, those of the first rank."""
    if name in _DROPS or not name.endswith("_like"):
        return _on_whole(func, args, kwargs)
    whole = torch.empty(like.shape, dtype=like.dtype, device=local_tensor(like).device)
    drawn = func(whole, *args[1:], **{name: x for name, x in kwargs.items() if name != "input"})
    return share_whole(drawn, like).requires_grad_(bool(kwargs.get("requires_grad", False)))


# --- functions with rules of their own


def _set_data(func: Any, args: Args, kwargs: Kwargs) -> None:
    """``p.data = x``: torch changes the wrapper, and leaves the part that ops read as it was."""
    target, value = args
    if not (isinstance(target, DTensor) and is_known(target)):
        func(target, _plain(value).detach())
        return
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ModelError(
            f"a parameter of shape {list(target.shape)} and dtype {target.dtype} was given data of shape "
            f"{list(value.shape)} and dtype {value.dtype}: the program of a parallelized model has the shapes of its "
            "parameters. Change the original model, and call autopar.parallelize after it"
        )
    set_local_tensor(target, local_tensor(laid_as(_whole_output(value), target)).detach())
    write_through(target)


def _set_grad(func: Any, args: Args, kwargs: Kwargs) -> None:
    target, value = args
    if value is not None:
        is_ours = isinstance(target, DTensor) and is_known(target)
        if value.shape == target.shape:
            value = laid_as(_whole_output(value), target) if is_ours else _plain(value).detach()
    func(target, value)


def _whole_output(x: Tensor) -> Tensor:
    return x.whole() if isinstance(x, LateTensor) else x


def _format(func: Any, args: Args, kwargs: Kwargs) -> str:
    x, spec = args
    return format(x.item(), spec) if x.dim() == 0 else func(*args)


def _backward(func: Any, args: Args, kwargs: Kwargs) -> None:
    """A loss that is made of parameters only."""
    func(read_whole(args[0]), *args[1:], **kwargs)


def _gradients(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.grad(outputs, inputs)``, which also gets parameters among inputs."""
    rest = {"outputs": args[0] if args else None, **kwargs}
    if args:
        rest["outputs"] = map_leaves(_plain, rest["outputs"])
        return func(rest.pop("outputs"), *args[1:], **rest)
    return func(**{**rest, "outputs": map_leaves(_plain, rest["outputs"])})


def _copy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``copy.deepcopy``, also where the part begins within other memory: torch takes its place there for a pointer."""
    x, memo = args
    if id(x) in memo or type(x) is not DTensor or not x.is_leaf:
        return func(x, memo)
    made = x.detach().clone().requires_grad_(x.requires_grad)
    memo[id(x)] = made
    if x.grad is not None:
        made.grad = copy.deepcopy(x.grad, memo)
    vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(x).items() if name != GATHERED_VIEW})
    return made


Rule = Callable[[Any, Args, Kwargs], Any]
_RULES: Mapping[Any, Rule] = {
    _tensor.data.__set__: _set_data,
    _tensor.grad.__set__: _set_grad,
    Tensor.__format__: _format,
    Tensor.__reduce_ex__: refuse_file,
    Tensor.__deepcopy__: _copy,
    Tensor.backward: _backward,
    torch.autograd.grad: _gradients,
}
