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
        fuses_norms: norms are one kernel each, even where other chains aren't.
        attention: ``"new"`` kernels written for the newest devices (cuDNN), ``"flash2"``, or ``"flash1"``, which takes
            twice as long as flash2 (abstract of FlashAttention-2, arXiv:2307.08691).
        overlaps_data: gradients are reduced, and parameters gathered, beside compute.
        hides_tensor: tensor-parallel communication is cut into pieces that run beside the products.
        gradient_bytes: per element of a gradient, when it is reduced.
        state_bytes: per parameter, what the optimizer's kernels read and write.
        copied_bytes: per whole parameter and microbatch, what gathering and reducing shards copies locally.
        sums_bytes: per parameter and further microbatch, what adding its gradients moves.
        stops_early: a recomputed layer stops before its last product, whose result nobody reads.
        casts_weights: weights are quantized in each microbatch, not once a step.
        splits_sends: tensor-parallel ranks send a slice each to the next stage.
        gathers_apart: how many gathers each layer's parameters are cut into.
        selects_blocks: selective recomputation takes some blocks whole, not some ops of each.
        broadcasts: each rank broadcasts the parameters that it has updated.
        splits_loss: maximum, difference, exponential, sum and quotient of the float32 logits are a kernel each.
        widens_gradients: gradients of parameters in bfloat16 are added up and reduced in float32.
    """

    name: str
    pattern: str
    source: str
    since: int = 0
    fuses: bool = True
    fuses_norms: bool = False
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
    splits_loss: bool = False
    widens_gradients: bool = False


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
    "tensor ranks; its optimizer copies, unscales, clips and steps in kernels of their own (60 bytes); "
    "its planning/arguments.py: gradients of bf16 in float32",
    overlaps_data=False, state_bytes=60.0, splits_sends=True, widens_gradients=True,
)  # fmt: skip
_NEMO = Stack(
    "nemo", "NeMo|Megatron-Bridge|DGX Cloud",
    "the rows' own notes: overlapped gradients and parameters, gradients in bf16, tensor-parallel overlap",
    since=2025, attention="new", hides_tensor=True, sums_bytes=2.0,
)  # fmt: skip
_MEGATRON_CORE = replace(
    _NEMO, name="megatron-core", pattern="Megatron", since=2024, hides_tensor=False, splits_loss=True,
    widens_gradients=True,
    source="Megatron-LM's scripts since 2023: overlap-grad-reduce, overlap-param-gather; by default neither "
    "tp-comm-overlap nor cross-entropy-loss-fusion; its planning/arguments.py as before",
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
    replace(_TORCH, name="automodel", pattern="AutoModel", source="its yaml files: torch's FSDP2, mostly compiled"),
    replace(_NEMO, name="nemo without cuDNN", pattern=r"DGX Cloud.*(Grok-1|25\.02 Nemotron4-340B)", attention="flash2",
            source="grok1/configure.sh and, for 340B, nemotron/configure.sh of dgxc-benchmarking: NVTE_FUSED_ATTN=0"),
    _NEMO,
    replace(_NEMO, name="nemo before 2025", since=2023, attention="flash2", splits_loss=True,
            source="conf/config.yaml of NeMo-Megatron-Launcher switches cuDNN's attention off (NVTE_FUSED_ATTN: 0); "
            "Megatron's loss, fused by default since September 2024"),
    _MEGATRON_CORE,
    replace(_MEGATRON_CORE, name="megatron of 2023", since=2023, attention="flash2", fuses=False, overlaps_data=False,
            source="as later, but transformer-impl was local by default: flash-attn; rotary, RMS norm by single ops; "
            "overlap-grad-reduce was new, and off unless asked for (MegaScale's Table 3 counts it as its own gain)"),
    Stack("internevo", "InternEvo|InternLM", "InternEvo's hybrid_zero_optim.py: each rank broadcasts what it updated",
          fuses=False, broadcasts=True),
    replace(_MEGATRON, name="deepspeed", pattern="SC21.*ZeRO-3", gathers_apart=12, splits_sends=False,
            source="calibrated: each tensor of a layer is gathered by itself, and nothing is hidden (3 rows)"),
    replace(_MEGATRON, name="bigscience", pattern="BigScience|Megatron( and |[- ])DeepSpeed", splits_sends=False,
            widens_gradients=False,
            source="Megatron-DeepSpeed: as Megatron-LM, but sends whole activations, and reduces bf16 as it is"),
    replace(_MEGATRON, name="megatron of 2022", pattern="Megatron|NeMo", since=2022, sums_bytes=2.0,
            splits_loss=True,
            source="as of 2021, with Megatron-LM's gradient accumulation fusion: products add to the sum themselves; "
            "its cross_entropy.py (of fp16 rows before, fp16-lm-cross-entropy may have halved its bytes)"),
    _MEGATRON,
)  # fmt: skip


def stack_of(run: Run) -> Stack:
    """The stack that produced a row; what the row itself says about compiling, attention and precision counts first."""
    found = next((s for s in _STACKS if re.search(s.pattern, run.source) and run.year >= s.since), None)
    if found is None:
        found = replace(_TORCH, name="other", source="none: taken as torch's own", fuses=False)
    if found.name in ("torch", "fms-fsdp", "automodel", "other"):
        found = replace(found, fuses=run.is_compiled)
    return _in_precision_of(run, _with_kernels_of(run, _overlapped_as(run, found)))


def _with_kernels_of(run: Run, stack: Stack) -> Stack:
    if re.search(r"rms[ _-]?(norm)?[ _-]?kernel|fused[ _-]rms", run.notes.lower()):
        stack = replace(stack, fuses_norms=True)
    # "fused/flash" is either: Transformer Engine has both.
    if re.search("cudnn(?!.*fused/flash)|flash ?attention ?-?3|fa3", run.attention):
        return replace(stack, attention="new")
    # Triton's, or flash attention, at a time when both were as fast as flash1.
    if re.search(r"triton|flash[ _-]?attention[ _-]?v?1\b", run.attention):
        return replace(stack, attention="flash1")
    return stack


def _overlapped_as(run: Run, stack: Stack) -> Stack:
    said = f"{run.zero}; {run.notes}".lower()
    if re.search(r"(not|never|no|without)( \w+)? overlap", said):
        return replace(stack, overlaps_data=False)
    if re.search(r"overlapped(?! (with|by))|overlap[ -]grad", said):
        return replace(stack, overlaps_data=True)
    return stack


def _in_precision_of(run: Run, stack: Stack) -> Stack:
    precision = run.precision.lower()
    if stack.widens_gradients and run.dtype == "bfloat16":
        stack = replace(stack, gradient_bytes=4, sums_bytes=stack.sums_bytes + 4)
    if "pure" in precision:  # parameters, gradients and states in 16 bits
        stack = replace(stack, state_bytes=stack.state_bytes / 2)
        if not re.search(r"reduc\w+ in (fp|float)32", precision):
            stack = replace(stack, gradient_bytes=2, copied_bytes=8.0)
    return replace(stack, sums_bytes=10.0) if "fp32 grad" in precision else stack
