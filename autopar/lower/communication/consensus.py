"""Errors that are raised on every rank, before any rank waits for another.

A rank that raised must not leave the others hanging in their next collective.  So whatever can fail on bad input runs
inside `agree` or `share`: its outcome is exchanged first, and if it failed anywhere it fails everywhere.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, MeshError, RankError
from autopar.lower.communication.digests import digest_each, digest_texts
from autopar.lower.communication.failures import StepMemoryError, is_out_of_memory
from autopar.objects.caught_errors import also_caught_as

__all__ = [
    "SAME_VALUES",
    "agree",
    "agree_equal",
    "agree_tensors",
    "attempt",
    "is_own_error",
    "naming_lost_ranks",
    "portable",
    "share",
]

SAME_VALUES = (
    "Call torch.manual_seed with the same seed on every rank before the model is made, or load the same checkpoint "
    "everywhere, or send the first rank's values before: for x in model.state_dict().values(): dist.broadcast(x, 0). "
    "What is made by torch.empty and never filled differs with any seed"
)
"""What to do where ranks have unlike initial values of a model."""

_SHOWN = 3  # names of tensors that a message has

T = TypeVar("T")

_dist: Any = dist  # the annotations of its object collectives are incomplete


def agree(group: dist.ProcessGroup | None, action: Callable[[], T]) -> T:
    """Run `action` on every rank of `group`; return its result, or raise on every rank if it raised on any.

    Raises:
        Exception: this rank's own error, or else the lowest failing rank's, with that rank named.
    """
    result, error = attempt(action)
    errors = _all_gather(group, portable(error))
    if error is not None:
        raise error
    _raise_foreign(errors)
    return result  # pyright: ignore[reportReturnType]  (no error: there is a result)


def share(group: dist.ProcessGroup | None, action: Callable[[], T]) -> T:
    """Run `action` on the first rank of `group` only; return its result on every rank, or raise its error there."""
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        result, error = attempt(action)
        outcome = [result, portable(error)]
    with naming_lost_ranks():
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def agree_equal(group: dist.ProcessGroup | None, value: str | tuple[str, ...], what: str, remedy: str) -> None:
    """Raise on every rank unless `value`, or each of as many of them, is the same on all of `group`.

    Raises:
        MeshError: naming `what`, the first rank that differs from the first, those that differ, and the `remedy`.
    """
    by_rank = _all_gather(group, (value,) if isinstance(value, str) else value)
    for rank, others in enumerate(by_rank):
        unlike = [pair for pair in zip(others, by_rank[0], strict=True) if pair[0] != pair[1]]
        if unlike:
            here, first = (", ".join(texts) for texts in zip(*unlike, strict=True))
            raise MeshError(f"ranks were given different {what}: rank {rank} has {here}, rank 0 has {first}. {remedy}")


def agree_tensors(
    group: dist.ProcessGroup | None, named: Callable[[], Iterable[tuple[str, Tensor]]], what: str, remedy: str
) -> None:
    """Raise on every rank unless the tensors, with their names, are the same on all of `group`.

    Raises:
        MeshError: naming `what`, the first rank that differs from the first, the tensors that differ, and the `remedy`.
    """
    own = agree(group, lambda: digest_each(named()))
    if len({*_all_gather(group, digest_texts(own))}) == 1:
        return
    by_rank = _all_gather(group, own)  # long texts, so ranks exchange them only here
    rank, others = next((rank, others) for rank, others in enumerate(by_rank) if others != by_rank[0])
    unlike = sorted({name for name, _ in {*others} ^ {*by_rank[0]}})
    differ = "differ from" if unlike else "stand in another order than"
    unlike = unlike or [name for (name, _), (first, _) in zip(others, by_rank[0], strict=True) if name != first]
    shown = ", ".join(unlike[:_SHOWN]) + (f" and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else "")
    raise MeshError(f"ranks were given different {what}: {shown} of rank {rank} {differ} rank 0's. {remedy}")


def _all_gather(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    with naming_lost_ranks():
        _dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def naming_lost_ranks() -> Generator[None]:
    """Inside ranks meet while they plan.

    Raises:
        RankError: some other rank does not come.
    """
    try:
        yield
    except RuntimeError as error:  # of the backend
        raise RankError(
            f"rank {dist.get_rank()} heard nothing from another rank while both planned: it ended, as its own output "
            "says, or did not come here within the process group's timeout (timeout= of init_process_group). "
            f"{type(error).__name__}: {error}"
        ) from error


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Its result and None, or None and the error that it raised."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must hear of it)
        return None, error


def is_own_error(error: Exception) -> bool:
    """Whether an action of `agree` or `share` raised it on this rank, and not a collective in which ranks meet."""
    return any(frame.f_code is attempt.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def portable(error: BaseException | None) -> Exception | None:
    """`error` as something that pickles: its own kind if it is ours, else an AutoparError with its text that is caught
    as it would be.
    """
    if error is None or isinstance(error, AutoparError):
        return error
    if is_out_of_memory(error):
        return StepMemoryError(f"{error}")
    return also_caught_as(AutoparError, error)(f"{type(error).__name__}: {error}")


def _raise_foreign(errors: list[Exception | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise type(error)(f"rank {rank} failed: {error}")
