"""Version-dependent API of torch.distributed that `lower` needs, each behind a small function."""

from __future__ import annotations

import hashlib
import inspect
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import MeshError

__all__ = [
    "close_group",
    "group_name",
    "on_completion",
    "open_group",
    "open_host_store",
    "open_store",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_broadcast",
    "start_permute",
    "start_receive",
    "start_reduce_scatter",
    "start_send",
    "store_answers",
    "wait_for",
    "world_timeout",
]

_UNUSED_TAG = 1 << 20  # of messages; nobody sends with it
_REACHED_S = timedelta(seconds=10)  # a store on this host answers at once or never
_dist: Any = dist  # the annotations of its collectives are incomplete


def start_all_gather(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gather the members' `x` into `result` (``[size, *x.shape]``), both contiguous."""
    gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
    return gather(result.view(-1), x.view(-1), group=group, async_op=True)


def start_reduce_scatter(result: Tensor, stack: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Leave the own entry of the members' summed `stack` in `result`, both contiguous."""
    scatter = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor
    return scatter(result.view(-1), stack.view(-1), group=group, async_op=True)


def start_all_to_all(
    result: Tensor,
    stack: Tensor,
    group: dist.ProcessGroup,
    received: list[int] | None = None,
    sent: list[int] | None = None,
) -> dist.Work:
    """Send entry c of `stack` to coordinate c, and put what comes from c into entry c of `result`.

    With `sent` and `received`, coordinate c gets ``sent[c]`` entries, and ``received[c]`` entries come from it.
    """
    return _dist.all_to_all_single(result, stack, received, sent, group=group, async_op=True)


def start_all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> dist.Work:
    """Reduce `x` in place over the members; `op` is ``"sum"`` or ``"max"``."""
    operation = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
    return _dist.all_reduce(x, operation, group=group, async_op=True)


def start_broadcast(x: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    """Overwrite `x` by that of process `source`."""
    return _dist.broadcast(x, source, group=group, async_op=True)


def on_completion(work: dist.Work, action: Callable[[], None]) -> None:
    """Call `action`, in any thread, when `work` on CPU tensors is done."""
    untyped: Any = work

    def done(future: Any) -> None:
        action()

    untyped.get_future().add_done_callback(done)


def start_send(x: Tensor, to: int, group: dist.ProcessGroup) -> dist.Work:
    """Send `x`, contiguous, to process `to`."""
    return _dist.isend(x, to, group=group)


def start_receive(x: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    """Overwrite `x`, contiguous, by what process `source` sends next."""
    return _dist.irecv(x, source, group=group)


def start_permute(result: Tensor, x: Tensor, to: int, source: int, group: dist.ProcessGroup) -> Sequence[dist.Work]:
    """Send `x` to process `to` and fill `result` with what process `source` sends, both contiguous, as one call."""
    return _dist.batch_isend_irecv(
        [_dist.P2POp(dist.isend, x, to, group), _dist.P2POp(dist.irecv, result, source, group)]
    )


def open_group(ranks: Sequence[int], *, keeps_order: bool = False, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of `ranks`, which alone take part; ascending, unless it `keeps_order`.  Its `backend` is that of
    the default group, unless given.

    Raises:
        MeshError: it should keep an order that does not ascend, but this torch (before 2.13) sorts.
    """
    ranks = list(ranks)
    if not keeps_order or ranks == sorted(ranks):
        return _open_named(sorted(ranks), backend)
    if "sort_ranks" not in inspect.signature(_dist.new_group).parameters:
        raise MeshError(
            f"the ranks {ranks} along an axis of the mesh descend, which needs torch 2.13: "
            "order the devices of the mesh so that ranks ascend along every axis"
        )
    return _open_named(ranks, backend, sort_ranks=False)


def _open_named(ranks: list[int], backend: str | None, **options: bool) -> dist.ProcessGroup:
    """A group whose name counts the groups of these ranks only.

    torch's own name counts all groups of a process (`_hash_ranks_to_str`): where one rank has a group more, of itself
    alone or of the script's, the others would wait for ever.
    """

    def give_name(*_: Any, **__: Any) -> str:
        return name

    key = "_".join(map(str, ranks))
    count = _dist.distributed_c10d._get_default_store().add(f"autopar/group/{key}/{dist.get_rank()}", 1)
    name = hashlib.sha1(f"autopar {key} {count}".encode(), usedforsecurity=False).hexdigest()
    with patch.object(_dist.distributed_c10d, "_process_group_name", give_name):
        return _dist.new_group(ranks, world_timeout(), backend, use_local_synchronization=True, **options)


def open_store(ranks: tuple[int, ...]) -> Any:
    """The default process group's store, for these ranks alone and for nothing else; all of them call it.

    It does not keep the process group's own server running.
    """
    store = _dist.distributed_c10d._get_default_store().clone()
    name = f"autopar/{hash(ranks)}"
    return _dist.PrefixStore(f"{name}/{store.add(f'{name}/{dist.get_rank()}', 1)}", store)


def open_host_store(store: Any) -> Any:
    """A store that the processes on this host share, kept by the first of them; None if it can't be reached.

    All processes that have `store` call it.
    """
    host = f"host/{socket.gethostname()}/{uuid.getnode()}"
    keeps = store.add(host, 1) == 1
    with suppress(OSError, RuntimeError, ValueError):
        if keeps:
            kept = _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set(f"{host}/port", str(kept.port))
            return kept
        port = int(store.get(f"{host}/port"))
        return _dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=_REACHED_S)
    if keeps:
        store.set(f"{host}/port", "none")
    return None


def close_group(group: dist.ProcessGroup) -> None:
    """End what anybody waits for in this group of gloo, here and on other ranks, with an error; it is of no use then.

    Gloo closes all connections of a group where a wait for a message passes its limit ("Application timeout caused pair
    closure", ``tcp/unbound_buffer.cc``).
    """
    untyped: Any = group
    with suppress(RuntimeError):  # that of the limit, or it is closed already
        untyped.recv([torch.empty(1, device="cpu")], int(group.rank() == 0), _UNUSED_TAG).wait(
            timedelta(milliseconds=1)
        )


def store_answers(store: Any) -> bool:
    """Whether the server of `store` still runs; if not, a request would fill the log."""
    while isinstance(store, _dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, _dist.TCPStore):
        return True
    with suppress(OSError), socket.create_connection((store.host, store.port), timeout=1):
        return True
    return False


def wait_for(work: dist.Work, every_s: float, meanwhile: Callable[[], None]) -> None:
    """Wait for a collective of gloo, and call `meanwhile`, which may raise, as often as it takes `every_s` more."""
    every = timedelta(seconds=every_s)
    while True:
        try:
            work.wait(every)
        except RuntimeError:
            if work.is_completed():  # it failed, or was done just after the wait gave up, which a second wait tells
                work.wait(every)
                return
            meanwhile()
        else:
            return


def world_timeout() -> timedelta | None:
    """How long the default group waits, as the user set it; torch gives further groups its own default."""
    world: Any = dist.group.WORLD
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def group_name(group: dist.ProcessGroup) -> str:
    """What functional collectives call it."""
    return group.group_name
