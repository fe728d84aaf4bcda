"""The private parts of torch that tracing needs, all in one place (seen on torch 2.11 to 2.13)."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._decomp import _should_decompose_because_unsafe_op, decomposition_table
from torch._export.utils import _is_cia_op, _is_preservable_cia_op, _materialize_cpp_cia_ops
from torch._higher_order_ops.wrap import WrapWithAutocast
from torch._subclasses import fake_tensor as fake_tensors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.export import _trace as export_trace
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from autopar.trace.compat.composite_ops import PIECES

__all__ = [
    "DATA_DEPENDENT",
    "SYMBOLIC",
    "TORCH_DIRECTORY",
    "DispatchMode",
    "above_autograd",
    "argument_names",
    "argument_source",
    "autocast_calls",
    "autocast_kernels",
    "below_autocast",
    "below_autograd",
    "fake_mode",
    "fake_parameter",
    "fake_tensor",
    "flatten",
    "flatten_one_level",
    "gradient_engine",
    "has_known_values",
    "has_storage",
    "intercept_autograd_functions",
    "intercept_batch_norms",
    "intercept_gradients",
    "intercept_lists",
    "is_cast_on_gpus",
    "is_fake",
    "is_higher_order",
    "is_plain_op",
    "is_wrapped_number",
    "overload",
    "plain_tensors",
    "run_decompositions",
    "stays",
    "storage_key",
    "unchecked_values",
    "unflatten",
    "unprinted_graphs",
    "unread_masks",
    "untraced",
    "values_to_print",
    "writes",
    "written_out",
]

TORCH_DIRECTORY = str(Path(torch.__file__).parent)

# What torch raises when the Python value of a tensor is read that has none while tracing.
DATA_DEPENDENT: tuple[type[BaseException], ...] = (
    GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException,
)  # fmt: skip

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers that a trace doesn't know


def fake_mode(*, repeats: bool = True) -> FakeTensorMode:
    """A mode whose tensors have shapes and a device but no memory, fit for torch.export.

    If no call `repeats`, torch need not keep what each of them gives, which takes about half as long as the call.
    """
    # A kernel that is given one of them says so, where it would write to address 0.
    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)
    mode.cache_enabled = mode.cache_enabled and repeats
    return mode


def fake_tensor(mode: FakeTensorMode, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A fake CPU tensor with the shape and strides of `like`.

    Always CPU: with a CPU-only build of torch, autograd on fake CUDA tensors aborts the process (seen on
    2.13), and tensors that a model makes in its forward without naming a device land on the CPU.
    """
    # Made directly, since an op under the mode takes 20 times as long, and a model has many members.
    meta = torch.empty_strided(tuple(like.shape), like.stride(), dtype=dtype or like.dtype, device="meta")
    made: Tensor = FakeTensor(mode, meta, torch.device("cpu"))
    return made.requires_grad_(like.requires_grad) if made.dtype.is_floating_point else made


def fake_parameter(mode: FakeTensorMode, like: nn.Parameter, dtype: torch.dtype | None = None) -> nn.Parameter:
    """The same as a parameter: what ``nn.Parameter(...)`` makes of a fake tensor, but for a detach that takes longer
    than all else.
    """
    made: Any = fake_tensor(mode, like.detach(), dtype)
    made._is_param = True
    return made.requires_grad_(like.requires_grad)


def flatten_one_level(value: Any) -> tuple[Sequence[str], Sequence[Any], Any] | None:
    """Keys, children and context of a container that pytree knows, else None."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if len(children) == 1 and children[0] is value:
        return None
    return _key_names(value, len(children)), children, spec


def _key_names(value: Any, count: int) -> tuple[str, ...]:
    """Readable keys for the `count` children of a container."""
    if isinstance(value, Mapping) and len(value) == count:
        return tuple(map(str, value))
    fields = getattr(value, "_fields", None)
    return tuple(fields) if isinstance(fields, tuple) and len(fields) == count else tuple(map(str, range(count)))


def is_higher_order(target: Any) -> bool:
    """Whether an fx target has graphs as arguments."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_plain_op(target: Any) -> bool:
    """Whether an fx target is an op with a schema (aten's or a custom one)."""
    return isinstance(target, torch._ops.OpOverload)


def writes(target: Any) -> bool:
    """Whether a plain op says that it writes to what it is given."""
    return target._schema.is_mutable


