"""What each training stack does, the same for all of its rows, and where that is known from."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.published.runs import Run

__all__ = ["Stack", "stack_of"]


@dataclass(frozen=True)
class Stack:
    """A training stack.

    Args:
        name: for messages.
        pattern: what its rows' sources match.
        since: the first year of its rows.
        source: where its habits are known from.
        fuses: chains of elementwise ops are one kernel each (a compiler, or fused layers written by hand).
        attention: ``"new"`` kernels written for the newest devices (cuDNN), ``"flash2"``, or ``"flash1"``, which takes
            twice as long as flash2 (abstract of FlashAttention-2, arXiv:2307.08691).
        overlaps_data: gradients are reduced, and parameters gathered, beside compute.
        hides_tensor: tensor-parallel communication is cut into pieces that run beside the products.
        gradient_bytes: per element of a gradient, when it is reduced.
        state_bytes: per parameter, what the optimizer's kernels read and write.
        copied_bytes: per whole parameter and microbatch, what gathering and reducing shards copies locally.
        sums_bytes: per parameter and further microbatch, what adding its gradients moves.
        stops_early: a recomputed layer stops before its last product, whose result nobody reads.
        casts_weights: weights are quantised in each microbatch, not once a step.
        splits_sends: tensor-parallel ranks send a slice each to the next stage.
        gathers_apart: how many gathers each layer's parameters are cut into.
        selects_blocks: selective recomputation takes some blocks whole, not some ops of each.
        broadcasts: each rank broadcasts the parameters that it has updated.
    """

    name: str
    pattern: str
    source: str
    since: int = 0
    fuses: bool = True
    attention: str = "flash2"
    overlaps_data: bool = True
    hides_tensor: bool = False
    gradient_bytes: int = 2
    state_bytes: float = 30.0
    copied_bytes: float = 0.0
    sums_bytes: float = 6.0
    stops_early: bool = False
    casts_weights: bool = False
    splits_sends: bool = False
    gathers_apart: int = 1
    selects_blocks: bool = False
    broadcasts: bool = False


_TORCH = Stack(
    "torch", "torchtitan|torchao|torchtune",
    "torch's _fsdp_collectives.py: parameters are split out of gathers (4 bytes, twice), gradients joined in float32",
    gradient_bytes=4, copied_bytes=14.0, sums_bytes=12.0, stops_early=True, casts_weights=True,
)  # fmt: skip
_FMS = replace(
    _TORCH, name="fms-fsdp", pattern="fms-fsdp|foundation-model-stack", gradient_bytes=2, copied_bytes=8.0,
    selects_blocks=True,
    source="its policies: gradients reduced in bf16 (mixed_precision.py), every k-th block recomputed (ac_handler.py); "
    "torch's _flat_param.py: gradients flattened and divided",
)  # fmt: skip
_MEGATRON = Stack(
    "megatron", "Megatron",
    "Narayanan 2021 (arXiv:2104.04473): fused kernels, gradients reduced after the backward, sends scattered over "
    "tensor ranks; its optimizer copies, unscales, clips and steps in kernels of their own (60 bytes)",
    overlaps_data=False, state_bytes=60.0, splits_sends=True,
)  # fmt: skip
_NEMO = Stack(
    "nemo", "NeMo|Megatron-Bridge|DGX Cloud",
    "the rows' own notes: overlapped gradients and parameters, gradients in bf16, tensor-parallel overlap",
    attention="new", hides_tensor=True, sums_bytes=2.0,
)  # fmt: skip
_STACKS = (
    _FMS,
    _TORCH,
    Stack(
        "composer", "MosaicML|llm-foundry|Composer",
        "torch's _flat_param.py: gradients flattened, cast, divided; composer's DecoupledAdamW steps by single ops",
        fuses=False, gradient_bytes=4, state_bytes=92.0, copied_bytes=18.0, sums_bytes=12.0,
        stops_early=True,
    ),
    Stack("paxml", "Paxml", "calibrated: gathers aren't hidden (2 rows; seen so on 17 further ones)", attention="new",
          overlaps_data=False, stops_early=True),
    Stack("xla", "MaxText|XLA|JAX", "XLA's latency-hiding scheduler; the rows' own notes", attention="new",
          stops_early=True),
    _NEMO,
    replace(_NEMO, name="megatron-core", pattern="Megatron", since=2023,
            source="Megatron-LM's options since 2023: overlap-grad-reduce, overlap-param-gather, tp-comm-overlap"),
    Stack("internevo", "InternEvo|InternLM", "InternEvo's hybrid_zero_optim.py: each rank broadcasts what it updated",
          fuses=False, broadcasts=True),
    replace(_MEGATRON, name="deepspeed", pattern="SC21.*ZeRO-3", gathers_apart=12, splits_sends=False,
            source="calibrated: each tensor of a layer is gathered by itself, and nothing is hidden (3 rows)"),
    replace(_MEGATRON, name="bigscience", pattern="BigScience", splits_sends=False,
            source="Megatron-DeepSpeed: as Megatron-LM, but sends whole activations"),
    replace(_MEGATRON, name="megatron of 2022", since=2022, sums_bytes=2.0,
            source="as of 2021, with Megatron-LM's gradient accumulation fusion: products add to the sum themselves"),
    _MEGATRON,
)  # fmt: skip


def stack_of(run: Run) -> Stack:
    """The stack that produced a row; what the row itself says about compiling, attention and precision counts first."""
    found = next((s for s in _STACKS if re.search(s.pattern, run.source) and run.year >= s.since), None)
    if found is None:
        found = replace(_TORCH, name="other", source="none: taken as torch's own", fuses=False)
    if found.name in ("torch", "fms-fsdp", "other"):
        found = replace(found, fuses=run.is_compiled)
    if "triton" in run.attention:  # or flash attention, at a time when both were as fast as flash1
        found = replace(found, attention="flash1")
    if re.search("cudnn|flash ?attention ?-?3|fa3", run.attention):
        found = replace(found, attention="new")
    if "pure" in run.precision.lower():  # parameters, gradients and states in 16 bits
        found = replace(found, gradient_bytes=2, state_bytes=found.state_bytes / 2, copied_bytes=8.0)
    if "fp32 grad" in run.precision.lower():
        found = replace(found, sums_bytes=10.0)
    return found
