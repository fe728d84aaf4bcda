"""Cost: seconds of ops, collectives and optimizer steps on a cluster, and the source of each number.

A search gets its prices from `ClusterPrices`.  `autopar.cost.measure` (the only part that imports torch) makes a
`Profile`.
"""

from autopar.cost.cluster_prices import ClusterPrices
from autopar.cost.profile import Curve, Point, Profile

__all__ = ["ClusterPrices", "Curve", "Point", "Profile"]
