"""Measures an optimizer's step.

``optimizer`` is a curve over the bytes that AdamW moves, for plain tensors.  ``optimizer/tensor`` is the overhead of
each parameter: parameters of a parallel model are DTensors, which run Python code before anything is computed.
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

from autopar.cost.measure.probe import Measurement, Probe, Sample
from autopar.cost.measure.ranks import Ranks
from autopar.cost.measure.timing import sample

__all__ = ["optimizer_probes"]

_ADAM_BYTES = 28
"""Per element: AdamW in float32 reads parameter, gradient and two moments, and writes all but the gradient."""
# Launching kernels dominates the first, memory the last; a curve joins them.  On an H200 2^20 elements took no longer
# than 2^14, so that the step of an optimizer was priced at 40 times its seconds.
_NUM_ELEMENTS = {"cpu": (2**14, 2**20), "accelerator": (2**14, 2**22, 2**27)}
_NUM_TENSORS = 32  # enough to make the constant overhead of a step small relative to that of the tensors


def optimizer_probes(ranks: Ranks) -> tuple[Probe, ...]:
    """Both probes, or only the first if the ranks aren't all processes of the default group."""
    by_bytes = Probe(("optimizer",), len(_sizes(ranks.device)), partial(_measure_bytes, ranks.device), 2.0)
    if not dist.is_initialized() or dist.get_world_size() != ranks.world_size:
        return (by_bytes,)
    return by_bytes, Probe(("optimizer/tensor",), 1, partial(_measure_tensors, ranks.device))


def _sizes(device: torch.device) -> tuple[int, ...]:
    return _NUM_ELEMENTS["cpu" if device.type == "cpu" else "accelerator"]


def _measure_bytes(device: torch.device, budget_s: float) -> Iterator[Measurement]:
    for num_elements in _sizes(device):
        parameters = [nn.Parameter(torch.randn(num_elements // 8, device=device)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-9, foreach=True)
        step = _time_step(optimizer, device, budget_s / len(_sizes(device)))
        yield Measurement("optimizer", float(num_elements * _ADAM_BYTES), step)


def _measure_tensors(device: torch.device, budget_s: float) -> Iterator[Measurement]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parameters: list[nn.Parameter] = []
    for _ in range(_NUM_TENSORS):
        whole = torch.ones(8, device=device)
        parameters.append(nn.Parameter(DTensor.from_local(whole, mesh, [Replicate()], run_check=False)))
        parameters[-1].grad = DTensor.from_local(torch.ones_like(whole), mesh, [Replicate()], run_check=False)
    step = _time_step(torch.optim.AdamW(parameters, lr=1e-9), device, budget_s)
    yield Measurement("optimizer/tensor", 1.0, Sample(step.seconds / _NUM_TENSORS, step.spread))


def _time_step(optimizer: torch.optim.Optimizer, device: torch.device, budget_s: float) -> Sample:
    return sample(cast(Callable[[], object], optimizer.step), device, budget_s)  # pyright: ignore[reportUnknownMemberType]
