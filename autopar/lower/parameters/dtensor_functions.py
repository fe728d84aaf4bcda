"""Functions of torch on parameters and gradients do what they do on one device.

torch's own DTensor refuses a plain tensor as another operand, gives each rank random numbers of its own for its part,
loses what is written to a view that had to be gathered, and ignores ``p.data = x``.  Scripts do all of this:
``h @ model.head.weight.T``, ``nn.init.normal_(p)``, ``p[0] = 0``, an average of weights put in place.  So for DTensors
of parallel modules (`known_meshes`)

- a function of them and plain tensors gets whole tensors, and gives what it gives of those;
- a change in place by plain tensors changes this rank's part by its part of them, or the whole tensor where it is not
  one for each element (`dtensor_writes`);
- random numbers are those that one device draws (`dtensor_draws`);
- collectives of a script see whole tensors (`script_collectives`);
- views that were gathered follow the tensor that they are of, and it follows them (`view_writes`);
- what torch has no rule for runs on whole tensors.

Plain tensors are the same on every rank, as everything is that a script computes alike on all ranks.  Every rank calls
the same functions, as some communicate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.errors import MeshError
from autopar.lower.compat import (
    allow_anomaly_detection,
    dtensor_like,
    functions_by,
    local_part_of,
    local_tensor,
    map_leaves,
    native_functions,
    with_dtensors,
    written_arguments,
)
from autopar.lower.parameters.dtensor_draws import draw_in_place, draw_like, draws_in_place, draws_like
from autopar.lower.parameters.dtensor_writes import (
    copy_deeply,
    is_across_stages,
    is_write,
    refuse_swaps,
    set_data,
    set_grad,
    write,
    write_arguments,
    write_out,
)
from autopar.lower.parameters.function_calls import FunctionCall, find_tensors, has_no_rule, plain
from autopar.lower.parameters.known_meshes import (
    finished,
    has_local_inputs,
    is_known,
    laid_as,
    placements_of,
    read_whole,
    set_apart,
    share_largest,
    stages_of,
)
from autopar.lower.parameters.other_stages import holders_of, is_elsewhere, note_holders
from autopar.lower.parameters.saved_files import reduce_whole, refuse_storage
from autopar.lower.parameters.script_collectives import is_collective, run_collective
from autopar.lower.parameters.stage_functions import norm_order, norms, stays_in_parts
from autopar.lower.parameters.view_writes import GATHERED_VIEW, note_views, note_write, refresh
from autopar.objects.tensor_questions import QUESTIONS

__all__ = ["begin_step", "end_step", "watch_functions"]

_tensor: Any = Tensor
_torch: Any = torch
_FACTS = QUESTIONS | {
    _tensor.grad.__get__, _tensor.requires_grad.__set__, _tensor.is_leaf.__get__, _tensor.grad_fn.__get__,
    _tensor.requires_grad_, _tensor.is_contiguous, _tensor.__hash__, _tensor.__repr__,
    _tensor.register_post_accumulate_grad_hook, _tensor.retain_grad, _tensor.data_ptr,
}  # fmt: skip
"""Functions that read or set properties that a slice shares with its whole; optimizers call these most often."""
_WHOLE = frozenset({
    "numpy", "__array__", "tolist", "equal", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor",
    "dropout", "dropout_", "alpha_dropout", "feature_dropout", "bernoulli", "normal", "poisson", "multinomial",
})  # fmt: skip
"""They want the whole tensor: all of it on the host, memory of any shape, or random numbers for it."""
_VIEWS = frozenset({
    "view", "reshape", "flatten", "ravel", "unflatten", "select", "narrow", "t", "transpose", "permute", "movedim",
    "moveaxis", "swapaxes", "swapdims", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "reshape_as",
    "diagonal", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "unbind", "detach",
    "__getitem__", "__iter__", "as_strided", "unfold", "broadcast_to", "adjoint", "contiguous",
})  # fmt: skip
_VIEW_GETTERS = frozenset(
    getter.__get__ for getter in (_tensor.data, _tensor.T, _tensor.mT, _tensor.H, _tensor.mH, _tensor.real)
)
_SET_GRAD = _tensor.grad.__set__
_FOR_SHAPE = frozenset({"view_as", "reshape_as", "expand_as", "type_as", "is_same_size", "to"})
"""Of their other operand they read the shape or the type only."""


def watch_functions() -> None:
    """From now on functions of torch on DTensors of parallel modules go through this module."""
    functions_by(_run)
    refuse_swaps()
    allow_anomaly_detection()


class _OptimizerStep(threading.local):
    """The optimizer step that this thread is in: the context of functions that are torch's own, and parameters of other
    stages, with their gradients, which take no part.
    """

    context: Any = None
    others: Sequence[tuple[nn.Parameter, Tensor]] = ()


_STEP = _OptimizerStep()


def begin_step(parameters: Iterable[nn.Parameter], *, is_native: bool) -> None:
    """An optimizer begins a step on `parameters`, in which each is updated by itself, on the ranks that have it.

    `is_native`: it is one of torch, and torch's DTensor does all of its functions right: to do them here takes as long
    again.
    """
    end_step()
    _STEP.others = [(p, p.grad) for p in parameters if p.grad is not None and is_elsewhere(p)]
    for parameter, _ in _STEP.others:
        parameter.grad = None
    set_apart(is_on=True)
    if is_native:
        note_write()
        _STEP.context = native_functions()
        _STEP.context.__enter__()


def end_step() -> None:
    """The step has ended, or failed."""
    context, _STEP.context = _STEP.context, None
    if context is not None:
        context.__exit__(None, None, None)
    others, _STEP.others = _STEP.others, ()
    with native_functions():  # the same tensors as before: there is no layout to look at
        for parameter, gradient in others:
            parameter.grad = gradient
    set_apart(is_on=False)


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function in _FACTS or (function == _SET_GRAD and args[1] is None):
        return function(*args, **kwargs)
    tensors = find_tensors((*args, *kwargs.values()) if kwargs else args)
    known = [x for x in tensors if isinstance(x, DTensor) and is_known(x)]
    if not known:
        return function(*args, **kwargs)
    for x in known:
        if GATHERED_VIEW in vars(x):
            refresh(x)
    call = FunctionCall(function, args, kwargs, tensors, known)
    rule = _RULES.get(function)
    if rule is not None:
        return rule(call)
    if is_collective(call):
        return run_collective(call)
    if is_write(call.name):
        return draw_in_place(call) if draws_in_place(call) else write(call)
    if kwargs.get("out") is not None:
        return write_out(call)
    written = {id(x) for x in written_arguments(function, args, kwargs)}
    if written:
        return write_arguments(call, [x for x in known if id(x) in written])
    return _compute(call)


def _compute(call: FunctionCall) -> Any:
    """A function that changes none of its arguments."""
    if draws_like(call):
        return draw_like(call)
    if any(stages_of(x) is not None for x in call.known):
        return _on_stages(call)
    is_whole = call.name in _WHOLE or (call.name not in _FOR_SHAPE and call.is_mixed())
    return _on_whole(call) if is_whole else _natively(_with_pending_finished(call))


def _with_pending_finished(call: FunctionCall) -> FunctionCall:
    """The same with results finished of which ranks have parts that torch would bring together wrongly.

    - Norms and extremes, which are no sums: torch adds up the parts of ``p.norm(dim=0).sum()``.
    - Sums of integers, where there are other tensors: torch divides a whole one, which makes an integer a float32.
    """
    pending = {id(x) for x in call.known if len(call.known) > 1 and _is_pending_count(x)}
    if call.name not in _KEEPS_NORMS:
        pending |= {id(x) for x in call.known if _is_pending_norm(x, call)}
    if not pending:
        return call
    args, kwargs = map_leaves(lambda x: finished(x) if id(x) in pending else x, (call.args, dict(call.kwargs)))
    tensors = find_tensors((*args, *kwargs.values()))
    return FunctionCall(call.function, args, kwargs, tensors, [x for x in tensors if isinstance(x, DTensor)])


_KEEPS_NORMS = frozenset({"stack", "to", "detach", "clone"})
"""Functions between the norms of parameters and the norm of these, which is one collective for all."""


def _is_pending_count(x: DTensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) and any(each.is_partial() for each in x.placements)


def _is_pending_norm(x: DTensor, call: FunctionCall) -> bool:
    """Whether ranks have parts of it that are neither added up nor brought together by a norm of the same order."""
    others = [each for each in placements_of(x) if each.is_partial() and not _adds_up(each)]
    return bool(others) and {getattr(each, "norm_type", None) for each in others} != {norm_order(call)}


def _adds_up(pending: Any) -> bool:
    terms: Any = Partial  # of which those of norms are a subclass
    return type(pending) is terms and pending.reduce_op in ("sum", "avg")


def _on_stages(call: FunctionCall) -> Any:
    """The function of parameters or gradients of which pipeline stages have parts, on all ranks."""
    order = norm_order(call)
    if order is not None:
        return norms(call, order)
    if stays_in_parts(call):
        return _on_whole(call) if is_across_stages(call) else _in_parts(call)
    return _viewed(call, _gathered(call)) if _is_view(call) else _on_whole(call)


def _in_parts(call: FunctionCall) -> Any:
    """The function of each stage's parts; its results lie on the same stages."""
    result = _natively(call)
    holders = holders_of(call.known)
    for x in find_tensors([result]):
        note_holders(x, holders)
    return result


