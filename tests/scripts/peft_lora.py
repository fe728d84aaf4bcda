"""In the style of peft's examples: LoRA on the attention of a Llama, the adapter saved alone, loaded, and merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

REQUIRES = ("peft",)
PLANS = {4: (("data=2", "tensor=2"),)}
TOLERANCE = 1e-5  # the model computes its norms and its loss in float32


def main(prepare: Callable[[Any, Any], Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    import peft

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    base = LlamaForCausalLM(config).double()
    initial = {name: x.clone() for name, x in base.state_dict().items()}
    peft_config = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM, r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]
    )
    model = peft.get_peft_model(base, peft_config).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # not zero, so that what A does counts from the first step on
    model.print_trainable_parameters()
    ids = torch.randint(3, 64, (14, 10))
    dataset: Any = [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x} for x in ids]
    train_loader: Any = DataLoader(dataset[:10], shuffle=True, batch_size=4)
    eval_loader: Any = DataLoader(dataset[10:], batch_size=2)
    model = prepare(model, torch.utils.data.default_collate(dataset[:4]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=6)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        model.train()
        total_loss = 0.0
        for batch in train_loader:
            loss = model(**batch).loss
            total_loss += loss.detach().float()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        eval_loss, predictions = 0.0, []
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model(**batch)
            eval_loss += outputs.loss.detach().float()
            predictions.extend(torch.argmax(outputs.logits, -1).tolist())
        found["losses"] += [float(total_loss), float(eval_loss)]
        found["predictions"] = predictions
    found["text"] = model.generate(input_ids=ids[:1, :4], max_new_tokens=5, do_sample=False)
    model.save_pretrained(folder / "adapter")
    assert sorted(p.name for p in (folder / "adapter").iterdir() if p.name.startswith("adapter")) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    fresh = LlamaForCausalLM(config).double()
    fresh.load_state_dict(initial)
    again = peft.PeftModel.from_pretrained(fresh, folder / "adapter").double()
    merged = again.merge_and_unload()
    found["state"] = {name: value.clone() for name, value in merged.state_dict().items()}
    return found
