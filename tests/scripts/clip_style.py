"""In the style of transformers' contrastive-image-text example: CLIP, with retrieval by its two encoders alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import CLIPConfig, CLIPModel

PLANS = {2: (("data=2",),)}


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    encoder = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**encoder, "vocab_size": 64, "max_position_embeddings": 12, "eos_token_id": 63},
        vision_config={**encoder, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    model: Any = CLIPModel(config).double()
    ids = torch.randint(1, 62, (18, 8))
    ids[:, -1] = 63
    images = torch.randn(18, 3, 8, 8, dtype=torch.float64)
    dataset: Any = [
        {"input_ids": x, "attention_mask": torch.ones_like(x), "pixel_values": y}
        for x, y in zip(ids, images, strict=True)
    ]
    loader: Any = DataLoader(dataset, batch_size=8, shuffle=True)
    example = {**torch.utils.data.default_collate(dataset[:8]), "return_loss": True}
    model = prepare(model, example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        model.train()
        for batch in loader:
            outputs = model(**batch, return_loss=True)
            optimizer.zero_grad()
            outputs.loss.backward()
            optimizer.step()
            right = (outputs.logits_per_image.argmax(-1) == torch.arange(len(batch["input_ids"]))).sum()
            found["losses"] += [outputs.loss.item(), right.item(), model.logit_scale.detach().sum().item()]
        model.eval()
        with torch.no_grad():
            image_features = model.get_image_features(pixel_values=images[:6]).pooler_output
            text_features = model.get_text_features(input_ids=ids[:6]).pooler_output
        image_features = image_features / image_features.norm(dim=-1, keepdim=True)
        text_features = text_features / text_features.norm(dim=-1, keepdim=True)
        similarity = image_features @ text_features.T
        found["losses"] += similarity.diagonal().tolist()
        found["retrieved"] = similarity.argsort(-1)
    model.save_pretrained(folder / "clip")
    again: Any = CLIPModel.from_pretrained(folder / "clip", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