def _on_whole(call: FunctionCall) -> Any:
    """The function of whole plain tensors.

    Raises:
        MeshError: a parameter would get the gradient of this rank's rows only.
    """
    if torch.is_grad_enabled() and len(call.known) < len(call.tensors):
        local = [x for x in call.known if x.requires_grad and has_local_inputs(x)]
        if local and call.plain_tensors():
            raise MeshError(
                f"{call.name} got a parameter of shape {list(local[0].shape)} and a plain tensor, and each rank has "
                "other rows (inputs='local'), so that the parameter's gradient would be that of this rank's rows only: "
                "compute it in forward() or in the loss_fn of autopar.parallelize"
            )
    result = call.with_leaves(plain)
    if call.name == "numpy":
        result.setflags(write=False)  # it is a copy, and who writes to it means the parameter
    return result


def _natively(call: FunctionCall) -> Any:
    """What torch's DTensor does, or, where it has no rule, the function of whole tensors."""
    try:
        result = call.natively()
    except (NotImplementedError, RuntimeError) as error:
        if not has_no_rule(error):
            raise
        if not _is_view(call):
            return _on_whole(call)
        result = _gathered(call)
    return _viewed(call, result) if _is_view(call) else result


def _is_view(call: FunctionCall) -> bool:
    return call.name in _VIEWS or call.function in _VIEW_GETTERS


