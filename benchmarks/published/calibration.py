"""The constants that are fitted to published training runs, each with one value for all rows.

`Device.sustained_fraction` of the presets (`autopar/cluster`) is the other kind; `sustained` overrides it here when
a source is held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost.cluster_prices import DEFAULT_INTERFERENCE

__all__ = ["BETWEEN_STEPS_S", "CALIBRATED", "OF_INFINIBAND", "PRIORS", "QUANTISING_S", "Calibration"]


@dataclass(frozen=True)
class Calibration:
    """Calibrated constants.

    Args:
        taken: part of a device's speed that a collective takes from compute beside it.
        hidden_tensor: part of tensor-parallel communication that runs beside the products it belongs to, in stacks
            that cut both into pieces.
        omni_path: what many rings at once get of Omni-Path, relative to InfiniBand of the same rate.
        row_scaled: rate of 8-bit products with a scale for each row, relative to one scale for all.
        power_limited: what a device whose source calls it power limited, and no more, keeps of its rates.
        sustained: per preset, instead of its own `Device.sustained_fraction`.
    """

    taken: float = DEFAULT_INTERFERENCE
    hidden_tensor: float = 0.5
    omni_path: float = 0.25
    row_scaled: float = 0.75
    power_limited: float = 0.65
    sustained: Mapping[str, float] = field(default_factory=dict[str, float])


CALIBRATED = Calibration()

PRIORS = {"taken": 0.15, "hidden_tensor": 0.0, "omni_path": 1.0, "row_scaled": 1.0, "power_limited": 1.0}
"""What one would take without any such row: a collective runs on some 20 of 132 cores; no more is lost or hidden."""

# Chosen on all 916 rows of the three tables that there were, together; no source is held out for them.
BETWEEN_STEPS_S = 0.02
"""What ranks of several nodes lose between two steps: the slowest, the reduction of norm and loss, the next batch."""
QUANTISING_S = 40e-6
"""Of quantizing a matrix, beside its bytes: kernels for maxima, scales and transposes."""
OF_INFINIBAND = 0.8
"""What Ethernet with remote memory access (RoCE, EFA, Slingshot) gets of InfiniBand's rate; EFA published: 0.75."""
