"""Known optima: decoder layers of 8 billion parameter size on one node of 8 H100s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.plan import LayerStrategy
from autopar.program import Layer, Program
from autopar.search.layer.layer_solutions import SolvedVariant, solve_problem
from tests.layer_costs import layer_collectives
from tests.search.inner_programs import build_problem, decoder_layer


def middle(program: Program) -> Layer:
    """The layer kind with most layers, which is the decoder layer; the program of one layer has no other."""
    kinds = Counter(layer.kind for layer in program.layers)
    return program.kinds[kinds.most_common(1)[0][0]]


def steady_state(program: Program, zeros: tuple[int, ...] = (0, 1, 2, 3)) -> LayerStrategy:
    """The best strategy of a layer that follows layers like itself: one policy on either side."""
    prices = ClusterPrices(Cluster.of("h100", nodes=1, devices_per_node=8))
    problem = build_problem(program, (8,), layer=middle(program), prices=prices)
    found: list[tuple[float, int, LayerStrategy]] = []
    for zero in zeros:
        solutions = solve_problem(problem, SolvedVariant(zero, (0,) if zero else ()))
        assert solutions.exact
        policy = int(np.diagonal(solutions.objective_s).argmin())
        found.append((solutions.objective_s[policy, policy], zero, solutions.strategy(policy, policy)))
    return min(found, key=lambda each: each[:2])[2]


def factors(program: Program, strategy: LayerStrategy, target: str) -> list[str]:
    ops = middle(program).ops
    return [each[0] for op, each in zip(ops, strategy.assignments, strict=True) if target in op.target]


def activation_collectives(program: Program, strategy: LayerStrategy) -> Counter[tuple[str, str]]:
    runs = layer_collectives(program, middle(program), strategy)
    return Counter((run.kind, run.phase) for run in runs if run.purpose == "activation")


def traced_decoder(batch: int, sequence: int) -> Program:
    """A causal language model of `transformers`, unmodified, with two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from autopar.trace import trace

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=sequence,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return trace(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}).program


Decoder = Callable[[int, int], Program]


@pytest.fixture(params=["by hand", pytest.param("traced", marks=pytest.mark.slow)])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return decoder_layer if request.param == "by hand" else traced_decoder


def test_one_long_sample_is_tensor_parallel_with_sequence_parallel(decoder: Decoder) -> None:
    program = decoder(1, 4096)
    strategy = steady_state(program)
    assert factors(program, strategy, "linear") == ["f", "f", "f", "h", "f", "f", "h"]
    assert factors(program, strategy, "attention") == ["d1"]  # heads
    assert set(factors(program, strategy, "rsqrt")) == {"d1"}  # norms: rows of the sequence
    # Twice: gather after the norm, reduce-scatter after the row-split product; the mirror image backward.
    assert activation_collectives(program, strategy) == {
        ("all_gather", "forward"): 2, ("reduce_scatter", "forward"): 2,
        ("all_gather", "backward"): 2, ("reduce_scatter", "backward"): 2,
    }  # fmt: skip


def test_eight_samples_are_data_parallel(decoder: Decoder) -> None:
    """With ZeRO-1: updating every parameter on every device costs more than splitting the products does."""
    program = decoder(8, 4096)
    strategy = steady_state(program)
    assert strategy.zero == 1
    ops = zip(middle(program).ops, strategy.assignments, strict=True)
    trained = {each[0] for op, each in ops if program.values[op.results[0]].requires_grad}
    assert trained == {"d0"}
    assert not activation_collectives(program, strategy)


def test_one_very_long_sample_exchanges_sequence_for_heads_around_attention() -> None:
    program = decoder_layer(1, 65536)
    strategy = steady_state(program)
    assert set(factors(program, strategy, "linear")) == {"d1"}  # the sequence
    assert factors(program, strategy, "attention") == ["d1"]  # heads
    exchanges = activation_collectives(program, strategy)
    assert exchanges == {("all_to_all", "forward"): 4, ("all_to_all", "backward"): 4}


@pytest.mark.parametrize(("zero", "gathers"), [(1, 1), (2, 1), (3, 2)])
def test_data_parallel_gathers_parameters_and_scatters_gradients(zero: int, gathers: int) -> None:
    """ZeRO-3 gathers for the forward and again for the backward."""
    program = decoder_layer(8, 4096)
    strategy = steady_state(program, (zero,))
    runs = layer_collectives(program, middle(program), strategy)
    products = [run for run in runs if run.value in ("w_gate", "w_o", "w_q")]
    assert {(run.kind, run.phase, run.times) for run in products} == {
        ("all_gather", "forward", gathers), ("reduce_scatter", "backward", 1)
    }  # fmt: skip
