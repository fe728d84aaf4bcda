"""In the style of sentence-transformers: a BERT called twice for a loss outside of it, embeddings compared in eval."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel

PLANS = {2: (("data=2",),)}


def mean_pooling(hidden: Tensor, mask: Tensor) -> Tensor:
    """[rows, length, width], [rows, length] -> [rows, width], normalized."""
    summed = (hidden * mask[..., None]).sum(1)
    return functional.normalize(summed / mask.sum(1, keepdim=True), dim=-1)


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    texts = torch.randint(1, 64, (2, 16, 10))
    masks = (torch.arange(10) < torch.randint(4, 11, (2, 16, 1))).long()
    dataset: Any = [{"ids": texts[:, i], "mask": masks[:, i]} for i in range(16)]
    loader: Any = DataLoader(dataset, batch_size=8, shuffle=True)
    model: Any = BertModel(config).double()
    model = prepare(model, {"input_ids": texts[0, :8], "attention_mask": masks[0, :8]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)

    def encode(ids: Tensor, mask: Tensor) -> Tensor:
        return mean_pooling(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)

    found: dict[str, Any] = {"losses": [], "params": model.num_parameters()}
    for _ in range(2):
        model.train()
        for batch in loader:
            anchors, positives = (encode(batch["ids"][:, i], batch["mask"][:, i]) for i in range(2))
            scores = anchors @ positives.T * 20
            loss = functional.cross_entropy(scores, torch.arange(len(scores)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
        model.eval()
        with torch.no_grad():
            similarity = encode(texts[0, :6], masks[0, :6]) @ encode(texts[1, :6], masks[1, :6]).T
        found["losses"] += similarity.flatten().tolist()
    with torch.no_grad():
        outputs = model(texts[0, :6], masks[0, :6], output_attentions=True, output_hidden_states=True)
        found["losses"] += [float(x.square().sum()) for x in (*outputs.hidden_states, *outputs.attentions)]
        found["losses"].append(float(model.get_input_embeddings()(texts[0, :6]).square().sum()))
    model.save_pretrained(folder / "encoder")
    again: Any = BertModel.from_pretrained(folder / "encoder", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
