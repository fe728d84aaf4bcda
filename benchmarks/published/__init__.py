"""What a step of a published training run should take, by autopar's own prices.

A row of the table says which transformer ran on what, with which parallelism (`runs`).  `layers` lists the ops of one
layer with their local shapes and prices each with `ClusterPrices`; `step` puts them on a timeline: data, tensor,
context and pipeline parallelism, sharded parameters, recomputation, the optimizer.  No row has a number of its own:
constants belong to devices and links (`autopar/cluster`), to kernels (`autopar/cost`), to a training stack
(`stacks`), or are among the few that are calibrated on such rows (`calibration`).
"""

from benchmarks.published.runs import Run, UnpricedRowError, read_runs
from benchmarks.published.step import predict_s

__all__ = ["Run", "UnpricedRowError", "predict_s", "read_runs"]
