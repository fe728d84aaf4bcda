"""`compile=True` computes what one device computes, in one graph for each kind of layer."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import CompilerError
from autopar.lower import ParallelModule
from autopar.lower.program import compiled
from autopar.planning.call_traces import trace_model
from autopar.step.activation_policies import rerun_ops
from autopar.step.costs.plan_collectives import plan_collectives
from autopar.verify.rehearsal import loss_of
from tests.collectives import assert_run_equals_priced
from tests.end_to_end.harness import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    assert_near,
    assert_same_step,
    gradients_of,
    launch,
    make,
    parallelize,
)
from tests.models import make_plain_gpt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU"),
]


def compile_counting(name: str, *constraints: str) -> tuple[ParallelModule, Any, Any, Counter[int]]:
    """A compiled model, the same model alone, its inputs, and how often each piece of a program is compiled."""
    model, inputs = make(name)
    counts: Counter[int] = Counter()
    compile_piece = compiled._Piece._compile

    def counting(piece: Any, tensors: Any) -> Any:
        counts[id(piece)] += 1
        return compile_piece(piece, tensors)

    compiled._Piece._compile = counting
    return parallelize(model, inputs, constraints=constraints, compile=True), model, inputs, counts


def check_model(name: str, *constraints: str) -> None:
    """The step is the single device's; each kind of layer is one graph, compiled at most for two kinds of inputs."""
    parallel, single, inputs, counts = compile_counting(name, *constraints)
    if "recompute=ops" in constraints:
        assert any(rerun_ops(strategy.recompute) for strategy in parallel.plan.strategies)
    assert_same_step(parallel, single, inputs)
    assert len(counts) == len(parallel._executor.programs), "a program in several pieces"
    first = sum(counts.values())
    assert first <= 2 * len(counts)
    assert_same_step(parallel, single, inputs)
    assert sum(counts.values()) == first, "compiled again"


def check_collectives() -> None:
    """What compiled layers run is recorded, and is what eager layers run."""
    model, inputs = make("llama")
    found: list[Counter[Any]] = []
    for compile_ in (False, True):
        parallel = parallelize(model, inputs, constraints=("tensor=2", "zero=0", "recompute=none"), compile=compile_)
        with parallel.recording() as collectives:
            loss_of(parallel(**inputs)).backward()
        found.append(Counter(collectives))
    assert found[0] == found[1]


def check_forwards_again() -> None:
    """Of a forward that runs again in backward, the collective behind the last product is left out, as is its price."""
    model, inputs = make("llama")
    program = trace_model(model, inputs).program
    parallel = parallelize(model, inputs, constraints=("tensor=2", "zero=0", "recompute=full"), compile=True)
    with parallel.recording() as collectives:
        loss_of(parallel(**inputs)).backward()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, list(collectives))
    assert_run_equals_priced(program, parallel.plan, ranks, steps=1)
    phases = Counter(each.phase for each in plan_collectives(program, parallel.plan) if each.purpose == "activation")
    assert 0 < phases["recompute"] < phases["forward"], phases


def check_logits(*constraints: str) -> None:
    """Logits beside the loss may be trained through; a loss that does not read them gives compiled layers no zeros.

    Their last dim is split nowhere, and larger than others.
    """
    tangents: set[torch.Size] = set()
    compile_graph = compiled.compile_graph

    def watching(module: Any, tensors: Any, noting: Any, *rest: Any) -> Any:
        def note(graph: Any) -> Any:
            placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
            tangents.update(node.meta["val"].shape for node in placeholders if node.name.startswith("tangents"))
            return noting(graph)

        return compile_graph(module, tensors, note, *rest)

    compiled.compile_graph = watching
    found = []
    for compile_ in (False, True):
        model, inputs = make("llama")
        parallel = parallelize(model, inputs, constraints=constraints, compile=compile_)
        for share in (0.0, 0.5):
            outputs = parallel(**inputs)
            (outputs.loss + share * outputs.logits.square().mean() if share else outputs.loss).backward()
        found.append(gradients_of(parallel))
        logits = outputs.logits.shape
    compiled.compile_graph = compile_graph
    assert tangents, "nothing was compiled"
    assert all(logits[-1] not in shape for shape in tangents), (logits, tangents)
    assert_near(found[1], found[0], GRADIENT_TOLERANCE)


def check_draws() -> None:
    """Dropout and microbatches, which cut a program into pieces: the losses and gradients of eager layers."""
    model, inputs = make_plain_gpt(layers=1, dropout=0.2)
    found = []
    for compile_ in (False, True):
        wanted = ("data=2", "microbatches=2", "zero=1")
        parallel = parallelize(model, inputs, constraints=wanted, compile=compile_)
        torch.manual_seed(1)
        loss = loss_of(parallel(**inputs))
        loss.backward()
        found.append((loss.item(), gradients_of(parallel)))
    assert found[1][0] == pytest.approx(found[0][0], rel=LOSS_TOLERANCE)
    assert_near(found[1][1], found[0][1], GRADIENT_TOLERANCE, floor=1e-2)


def check_no_compiler() -> None:
    """A compiled plan that is given is not run eagerly because nothing is there that could compile it."""
    model, inputs = make("flat")
    compiled_plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, compile=True)
    find, shutil.which = shutil.which, no_program
    try:
        with pytest.raises(CompilerError, match="compiler"):
            parallelize(model, inputs, plan=compiled_plan)
        assert not parallelize(model, inputs, plan=compiled_plan, compile=False).plan.compiled
    finally:
        shutil.which = find


def no_program(name: str) -> None:
    """Nothing is installed."""


def test_two_ranks_run_compiled_layers() -> None:
    gpt2 = partial(check_model, "gpt2", "tensor=2", "recompute=ops")
    launch(2, gpt2, check_collectives, check_forwards_again, check_no_compiler, timeout_s=400)


def test_compiled_layers_with_gathers_recomputation_and_microbatches() -> None:
    launch(
        2,
        partial(check_model, "llama", "data=2", "zero=3", "recompute=full", "offload=activations"),
        partial(check_logits, "data=2", "zero=3", "recompute=none"),
        check_draws,
        timeout_s=400,
    )
