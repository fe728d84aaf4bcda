"""A training step as data: what a layer runs under a strategy, what a device group does when, what that costs."""
