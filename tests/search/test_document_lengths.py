"""How long packed documents are: what the user or the example says of it, and what prices make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import Cluster, plan
from autopar.balance import Lengths
from autopar.errors import ConstraintError
from autopar.explain.planner import Planner
from autopar.explain.question import Question, change
from autopar.ops import family_of
from autopar.ops.attention import DOCUMENTS
from autopar.planning.document_lengths import read_lengths, with_lengths
from autopar.planning.expectations import Expectations
from autopar.program import Program
from autopar.search import SearchRequest
from autopar.step.pricing import predict
from tests.parity.test_documents import make, positions, searched, subject
from tests.zoo import quick_prices


@pytest.mark.parametrize(
    ("given", "of_24", "of_100"),
    [
        (None, 24, 100),
        (8, 8, 8),
        ("48", 24, 48),  # rows cut what is longer
        ([10, 30], (100 + 24**2) / 34, 25),
        (torch.tensor([1, 1, 10]), 102 / 12, 102 / 12),
        (Lengths.of([16]), 16, 16),
        (Lengths.histogram({1: 3, 9: 1}), 84 / 12, 84 / 12),
    ],
)
def test_tokens_of_the_document_of_a_token(given: Any, of_24: float, of_100: float):
    found = read_lengths(given)
    assert [found.around_a_token(row) for row in (24, 100)] == pytest.approx([of_24, of_100])


@pytest.mark.parametrize("given", [0, "many.txt", [], [4, -1], float("nan"), [None], {"a": "b"}])
def test_what_says_nothing_of_lengths_is_refused(given: Any):
    with pytest.raises(ConstraintError, match="documents="):
        read_lengths(given)


def flops(program: Program) -> float:
    """Of all attention."""
    ops = (op for layer in program.layers for op in layer.ops if op.target == DOCUMENTS)
    types = ((op, *(tuple(map(program.type_of, names)) for names in (op.operands, op.results))) for op in ops)
    return sum(family_of(DOCUMENTS).count_work(*each).flops for each in types)


def test_attention_is_priced_by_the_sum_of_squares(tmp_path: Path):
    who = subject("llama")
    program, found = who.traced.program, searched(who, 2, "context=2")
    (tmp_path / "lengths.txt").write_text("9\n9\n")
    cases = {24: None, 8: 8, 9: str(tmp_path / "lengths.txt")}
    priced = {tokens: with_lengths(program, read_lengths(given)) for tokens, given in cases.items()}
    assert {tokens: flops(each) * 24 / flops(program) for tokens, each in priced.items()} == {n: n for n in cases}
    seconds = [
        predict(each, found.decisions, quick_prices(2), SearchRequest().training, None).step_time_s
        for each in priced.values()
    ]
    assert seconds[1] < seconds[2] < seconds[0]


def test_a_ring_is_priced_by_the_documents_that_lie_in_several_slices():
    """For documents of 4 tokens in rows of 24, those at the ends of 2 slices; for documents over half a slice, all."""
    program = subject("llama").traced.program
    parts = {}
    for tokens in (4, 8, 24):
        priced = with_lengths(program, read_lengths(tokens))
        op = next(op for layer in priced.layers for op in layer.ops if op.target == DOCUMENTS)
        (ring,) = (option for option in op.options if option.kernel == "ring_documents")
        parts[tokens] = {dict(each.growth).get(2, 1.0) for each in ring.collectives}
    assert parts == {4: {8 / 24}, 8: {1.0}, 24: {1.0}}


def test_the_example_inputs_say_how_long_documents_are():
    seen = Expectations().seeing(subject("llama").traced, ((), subject("llama").inputs)).documents
    assert sorted(seen.lengths) == sorted([7, 10, 7, 1, 20, 3] * 4)
    assert seen.around_a_token(24) == (49 + 100 + 49 + 1 + 400 + 9) / 48
    on_meta = {name: x.to("meta") for name, x in subject("llama").inputs.items()}
    assert not Expectations().seeing(subject("llama").traced, ((), on_meta)).documents.lengths


@pytest.mark.slow
def test_a_plan_says_what_it_assumes(tmp_path: Path):
    model, inputs = make("llama", 4)
    packed = {**inputs, "position_ids": positions(([12, 12], [24]), 4)}
    cluster = Cluster.of("h100", devices_per_node=2)
    texts = ("data=2", "recompute=none", "microbatches=1")
    said = [plan(model, cluster, packed, compile=False, documents=each, constraints=texts) for each in (None, 4)]
    assert "example inputs: 1.5 a row, the longest of 24 tokens" in " ".join(str(said[0]).split())
    assert "documents of 4 tokens each" in " ".join(str(said[1]).split())
    unpacked = plan(model, cluster, inputs, compile=False, documents=4, constraints=texts)
    assert "so their lengths change nothing" in " ".join(str(unpacked).split())
    question = change(Question(cluster, batch=4, sequence=24), "documents=6")
    (tmp_path / "config.json").write_text(json.dumps({**model.config.to_dict(), "model_type": "llama"}))
    program = Planner(str(tmp_path / "config.json")).program(question)
    assert any("documents of 6 tokens each" in note for note in program.notes)
    with pytest.raises(ConstraintError, match="documents='none'"):
        change(question, "documents=none")
