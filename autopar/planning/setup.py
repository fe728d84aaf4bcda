"""The arguments of `parallelize` and `plan`, read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from autopar.balance import Lengths
from autopar.lower.parameters.materialize import Draws
from autopar.plan import Plan
from autopar.planning.expectations import Expectations
from autopar.program import Program
from autopar.search import TrainingSpec
from autopar.step.prices import Prices
from autopar.trace import Traced

__all__ = ["Setup"]


@dataclass(frozen=True)
class Setup:
    """The user's keyword arguments, read once.

    Args:
        dtype: what the program computes in, where it differs from the parameters' own.
        memory_bytes: limit per device; None: what the device has.
        training: bytes of optimizer state and stored parameters.
        constraints: the user's texts.
        prices: of the devices at hand; None where nothing is searched for.
        trace_s: seconds that tracing took.
        draws: the values of what is on the meta device.
        compile: whether layers are compiled; None: as the search finds best.
        expected: what is expected of the data.
        lengths: of sequences, to make a family of plans for.
        trace_rows: what the model does with so many rows of so many tokens, for that family.
        time_layers: as in `FamilyPlanner`.
        num_layers: into at least how many layers programs are cut, for pipelines.
    """

    dtype: torch.dtype | None = None
    memory_bytes: float | None = None
    training: TrainingSpec = field(default_factory=TrainingSpec)
    constraints: tuple[str, ...] = ()
    prices: Prices | None = None
    trace_s: float = 0.0
    draws: Draws | None = None
    compile: bool | None = None
    device_type: str = "cpu"
    expected: Expectations = field(default_factory=Expectations)
    lengths: Lengths | None = None
    trace_rows: Callable[[int, int], Program] | None = None
    time_layers: Callable[[Program, Plan], Prices] | None = None
    num_layers: int = 1

    def priced(self, prices: Prices) -> Setup:
        """The same for the devices that have these prices."""
        return replace(self, prices=prices, training=self.training.on_device(prices.device))

    def expecting(self, traced: Traced) -> Traced:
        """What was traced, priced for the data expected."""
        return replace(traced, program=self.expected.priced(traced.program))
