"""Every private or version-dependent torch API that `lower` needs, each behind a small function."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

from autopar.lower.communication.torch_groups import open_group
from autopar.placement import REPLICATE, Layout, Placement, shard

__all__ = [
    "DispatchMode", "ModuleTables", "accumulation_hooks_on", "after_backward", "allow_anomaly_detection", "can_part",
    "dtensor_like", "foreach_norm", "from_torch_placement", "full_tensor_by", "functional_all_gather",
    "functional_all_reduce", "functional_all_to_all", "functional_collectives", "functional_reduce_scatter",
    "functional_wait", "functions_by", "hooks_on", "in_transform", "is_exported", "is_random", "item_by",
    "keeping_saved_tensors", "leaves_of", "local_part_of", "local_tensor", "make_dtensor", "make_mesh", "map_leaves",
    "module_tables", "named_plain", "named_tensors", "native_functions", "not_compiled", "register_container",
    "renamed_mesh", "scale_in_place", "set_local_tensor", "state_calls_by", "storage_key", "stride_as_parts",
    "takes_device", "tensor_norms", "to_parted_placements", "to_torch_placements", "whole_initializers",
    "will_run", "with_dtensors", "written_arguments",
]  # fmt: skip

_dist: Any = dist  # the annotations of its collectives are incomplete


@functools.cache
def allow_anomaly_detection() -> None:
    """Have DTensors of gradients in ``detect_anomaly()``, which looks for NaNs by an op that torch has no rule for."""
    rule: Callable[[Any], Any] = lambda _: [([Replicate()], [Replicate()])]  # noqa: E731
    register_sharding(torch.ops.aten._is_any_true.default)(rule)


def in_transform() -> bool:
    """Whether a function runs in ``torch.func``'s ``grad``, ``vmap`` and the like."""
    internals: Any = importlib.import_module("torch._C._functorch")
    return internals.maybe_current_level() is not None


def make_mesh(sizes: tuple[int, ...], ranks: Sequence[int], device_type: str, *, rank: int | None = None) -> DeviceMesh:
    """A DeviceMesh of these axis sizes over `ranks`, row-major.

    With `rank` (the process rank that it is for) no process group is touched or needed; operations that
    communicate then fail.  Without, its groups are created: call it on every process of `ranks`.

    Raises:
        MeshError: `ranks` descend along an axis, and this torch sorts the ranks of a group (before 2.13), so
            that DTensor would join slices in the wrong order.
    """
    layout = torch.tensor(list(ranks), dtype=torch.int, device="cpu").view(sizes)
    if rank is not None:
        return DeviceMesh(device_type, layout, _init_backend=False, _rank=rank)
    is_sorted = all(bool((layout.diff(dim=dim) > 0).all()) for dim in range(layout.ndim))
    if is_sorted and len(ranks) == dist.get_world_size():
        return DeviceMesh(device_type, layout)
    groups = [open_group(_members(layout, dim), keeps_order=True) for dim in range(layout.ndim)]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type)
    names = tuple(f"axis_{dim}" for dim in range(layout.ndim))
    return DeviceMesh.from_group(groups, device_type, layout, mesh_dim_names=names)


