"""Tokens a second of ``generate()``, with and without its cache.

Run as ``torchrun --nproc-per-node 2 benchmarks/generation.py [constraint]``.

A LLaMA of 4 layers, 256 wide, continues two texts of 16 tokens by 256 tokens each; forms of calls are planned before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import autopar

_NEW_TOKENS = 256


def main(constraint: str) -> None:
    """Measure one plan; every rank runs this."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        max_position_embeddings=1024, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(1, 1024, (2, 64))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = transformers.LlamaForCausalLM(config)
    parallel: Any = autopar.parallelize(
        model, mesh, {"input_ids": ids, "labels": ids}, profile=False, constraints=(constraint,)
    )
    speeds: list[float] = []
    for use_cache in (True, False):
        arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": _NEW_TOKENS, "use_cache": use_cache}
        parallel.eval().generate(ids[:, :16], **arguments)
        started = time.perf_counter()
        tokens = parallel.generate(ids[:, :16], **arguments)
        speeds.append((tokens.numel() - 32) / (time.perf_counter() - started))
    if dist.get_rank() == 0:
        print(f"{constraint}: {speeds[0]:.1f} tokens/s with a cache, {speeds[1]:.1f} without")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "data=2")
