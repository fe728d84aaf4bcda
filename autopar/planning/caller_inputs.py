"""How a parallel module reads the inputs of its calls: whole tensors, DTensors, or each rank's own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autopar.lower.communication.communicator import Communicator
from autopar.lower.run.call_inputs import CallInputs
from autopar.planning.call_plans import example_call
from autopar.program import Program
from autopar.step.data_split import DataSplit
from autopar.trace import call_opener

__all__ = ["call_inputs"]


def call_inputs(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None,
    program: Program,
    split: DataSplit,
    communicator: Communicator,
    *,
    is_local: bool,
) -> CallInputs:
    """What makes the inputs of calls of `model`, whose `program` was traced with `example_inputs`, whole."""
    example = example_call(model, example_inputs) if is_local else None
    return CallInputs(call_opener(model), communicator, split, example, program.batch_size)