def renamed_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh of the same ranks and process groups that is not equal to `mesh`, as its axes are called `name`."""
    made: Any = object.__new__(DeviceMesh)
    made.__dict__ |= mesh.__dict__
    made._mesh_dim_names = tuple(f"{name}_{dim}" for dim in range(mesh.ndim))
    made._hash = None
    return made


def _members(layout: Tensor, dim: int) -> list[int]:
    """The ranks that share axis `dim` of the mesh with this process."""
    rank = dist.get_rank()
    columns = torch.movedim(layout, dim, 0).flatten(1) if layout.ndim > 1 else layout.unsqueeze(1)
    own = columns[:, (columns == rank).any(0)]
    return [int(member) for member in own.flatten()]


def to_torch_placements(layout: Layout) -> tuple[TorchPlacement, ...]:
    """DTensor placements of a storage layout; what is not sharded is whole."""
    return tuple(Shard(placement.dim) if placement.is_shard else Replicate() for placement in layout)


def from_torch_placement(placement: TorchPlacement, num_dims: int) -> Placement | None:
    """The placement of a tensor of `num_dims` dims that torch calls so; None if there is no word for it here."""
    if type(placement) is Shard:
        return next(shard(d) for d in range(num_dims) if placement in (Shard(d), Shard(d - num_dims)))
    return REPLICATE if type(placement) is Replicate else None


def to_parted_placements(layout: Layout, mesh: tuple[int, ...], dim: int, parts: int) -> tuple[TorchPlacement, ...]:
    """`to_torch_placements` of a tensor whose `dim` is cut into `parts` before the mesh cuts each of these: a device
    holds its slices of all parts, side by side.
    """
    placements = list(to_torch_placements(layout))
    pieces = parts  # torch counts into how many pieces the whole dim is cut before this axis cuts it
    for axis, placement in enumerate(layout):
        if placement.is_shard and placement.dim == dim and mesh[axis] > 1:
            placements[axis] = _StridedShard(dim, split_factor=pieces)
            pieces *= mesh[axis]
    return tuple(placements)


def can_part(layout: Layout, mesh: tuple[int, ...], dim: int) -> bool:
    """Whether this torch reads `to_parted_placements`: before 2.13 it takes several axes on `dim` in another order."""
    num_axes = sum(p.is_shard and p.dim == dim and size > 1 for p, size in zip(layout, mesh, strict=True))
    return _READS_PARTS or num_axes <= 1


def stride_as_parts(x: DTensor) -> DTensor:
    """`x`, which is laid out by `to_parted_placements`, without gradient, read so by every torch.

    Before 2.13 torch takes such placements for the order of axes that cut a tensor once, and fails on others.
    """
    if _READS_PARTS:
        return x
    spec = dataclasses.replace(
        x._spec,  # pyright: ignore[reportPrivateUsage]
        shard_order=None,  # pyright: ignore[reportArgumentType]  (it follows from the placements)
        use_strided_shard_as_shard_order=False,
    )
    return DTensor(local_tensor(x).detach(), spec, requires_grad=False)


_READS_PARTS = hasattr(
    importlib.import_module("torch.distributed.tensor._dtensor_spec"), "_StridedShardNotDecodableError"
)


def make_dtensor(
    local: Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int], stride: Sequence[int] | None = None
) -> DTensor:
    """The DTensor of global `shape` whose local part is `local`, without communication.

    It shares `local`'s storage, which may be in the host's memory: torch would copy that to a device of `mesh`.
    `stride` is the global one, row-major by default.
    """
    if stride is None:
        stride = torch.empty(tuple(shape), device="meta").stride()
    # Torch takes an empty shape for none given, and the local one in its place.
    is_number_elsewhere = not shape and local.dim() > 0
    is_there = local.device.type == mesh.device_type and not is_number_elsewhere
    form = torch.empty(() if is_number_elsewhere else local.shape, dtype=local.dtype, device="meta")
    made = DTensor.from_local(
        local.detach() if is_there else form,
        mesh,
        to_torch_placements(layout),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
    return made if is_there else dtensor_like(local.detach(), made)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """The DTensor laid out as `like` whose local part is `local`; as `make_dtensor`, without its checks."""
    spec = like._spec  # pyright: ignore[reportPrivateUsage]
    return DTensor(local, spec, requires_grad=False)


W = TypeVar("W", bound=Tensor)


def make_wrapper(kind: type[W], like: Tensor) -> W:
    """A tensor without memory of its own, of a subclass that says what functions of torch do with it."""
    untyped: Any = Tensor
    return untyped._make_wrapper_subclass(
        kind, like.shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
    )


def local_tensor(x: DTensor) -> Tensor:
    """The local part itself, outside autograd (``to_local`` makes a view that takes part in it)."""
    return x._local_tensor  # pyright: ignore[reportPrivateUsage]


def hooks_on(x: Tensor) -> tuple[Any, ...]:
    """The hooks on the gradient of `x`; not that of ``retain_grad()``."""
    return tuple((x._backward_hooks or {}).values())  # pyright: ignore[reportPrivateUsage]


def accumulation_hooks_on(x: Tensor) -> tuple[Any, ...]:
    """The hooks that are called when `x`, a leaf, has got its gradient."""
    untyped: Any = x
    hooks: dict[int, Any] = untyped._post_accumulate_grad_hooks or {}
    return tuple(hooks.values())


def set_local_tensor(x: DTensor, local: Tensor) -> None:
    """Make `x` the DTensor of this local tensor, which is placed like the one that it has."""
    x._local_tensor = local  # pyright: ignore[reportPrivateUsage]


def local_part_of(x: Tensor) -> Tensor:
    """What this rank has of a tensor, outside autograd: `local_tensor` of a DTensor, a plain tensor itself."""
    return (local_tensor(x) if isinstance(x, DTensor) else x).detach()


def storage_key(x: Tensor) -> int:
    """The same number for two tensors that live at the same time exactly if they share memory."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


_torch: Any = torch  # its multi-tensor functions are private, and what torch's own optimizers use


foreach_norm = _torch._foreach_norm


