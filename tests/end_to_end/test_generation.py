"""``generate()`` of a parallel module: the tokens that one device gives, on every rank."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import ModelError
from tests.end_to_end.harness import launch, make, parallelize

pytestmark = pytest.mark.slow


def check_generation(name: str, constraint: str) -> None:
    """Greedy, sampled, several at a time, and of a text that is padded, each with another number of tokens."""
    given, inputs = make(name, torch.float64)
    single: Any = given.eval()
    parallel: Any = parallelize(copy.deepcopy(single), inputs, constraints=(constraint,))
    parallel.eval()
    text = inputs["input_ids"][:3, :5]
    mask = torch.ones_like(text)
    mask[1, :2] = 0
    for arguments in (
        {"do_sample": False, "max_new_tokens": 6},
        {"do_sample": True, "top_k": 8, "max_new_tokens": 4},
        {"do_sample": False, "num_beams": 2, "max_new_tokens": 4},
        {"do_sample": False, "max_new_tokens": 5, "attention_mask": mask},
    ):
        torch.manual_seed(3)
        expected = single.generate(text, **arguments)
        torch.manual_seed(3)
        assert torch.equal(parallel.generate(text, **arguments), expected), arguments
    forms = {(call.part, call.inputs) for call in parallel.plans}
    # Of training, and one for each batch size with and without a mask; an encoder runs by itself, with and without one.
    assert len(forms) == len(parallel.plans) <= 5 + 2 * (name == "bart"), parallel.plans
    with pytest.raises(
        ModelError, match=r"generate\(assistant_model=...\) needs a cache.*full_state_dict\(\) into the"
    ):
        parallel.generate(text, assistant_model=single)
    parallel.train()
    parallel(**inputs).loss.backward()


def check_unlike_seeds() -> None:
    """Ranks that were seeded differently sample what the first one does."""
    given, inputs = make("gpt2")
    torch.manual_seed(dist.get_rank())
    parallel: Any = parallelize(given, inputs, constraints=("data=2",))
    tokens = parallel.eval().generate(inputs["input_ids"], do_sample=True, max_new_tokens=4)
    found = [torch.empty_like(tokens) for _ in range(2)]
    dist.all_gather(found, tokens)
    assert torch.equal(*found)


def test_tokens_are_those_of_one_device() -> None:
    launch(
        2,
        partial(check_generation, "gpt2", "data=2"),
        partial(check_generation, "llama", "tensor=2"),
        partial(check_generation, "bart", "tensor=2"),
        check_unlike_seeds,
    )
