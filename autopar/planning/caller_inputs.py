"""How a parallel module reads the inputs of its calls: whole tensors, DTensors, or each rank's own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from autopar.errors import TraceError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.run.call_inputs import CallInputs
from autopar.planning.arguments import are_inputs_local
from autopar.planning.call_traces import example_call
from autopar.program import Program
from autopar.step.layer.data_split import DataSplit
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
    """`traced`, unless ranks pass their own rows and it is for certain values of inputs that have rows.

    Raises:
        TraceError: it is.
    """
    program = traced.program
    shapes = {name: program.values[name].type.shape for name in traced.read_values}
    own = [name for name, shape in shapes.items() if shape[:1] == (program.batch_size,)]
    if is_local and own:
        raise TraceError(
            f"forward reads the values of {own} in Python, which have as many entries as the example has rows. With "
            "inputs='local' a rank passes those of its own rows only, but needs the values of the whole batch. If they "
            "are not of rows, but of images, make the example with another number of images: every rank then passes "
            "the values of all images of the batch, as autopar.balanced(..., encoder=EncoderRows(..., grids=)) gives "
            "them. Otherwise leave inputs='local' out, and pass the whole batch on every rank. Each set of values is "
            "planned when it first comes; autopar.data.BucketSampler gives batches whose samples have one size"
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
    read_values: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> CallInputs:
    """What makes the inputs of calls of `model`, whose `program` was traced with `example_inputs`, whole.

    `read_values`: those that forward reads in Python.
    """
    example = example_call(model, example_inputs) if is_local else None
    return CallInputs(call_opener(model), communicator, split, example, program.batch_size, read_values)
