"""The entry point ``"autopar"`` of torch.compile's backends, registered by the package's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.backend.compiled_graph import CompiledGraph
from autopar.backend.dynamo_graph import read_graph

__all__ = ["compile_graph"]


def compile_graph(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str = ""
) -> Callable[..., Any]:
    """Dynamo's graph as a callable that runs it on all devices of ``options["mesh"]``.

    Nothing is planned here: Dynamo may pass symbolic sizes, and would wrap every error in one of its own.  The first
    call with given sizes plans for them, on all ranks together.

    Args:
        module: the graph.
        example_inputs: fake tensors and symbolic numbers, one per argument of the graph.
        options: see `autopar.backend.options`.
        mode: the ``mode`` of ``torch.compile``, which is for inductor: none is known here.
    """
    return CompiledGraph(read_graph(module, example_inputs), options, mode)
