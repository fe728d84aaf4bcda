"""Batch samplers: batches in which all clips or images have one shape, and batches with balanced amounts of work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from autopar.balance import BatchPlanner, Clip
from autopar.errors import LoaderError

__all__ = ["BucketSampler", "EvenSteps", "nearest_bucket"]


def nearest_bucket(clip: Clip, buckets: Sequence[Clip]) -> Clip:
    """The bucket that a clip is to be cut and scaled to: of those with the most frames that it can fill, that with the
    nearest aspect ratio, and of these the one with the nearest number of pixels.

    Raises:
        LoaderError: each bucket has more frames.

    Example:
        >>> nearest_bucket(Clip(40, 720, 1280), [Clip(1, 512, 512), Clip(33, 384, 688), Clip(33, 512, 512)])
        Clip(frames=33, height=384, width=688, patch=(1, 16, 16), text=0)
    """
    frames = max((bucket.frames for bucket in buckets if bucket.frames <= clip.frames), default=0)
    if not frames:
        raise LoaderError(
            f"no bucket has {clip.frames} frames or fewer: leave such a clip out, or add a bucket of fewer"
        )

    def distance(bucket: Clip) -> tuple[float, float]:
        ratio, own = bucket.height / bucket.width, clip.height / clip.width
        pixels = bucket.height * bucket.width / (clip.height * clip.width)
        return round(abs(math.log(ratio / own)), 6), abs(math.log(pixels))

    return min((bucket for bucket in buckets if bucket.frames == frames), key=distance)


class BucketSampler(Sampler[list[int]]):
    """A batch sampler whose batches have samples of one bucket, in a random order; each sample comes once an epoch.

    Small clips come in larger batches, so that steps take as long as each other.  With `autopar.shard_dataloader` each
    rank gets its rows of each batch, which are all of one shape, so ranks have equally much to compute.

    Args:
        buckets: of each sample of the dataset: what a batch has only one of (such as `Clip`).
        batch_size: bucket -> samples of a batch, as a mapping or a function.
        seed: of the order, together with the epoch; None: in the order of the data.
        drop_last: whether samples that are too few for a batch are left out, else they are a smaller batch.

    Raises:
        LoaderError: a bucket has no batch size, or one below 1.

    Example:
        >>> sampler = BucketSampler([Clip(1, 256, 256), Clip(17, 256, 256)] * 8, lambda clip: 4096 // clip.tokens or 1)
        >>> loader = DataLoader(clips, batch_sampler=sampler)
        >>> loader = autopar.shard_dataloader(loader, model)
    """

    def __init__(
        self,
        buckets: Sequence[Any],
        batch_size: Mapping[Any, int] | Callable[[Any], int],
        *,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        """Find which samples each bucket has."""
        self.members: dict[Any, list[int]] = {}
        for index, bucket in enumerate(buckets):
            self.members.setdefault(bucket, []).append(index)
        self.sizes: dict[Any, int] = {}
        for bucket in self.members:
            size = batch_size(bucket) if callable(batch_size) else batch_size.get(bucket, 0)
            self.sizes[bucket] = size
            if size < 1:
                raise LoaderError(
                    f"batch_size says {size!r} for {bucket}: a batch has at least one sample, so let it say 1 or more"
                )
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw another order: call it before each epoch, with the same number on every rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many batches an epoch has."""
        counts = ((len(members), self.sizes[bucket]) for bucket, members in self.members.items())
        return sum(count // size if self.drop_last else -(-count // size) for count, size in counts)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of an epoch, each the indices of its samples."""
        generator = torch.Generator().manual_seed((((self.seed or 0) << 32) + self.epoch) % (1 << 63))
        batches: list[list[int]] = []
        for bucket, members in self.members.items():
            size = self.sizes[bucket]
            order = range(len(members)) if self.seed is None else _shuffled(len(members), generator)
            ordered = [members[place] for place in order]
            end = len(ordered) // size * size if self.drop_last else len(ordered)
            batches += [ordered[start : start + size] for start in range(0, end, size)]
        order = range(len(batches)) if self.seed is None else _shuffled(len(batches), generator)
        return iter([batches[place] for place in order])


def _shuffled(count: int, generator: torch.Generator) -> list[int]:
    return [int(place) for place in torch.randperm(count, generator=generator, device="cpu")]


class EvenSteps:
    """A batch sampler that gives the samples of several batches of another one as equally many batches of like work.

    Args:
        base: gives batches of indices.
        lengths: ``[samples]`` tokens of each.
        planner: says what is like work.
        steps: how many batches are taken together; at the end of an epoch fewer.
    """

    def __init__(self, base: Any, lengths: np.ndarray, planner: BatchPlanner, steps: int) -> None:
        self.base, self.lengths, self.planner, self.steps = base, lengths, planner, steps

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> _EvenStepsIterator:
        return _EvenStepsIterator(self)

    def spread(self, drawn: Sequence[Sequence[int]]) -> list[list[int]]:
        """The samples of these batches, dealt out anew to as many."""
        if not drawn:
            return []
        indices = np.concatenate([np.asarray(batch, dtype=np.int64) for batch in drawn])
        assignment = self.planner.assign(self.lengths[indices], batches=len(drawn))
        step: np.ndarray = assignment.group // (len(assignment.degrees) // len(drawn))
        parts: list[list[int]] = [indices[step == number].tolist() for number in range(len(drawn))]
        return parts if all(parts) else list(map(list, drawn))  # a step without a sample has no loss


class _EvenStepsIterator:
    """The batches of `EvenSteps`, with a state that holds those that are dealt out and not yet given: another number of
    ranks would deal them out in another way.
    """

    def __init__(self, steps: EvenSteps) -> None:
        self._steps = steps
        self._base: Any = iter(steps.base)
        self._ready: list[list[int]] = []
        self._drawn = 0
        self._skipped = 0  # batches of a base without a state that another iterator drew

    def __iter__(self) -> _EvenStepsIterator:
        return self

    def __next__(self) -> list[int]:
        # Here, since samplers draw for a whole epoch with their first batch, and `AgreedDraws` waits for that.
        for _ in itertools.islice(self._base, self._skipped):
            pass
        self._skipped = 0
        if not self._ready:
            drawn: list[list[int]] = list(itertools.islice(self._base, self._steps.steps))
            self._drawn += len(drawn)
            self._ready = self._steps.spread(drawn)
        if not self._ready:
            raise StopIteration
        return self._ready.pop(0)

    def state_dict(self) -> dict[str, Any]:
        """Where the base is, and the batches that are left of those drawn."""
        base = self._base.state_dict() if hasattr(self._base, "state_dict") else None
        return {"base": base, "drawn": self._drawn, "ready": [list(batch) for batch in self._ready]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._drawn, self._ready = state_dict["drawn"], [list(batch) for batch in state_dict["ready"]]
        if state_dict["base"] is None:
            self._skipped = self._drawn
        else:
            self._base.load_state_dict(state_dict["base"])

    def update_state_dict(self) -> None:
        """Pass it on."""
        if hasattr(self._base, "update_state_dict"):
            self._base.update_state_dict()
