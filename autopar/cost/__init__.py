"""Cost: what ops, collectives and optimizer steps take on a cluster, in seconds, and where each number
comes from.

`ClusterPrices` is what a search asks.  `autopar.cost.measure` (the only part that loads torch) makes a
`Profile`.
"""

from autopar.cost.cluster_prices import ClusterPrices
from autopar.cost.profile import Curve, Point, Profile

__all__ = ["ClusterPrices", "Curve", "Point", "Profile"]
