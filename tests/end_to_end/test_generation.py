"""``generate()`` of a parallel module: the tokens that one device gives, on every rank."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autopar.errors import ModelError
from autopar.lower.run.token_cache import TokenCache
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
    plans = parallel.plans
    # Of training, and for each batch size one of what texts begin with and one of their tokens; without a cache
    # one with and one without a mask; an encoder runs by itself, with and without one.
    assert len({(call.part, call.inputs) for call in plans}) == len(plans) <= 5 + 2 * (name == "bart"), plans
    assert any("keys and values" in call.inputs for call in plans) == (name != "bart")
    with pytest.raises(
        ModelError, match=r"generate\(assistant_model=...\) needs a cache.*full_state_dict\(\) into the"
    ):
        parallel.generate(text, assistant_model=single)
    for model in (single, parallel):
        model.train()(**inputs).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    sampled = {"max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    expected, found = (model.eval().generate(text, **sampled) for model in (single, parallel))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)  # generate() has them in float32
    assert len(parallel.plans) == len(plans)


def check_unlike_seeds() -> None:
    """Ranks that were seeded differently sample what the first one does; also where a cache can't be traced."""
    given, inputs = make("gpt2", torch.float64)
    single: Any = copy.deepcopy(given).eval()
    torch.manual_seed(0)
    expected = single.generate(inputs["input_ids"], do_sample=True, max_new_tokens=4)
    torch.manual_seed(dist.get_rank())
    parallel: Any = parallelize(given, inputs, constraints=("data=2",))
    with patch.object(TokenCache, "update", side_effect=TypeError):
        assert torch.equal(parallel.eval().generate(inputs["input_ids"], do_sample=True, max_new_tokens=4), expected)
    assert not any("keys and values" in call.inputs for call in parallel.plans)


def check_rows_that_do_not_divide() -> None:
    """The second text of three rows, after one of two: a call makes four of them, and what goes to the next is cut."""
    given, inputs = make("gpt2", torch.float64)
    single: Any = copy.deepcopy(given).eval()
    parallel: Any = parallelize(given, inputs, constraints=("data=2",))
    parallel.eval()
    text = inputs["input_ids"][:3, :5]
    for start in (text[:2], text, text.flip(1)):
        expected = single.generate(start, do_sample=False, max_new_tokens=3)
        assert torch.equal(parallel.generate(start, do_sample=False, max_new_tokens=3), expected)
    assert any(call.inputs.startswith("input_ids [3, 64]") for call in parallel.plans)


def test_tokens_are_those_of_one_device() -> None:
    launch(
        2,
        check_rows_that_do_not_divide,
        partial(check_generation, "gpt2", "data=2"),
        partial(check_generation, "llama", "tensor=2"),
        partial(check_generation, "bart", "tensor=2"),
        check_unlike_seeds,
    )
