"""`LoweredProgram`: what this rank runs, printed for people.

Each kind of layer is shown once, as the code that runs: every line with what it holds on one device, every collective
with its bytes and its predicted time, under the lines of the user's own code that it comes from.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.fx import GraphModule

from autopar.lower.program.naming import (
    format_bytes,
    format_statement,
)
from autopar.lower.run.layer_runner import LayerRunner
from autopar.placement import Axis
from autopar.plan import LayerStrategy, Plan
from autopar.plan.prediction import LayerCost
from autopar.program import Program, TensorType
from autopar.step.prices import CollectiveCall, reshard_calls
from autopar.user_text.quantities import format_seconds

__all__ = ["CollectiveSeconds", "LoweredProgram"]

CollectiveSeconds = Callable[[str, Axis, float], float]
"""Predicted seconds of a collective: its kind, axis and bytes, as `Step.fraction` counts them."""

_WIDTH = 76  # comments begin here, or behind a longer line


@dataclass(frozen=True)
class LoweredProgram:
    """What this rank runs: printed, it shows the code of every layer kind.

    Args:
        source: the traced program.
        plan: by which it was lowered.
        runners: the lowered layers of this rank, in order.
        collective_s: prices of collectives; None where nothing was priced.
        hoisted: what runs once a step before all layers: what they read that is computed from buffers.
    """

    source: Program
    plan: Plan
    runners: tuple[LayerRunner, ...]
    collective_s: CollectiveSeconds | None = None
    hoisted: GraphModule | None = None

    def __str__(self) -> str:
        """What runs once a step, and every distinct layer program once."""
        parts = [self._describe_hoisted(), *(self._describe(users) for users in self._users())]
        return "\n\n".join(text for text in map("\n".join, parts) if text)

    def _describe_hoisted(self) -> Iterator[str]:
        if self.hoisted is None or not any(node.op == "call_function" for node in self.hoisted.graph.nodes):
            return
        yield "# ---- once a step, from buffers and constants ".ljust(120, "-")
        yield "# whole on every device; not priced"
        yield from self._code(self.hoisted)

    def _users(self) -> list[list[LayerRunner]]:
        """The layers that run one program, for each."""
        users: dict[int, list[LayerRunner]] = {}
        for runner in self.runners:
            users.setdefault(id(runner.program), []).append(runner)
        return list(users.values())

    def _describe(self, users: Sequence[LayerRunner]) -> Iterator[str]:
        runner = users[0]
        yield from self._title(users)
        arrivals = [(f"{name} arrives:", self._arriving(name, runner, i)) for i, name in enumerate(runner.layer.inputs)]
        moved = [(label, buffers) for label, buffers in (*arrivals, *self._stored(runner)) if buffers]
        inside = [b for node in runner.program.module.graph.nodes for b in node.meta.get("collectives", ())]
        yield from self._totals([b for _, buffers in moved for b in buffers], inside)
        for label, buffers in moved:
            yield f"#   {label} {self._moves(buffers)}"
        yield from self._code(runner.program.module)

    def _title(self, users: Sequence[LayerRunner]) -> Iterator[str]:
        first, last = users[0].layer.name, users[-1].layer.name
        strategy = users[0].strategy
        names = first if len(users) == 1 else f"{first} ... {last}, {len(users)} layers of one kind"
        labels = ", ".join(
            f"{size} {label or '-'}" for size, label in zip(strategy.mesh, _labels(strategy), strict=True)
        )
        yield f"# ---- {names} ".ljust(120, "-")
        yield f"# mesh {labels}; ZeRO {strategy.zero}; recompute {strategy.recompute}"
        if strategy.pieces:
            yield f"# collectives in pieces, overlapped with products: {strategy.pieces_name}"
        cost = self._cost(users[0])
        if cost is not None:
            yield (
                f"# predicted per step and layer: forward {format_seconds(cost.forward_s)}, backward "
                f"{format_seconds(cost.backward_s + cost.recompute_s)}, collectives of activations "
                f"{format_seconds(cost.activation_comm_s)}, of parameters {format_seconds(cost.parameter_comm_s)}"
            )

    def _cost(self, runner: LayerRunner) -> LayerCost | None:
        costs = zip(self.plan.layers, self.plan.costs, strict=False)
        return next((cost for layer, cost in costs if layer.name == runner.layer.name and cost.total_s), None)

    def _totals(self, moved: Sequence[CollectiveCall], inside: Sequence[CollectiveCall]) -> Iterator[str]:
        for where, buffers in (("around it", moved), ("inside", inside)):
            if buffers:
                total = sum(each.num_bytes for each in buffers)
                count = f"{len(buffers)} collectives" if len(buffers) > 1 else "1 collective"
                yield f"# {count} {where}, {format_bytes(total)}{self._seconds(buffers)}"

    def _arriving(self, name: str, runner: LayerRunner, index: int) -> tuple[CollectiveCall, ...]:
        value = self.source.values[name]
        return reshard_calls(
            runner.moves[index][1], self._slice(value.type, runner).num_bytes, has_gradient=value.requires_grad
        )

    def _slice(self, tensor: TensorType, runner: LayerRunner) -> TensorType:
        """A microbatch's part of an activation, for its bytes."""
        count = runner.program.num_microbatches
        shape = tensor.shape
        return TensorType((shape[0] // count, *shape[1:]), tensor.dtype) if count > 1 and shape else tensor

    def _stored(self, runner: LayerRunner) -> Iterator[tuple[str, tuple[CollectiveCall, ...]]]:
        """Parameters with the same collectives share a buffer."""
        parameters = runner.parameters
        by_moves: dict[tuple[str, ...], list[tuple[str, tuple[CollectiveCall, ...]]]] = {}
        for name, position, steps in zip(parameters.names, parameters.positions, parameters.steps, strict=True):
            value = self.source.values[runner.layer.state[position]]
            buffers = reshard_calls(steps, value.type.num_bytes, has_gradient=value.requires_grad)
            moves = (value.type.dtype, *(f"{b.phase} {b.kind} {b.axis}" for b in buffers))
            by_moves.setdefault(moves, []).append((name, buffers))
        for together in by_moves.values():
            names = [name for name, _ in together]
            joined = [
                same[0]._replace(num_bytes=sum(each.num_bytes for each in same))
                for same in zip(*(buffers for _, buffers in together), strict=True)
            ]
            again = " (gathered again in backward)" if runner.strategy.zero == 3 and _gathers(joined) else ""
            yield f"{', '.join(names)}{again}:\n#    ", tuple(joined)

    def _code(self, module: GraphModule) -> Iterator[str]:
        nodes = {node.name: node for node in module.graph.nodes}
        place = ("", "")
        for line in module.code.strip().splitlines():
            text = format_statement(line)
            if text.startswith("def "):
                yield from self._signature(text, module)
                continue
            name = re.match(r"\s*(\w+) = ", text)
            node = nodes.get(name[1]) if name else None
            now = place if node is None else node.meta.get("place", place)
            yield from _describe_place(place, now)
            place = now
            buffers = () if node is None else node.meta.get("collectives", ())
            if buffers:
                yield f"    # >> {self._moves(buffers)}"
            comment = "" if node is None else node.meta.get("comment", "")
            yield f"{text.ljust(_WIDTH)}  # {comment}" if comment else text

    def _signature(self, text: str, module: GraphModule) -> Iterator[str]:
        """An argument a line."""
        comments = {node.name: node.meta.get("comment", "") for node in module.graph.nodes}
        names = re.sub(r"^def forward\(self, |\)\s*(->.*)?:$", "", text).split(", ")
        yield "def forward("
        for name in names:
            comment = comments.get(name, "")
            yield f"{f'    {name},'.ljust(_WIDTH)}  # {comment}" if comment else f"    {name},"
        yield "):"

    def _moves(self, buffers: Iterable[CollectiveCall]) -> str:
        phases: dict[str, list[str]] = {"forward": [], "backward": []}
        for each in buffers:
            phases[each.phase].append(
                f"{each.kind} of {format_bytes(each.num_bytes)} over {each.axis.size} devices{self._seconds([each])}"
            )
        return "; ".join(f"{phase} {', '.join(texts)}" for phase, texts in phases.items() if texts)

    def _seconds(self, buffers: Sequence[CollectiveCall]) -> str:
        if self.collective_s is None:
            return ""
        return f", {format_seconds(sum(self.collective_s(b.kind, b.axis, b.num_bytes) for b in buffers))}"


def _labels(strategy: LayerStrategy) -> tuple[str, ...]:
    return strategy.labels or ("",) * len(strategy.mesh)


def _gathers(buffers: Iterable[CollectiveCall]) -> bool:
    return any(each.phase == "forward" for each in buffers)


def _describe_place(before: tuple[str, str], now: tuple[str, str]) -> Iterator[str]:
    """Where the user's code goes on: the module if it is another, the line if it is another, and what stands there."""
    module, source = now
    path, _, line = source.rpartition(":")
    if now == before or not path:
        return
    if module != before[0]:
        yield ""
        yield f"    # {module}" if module else "    # the model"
    if source != before[1]:
        yield f"    # {_shorten(path)}:{line}  {linecache.getline(path, int(line)).strip()}".rstrip()


def _shorten(path: str) -> str:
    """Relative to where the user is, or to where packages are installed."""
    if "site-packages/" in path:
        return path.rpartition("site-packages/")[2]
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