def tensor_norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """The p-norm of each tensor, p being `order`, as scalars."""
    return foreach_norm(list(tensors), order)


def scale_in_place(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all of `tensors` by `factor`."""
    _torch._foreach_mul_(list(tensors), factor)


def leaves_of(tree: Any) -> list[Any]:
    """What stands at the ends of nested lists, tuples, dicts and other containers that torch knows."""
    return pytree.tree_leaves(tree)


def named_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors of a call with the arguments that they are in: ``"argument 0"``, ``"labels"``, ``"batch['ids']"``."""
    return [(name, leaf) for name, leaf in _named_leaves(args, kwargs) if isinstance(leaf, Tensor)]


def named_plain(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, float | str]]:
    """The numbers, flags and text of a call, named like its tensors."""
    if all(isinstance(x, Tensor) for x in (*args, *kwargs.values())):  # as most calls are; spares a walk
        return []
    return [(name, leaf) for name, leaf in _named_leaves(args, kwargs) if isinstance(leaf, int | float | str)]


def _named_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    named = [(f"argument {i}", x) for i, x in enumerate(args)] + list(kwargs.items())
    return [
        (name + pytree.keystr(path), leaf)
        for name, value in named
        for path, leaf in pytree.tree_leaves_with_path(value)
    ]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same containers, with ``function(leaf)`` at each end."""
    return pytree.tree_map(function, tree)


def register_container(kind: Any, take: Callable[[Any], list[Any]], make: Callable[[list[Any]], Any]) -> None:
    """Have torch look into objects of this class: ``make(take(x))`` is as good as x."""
    pytree.register_pytree_node(
        kind, lambda x: (take(x), None), lambda given, _: make(list(given)),
        flatten_with_keys_fn=lambda x: (list[Any]((pytree.GetAttrKey(f"{i}"), y) for i, y in enumerate(take(x))), None),
    )  # fmt: skip


class ModuleTables(NamedTuple):
    """The registers of one module, by name; writing to them registers."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    children: dict[str, nn.Module | None]
    not_saved: set[str]


def module_tables(module: nn.Module) -> ModuleTables:
    """The registers themselves: names keep their order, repeats and ``None``, and clash with no attribute."""
    untyped: Any = module
    return ModuleTables(untyped._parameters, untyped._buffers, untyped._modules, untyped._non_persistent_buffers_set)


def after_backward(action: Callable[[], None]) -> None:
    """Call `action` when the backward that is running has ended; only while one runs."""
    untyped: Any = torch.autograd.Variable
    untyped._execution_engine.queue_callback(action)


def keeps_graph() -> bool:
    """Whether the current ``backward`` runs with ``retain_graph=True``."""
    untyped: Any = torch
    return bool(untyped._C._autograd._get_current_graph_task_keep_graph())


def will_run(node: Any) -> bool:
    """Whether the backward that is under way comes to this node, which is no leaf's; None stands for no node."""
    untyped: Any = torch
    return node is not None and bool(untyped._C._will_engine_execute_node(node))


def is_random(function: Any) -> bool:
    """Whether an op draws from a generator."""
    return torch.Tag.nondeterministic_seeded in function.tags


def item_by(read: Callable[[DTensor], Tensor]) -> None:
    """From now on ``item()`` of a DTensor is that of the plain tensor that `read` makes of it."""

    def item(op: Callable[[Tensor], Any], args: Sequence[Any], _: Mapping[str, Any]) -> Any:
        return op(read(args[0]))

    untyped: Any = DTensor
    untyped._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = item


_own_full_tensor: Any = DTensor.full_tensor


def full_tensor_by(read: Callable[[DTensor, Callable[[], Tensor]], Tensor]) -> None:
    """From now on ``x.full_tensor()`` of a DTensor is ``read(x, own)``, where ``own()`` is what torch gives."""

    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        return read(self, lambda: _own_full_tensor(self, *args, **kwargs))

    untyped: Any = DTensor
    untyped.full_tensor = full_tensor


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which a ``torch.compile`` around it leaves as it is."""
    untyped: Any = torch.compiler
    return untyped.disable(function)


native_functions: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]
"""``with native_functions():`` functions of DTensors are torch's own, whatever `functions_by` was told."""


def with_dtensors() -> Any:
    """A context in which ops run as of DTensors, also inside of what excludes subclasses, as ``torch.tensor`` does."""
    untyped: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    excluded, key = untyped._dispatch_tls_local_exclude_set(), untyped.DispatchKey.Python
    if not excluded.has(key):
        return nullcontext()
    for each in (key, untyped.DispatchKey.PythonTLSSnapshot):
        excluded = excluded.remove(each)
    return untyped._ForceDispatchKeyGuard(untyped._dispatch_tls_local_include_set(), excluded)


