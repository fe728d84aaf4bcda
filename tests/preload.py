"""What ranks import, before there are any (`tests.ranks`).

Nothing here may start a thread: threads don't survive a fork.
"""

# ruff: noqa: F401
import gc
import threading

import torch
import torch._inductor.codecache
import torch.distributed.checkpoint
import torch.distributed.pipelining
import torch.export.pt2_archive
import tqdm
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama

import autopar.verify
import tests.end_to_end.harness
import tests.models
import tests.shared_traces
from autopar.planning.call_traces import trace_model

tqdm.tqdm.monitor_interval = 0  # torch.export's progress bar would start a thread

# What a first trace loads and sets up is most of what it takes.
trace_model(*tests.models.make("flat"))
assert threading.active_count() == 1

gc.freeze()  # what is here is looked through for garbage by no rank
gc.set_threshold(50_000, 20, 10)
