"""What a layer's backward computes again, by the policies that rows name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.published.layers import Piece
from benchmarks.published.runs import Run
from benchmarks.published.stacks import Stack

__all__ = ["recomputed_s"]

# XLA's policies name what they save; here is what they compute again.
_POLICIES = {
    "save_qkv_proj": ("bytes", "attention", "out", "up"),
    "save_dot_except_mlpwi": ("bytes", "attention", "up"),
    "save_dot_except_mlp": ("bytes", "attention", "up"),
    "save_qkv_out_proj": ("bytes", "attention", "up"),
    "save_dot_with_context_except_mlp": ("bytes", "up"),
    r"save_dot_with_no_batch_dims?": ("bytes", "attention"),
    r"save_out_proj": ("qkv", "bytes", "attention", "up"),
    "minimal_flash": ("bytes",),
    "minimal": ("bytes", "attention"),
}


def recomputed_s(run: Run, stack: Stack, pieces: Iterable[Piece]) -> float:
    """Forward seconds that one layer's backward spends again."""
    shares = _shares(run, stack)
    return sum(piece.forward_s * shares.get(piece.tag, shares[""]) for piece in pieces)


def _shares(run: Run, stack: Stack) -> dict[str, float]:
    """Which part of the forward of each tag is computed again; ``""`` for all other tags."""
    policy = run.recompute
    last = 0.0 if stack.stops_early else 1.0
    if policy.startswith("full"):
        return {"": 1.0, "down": last}
    if not policy.startswith("selective"):
        return {"": 0.0}
    named = next((tags for name, tags in _POLICIES.items() if re.search(rf"\b{name}\b", policy)), ())
    if named:
        return {"": 0.0, **dict.fromkeys(named, 1.0)}
    if share := _share_of_layers(policy) or _share_of_layers(run.notes.lower()) or 0.5 * stack.selects_blocks:
        return {"": share, "down": share * last}
    if not stack.stops_early:  # Megatron's: core attention
        return {"": 0.0, "attention": 1.0}
    # torch's per-op selection keeps attention and every second product.
    return {"": 0.5, "bytes": 1.0, "attention": 0.0}


def _share_of_layers(text: str) -> float:
    """The part of the layers that is recomputed whole, where the text names one; else 0."""
    if found := re.search(r"\b1/(\d+)\b", text):
        return 1 / int(found[1])
    if found := re.search(r"every[ -](other|second|2nd|third|3rd|\d+)", text):
        words = {"other": 2, "second": 2, "2nd": 2, "third": 3, "3rd": 3}
        return 1 / (words[found[1]] if found[1] in words else int(found[1]))
    found = re.search(r"\b(0\.\d+)\b", text)
    return float(found[1]) if found else 0.0
