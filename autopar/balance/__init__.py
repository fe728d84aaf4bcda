"""Sequences of many lengths shared out among devices: pure arithmetic over lengths, the same on every rank.

`lengths` says how long sequences are, `costs` what one costs on a group of devices, `packing` fills rows of tokens,
`groups` chooses groups of devices of several degrees; `planner` puts them together.
"""

from autopar.balance.assignment import Assignment
from autopar.balance.lengths import Clip, Lengths
from autopar.balance.planner import BatchPlanner

__all__ = ["Assignment", "BatchPlanner", "Clip", "Lengths"]
