"""Measures memory: how fast it moves, and on GPUs what is held beyond the tensors that a program asks for.

The readings, all in bytes:

=================================== ==========================================================================
``allocator/rounded``               what one tensor takes of the allocator, over its bytes
``allocator/segment``               what the allocator takes of the device for it, over its bytes
``allocator/kept``                  what is kept after tensors of such a size were freed, over the bytes of all
``allocator/fragmented``            peak taken of the device, over peak in tensors, for a mixed sequence
``allocator/context``               what the device holds besides tensors (context, libraries); amount 1
``allocator/communicator/<n>/<s>``  what a new process group on ``Axis(n, s)`` takes once it was used; amount 1
=================================== ==========================================================================
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.measure.collectives import Collectives
from autopar.cost.measure.probe import Measurement, Probe, Sample
from autopar.cost.measure.timing import sample, synchronize
from autopar.placement import Axis

__all__ = ["communicator_probes", "memory_probes"]

_BYTES = {"cpu": tuple(4**power for power in range(6, 15)), "cuda": tuple(4**power for power in range(8, 16))}
"""4 KiB to 256 MiB on a CPU, 64 KiB to 1 GiB on a GPU."""
_LAUNCHES = 200
_TENSOR_BYTES = (
    1,
    512,
    513,
    2**16,
    2**20,
    2**20 + 1,
    3 * 2**20,
    10 * 2**20,
    10 * 2**20 + 1,
    33 * 2**20,
    100 * 2**20 + 1,
)
"""Either side of where PyTorch's allocator changes its ways: 512 B, 1 MiB and 10 MiB (its documentation)."""
_KEPT_BYTES = (2**12, 2**16, 2**20, 2**24, 2**26)
_KEPT_TOTAL = 2**27
_MIXED_TENSORS = 400


def memory_probes(device: torch.device) -> tuple[Probe, ...]:
    """What to measure of one device's memory, and of its host's way to it."""
    sizes = _BYTES["cuda" if device.type == "cuda" else "cpu"]
    common = (
        *(Probe((f"memory/{how}",), len(sizes), partial(_measure_moving, how, sizes, device), float(len(sizes)))
          for how in _MOVES),
        Probe(("launch",), 1, partial(_measure_launch, device)),
    )  # fmt: skip
    if device.type != "cuda":
        return common
    return (
        *common,
        _reading(("allocator/context",), 1, partial(_measure_context, device)),
        _reading(("allocator/rounded", "allocator/segment"), len(_TENSOR_BYTES), partial(_measure_rounded, device)),
        _reading(("allocator/kept",), len(_KEPT_BYTES), partial(_measure_kept, device)),
        _reading(("allocator/fragmented",), 1, partial(_measure_fragmented, device)),
    )


def communicator_probes(communicator: Collectives, axes: Iterable[Axis]) -> tuple[Probe, ...]:
    """What process groups take of a GPU, one probe for each axis; logical ranks must be those of the default process
    group.
    """
    if communicator.device.type != "cuda":
        return ()
    return tuple(
        Probe((f"allocator/communicator/{axis.size}/{axis.stride}",), 1,
              partial(_measure_communicator, communicator, axis), is_local=False, is_reading=True)
        for axis in axes
    )  # fmt: skip


def _reading(keys: tuple[str, ...], num_points: int, measure: Callable[[float], Iterator[Measurement]]) -> Probe:
    return Probe(keys, num_points, measure, is_reading=True)


# Function of two equal tensors of float32, and how many bytes of both it moves for each byte of one.
_MOVES: dict[str, tuple[Callable[[Tensor, Tensor], object], float]] = {
    "read": (lambda x, _: x.sum(), 1.0),
    "write": (lambda x, _: x.fill_(1.0), 1.0),
    "copy": (lambda x, y: x.copy_(y), 2.0),
}


def _measure_moving(how: str, sizes: tuple[int, ...], device: torch.device, budget_s: float) -> Iterator[Measurement]:
    run, share = _MOVES[how]
    for num_bytes in sizes:
        x, y = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
        taken = sample(partial(run, x, y), device, budget_s / len(sizes))
        yield Measurement(f"memory/{how}", share * num_bytes, taken)


def _measure_launch(device: torch.device, budget_s: float) -> Iterator[Measurement]:
    """Host time of an op on one element: on a GPU, until the next one can be asked for."""
    x = torch.ones(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1.0)

    taken = sample(launch, torch.device("cpu"), budget_s)
    synchronize(device)
    yield Measurement("launch", 1.0, Sample(taken.seconds / _LAUNCHES, taken.spread))


def _measure_context(device: torch.device, _: float) -> Iterator[Measurement]:
    torch.mm(torch.ones((64, 64), device=device), torch.ones((64, 64), device=device))  # loads the library of products
    synchronize(device)
    yield _bytes("allocator/context", 1, _device_bytes(device) - torch.cuda.memory_reserved(device))


def _measure_rounded(device: torch.device, _: float) -> Iterator[Measurement]:
    for num_bytes in _TENSOR_BYTES:
        torch.cuda.empty_cache()
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        x = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        yield _bytes("allocator/rounded", num_bytes, torch.cuda.memory_allocated(device) - allocated)
        yield _bytes("allocator/segment", num_bytes, torch.cuda.memory_reserved(device) - reserved)
        del x


def _measure_kept(device: torch.device, _: float) -> Iterator[Measurement]:
    for num_bytes in _KEPT_BYTES:
        torch.cuda.empty_cache()
        before = _device_bytes(device)
        tensors = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(_KEPT_TOTAL // num_bytes)]
        del tensors
        yield _bytes("allocator/kept", num_bytes, _device_bytes(device) - before)


def _measure_fragmented(device: torch.device, _: float) -> Iterator[Measurement]:
    """Tensors of many sizes, of which half live on while the others come and go, as activations and gradients do."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    numbers = random.Random(0)
    alive: list[Tensor] = []
    for _index in range(_MIXED_TENSORS):
        alive.append(torch.empty(int(2 ** numbers.uniform(10, 26)), dtype=torch.uint8, device=device))
        if len(alive) > _MIXED_TENSORS // 4:
            alive.pop(numbers.randrange(len(alive)))
    peak = torch.cuda.max_memory_allocated(device) - allocated
    yield _bytes("allocator/fragmented", peak, torch.cuda.max_memory_reserved(device) - reserved)


def _measure_communicator(communicator: Collectives, axis: Axis, _: float) -> Iterator[Measurement]:
    """Every rank makes the groups of the axis, in one order, and uses its own."""
    torch_dist: Any = dist
    x = torch.ones(2**20, device=communicator.device)
    synchronize(communicator.device)
    before = _device_bytes(communicator.device)
    mine = None
    for members in sorted({axis.group(rank) for rank in range(communicator.world_size)}):
        group = torch_dist.new_group(list(members))
        mine = group if communicator.rank in members else mine
    torch_dist.all_reduce(x, group=mine)
    synchronize(communicator.device)
    taken = _device_bytes(communicator.device) - before
    torch_dist.destroy_process_group(mine)
    yield _bytes(f"allocator/communicator/{axis.size}/{axis.stride}", 1, taken)


def _device_bytes(device: torch.device) -> int:
    """What all processes hold of a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _bytes(key: str, amount: float, taken: int) -> Measurement:
    return Measurement(key, float(amount), Sample(float(max(0, taken)), 0.0))
