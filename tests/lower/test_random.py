"""Draws differ between shards, agree between replicas, repeat, and leave torch's own generator alone."""

from __future__ import annotations

import pytest
import torch

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.kernels.random import RandomState, agree_base_seed, derive_seed, random_scope

CPU = torch.device("cpu")


def test_derived_seeds_do_not_collide_and_depend_on_every_part():
    seeds = {
        derive_seed(base, op, microbatch, number)
        for base in (0, 1, 1 << 62, -1)
        for op in range(40)
        for microbatch in range(4)
        for number in range(8)
    }
    assert len(seeds) == 4 * 40 * 4 * 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derive_seed(1, 2, 3) != derive_seed(1, 3, 2)


def test_derived_seeds_are_the_same_in_every_process():
    assert derive_seed(0) == 0
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)
    # splitmix64 from state 0 gives 0xE220A8397B1DCDAF first (its published test vector)
    assert derive_seed(0, 0) == 0xE220A8397B1DCDAF >> 1


def test_a_state_draws_by_op_microbatch_and_shard():
    def draw(state: RandomState, op: int, number: int) -> float:
        return torch.rand((), generator=state.generator(op, number)).item()

    first, second = RandomState(3, CPU), RandomState(3, CPU, microbatch=1)
    draws = [draw(first, 0, 0), draw(first, 0, 1), draw(first, 1, 0), draw(second, 0, 0)]
    draws.append(draw(RandomState(4, CPU), 0, 0))
    assert len(set(draws)) == 5
    assert draw(first, 0, 1) == draws[1]


def test_a_scope_repeats_and_leaves_the_default_generator_alone():
    torch.manual_seed(1)
    undisturbed = torch.rand(4)
    torch.manual_seed(1)
    with random_scope(5):
        first = torch.rand(3)
    assert torch.equal(torch.rand(4), undisturbed)
    with random_scope(5):
        assert torch.equal(torch.rand(3), first)


def test_a_scope_restores_after_an_error():
    torch.manual_seed(1)
    undisturbed = torch.rand(4)
    torch.manual_seed(1)
    with pytest.raises(TypeError), random_scope(5):
        torch.rand(3).bernoulli_("not a probability")
    assert torch.equal(torch.rand(4), undisturbed)


def test_scopes_of_simulated_ranks_do_not_mix():
    def run(c: Communicator) -> list[torch.Tensor]:
        drawn = []
        for step in range(50):
            with random_scope(derive_seed(step, c.rank)):
                drawn.append(torch.cat([torch.rand(5) for _ in range(3)]))
        return drawn

    torch.manual_seed(0)
    for rank, drawn in enumerate(simulate(4, run)):
        for step, got in enumerate(drawn):
            alone = torch.Generator().manual_seed(derive_seed(step, rank))
            assert torch.equal(got, torch.rand(15, generator=alone))


def test_the_base_seed_is_rank_0s_and_follows_manual_seed():
    torch.manual_seed(2)
    first, second = (simulate(4, agree_base_seed) for _ in range(2))
    torch.manual_seed(2)
    again = simulate(4, agree_base_seed)
    assert len(set(first)) == len(set(second)) == 1
    assert first == again
    assert first != second
