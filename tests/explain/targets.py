"""Factories that the tests name on the command line."""

from __future__ import annotations

import torch
from torch import nn

from tests.models import Model, PlainGPT, make_plain_gpt


def make(batch: int = 8) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small model on the meta device."""
    with torch.device("meta"):
        model = PlainGPT(layers=2)
        ids = torch.empty(batch, 16, dtype=torch.int64)
    return model, {"ids": ids, "targets": ids}


def make_real() -> Model:
    """The same with values, equal on every rank."""
    torch.manual_seed(0)
    return make_plain_gpt()


def make_nothing() -> int:
    """No model."""
    return 3
