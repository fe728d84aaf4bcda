"""Inductor, and what autopar needs of torch's graphs around it: the private torch APIs for compiling, each behind a
small function.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["compile_graph", "run_again_in_backward", "split_graph"]


def split_graph(module: fx.GraphModule, piece_of: Callable[[fx.Node], int]) -> fx.GraphModule:
    """`module` as submodules in a row, each holding the ops of one piece; pieces are numbered in the graph's order."""
    untyped: Any = split_module
    return untyped(module, module, piece_of, keep_original_order=True)


def run_again_in_backward(nodes: Iterable[fx.Node]) -> None:
    """Have `compile_graph` compute the results of these nodes again in backward instead of keeping them.

    These are the marks that Dynamo puts on the nodes of a checkpointed region (torch/_higher_order_ops/wrap.py,
    `TagActivationCheckpoint`), and that AOTAutograd's partitioner obeys.
    """
    for node in nodes:
        node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}


def compile_graph(
    module: fx.GraphModule,
    tensors: Sequence[Tensor],
    noting: Callable[[fx.GraphModule], Callable[[], None]],
    saves_only: Callable[[], bool] | None = None,
) -> Callable[..., Any]:
    """`module` compiled by inductor, forward and backward, for arguments that lie as `tensors`; it is used up.

    Args:
        module: a graph of any Python functions that can be traced, returning a tuple of tensors.
        tensors: examples of its arguments.
        noting: gets the forward's graph, and the backward's; what it returns is called whenever that one runs.
        saves_only: asked whenever the forward runs, whether nobody will read its results.  Then what leads to no tensor
            that is saved for backward does not run, and tensors of the same shapes without data stand for the results.
    """
    with_gradients, num_threads = torch.is_grad_enabled(), torch.get_num_threads()
    on_accelerator = any(x.device.type not in ("cpu", "meta") for x in tensors)
    device = torch.accelerator.current_device_index() if on_accelerator else None
    examples = [x.detach().requires_grad_(x.requires_grad and with_gradients) for x in tensors]
    inductor: Any = importlib.import_module("torch._inductor.compile_fx")
    functorch: Any = importlib.import_module("torch._functorch.config")

    def noted(note: Callable[[], None], run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run_and_note(values: Any) -> Any:
            note()
            return run(values)

        return run_and_note

    def inner_compile(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        # The compiler changes graphs, so they are read first.
        is_forward = with_gradients and not kwargs.get("is_backward")
        saving = _SavedPart.of(graph) if saves_only and is_forward else None
        note, note_saving = noting(graph), noting(saving.graph) if saving else None
        whole: Any = inductor.compile_fx_inner(graph, *args, **kwargs)
        run = run_saving = noted(note, whole)
        if saving and note_saving and (short := saving.compiled(inductor, whole, *args, **kwargs)):
            run_saving = noted(note_saving, short)

        def chosen(values: Any) -> Any:
            return run_saving(values) if saves_only and saves_only() else run(values)

        untyped: Any = chosen
        untyped._boxed_call = True  # it takes its arguments as a list, and may empty it
        return chosen

    def compile_it() -> Callable[..., Any]:
        torch.set_num_threads(num_threads)
        # A backward may run again (retain_graph), as the one that runs in two parts does.
        with torch.set_grad_enabled(with_gradients), functorch.patch(donated_buffer=False):
            if device is None:
                return inductor.compile_fx(module, examples, inner_compile=inner_compile)
            with torch.accelerator.device_index(device):
                return inductor.compile_fx(module, examples, inner_compile=inner_compile)

    # In a thread of its own: hooks on what autograd saves, which may be in force here, are not to see the tracing.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compile_it).result()


@dataclass(frozen=True)
class _SavedPart:
    """The part of a forward that makes what is saved for backward.

    Args:
        graph: it puts out what is saved alone.
        results: by place in what the forward puts out, examples of the program's own results; the others are saved.
        num_results: of the forward.
    """

    graph: fx.GraphModule
    results: dict[int, Tensor]
    num_results: int

    @staticmethod
    def of(whole: fx.GraphModule) -> _SavedPart | None:
        """That of a forward as AOTAutograd made it; None if that is all of it."""
        output = whole.graph.output_node()
        put_out: Any = output.args[0]
        own: list[int] = output.meta.get("user_visible_output_idxs", [])
        made, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        made.graph_copy(whole.graph, nodes)
        saved = (each for place, each in enumerate(put_out) if place not in own)
        last = made.output(tuple(nodes[each] if isinstance(each, fx.Node) else each for each in saved))
        last.meta = {**output.meta, "user_visible_output_idxs": []}
        count = len(made.nodes)
        for node in reversed(made.nodes):
            if node.op in ("call_function", "get_attr") and not node.users and not _writes(node):
                made.erase_node(node)
        if len(made.nodes) == count:
            return None
        results = {place: put_out[place].meta["val"] for place in own}
        return _SavedPart(fx.GraphModule(whole, made), results, len(put_out))

    def compiled(self, inductor: Any, whole: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any] | None:
        """It puts out tensors without data for the program's own results; None if it would save tensors that lie
        otherwise than those of the `whole` forward, for which backward is compiled.
        """
        if all(node.op in ("placeholder", "output") for node in self.graph.graph.nodes):  # arguments are all it saves
            return self._with_stand_ins(lambda values: self.graph(*values))
        guards: Any = importlib.import_module("torch._guards")
        with guards.TracingContext.report_output_strides():  # those of the whole forward are reported
            run = inductor.compile_fx_inner(self.graph, *args, **kwargs)
        strides = [each for place, each in enumerate(whole.output_strides) if place not in self.results]
        return self._with_stand_ins(run) if run.output_strides == strides else None

    def _with_stand_ins(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def with_stand_ins(values: Any) -> Any:
            saved, results = iter(run(values)), self.results
            return tuple(
                _stand_in(results[place]) if place in results else next(saved) for place in range(self.num_results)
            )

        return with_stand_ins


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _stand_in(example: Tensor) -> Tensor:
    return torch.empty((), dtype=example.dtype, device=example.device).expand(tuple(example.shape))
