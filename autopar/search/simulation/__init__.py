"""A training step by a plan, simulated: what every stream of every device group does when."""

from autopar.search.simulation.simulate import MAX_EVENTS, simulate_step

__all__ = ["MAX_EVENTS", "simulate_step"]
