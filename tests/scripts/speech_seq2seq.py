"""In the style of transformers' run_speech_recognition_seq2seq.py: Whisper, its encoder frozen, with transcripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import WhisperConfig, WhisperForConditionalGeneration

PLANS = {2: (("tensor=2",),)}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    labels = torch.stack([torch.nn.functional.pad(x["labels"], (0, 6 - len(x["labels"])), value=-100) for x in rows])
    return {"input_features": torch.stack([x["input_features"] for x in rows]), "labels": labels}


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=64, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=16, max_source_positions=10,
        max_target_positions=16, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        dropout=0.0, init_std=0.3, begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    model: Any = WhisperForConditionalGeneration(config).double()
    model.freeze_encoder()
    model.config.use_cache = False
    lengths = torch.randint(3, 7, (10,)).tolist()
    dataset: Any = [
        {"input_features": torch.randn(8, 20, dtype=torch.float64), "labels": torch.randint(3, 64, (n,))}
        for n in lengths
    ]
    loader: Any = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate)  # type: ignore
    model = prepare(model, collate(dataset[:4]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-5)
    found: dict[str, Any] = {"losses": []}
    for epoch in range(2):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
        model.eval()
        features = collate(dataset[:5])["input_features"]
        found[f"transcripts{epoch}"] = model.generate(features, max_new_tokens=6, return_timestamps=False)
    model.save_pretrained(folder / "whisper")
    again: Any = WhisperForConditionalGeneration.from_pretrained(folder / "whisper", dtype=torch.float64)
    found["state"] = {name: value.clone() for name, value in again.state_dict().items()}
    return found
