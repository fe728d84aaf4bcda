"""Tools that watch torch don't see traces, and go on afterwards."""

import torch
from torch import nn
from torch.nn.modules import module
from torch.utils.flop_counter import FlopCounterMode

from autopar.trace import trace


def test_a_trace_counts_no_flops():
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(2, 8)
    seen = []
    handle = module.register_module_forward_hook(lambda own, given, result: seen.append(own))
    try:
        with FlopCounterMode(display=False) as counter:
            before = list(module._global_forward_hooks.items())
            trace(model, (x,), {})
            assert seen, "a hook of the script's own is part of the model"
            assert list(module._global_forward_hooks.items()) == before
            assert counter.get_total_flops() == 0
            model(x).sum().backward()
            assert counter.get_total_flops() > 0
    finally:
        handle.remove()
