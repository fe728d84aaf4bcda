"""Loaders of data for parallel models: each rank loads its own rows of the batches that one device would load."""

from autopar.data.balanced import balanced
from autopar.data.loaders import shard_dataloader

__all__ = ["balanced", "shard_dataloader"]
