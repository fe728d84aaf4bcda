"""What an optimizer's step takes for each parameter, however small: on a CPU it goes through Python for every one.

``optimizer`` (in `ops`) is over bytes, of plain tensors.  The parameters of a parallel model are DTensors, each of
whose ops costs more before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.cost.measure.collectives import Collectives
from autopar.cost.measure.probe import Measurement, Probe
from autopar.cost.measure.timing import sample

__all__ = ["optimizer_probes"]

_NUM_TENSORS = 32


def optimizer_probes(communicator: Collectives) -> tuple[Probe, ...]:
    """The probe of ``optimizer/tensor``; none where the ranks are not all processes of the default group."""
    if not dist.is_initialized() or dist.get_world_size() != communicator.world_size:
        return ()
    return (Probe(("optimizer/tensor",), 1, partial(_measure, communicator.device), 1.0, is_own_time=True),)


def _measure(device: torch.device, budget_s: float) -> Iterator[Measurement]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parameters: list[nn.Parameter] = []
    for _ in range(_NUM_TENSORS):
        whole = torch.ones(8, device=device)
        parameters.append(nn.Parameter(DTensor.from_local(whole, mesh, [Replicate()], run_check=False)))
        parameters[-1].grad = DTensor.from_local(torch.ones_like(whole), mesh, [Replicate()], run_check=False)
    step = cast(Callable[[], object], torch.optim.AdamW(parameters, lr=1e-9).step)  # pyright: ignore[reportUnknownMemberType]
    taken = sample(step, device, budget_s)
    yield Measurement("optimizer/tensor", 1.0, type(taken)(taken.seconds / _NUM_TENSORS, taken.spread))
