"""Running single ops of a graph on tensors: for folding, and to learn types and what autograd keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from autopar.program import Arg, Op, Ref
from autopar.trace.compat.torch_internals import overload

__all__ = ["run_op"]


def run_op(op: Op, values: Mapping[str, Tensor]) -> Sequence[Any]:
    """The results of `op`, reading its operands from `values`.

    Raises:
        KeyError: no torch op has this name.
    """
    function = overload(op.target)
    if function is None:
        raise KeyError(op.target)
    args = [_value(arg, values) for arg in op.args]
    returned: Any = function(*args, **{key: _value(arg, values) for key, arg in op.kwargs})
    if isinstance(returned, list | tuple):
        return cast("Sequence[Any]", returned)
    return (returned,)


def _value(arg: Arg, values: Mapping[str, Tensor]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, tuple):
        return [_value(part, values) for part in arg]
    if isinstance(arg, str) and arg.startswith("torch."):
        return getattr(torch, arg.removeprefix("torch."))
    return arg
