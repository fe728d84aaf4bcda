"""How a parallel module reads the inputs of its calls: whole tensors, DTensors, or each rank's own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autopar.errors import TraceError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.run.call_inputs import CallInputs
from autopar.planning.arguments import are_inputs_local
from autopar.planning.call_plans import example_call
from autopar.program import Program
from autopar.step.data_split import DataSplit
from autopar.trace import Traced, call_opener

__all__ = ["call_inputs", "check_read_values", "read_inputs"]


def read_inputs(inputs: str, traced: Traced) -> bool:
    """Whether ranks pass their own rows of the batch, by the argument `inputs`.

    Raises:
        ConstraintError: `inputs` is no word for either.
        TraceError: what was traced takes whole batches only.
    """
    is_local = are_inputs_local(inputs)
    check_read_values(traced, is_local=is_local)
    return is_local


def check_read_values(traced: Traced, *, is_local: bool) -> Traced:
    """`traced`, unless ranks pass their own rows and it is for certain values of inputs.

    Raises:
        TraceError: it is.
    """
    if is_local and traced.read_values:
        raise TraceError(
            f"forward reads the values of {list(traced.read_values)} in Python, which are those of the whole batch on "
            "one device. With inputs='local' a rank has those of its own rows only, so autopar.balanced can't be used: "
            "leave inputs='local' out, and pass the whole batch on every rank. Each set of values is planned when it "
            "first comes; autopar.data.BucketSampler gives batches whose samples have one size, of which there are few"
        )
    return traced


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
