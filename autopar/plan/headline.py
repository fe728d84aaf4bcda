"""A plan in one line, as people who train large models compare runs::

    bf16 · ZeRO-3 · DP 8 x TP 4 x PP 2 (1F1B, 16 microbatches) · 8.1k tokens/s/GPU · 423 TFLOP/s · 43 % MFU · 65.7 of
    72.2 GiB

===========  ========================================================================================================
DP           data parallel: devices that split the batch; with experts, those that split the experts too
TP           tensor parallel, vocabulary included; ``TP 4+SP`` where activations between are cut in the sequence
CP, Ulysses  context parallel; sequence parallel by heads
EP           expert parallel: of the devices that split the batch, how many share one set of experts
replicas     devices that compute the same
other        mesh axes that are none of these
PP           device groups of a pipeline, its schedule, stages where a group has several, and microbatches
===========  ========================================================================================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from autopar.cluster.hardware import device_type_of
from autopar.plan.decisions import Decisions, LayerStrategy
from autopar.plan.prediction import Prediction
from autopar.quantities import count_unit, short_count, size_unit, three_digits

__all__ = ["describe_headline", "describe_parallelism", "describe_usual", "of_limit", "throughput"]

# Names of `autopar.search.labels`, in the order in which the line has them.
_DEGREES = {
    "data": "DP", "tensor": "TP", "tensor+sequence": "TP", "vocabulary": "TP", "context": "CP",
    "sequence (Ulysses)": "Ulysses", "sequence": "SP", "expert": "EP", "replicated": "replicas",
}  # fmt: skip
_ORDER = (*dict.fromkeys(_DEGREES.values()), "other")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "interleaved 1F1B", "zbv": "ZBV", "dualpipev": "DualPipeV",
    "interleaved_zero_bubble": "interleaved zero bubble", "looped_bfs": "looped BFS",
}  # fmt: skip


def describe_headline(decisions: Decisions, prediction: Prediction, limit_bytes: float) -> str:
    """The line of a plan that was allowed so many bytes per device; what is not predicted is left out."""
    dtype = _DTYPES.get(prediction.dtype, prediction.dtype)
    predicted = _predicted(prediction, decisions, limit_bytes)
    return " · ".join(filter(None, [dtype, describe_parallelism(decisions), *predicted]))


def _predicted(prediction: Prediction, decisions: Decisions, limit_bytes: float) -> list[str]:
    if not prediction.step_time_s:
        return []
    found = [throughput(prediction, decisions.world_size, prediction.step_time_s)]
    return [*found, of_limit(prediction.peak_memory_bytes, limit_bytes)]


def throughput(prediction: Prediction, world_size: int, step_s: float) -> str:
    """Rate, model FLOPs a second and their share of the peak, of each device in a step of so many seconds."""
    each = "GPU" if device_type_of(prediction.device) == "cuda" else "device"
    count, unit = (prediction.tokens_per_step, "tokens") if prediction.tokens_per_step else (
        prediction.samples_per_step, "samples")  # fmt: skip
    found = [f"{short_count(count / step_s / world_size)} {unit}/s/{each}"]
    rate = prediction.model_flops / step_s / world_size
    if rate:
        found.append(f"{_flops(rate)}/s")
    if rate and prediction.peak_flops_per_s:
        share = rate / prediction.peak_flops_per_s
        found.append(f"{share * 100:.{0 if share >= 0.1 else 1}f} % MFU")
    return " · ".join(found)


def _flops(rate: float) -> str:
    factor, unit = count_unit(rate)
    return f"{three_digits(rate / factor)} {unit.upper()}FLOP"


def of_limit(num_bytes: float, limit_bytes: float) -> str:
    """What is filled of what may be: ``"65.7 of 72.2 GiB"``."""
    (size, unit), (limit, of_unit) = _size(num_bytes), _size(limit_bytes)
    if not math.isfinite(limit_bytes):
        return f"{size} {unit}"
    return f"{size} of {limit} {unit}" if unit == of_unit else f"{size} {unit} of {limit} {of_unit}"


def _size(num_bytes: float) -> tuple[str, str]:
    factor, unit = size_unit(num_bytes)
    return three_digits(num_bytes / factor), unit


def describe_parallelism(decisions: Decisions) -> str:
    """What is split how, by all layers: exact, or "mixed" and how most of them run."""
    strategies = decisions.layer_strategies
    stored = [each for each in strategies if each.storage]
    recomputing = _agreed("recompute", [_recompute(each) for each in strategies])
    zero = _agreed("ZeRO", [f"ZeRO-{each.zero}" for each in stored])
    mesh = _agreed("mesh", _meshes(strategies), _pipeline(decisions))
    return _in_order(decisions, zero, mesh, recomputing)


def describe_usual(decisions: Decisions) -> str:
    """As `describe_parallelism`, of the way in which most layers run."""
    strategies = decisions.layer_strategies
    words = Counter(zip((f"ZeRO-{each.zero}" for each in strategies), _meshes(strategies), map(_recompute, strategies),
                        strict=True))  # fmt: skip
    zero, mesh, recompute = words.most_common(1)[0][0]
    return _in_order(decisions, zero, _join(mesh, _pipeline(decisions)), recompute)


def _in_order(decisions: Decisions, zero: str, mesh: str, recompute: str) -> str:
    """The parts of the line that say how a plan runs, with what holds for all of it."""
    passes = "" if decisions.stages else _passes(decisions.num_microbatches)
    again = "" if recompute == "no recompute" else recompute
    return " · ".join(filter(None, (zero, mesh, passes, again, *_extras(decisions))))


def _agreed(what: str, words: Iterable[str], pipeline: str = "") -> str:
    """The one word of all layers with what goes on behind it; else that they differ, and what most of them have."""
    counted = Counter(words)
    if not counted:
        return pipeline
    word, most = counted.most_common(1)[0]
    if len(counted) == 1:
        return _join(word, pipeline)
    mixed = f"{what} mixed (see table; {most} of {counted.total()} layers: {word})"
    return f"{mixed} · {pipeline}" if pipeline else mixed


def _join(mesh: str, pipeline: str) -> str:
    return " x ".join(filter(None, (mesh, pipeline))) or "1 device"


def _meshes(strategies: Iterable[LayerStrategy]) -> list[str]:
    """What the mesh axes of each layer do."""
    each = [_degrees(strategy) for strategy in strategies]
    # A layer without attention can't tell which of the two splits the sequence, one without experts not how many share.
    split = next((name for name in ("CP", "Ulysses") if any(name in degrees for degrees in each)), "SP")
    experts = Counter(degrees["EP"] for degrees in each if "EP" in degrees)
    is_cut = any("tensor+sequence" in strategy.labels for strategy in strategies)
    words: list[str] = []
    for degrees in each:
        degrees[split] = degrees.pop("SP", 1) * degrees.pop(split, 1)
        if len(experts) == 1 and "EP" not in degrees and degrees.get("DP", 1) > 1:
            degrees["EP"] = next(iter(experts))
        names = [name for name in _ORDER if degrees.get(name, 1) > 1]
        words.append(" x ".join(f"{n} {degrees[n]}{'+SP' if is_cut and n == 'TP' else ''}" for n in names))
    return words


def _degrees(strategy: LayerStrategy) -> dict[str, int]:
    """Short name -> the product of the mesh axes that do that."""
    found: dict[str, int] = {}
    for label, size in zip(strategy.labels or ("",) * len(strategy.mesh), strategy.mesh, strict=True):
        name = _DEGREES.get(label, "other")
        found[name] = found.get(name, 1) * size
    if "EP" in found:
        found["DP"] = found.get("DP", 1) * found["EP"]
    return found


def _pipeline(decisions: Decisions) -> str:
    if not decisions.stages:
        return ""
    groups, stages = decisions.num_groups, len(decisions.stages)
    schedule = _SCHEDULES.get(decisions.schedule, decisions.schedule)
    several = f"{stages} stages, " if stages > groups else ""
    return f"PP {groups} ({schedule}, {several}{_passes(decisions.num_microbatches) or '1 microbatch'})"


def _passes(num_microbatches: int) -> str:
    return f"{num_microbatches} microbatches" if num_microbatches > 1 else ""


def _recompute(strategy: LayerStrategy) -> str:
    word = strategy.recompute.partition("+")[0].partition(":")[0]
    names = {"none": "no recompute", "offload": "no recompute", "rerun": "recompute of some ops"}
    return names.get(word, f"{word} recompute")


def _extras(decisions: Decisions) -> Iterable[str]:
    if any("offload" in strategy.recompute for strategy in decisions.strategies):
        yield "offload of activations"
    if decisions.host_storage:
        yield "offload of optimizer"
    if decisions.compiled:
        yield "compiled"
