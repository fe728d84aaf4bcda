"""The callable for Dynamo: a graph that is planned for each new set of sizes, and then runs by that plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.backend.dynamo_graph import CapturedGraph
from autopar.backend.options import Options, read_options
from autopar.backend.planning import plan_graph
from autopar.backend.running import RunningGraph
from autopar.backend.session import Session, session_of
from autopar.backend.storage import with_whole_inputs
from autopar.lower.communication.consensus import agree, agree_equal

__all__ = ["CompiledGraph"]

_Key = tuple[object, ...]


class CompiledGraph:
    """Calls of one graph, sorted by the sizes of their arguments and whether gradients are needed."""

    def __init__(self, graph: CapturedGraph, options: Mapping[str, Any] | None, mode: str) -> None:
        """Nothing is looked at before the first call."""
        self._graph = graph
        self._runs_as_it_is = graph.is_distributed or graph.only_writes
        self._places = [place for place, argument in enumerate(graph.arguments) if argument.role != "number"]
        self._given = options
        self._mode = mode
        self._options: Options | None = None
        self._running: dict[_Key, RunningGraph | None] = {}

    def __call__(self, *values: Any) -> Sequence[Any]:
        """The graph's outputs.

        Raises:
            AutoparError: one of its kinds, on every rank, before any rank waits for another.
        """
        if self._options is None:
            self._options = self._read_options()
        if self._runs_as_it_is:
            return self._graph.code(*values)
        session = session_of(self._options.mesh)
        session.check_replaced()
        values = tuple(with_whole_inputs(self._graph, values))
        trains = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)
        tensors = (values[place] for place in self._places)
        key = (
            trains, *((tuple(x.shape), x.dtype, x.requires_grad) for x in tensors),
            *self._graph.numbers(values).values(),
        )  # fmt: skip
        if key not in self._running:
            self._running[key], values = self._plan(values, self._options, session, trains=trains)
        running = self._running[key]
        return self._graph.code(*values) if running is None else running(values)

    def _read_options(self) -> Options:
        """The options, which no rank takes alone: one that can't read its own is heard of on all."""
        mesh = (self._given or {}).get("mesh")
        if self._runs_as_it_is or not isinstance(mesh, DeviceMesh):  # ranks plan nothing, or have nowhere to meet
            return read_options(self._given, self._mode)
        session = session_of(mesh)

        def read() -> Options:
            options = agree(session.group, lambda: read_options(self._given, self._mode))
            remedy = "Pass the same options on every rank"
            agree_equal(session.group, options.texts, "options of torch.compile", remedy)
            return options

        return session.together(self._name, read)

    def _plan(
        self, values: tuple[Any, ...], options: Options, session: Session, *, trains: bool
    ) -> tuple[RunningGraph | None, tuple[Any, ...]]:
        """What runs the graph, and the values that it runs on: parameters may have been sharded."""

        grad = torch.is_grad_enabled()

        def plan() -> tuple[RunningGraph | None, tuple[Any, ...]]:
            # A DTensor can't be detached in inference mode, and what is kept here is for calls in other modes, too.
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                planned = plan_graph(self._graph, values, options, session, trains=trains)
                if planned is None:
                    return None, values
                with session.communicator.preparing_later():  # a rank that raises meets the others before groups open
                    running = agree(session.group, lambda: RunningGraph(self._graph, planned, options, session))
                return running, tuple(planned.replaced.get(id(value), value) for value in values)

        return session.together(self._name, plan)

    @property
    def _name(self) -> str:
        """What the graph is called in messages."""
        names = [*self._graph.names("input"), *self._graph.names("parameter")]
        return f"of {len(self._graph.code.graph.nodes)} nodes on {', '.join(names[:3])} ..."