def shared(target: Any) -> tuple[int, ...]:
    """The positions of what a plain op writes to, or gives views of, as it says."""
    return tuple(at for at, each in enumerate(target._schema.arguments) if each.alias_info is not None)


def overload(target: str) -> Callable[..., Any] | None:
    """The torch op called ``namespace.name.overload``, or None for autopar's own and unknown ones."""
    parts = target.split(".")
    if len(parts) != 3:
        return None
    namespace, name, variant = parts
    return getattr(getattr(getattr(torch.ops, namespace, None), name, None), variant, None)


def argument_names(target: str) -> tuple[str, ...]:
    """The names of the arguments in the op's schema; none for an unknown op."""
    results: Any = overload(target)
    return () if results is None else tuple(a.name for a in results._schema.arguments)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Inside, a call of an op passes by its kernel for autograd."""
    return torch._C._AutoDispatchBelowAutograd()


def above_autograd() -> contextlib.AbstractContextManager[Any]:
    """Inside a kernel of an op, ops are recorded for backward again."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def autocast_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, ``torch.autocast("cpu")`` runs these instead of the ops of these names."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutocastCPU")
        yield


def autocast_calls() -> tuple[Any, Any]:
    """The functions that begin and end a region of autocast in Dynamo's graphs."""
    module: Any = torch.amp.autocast_mode
    return module._enter_autocast, module._exit_autocast


def below_autocast() -> contextlib.AbstractContextManager[Any]:
    """Inside, a call of an op passes by its kernel for autocast."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def untraced() -> Iterator[FakeTensorMode]:
    """Inside, nothing is traced, and tensors can be made of the mode that is given."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), fake_mode() as mode:
        yield mode


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def plain_tensors() -> Iterator[None]:
    """Inside, nothing is traced, and ops run on tensors with values."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and their structure."""
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """The inverse of `flatten`, and of `flatten_one_level`."""
    return pytree.tree_unflatten(leaves, structure)


def has_storage(tensor: Tensor) -> bool:
    """Whether it has memory: not one that stands for many of a transform of torch.func, as in ``vmap``."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def keeps_nodes() -> bool:
    """Whether a reference in Python keeps the node of a custom function; before torch 2.13 what led to it had to."""
    untyped: Any = torch.__version__  # a str that compares with tuples
    return untyped >= (2, 13)


def edge_of(x: Tensor) -> tuple[Any, int]:
    """The node that made `x` and the number of `x` among its results; the node is kept without `x`, too."""
    if not keeps_nodes() and isinstance(x.grad_fn, torch.autograd.function.BackwardCFunction):
        with torch.enable_grad():
            x = x.view_as(x)
    return x.grad_fn, x.output_nr


def storage_key(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, fake ones included, while it lives."""
    with torch._C.DisableTorchFunction():  # the modes of a trace have nothing to say of it
        return tensor.untyped_storage()._cdata


_APPLY = torch.autograd.Function.__dict__["apply"]
_ITSELF: ContextVar[type | None] = ContextVar("itself", default=None)  # the function that `apply_itself` runs


def apply_itself(function: type, *args: Any, **kwargs: Any) -> Any:
    """``function.apply(*args, **kwargs)``, also where `intercept_autograd_functions` would intercept it."""
    token = _ITSELF.set(function)
    try:
        return _APPLY.__get__(None, function)(*args, **kwargs)
    finally:
        _ITSELF.reset(token)


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def intercept_autograd_functions(
    call: Callable[[type, tuple[Any, ...]], Any], on_checkpoint: Callable[[], None]
) -> Iterator[None]:
    """In this context, `call(function_class, args)` takes the place of each custom autograd function that would get a
    gradient, and `on_checkpoint` is called for each checkpoint, reentrant or not.

    Reentrant checkpoints are such functions too; they are run as the plain function that they wrap.
    """
    from torch.utils import checkpoint  # noqa: PLC0415  (loads late on purpose)

    module: Any = checkpoint
    frames = "_checkpoint_without_reentrant_generator"
    frames = f"{frames}_impl" if hasattr(module, f"{frames}_impl") else frames  # since torch 2.15
    original_frame = getattr(module, frames)

    def frame(*args: Any, **kwargs: Any) -> Any:
        on_checkpoint()
        return original_frame(*args, **kwargs)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is module.CheckpointFunction and _ITSELF.get() is not cls:
            on_checkpoint()
            run_function, _, *inputs = args
            return run_function(*inputs)
        is_called = _ITSELF.get() is not cls and torch.is_grad_enabled() and _gets_gradient(args) and _is_custom(cls)
        return call(cls, args) if is_called else apply_itself(cls, *args, **kwargs)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        patches.enter_context(patch.object(module, frames, frame))
        for function, forward in _forwards_below(call):
            patches.enter_context(patch.object(function, "forward", staticmethod(forward)))
        yield


