"""Distributes sequences of different lengths over devices: pure arithmetic on lengths, with equal results on all ranks.

`lengths` describes how long sequences are, `costs` what one costs on a group of devices; `packing` packs sequences into
rows, `groups` chooses device groups of different degrees, and `planner` combines them.
"""

from autopar.balance.assignment import Assignment
from autopar.balance.lengths import Clip, Lengths
from autopar.balance.planner import BatchPlanner

__all__ = ["Assignment", "BatchPlanner", "Clip", "Lengths"]
