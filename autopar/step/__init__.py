"""A training step as data: what a layer runs under a strategy, what a device group does when, what that costs.

`layer` derives what one device runs, `layer_tensors` what that keeps in memory, `costs` its prices; `simulation` times
a whole step and its memory; `pricing` predicts a plan, and `plan_check` says whether it is legal.
"""
