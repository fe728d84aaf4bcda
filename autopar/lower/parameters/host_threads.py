"""How many threads update parameters in the host's memory.

Launchers give each process one thread (torchrun sets ``OMP_NUM_THREADS=1``), so that processes which only launch work
for their devices don't get in each other's way.  A step of an optimizer on the host is bound by how fast its cores read
and write memory: with one thread a step of 1.1e9 parameters took 7.3 s on an H100 machine (`benchmarks/measured`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.host.cores import usable_cores
from autopar.lower.compat import local_part_of
from autopar.lower.once import once

__all__ = ["host_threads", "widen_host_steps"]

_BEFORE: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # threads before a step that is under way


def host_threads() -> int:
    """This process's share of the cores that it may run on, if one process drives each accelerator of its host; never
    fewer threads than it has.
    """
    return max(torch.get_num_threads(), usable_cores() // max(1, torch.accelerator.device_count()))


@once
def widen_host_steps() -> None:
    """From now on optimizers update parallel parameters that are in the host's memory with `host_threads`."""
    register_optimizer_step_pre_hook(_widen)
    register_optimizer_step_post_hook(_narrow)


def _widen(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if any(isinstance(p, DTensor) and local_part_of(p).device.type == "cpu" for p in parameters):
        _BEFORE.setdefault(optimizer, torch.get_num_threads())
        torch.set_num_threads(host_threads())


def _narrow(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    before = _BEFORE.pop(optimizer, None)
    if before is not None:
        torch.set_num_threads(before)
