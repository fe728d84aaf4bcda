"""``nn.SyncBatchNorm`` is a batch norm in a trace: its statistics are those of the whole batch in any case."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

from torch import nn

__all__ = ["unsynced_norms"]


@contextmanager
def unsynced_norms() -> Generator[None]:
    """Inside, synchronized batch norms don't communicate: their inputs are of the whole batch."""
    with patch.object(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward):
        yield
