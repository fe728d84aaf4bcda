"""``torch.autograd.grad`` inside of a model, as a gradient penalty has it: its backward pass as ops of the program.

The ops that lead from the inputs of the gradient to its outputs are taken from the trace so far and run again with
torch's own backward, which gives another graph; that graph is run in the trace.  So the result is computed by ordinary
ops, which have rules and gradients of their own.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import proxy_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.errors import TraceError
from autopar.trace.compat import torch_internals
from autopar.trace.compat.source_lines import user_line

__all__ = ["traced_gradients"]


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Any:
    """By other convolutions, which have rules; that of a weight only in the simplest form."""
    _, stride, padding, dilation, transposed, _, groups, mask = options
    if mask[1] and (transposed or groups > 1):
        return NotImplemented
    none = [0] * len(stride)
    of_x = of_weight = None
    if mask[0]:
        sizes = zip(x.shape[2:], gradient.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        rest = none if transposed else [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
        of_x = torch.convolution(gradient, weight, None, stride, padding, dilation, not transposed, rest, groups)
    if mask[1]:
        turned = x.transpose(0, 1), gradient.transpose(0, 1)
        swapped = torch.convolution(*turned, None, dilation, padding, stride, False, none, 1)
        of_weight = swapped.transpose(0, 1)[(..., *(slice(n) for n in weight.shape[2:]))]
    of_bias = gradient.sum([0, *range(2, gradient.dim())]) if mask[2] else None
    return of_x, of_weight, of_bias


def _max_pool_backward(gradient: Tensor, x: Tensor, *options: Any) -> Tensor:
    indices: Tensor = options[-1]
    zeros = torch.zeros_like(x).flatten(-2)
    return zeros.scatter_add(-1, indices.flatten(-2), gradient.flatten(-2)).view(x.shape)


def _average_pool_backward(
    gradient: Tensor, x: Tensor, size: list[int], stride: list[int], padding: list[int], ceil_mode: bool, *counts: Any
) -> Any:
    """As of a convolution of each channel."""
    if ceil_mode or counts != (True, None) or x.dim() != 4:
        return NotImplemented
    stride, weight = stride or size, torch.full((x.shape[1], 1, *size), 1 / math.prod(size), dtype=x.dtype)
    options = (stride, padding, [1, 1], False, [0, 0], x.shape[1], [True, False, False])
    return _convolution_backward(gradient, x, weight.to(x.device), None, *options)[0]


# Some ops of backward passes have no derivative, or no rule.  The statistics that a norm's kernel returns pass on no
# gradient, which its second derivative needs.
_SPELLED_OUT = (
    "_backward",
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_fused_rms_norm",
    "nll_loss",
)
_DECOMPOSITIONS = {
    **torch_internals.written_out(_SPELLED_OUT),
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    torch.ops.aten.avg_pool2d_backward.default: _average_pool_backward,
}
_AUTOCAST = ("_enter_autocast", "_exit_autocast")
_DETACHED = ("aten.detach.default", "aten.detach_.default")


def traced_gradients(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor],
    keep_graph: bool | None,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unused: bool = False,
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> tuple[Tensor | None, ...]:
    """Takes the place of autograd's engine in a trace.

    Raises:
        TraceError: the gradients can't be ops of the program.
    """
    mode: Any = proxy_tensor.get_proxy_mode()
    del keep_graph, allow_unreachable
    if accumulate_grad or mode is None:
        raise _refusal("calls backward(), which writes to .grad: take torch.autograd.grad(loss, inputs)")
    starts, ends = ([_node(mode.tracer, x) for x in tensors] for tensors in (inputs, outputs))
    path = _path(mode.tracer.graph, starts, ends)
    read = dict.fromkeys(node for each in path for node in each.all_input_nodes if node not in path)
    others = [node for node in read if node not in starts]
    _check_writes(mode.tracer.graph, {*path, *starts}, {*starts, *others})
    seeds = [_seed(mode.tracer, x) for x in output_gradients]
    operands = [*inputs, *(_tensor(mode.tracer, node) for node in others), *seeds]
    backward = _Backward(path, (*starts, *others), ends, len(starts), allow_unused=allow_unused, twice=create_graph)
    results = fx.Interpreter(backward.traced(operands)).run(*operands)
    return tuple(x if x is None else x.requires_grad_() if create_graph else x.detach() for x in results)


def _refusal(what: str) -> TraceError:
    return TraceError(f"{user_line()}: the model {what}, which a traced program can't hold")


def _node(tracer: Any, x: Any) -> fx.Node:
    slot = proxy_tensor.get_proxy_slot(x, tracer, None) if isinstance(x, Tensor) else None
    if slot is None:
        raise _refusal(
            "takes a gradient by torch.func (torch.autograd.grad works), or of what is no tensor of its forward"
        )
    return slot.proxy.node


def _seed(tracer: Any, x: Tensor) -> Tensor:
    """`x`, but ones that depend on nothing, so that what they are like need not be computed."""
    like = str(_node(tracer, x).target) == "aten.ones_like.default"
    return torch.ones(x.shape, dtype=x.dtype, device=x.device) if like else x


def _tensor(tracer: Any, node: fx.Node) -> Tensor:
    """Another tensor that stands for the node's value."""
    with proxy_tensor.disable_proxy_modes_tracing():
        made = node.meta["val"].detach()
    proxy_tensor.track_tensor_tree(made, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return made


def _path(graph: fx.Graph, starts: Sequence[fx.Node], ends: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The nodes between `starts` and `ends` that gradients flow through, and changes of autocast, in order."""
    reached, enabled = set(starts), True
    for node in graph.nodes:
        if "_set_grad_enabled" in str(node.target):
            enabled = bool(node.args[0])
        elif enabled and str(node.target) not in _DETACHED and any(each in reached for each in node.all_input_nodes):
            reached.add(node)
    needed, waiting = set[fx.Node](), [node for node in ends if node in reached]
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in starts:
            needed.add(node)
            waiting += [source for source in node.all_input_nodes if source in reached]
    return {node: None for node in graph.nodes if node in needed or any(name in str(node.target) for name in _AUTOCAST)}


def _check_writes(graph: fx.Graph, path: set[fx.Node], given: set[fx.Node]) -> None:
    """Raise if something is written to that runs again, but by an op that does not, or is read when that runs."""
    roots, outside = {_root(node) for node in path}, {_root(node) for node in given}
    for node in graph.nodes:
        if torch_internals.is_plain_op(node.target) and torch_internals.writes(node.target):
            root = _root(node)
            if root in outside or (root in roots and node not in path):
                raise _refusal("takes a gradient of what it writes to in place")


def _root(node: fx.Node) -> fx.Node:
    """What holds the memory of a view, or of what is written to."""
    while torch_internals.is_plain_op(node.target) and _is_alias(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_alias(target: Any) -> bool:
    returns = target._schema.returns
    return bool(returns) and returns[0].alias_info is not None


@dataclass(frozen=True)
class _Backward:
    """A forward pass and its backward pass.

    Args:
        path: the ops of the forward pass, in order.
        given: what these read, first that with respect to which gradients are taken.
        ends: what gradients start from.
        num_gradients: how many are taken.
        allow_unused: gradients may be None.
        twice: they have gradients themselves.
    """

    path: Mapping[fx.Node, None]
    given: tuple[fx.Node, ...]
    ends: Sequence[fx.Node]
    num_gradients: int
    allow_unused: bool
    twice: bool

    def traced(self, operands: Sequence[Tensor]) -> fx.GraphModule:
        """Both passes as a graph of ATen, which gets `operands`: tensors like `given`, and the gradients of `ends`."""
        forward = self._forward()

        def gradients(*tensors: Tensor) -> Any:
            given, starts = tensors[: len(self.given)], tensors[: self.num_gradients]
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                ends = forward.run(*given)
            # What does not depend on the inputs adds nothing to the gradients.
            pairs = [pair for pair in zip(ends, tensors[len(given) :], strict=True) if pair[0].requires_grad]
            with torch.enable_grad():
                starts_from = [tuple(each) for each in zip(*pairs, strict=True)] or [(), ()]
                return _ENGINE(*starts_from, True, self.twice, starts, self.allow_unused, accumulate_grad=False)

        with torch_internals.untraced() as mode:
            like = [torch_internals.fake_tensor(mode, x.detach()) for x in operands]
            for x in like[: self.num_gradients]:
                x.requires_grad_()
            made = proxy_tensor.make_fx(gradients, decomposition_table=_DECOMPOSITIONS)(*like)
        for node in made.graph.nodes:
            source = node.all_input_nodes[0] if node.all_input_nodes else node
            if str(node.target) == _DETACHED[0]:  # what autograd has kept: the path has none of its own
                node.replace_all_uses_with(source)
            elif str(node.target) == str(source.target) == "aten.t.default":
                node.replace_all_uses_with(source.args[0])
        made.graph.eliminate_dead_code()
        for node in made.graph.nodes:
            _check_op(node)
        made.recompile()
        return made

    def _forward(self) -> fx.Interpreter:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.given:
            copies[node] = graph.placeholder(node.name)
        for node in self.path:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.ends))
        return fx.Interpreter(fx.GraphModule(nn.Module(), graph), garbage_collect_values=False)


_ENGINE = torch_internals.gradient_engine()


def _check_op(node: fx.Node) -> None:
    """Raise unless it may run twice, and passes on all of its gradient."""
    target: Any = node.target
    if not torch_internals.is_plain_op(target):
        return
    if "_backward" in str(node.target):
        raise _refusal(f"takes a gradient through what has {node.target}, an op without a rule")
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise _refusal(f"takes a gradient through {node.target}, which would draw other random numbers")
    if torch_internals.writes(node.target) and _root(node).op == "placeholder":
        raise _refusal("takes a gradient through what updates a buffer, such as a batch norm in training mode")
    read = [int(str(user.args[1])) for user in node.users if user.target is getitem and user.users]
    if any(read) and not _pass_on_gradients(node, read):
        raise _refusal(f"takes a gradient through {node.target}, whose second derivative is not known")


def _pass_on_gradients(node: fx.Node, places: Sequence[int]) -> bool:
    """Whether those results of the op that are read and floating have gradients."""
    with torch_internals.untraced() as mode, torch.enable_grad():
        like = {each: torch_internals.fake_tensor(mode, each.meta["val"].detach()) for each in node.all_input_nodes}
        for x in like.values():
            x.requires_grad_(x.is_floating_point())
        run: Any = node.target
        results = run(*fx.map_arg(node.args, like.get), **fx.map_arg(node.kwargs, like.get))
    return all(results[place].requires_grad or not results[place].is_floating_point() for place in places)