def _forwards_below(call: Callable[[type, tuple[Any, ...]], Any]) -> list[tuple[type, Callable[..., Any]]]:
    """The forward of each custom autograd function, with `call` in its place where it runs without an apply that is
    intercepted: by a name that was bound to ``function.apply`` before, which goes straight into torch's C++.
    """

    def below(cls: type, forward: Callable[..., Any], takes_context: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if takes_context else args
            is_called = _ITSELF.get() is None and _gets_gradient(given)
            return call(cls, given) if is_called else forward(*args, **kwargs)

        return run

    found: list[tuple[type, Callable[..., Any]]] = []
    base: Any = torch.autograd.Function
    functions: list[Any] = [base]
    for each in functions:  # which grows
        functions += each.__subclasses__()
        if _is_custom(each):
            found.append((each, below(each, each.forward, each.setup_context is base.setup_context)))
    return found


def _is_custom(function: type) -> bool:
    return not function.__module__.startswith("torch.")


def _gets_gradient(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, Tensor) and arg.requires_grad for arg in pytree.tree_leaves(args))


def run_decompositions(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Functional ATen with composite ops (linear, attention, norms, losses) kept whole, but for those of `PIECES`."""
    _materialize_cpp_cia_ops()  # once, not again for each namespace of ops: it takes as long as a small layer
    # Checks of inputs would be generated, and dropped afterwards.
    with (
        patch("torch._export.utils._materialize_cpp_cia_ops", lambda: None, create=True),
        patch("torch.export._unlift._ok_to_generate_guards_fn", lambda: False, create=True),
        patch.object(WrapWithAutocast, "__call__", _interpret_autocast),
    ):
        return program.run_decompositions(dict(PIECES))


def _interpret_autocast(
    _: Any, device_type: str, dtype: torch.dtype, enabled: bool, cache: bool, body: fx.GraphModule, *args: Any
) -> Any:
    """The body of an autocast region node by node, so that what becomes of a node keeps its modules and lines."""
    with torch.autocast(device_type, dtype, enabled, cache):
        untyped: Any = fx.Interpreter(body)
        return untyped.run(*args)


def stays(target: Any) -> bool:
    """Whether `run_decompositions` leaves a plain op that writes to nothing as it is, whatever it is called with."""
    if target in PIECES or str(target).startswith("aten.lift_fresh"):
        return False
    if shared(target):
        return str(target) in _VIEWS
    if _is_cia_op(target):
        return _is_preservable_cia_op(target)
    written_in_python = target.py_kernels.keys() - {torch._C.DispatchKey.Meta}
    return not written_in_python and not _should_decompose_because_unsafe_op(target)


_VIEWS = frozenset({
    "aten.view.default", "aten.transpose.int", "aten.permute.default", "aten.unsqueeze.default", "aten.expand.default",
    "aten.slice.Tensor", "aten.select.int", "aten.unbind.int", "aten.split.Tensor", "aten.split_with_sizes.default",
    "aten.squeeze.default", "aten.squeeze.dim", "aten.t.default", "aten.view_as_complex.default",
    "aten.view_as_real.default",
})  # fmt: skip


def is_cast_on_gpus(name: str) -> bool:
    """Whether this torch's autocast for CUDA has an entry for the op ``aten::name``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def unread_masks() -> Iterator[None]:
    """Inside, torch's and Hugging Face's transformers don't ask whether a mask is causal, or hides nothing.

    They do so only to choose a kernel; the mask takes effect either way, and `trace` itself knows such masks.
    Without a mask, transformers would give attention fewer heads of keys than of queries, which can be split less.
    """

    def is_said_to_be_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        del mask, size
        return is_causal is True

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(nn.modules.transformer, "_detect_is_causal_mask", is_said_to_be_causal))
        masking: Any = sys.modules.get("transformers.masking_utils")
        if hasattr(masking, "fast_all"):
            patches.enter_context(patch.object(masking, "fast_all", lambda _: False))
        if hasattr(masking, "is_torchdynamo_exporting"):
            patches.enter_context(patch.object(masking, "is_torchdynamo_exporting", lambda: True))
        yield


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def unchecked_values() -> Iterator[None]:
    """Inside, neither torch nor models check values: that a scale is positive, or images fill their places in text."""
    loss = nn.functional.gaussian_nll_loss

    def gaussian_nll_loss(*args: Any, **kwargs: Any) -> Tensor:
        with patch.object(torch, "any", lambda _: False):
            return loss(*args, **kwargs)

    with (
        patch.object(torch.distributions.Distribution, "_validate_args", False),
        patch.object(nn.functional, "gaussian_nll_loss", gaussian_nll_loss),
        patch.object(torch, "_check_tensor_all", lambda *_: None),
    ):
        yield


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def known_constants(most_entries: int) -> Iterator[None]:
    """Inside, Python may ask for what is computed from tensors of so few entries that a forward writes down."""
    with (
        patch.object(fake_tensors, "CONSTANT_NUMEL_LIMIT", most_entries),
        patch.object(proxy_tensor, "CONSTANT_NUMEL_LIMIT", most_entries),
    ):
        yield


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no memory."""
    return isinstance(tensor, FakeTensor)


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def unprinted_graphs() -> Iterator[None]:
    """Inside, torch.export doesn't print the graph that it had made when it failed."""
    with patch.object(export_trace, "print", lambda *_, **__: None, create=True):  # pyright: ignore[reportUnknownLambdaType]
        yield