def _viewed(call: FunctionCall, result: Any) -> Any:
    """`result`, a view, which follows what it is of."""
    if call.args and call.args[0] is call.known[0] and len(call.tensors) == 1:
        function, rest, kwargs = call.function, call.args[1:], call.kwargs
        note_views(call.known[0], lambda whole: function(whole, *rest, **kwargs), result)
    return result


def _gathered(call: FunctionCall) -> Any:
    """A view of whole tensors, as DTensors; torch has no rule for some even then (``unfold``)."""
    try:
        return call.with_leaves(_replicated)
    except (NotImplementedError, RuntimeError) as error:
        if not has_no_rule(error):
            raise
    mesh = call.known[0].device_mesh
    whole = [Replicate()] * mesh.ndim
    return map_leaves(
        lambda x: DTensor.from_local(x, mesh, whole, run_check=False) if isinstance(x, Tensor) else x,
        call.with_leaves(plain),
    )


def _replicated(x: Any) -> Any:
    if not (isinstance(x, DTensor) and is_known(x)):
        return x
    untyped: Any = x
    whole = [Replicate()] * untyped.device_mesh.ndim
    if stages_of(x) is not None:
        return DTensor.from_local(read_whole(x), untyped.device_mesh, whole, run_check=False)
    return untyped.redistribute(untyped.device_mesh, whole)


