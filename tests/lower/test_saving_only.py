"""A compiled layer whose forward runs again in backward leaves out what backward doesn't read, and has that price."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.lower.program import compiled
from autopar.lower.program.single_layer import SingleLayer
from autopar.planning.call_traces import trace_model
from autopar.program import Layer, Program
from autopar.step.costs.layer_cost import are_rerun
from autopar.step.layer.local_layer import place, whole_strategy
from autopar.step.layer_tensors.rerun_forward import surely_run_again
from autopar.step.training import TrainingSpec
from tests import models

PRODUCTS = (["mm"], ["addmm"], ["bmm"])


def block() -> tuple[Program, Layer]:
    """A block of a decoder: attention, a gated network, residuals behind both."""
    program = trace_model(*models.make("llama")).program
    return program, program.layers[1]


def products_of(graph: Any) -> int:
    return sum(str(node.target).split(".")[1:2] in PRODUCTS for node in graph.graph.nodes)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
def test_a_forward_that_runs_again_leaves_out_the_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    compile_graph = compiled.compile_graph

    def watching(
        module: Any, tensors: Sequence[Tensor], noting: Callable[[Any], Callable[[], None]], *rest: Any
    ) -> Any:
        def note(graph: Any) -> Callable[[], None]:
            noted, count = noting(graph), products_of(graph)
            return lambda: (ran.append(count), noted())[1]

        return compile_graph(module, tensors, note, *rest)

    monkeypatch.setattr(compiled, "compile_graph", watching)
    gated = models.Gated().double()
    program = trace_model(gated, {"x": torch.ones(32, 64, dtype=torch.float64, requires_grad=True)}).program
    (layer,) = program.layers
    found: dict[str, Sequence[Tensor | None]] = {}
    for recompute, is_compiled in (("none", False), ("full", True)):
        torch.manual_seed(0)
        lone = SingleLayer(program, layer, replace(whole_strategy(layer), recompute=recompute), compiled=is_compiled)
        ran.clear()
        found[recompute] = lone.backward(lone.forward())
    assert ran == [3, 2, 6]  # forward, forward again, backward: a gradient of each operand
    for one, other in zip(*found.values(), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_what_is_left_out_is_not_priced() -> None:
    program, layer = block()
    placed = place(program, layer, replace(whole_strategy(layer), recompute="full"))
    training = TrainingSpec(fuses_attention=False)
    for is_compiled, expected in ((False, []), (True, ["linear", "add"])):
        again = are_rerun(placed, "full", replace(training, compiled=is_compiled))
        out = [op for op, is_again in zip(layer.ops, again, strict=True) if not is_again and not op.is_view]
        assert [op.target.split(".")[1] for op in out] == expected, out
        assert all(op in layer.ops[-4:] for op in out)
    again = surely_run_again(placed, fuses_attention=False)
    assert Counter(index in again for index in range(len(layer.ops)))[False] >= 2
