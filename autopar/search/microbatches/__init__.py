"""Which programs may run in microbatches: the axis in time."""
