"""Which tensors are alive on a GPU where a step needs the most memory, and where they were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

_MIB = 2**20
_ROWS = 30
_FRAMES = 3  # of a stack, the innermost ones that are not torch's own


def live_at_peak(step: Callable[[], object]) -> str:
    """A table of the allocations of a step that are alive at its peak, largest first.

    Allocations of one size that were made in one place are a row.  It reads the history of torch's caching allocator
    (https://pytorch.org/docs/stable/torch_cuda_memory.html).
    """
    memory: Any = torch.cuda.memory
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    memory._record_memory_history(stacks="python", max_entries=500_000)
    step()
    torch.cuda.synchronize()
    (events, *_) = memory._snapshot()["device_traces"]
    memory._record_memory_history(enabled=None)
    live: dict[int, Any] = {}
    now = most = before
    at_peak: list[Any] = []
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
            now -= event["size"]
        if now > most:
            most, at_peak = now, list(live.values())
    rows = Counter((event["size"], _place(event["frames"])) for event in at_peak)
    lines = [f"{most / _MIB:.0f} MiB at the peak, {before / _MIB:.0f} MiB of them since before the step"]
    ordered = sorted(rows.items(), key=lambda row: -row[0][0] * row[1])
    lines += [f"{count:>4} x {size / _MIB:9.1f} MiB  {place}" for (size, place), count in ordered[:_ROWS]]
    return "\n".join(lines)


def _place(frames: Iterable[Any]) -> str:
    own = [frame for frame in frames if "/torch/" not in frame["filename"]]
    return " < ".join(f"{each['filename'].split('/')[-1]}:{each['line']} {each['name']}" for each in own[:_FRAMES])
