"""What rows cost by the lengths of their sequences does not depend on the lengths that a plan was priced for."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.planning.call_traces import trace_model
from autopar.planning.document_lengths import read_lengths, with_lengths
from autopar.search import SearchRequest, search

ROW = 2048


@pytest.mark.slow
def test_attention_to_documents_has_a_part_for_tokens_and_one_for_pairs() -> None:
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2,
                         vocab_size=64, max_position_embeddings=ROW, use_cache=False)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(2, ROW, dtype=torch.int64)
        example = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(ROW).expand(2, -1)}
    program = trace_model(model, example).program
    prices = ClusterPrices(Cluster.of("h100", devices_per_node=2))
    rows = []
    for length in (128, 512, ROW):
        known = with_lengths(program, read_lengths(length))
        plan = search(known, 2, prices, SearchRequest(constraints=("data=2",)))
        row = plan.prediction.row
        # Each says of documents of its own length what its step takes.
        row_s = ROW * (row.token_s + length * row.pair_s)
        assert row.fixed_s(1, 1) + row_s == pytest.approx(plan.step_time_s, rel=1e-6)
        rows.append(row)
    # Flash attention reaches length / (length + 540) of its rate, so pairs at 128 tokens take 2.5 times what they do at
    # 512: as if all were a cost of pairs, a long document would be that much too dear.
    for row in rows[1:]:
        assert row.pair_s == pytest.approx(rows[0].pair_s, rel=0.01)
        assert row.token_s == pytest.approx(rows[0].token_s, rel=0.01)