def functions_by(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """From now on functions of torch that get a DTensor are ``run(function, args, kwargs)``.

    While it runs, functions are torch's own.
    """

    def function(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with native_functions():
            return run(func, args, kwargs or {})

    untyped: Any = DTensor
    untyped.__torch_function__ = classmethod(function)


def takes_device(function: Any) -> bool:
    """Whether an op can be told where to put what it makes."""
    schema = getattr(function, "_schema", None)
    return schema is not None and any(argument.name == "device" for argument in schema.arguments)


def written_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an op, or of ``torch.ops.library.name``, that it writes to; none of functions
    that are no ops.
    """
    untyped: Any = torch
    is_packet = isinstance(function, untyped._ops.OpOverloadPacket)
    ops: list[Any] = [getattr(function, name) for name in function.overloads()] if is_packet else [function]
    values: list[Any] = []
    for argument, index in ((each, i) for op in ops for i, each in enumerate(_arguments_of(op))):
        if argument.alias_info is not None and argument.alias_info.is_write:
            is_placed = index < len(args) and not argument.kwarg_only
            values += leaves_of(args[index] if is_placed else kwargs.get(argument.name))
    return [x for x in dict.fromkeys(values) if isinstance(x, Tensor)]


def _arguments_of(op: Any) -> Sequence[Any]:
    schema = getattr(op, "_schema", None)
    return () if schema is None else schema.arguments


@contextmanager
def whole_initializers(note: Callable[..., Tensor]) -> Generator[None]:
    """Inside, initializers that look at what they drew are not run but given to ``note(function, tensor, ...)``."""
    module: Any = nn.init
    original = module._no_grad_trunc_normal_
    module._no_grad_trunc_normal_ = functools.partial(note, original)
    try:
        yield
    finally:
        module._no_grad_trunc_normal_ = original


def functional_collectives(module: fx.GraphModule) -> list[tuple[str, str, int]]:
    """(kind, name of the process group, bytes of the larger side) of each functional collective in a traced graph."""
    collectives: list[tuple[str, str, int]] = []
    for node in module.graph.nodes:
        kind = _FUNCTIONAL.get(getattr(node.target, "_opname", ""))
        if node.op == "call_function" and kind is not None and node.target.namespace == "_c10d_functional":
            whole = node if kind == "all_gather" else node.args[0]
            is_message = kind == "all_to_all" and 0 in node.args[1]
            collectives.append(("send" if is_message else kind, node.args[-1], whole.meta["val"].nbytes))
    return collectives


_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
_functional: Any = torch.ops._c10d_functional


def functional_all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """``[n] -> [size * n]``, to be waited for."""
    return _functional.all_gather_into_tensor(x, size, group)


def functional_reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """``[size * n] -> [n]``, the own part of the sum, to be waited for."""
    return _functional.reduce_scatter_tensor(x, "sum", size, group)


def functional_all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The sum or maximum, to be waited for."""
    return _functional.all_reduce(x, op, group)


def functional_all_to_all(stack: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """``[sum(sent), ...] -> [sum(received), ...]``, so many entries to and from each member, to be waited for."""
    return _functional.all_to_all_single(stack, received, sent, group)


def functional_wait(x: Tensor) -> Tensor:
    """What a functional collective gives, when it has come."""
    return _functional.wait_tensor(x)


_state_dict: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")


def state_calls_by(runs: Mapping[str, Callable[..., Any]]) -> None:
    """From now on ``get_model_state_dict`` and the like of torch.distributed.checkpoint call ``runs[name](own, ...)``
    for the function `name` of their module, `own` being torch's.
    """
    for name, run in runs.items():
        own = getattr(_state_dict, name)
        setattr(_state_dict, name, functools.update_wrapper(functools.partial(run, own), own))


def give_state(module: nn.Module, hook: Callable[..., dict[str, Any] | None]) -> None:
    """Have ``module.state_dict()`` give what ``hook(module, state, prefix, metadata)`` does, if that is not None."""
    untyped: Any = module
    untyped._register_state_dict_hook(hook)


def is_exported() -> bool:
    """Whether torch.jit, torch.export or torch.onnx traces what runs now."""
    untyped: Any = torch
    return untyped.jit.is_tracing() or untyped.compiler.is_exporting()


def keeping_saved_tensors() -> AbstractContextManager[Any]:
    """Inside, autograd keeps what it saves where ``torch.utils.checkpoint`` would drop it and call the model again."""
    untyped: Any = torch
    hooks: Any = untyped._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x)