def has_known_values(tensor: Tensor) -> bool:
    """Whether torch knows what is in a fake tensor: it was written down, or computed from tensors that were."""
    return isinstance(tensor, FakeTensor) and tensor.constant is not None


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def values_to_print(report: Callable[[], None]) -> Iterator[None]:
    """Inside, what ``.item()`` gives can be formatted, as for a log; `report` is called for each that has no value."""
    item = torch._C.TensorBase.item

    def note_item(tensor: Tensor) -> Any:
        value = item(tensor)
        if isinstance(value, SYMBOLIC):
            report()
        return value

    with (
        patch.object(Tensor, "item", note_item),
        patch.object(torch.SymFloat, "__format__", lambda _, form: format(math.nan, form)),
        patch.object(torch.SymInt, "__format__", lambda _, form: format(0, form)),
    ):
        yield


def intercept_lists(call: Callable[[Tensor, Callable[[Tensor], Any]], Any]) -> contextlib.AbstractContextManager[Any]:
    """Inside, ``x.tolist()`` of a fake tensor is ``call(x, tolist)``, with torch's own `tolist`."""
    plain: Any = FakeTensor.tolist
    return patch.object(FakeTensor, "tolist", lambda x: call(x, plain))


def intercept_gradients(run: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Inside, `run` replaces autograd's engine."""
    return patch.object(torch.autograd, "_engine_run_backward", run)


def gradient_engine() -> Callable[..., Any]:
    """Autograd's engine; tracing replaces it where torch calls it."""
    return torch.autograd.graph._engine_run_backward


def written_out(parts: Sequence[str]) -> dict[Any, Callable[..., Any]]:
    """Torch's decompositions of the ops with one of these `parts` in their names."""
    return {op: function for op, function in decomposition_table.items() if any(part in str(op) for part in parts)}


def argument_source(node: fx.Node) -> str:
    """Where the argument of one of Dynamo's graphs comes from, as a Python expression such as ``L['x']``; or ""."""
    argument = node.meta.get("grapharg")
    result = getattr(getattr(argument, "source", None), "name", "")
    return str(result() if callable(result) else result)  # a method before torch 2.12


def is_wrapped_number(node: fx.Node) -> bool:
    """Whether an argument of one of Dynamo's graphs is a Python number that travels as a tensor."""
    return bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


@contextlib.contextmanager  # pyright: ignore[reportDeprecated]
def intercept_batch_norms(replaced: Callable[[Any, Tensor], Tensor | None]) -> Iterator[None]:
    """Inside, batch norm modules give what `replaced` makes of them and their input, unless that is None."""
    forward = _BatchNorm.forward

    def intercepted(self: _BatchNorm, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        result = replaced(self, input)
        return forward(self, input) if result is None else result

    with patch.object(_BatchNorm, "forward", intercepted):
        yield