def _new_empty(call: FunctionCall) -> Any:
    """Memory for the tensor's own shape on a named device is laid out as it is: ``dcp.async_save`` puts a copy of each
    part there.  Without a device it is for all of it (``nn.init.orthogonal_``).
    """
    x, sizes = call.args[0], call.args[1:] or (call.kwargs["size"],)
    size = sizes if isinstance(sizes[0], int) else sizes[0]
    if tuple(size) != tuple(x.shape) or "device" not in call.kwargs or call.kwargs.get("requires_grad"):
        return _on_whole(call)
    options, part = {name: value for name, value in call.kwargs.items() if name != "size"}, local_tensor(x)
    return dtensor_like(part.new_empty(part.shape, **options), x)


def _number(call: FunctionCall) -> float:
    """``float(x)``, also where ``torch.tensor([x, y])`` calls it."""
    with with_dtensors():
        return _compute(call)


def _format(call: FunctionCall) -> str:
    x, spec = call.args
    return format(x.item(), spec) if x.dim() == 0 else call.natively()


def _backward(call: FunctionCall) -> None:
    """Of a loss that is made of parameters only."""
    call.function(read_whole(call.known[0]), *call.args[1:], **call.kwargs)


def _gradients(call: FunctionCall) -> Any:
    """``torch.autograd.grad(outputs, inputs)``, which also gets parameters among inputs."""
    if call.args:
        return call.function(map_leaves(plain, call.args[0]), *call.args[1:], **call.kwargs)
    return call.function(**{**call.kwargs, "outputs": map_leaves(plain, call.kwargs["outputs"])})


def _accumulate(call: FunctionCall) -> None:
    """``torch.autograd.backward(outputs, gradients, inputs=inputs)``, by which parameters get gradients."""
    kwargs = {name: value if name == "inputs" else map_leaves(plain, value) for name, value in call.kwargs.items()}
    call.function(*map_leaves(plain, call.args), **kwargs)


def _unscale(call: FunctionCall) -> Any:
    """What gradient scalers call: an overflow in the gradients of one pipeline stage is one on all ranks."""
    result = write(call)
    share_largest(call.known[0], call.args[1])
    return result


def _register_hook(call: FunctionCall) -> Any:
    """What a hook gives in place of a gradient, which may be a whole tensor, takes the gradient's layout."""
    x, hook = call.args[0], call.args[1] if len(call.args) > 1 else call.kwargs["hook"]

    @wraps(hook)
    def laid(gradient: Tensor) -> Tensor | None:
        given = hook(gradient)
        if isinstance(given, Tensor) and isinstance(gradient, DTensor) and given.shape == gradient.shape:
            return laid_as(given, gradient)
        return given

    return call.function(x, laid)


def _on_parts(call: FunctionCall) -> None:
    """What changes tensors that are laid out alike, element by element: each rank does it to its parts of them."""
    note_write()
    call.with_leaves(lambda x: local_part_of(x) if isinstance(x, Tensor) else x)


_RULES: Mapping[Any, Callable[[FunctionCall], Any]] = {
    _tensor.data.__set__: set_data,
    _SET_GRAD: set_grad,
    _tensor.__float__: _number,
    _tensor.__format__: _format,
    _tensor.__reduce_ex__: lambda call: reduce_whole(*call.args),
    _tensor.storage: lambda call: refuse_storage(call.args[0]),
    _tensor.__deepcopy__: copy_deeply,
    _tensor.new_empty: _new_empty,
    _tensor.backward: _backward,
    _tensor.register_hook: _register_hook,
    _torch.autograd.grad: _gradients,
    _torch.autograd.backward: _accumulate,
    _torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    _torch._fused_sgd_: _on_parts,
    _torch._fused_adagrad_: _on_parts,
}
