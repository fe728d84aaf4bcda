"""Where the examples run: an accelerator for each process, where the machine has so many, else its CPU cores."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def device_type() -> str:
    """What each process of this machine can have one of."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # noqa: TID251  (where torchrun says it)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or torch.accelerator.device_count() < processes else accelerator.type


def make_mesh() -> DeviceMesh:
    """All processes that torchrun started."""
    dist.init_process_group()  # a backend for each type of device, such as gloo and NCCL
    return init_device_mesh(device_type(), (dist.get_world_size(),))
