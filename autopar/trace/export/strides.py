"""Where a view by strides lies in its tensor, whatever the order of that tensor in memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["row_major_strides"]


@dataclass
class _JoinedDims:
    """Dims that follow each other in memory, taken as one; `last` is the place of the last entry that is read."""

    entries: int
    step: int
    row_major_step: int
    last: int = 0


def row_major_strides(x: Tensor, view: Tensor) -> tuple[tuple[int, ...], int] | None:
    """The strides and the offset by which ``as_strided`` would give `view` if `x` lay in row-major order in memory.

    On several devices a tensor lies otherwise in memory than on one.  A dim of `view` that goes along one dim of `x`
    (or several that follow each other in memory) does so in any order.

    None if it goes from one dim to another by their places in memory, or beyond `x`.
    """
    runs = sorted(_runs(x), key=lambda run: -run.step)
    strides: list[int] = []
    for size, step in zip(view.shape, view.stride(), strict=True):
        if size == 1 or step == 0:
            strides.append(0)
            continue
        run = next((run for run in runs if run.step and step % run.step == 0), None)
        if run is None:
            return None
        run.last += (size - 1) * (step // run.step)
        strides.append(step // run.step * run.row_major_step)
    offset, left = 0, int(view.storage_offset() - x.storage_offset())
    for run in runs:
        times, left = divmod(left, run.step) if run.step else (0, left)
        run.last += times
        offset += times * run.row_major_step
    is_within = not left and all(run.last < run.entries for run in runs)
    return (tuple(strides), offset) if is_within else None


def _runs(x: Tensor) -> list[_JoinedDims]:
    runs: list[_JoinedDims] = []
    row_major_step = x.numel()
    for size, step in zip(x.shape, x.stride(), strict=True):
        row_major_step //= max(1, size)
        entries = size
        if runs and runs[-1].step == step * size:
            entries *= runs.pop().entries
        if entries > 1:
            runs.append(_JoinedDims(entries, step, row_major_step))
    return runs
