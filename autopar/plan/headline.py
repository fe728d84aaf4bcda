"""A plan in one line, in the form in which people who train large models compare runs::

    bf16 · ZeRO-3 · DP 8 x TP 4 x PP 2 (1F1B, 16 microbatches) · 8.1k tokens/s/GPU · 423 TFLOP/s · 43 % MFU · 65.7 of
    72.2 GiB

===========  ========================================================================================================
DP           data parallel: devices that split the batch, including those that split the experts
TP           tensor parallel, including the vocabulary; ``TP 4+SP`` where activations in between are split by sequence
CP, Ulysses  context parallel; sequence parallel by heads
EP           expert parallel: how many of the DP devices share one set of experts
replicas     devices that compute the same
other        mesh axes that do something else
PP           device groups of a pipeline, its schedule, number of stages if a group has several, and microbatches
===========  ========================================================================================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from autopar.cluster.hardware import device_type_of
from autopar.plan.decisions import Decisions, LayerStrategy
from autopar.plan.prediction import Prediction
from autopar.user_text.quantities import count_unit, short_count, size_unit, three_digits

__all__ = ["describe_gap", "describe_headline", "describe_parallelism", "describe_usual", "of_limit", "throughput"]

# Labels of `autopar.search.settings.labels` -> their short names, in the order in which the headline lists them.
_DEGREES = {
    "data": "DP", "tensor": "TP", "tensor+sequence": "TP", "vocabulary": "TP", "context": "CP",
    "sequence (Ulysses)": "Ulysses", "sequence": "SP", "expert": "EP", "replicated": "replicas",
}  # fmt: skip
_ORDER = (*dict.fromkeys(_DEGREES.values()), "other")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_DEVICES = {"cuda": "GPU", "npu": "NPU", "hpu": "HPU"}  # the usual word for a device of these types
_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "interleaved 1F1B", "zbv": "ZBV", "dualpipev": "DualPipeV",
    "interleaved_zero_bubble": "interleaved zero bubble", "looped_bfs": "looped BFS",
    "breadth_first_v": "breadth-first V",
}  # fmt: skip


def describe_headline(decisions: Decisions, prediction: Prediction, limit_bytes: float) -> str:
    """The headline of a plan with `limit_bytes` of memory per device; leaves out what is not predicted."""
    parts = [_DTYPES.get(prediction.dtype, prediction.dtype), describe_parallelism(decisions)]
    if prediction.step_time_s:
        parts.append(throughput(prediction, decisions.world_size, prediction.step_time_s))
        parts.append(of_limit(prediction.peak_memory_bytes, limit_bytes))
    return " · ".join(filter(None, parts))


def throughput(prediction: Prediction, world_size: int, step_s: float) -> str:
    """Tokens or samples per second, model FLOP/s and MFU of each device, if a step takes `step_s` seconds."""
    device = _DEVICES.get(device_type_of(prediction.device), "device")
    count, unit = (prediction.tokens_per_step, "tokens") if prediction.tokens_per_step else (
        prediction.samples_per_step, "samples")  # fmt: skip
    parts = [f"{short_count(count / step_s / world_size)} {unit}/s/{device}"]
    flops_per_s = prediction.model_flops / step_s / world_size
    if flops_per_s:
        parts.append(f"{_format_flops(flops_per_s)}/s")
    if flops_per_s and prediction.peak_flops_per_s:
        utilization = flops_per_s / prediction.peak_flops_per_s
        parts.append(f"{utilization * 100:.{0 if utilization >= 0.1 else 1}f} % MFU")
    return " · ".join(parts)


def _format_flops(flops: float) -> str:
    factor, unit = count_unit(flops)
    return f"{three_digits(flops / factor)} {unit.upper()}FLOP"


def of_limit(num_bytes: float, limit_bytes: float) -> str:
    """Format the memory in use and its limit: ``"65.7 of 72.2 GiB"``."""
    (size, unit), (limit, of_unit) = _size(num_bytes), _size(limit_bytes)
    if not math.isfinite(limit_bytes):
        return f"{size} {unit}"
    return f"{size} of {limit} {unit}" if unit == of_unit else f"{size} {unit} of {limit} {of_unit}"


def _size(num_bytes: float) -> tuple[str, str]:
    factor, unit = size_unit(num_bytes)
    return three_digits(num_bytes / factor), unit


def describe_parallelism(decisions: Decisions) -> str:
    """ZeRO level, degrees and recomputation of all layers; where they differ, "mixed" and those of most layers."""
    strategies = decisions.layer_strategies
    with_state = [each for each in strategies if each.storage]
    recompute = _common("recompute", [_recompute(each) for each in strategies])
    zero = _common("ZeRO", [f"ZeRO-{each.zero}" for each in with_state])
    mesh = _common("mesh", _meshes(strategies), _pipeline(decisions))
    return _join_parts(decisions, zero, mesh, recompute)


def describe_usual(decisions: Decisions) -> str:
    """As `describe_parallelism`, for the combination that most layers have."""
    strategies = decisions.layer_strategies
    counts = Counter(zip((f"ZeRO-{each.zero}" for each in strategies), _meshes(strategies), map(_recompute, strategies),
                         strict=True))  # fmt: skip
    zero, mesh, recompute = counts.most_common(1)[0][0]
    return _join_parts(decisions, zero, _with_pipeline(mesh, _pipeline(decisions)), recompute)


def _join_parts(decisions: Decisions, zero: str, mesh: str, recompute: str) -> str:
    """Join the parts of the line that say how layers run with those that hold for the whole plan."""
    microbatches = "" if decisions.stages else _microbatches(decisions.num_microbatches)
    shown_recompute = "" if recompute == "no recompute" else recompute
    return " · ".join(filter(None, (zero, mesh, microbatches, shown_recompute, *_extras(decisions))))


def _common(what: str, texts: Iterable[str], pipeline: str = "") -> str:
    """The text that all layers share, followed by the pipeline; or "mixed" and the text of most layers."""
    counts = Counter(texts)
    if not counts:
        return pipeline
    text, num_layers = counts.most_common(1)[0]
    if len(counts) == 1:
        return _with_pipeline(text, pipeline)
    mixed = f"{what} mixed (see table; {num_layers} of {counts.total()} layers: {text})"
    return f"{mixed} · {pipeline}" if pipeline else mixed


def _with_pipeline(mesh: str, pipeline: str) -> str:
    return " x ".join(filter(None, (mesh, pipeline))) or "1 device"


def _meshes(strategies: Iterable[LayerStrategy]) -> list[str]:
    """The degrees of each layer as text: ``"DP 8 x TP 4"``."""
    layers = [_degrees(strategy) for strategy in strategies]
    # A layer without attention can't tell which of the two splits the sequence, nor one without experts the EP degree.
    # Both take them from the other layers.
    sequence = next((name for name in ("CP", "Ulysses") if any(name in degrees for degrees in layers)), "SP")
    experts = Counter(degrees["EP"] for degrees in layers if "EP" in degrees)
    has_sequence_parallel = any("tensor+sequence" in strategy.labels for strategy in strategies)
    texts: list[str] = []
    for degrees in layers:
        degrees[sequence] = degrees.pop("SP", 1) * degrees.pop(sequence, 1)
        if len(experts) == 1 and "EP" not in degrees and degrees.get("DP", 1) > 1:
            degrees["EP"] = next(iter(experts))
        names = [name for name in _ORDER if degrees.get(name, 1) > 1]
        suffixes = {"TP": "+SP"} if has_sequence_parallel else {}
        texts.append(" x ".join(f"{name} {degrees[name]}{suffixes.get(name, '')}" for name in names))
    return texts


def _degrees(strategy: LayerStrategy) -> dict[str, int]:
    """Short name -> the product of the sizes of the mesh axes with that label."""
    degrees: dict[str, int] = {}
    for label, size in zip(strategy.labels or ("",) * len(strategy.mesh), strategy.mesh, strict=True):
        name = _DEGREES.get(label, "other")
        degrees[name] = degrees.get(name, 1) * size
    if "EP" in degrees:
        degrees["DP"] = degrees.get("DP", 1) * degrees["EP"]
    return degrees


def _pipeline(decisions: Decisions) -> str:
    if not decisions.stages:
        return ""
    groups, stages = decisions.num_groups, len(decisions.stages)
    schedule = _SCHEDULES.get(decisions.schedule, decisions.schedule)
    count = f"{stages} stages, " if stages > groups else ""
    return f"PP {groups} ({schedule}, {count}{_microbatches(decisions.num_microbatches) or '1 microbatch'})"


def _microbatches(num_microbatches: int) -> str:
    return f"{num_microbatches} microbatches" if num_microbatches > 1 else ""


def _recompute(strategy: LayerStrategy) -> str:
    policy = strategy.recompute.partition("+")[0].partition(":")[0]
    names = {"none": "no recompute", "offload": "no recompute", "rerun": "recompute of some ops"}
    return names.get(policy, f"{policy} recompute")


def _extras(decisions: Decisions) -> Iterable[str]:
    if any("offload" in strategy.recompute for strategy in decisions.strategies):
        yield "offload of activations"
    if decisions.host_storage:
        yield "offload of optimizer"
    if decisions.compiled:
        yield "compiled"


def describe_gap(optimality_gap: float) -> str:
    """How far a plan can be from the best one, as simulated."""
    return f"within {optimality_gap:.1%} of the search space's best"
