"""Data loaders for parallel models: each rank loads its own rows of the batches that a single device would load."""

from autopar.data.balanced import balanced
from autopar.data.buckets import BucketSampler, nearest_bucket
from autopar.data.encoder_rows import EncoderRows
from autopar.data.loaders import shard_dataloader

__all__ = ["BucketSampler", "EncoderRows", "balanced", "nearest_bucket", "shard_dataloader"]
