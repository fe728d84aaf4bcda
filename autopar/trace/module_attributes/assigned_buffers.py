"""Buffers that forward replaces, ``self.average = 0.9 * self.average + 0.1 * x``: the values go to the buffers.

An export follows what is written to a buffer in place, and an assignment in the module that it exports, but not those
in modules inside of it, whose new tensors it forgets.  A buffer that forward makes when there is none,
``if self.mask is None: self.register_buffer("mask", ...)``, is made in each program instead, where it is the same in
all calls.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.objects.attribute_owners import joined
from autopar.objects.made_buffers import MadeBuffers
from autopar.trace.compat import torch_internals
from autopar.trace.python_values.recorded_computations import depend_on_calls

__all__ = ["written_assignments"]


@contextmanager
def written_assignments(module: nn.Module) -> Generator[None]:
    """When this context ends, buffers of `module` that were assigned in it are the tensors that they were before, with
    the new values written to them.

    Raises:
        TraceError: a buffer was given something else than a tensor of its shape and dtype, or there was none and it
            was given a tensor that depends on the call.
    """
    buffers = MadeBuffers(module)
    before = buffers.before
    yield
    _check_made(buffers)
    buffers.forget()
    assigned: list[tuple[Tensor, Tensor]] = []
    for (path, name), buffer in before.items():
        owner = module.get_submodule(path)
        value: Any = getattr(owner, name, None)
        if value is not buffer:
            if _is_of_its_form(joined(path, name), buffer, value, [*before.values()]):
                assigned.append((buffer, value))
            setattr(owner, name, buffer)
    _write(assigned, [*before.values()])


def _check_made(buffers: MadeBuffers) -> None:
    """Refuse buffers that follow from more than those that were there, as the next call would find this call's."""
    for (path, name), made in buffers.made().items():
        if depend_on_calls([made], other_than=[*buffers.before.values()]):
            raise TraceError(
                f"forward makes the buffer {joined(path, name)}, which does not exist before, of what depends on the "
                f"call, and the next call would find it: register a tensor of {made.dtype} {list(made.shape)} in "
                "__init__, and let forward write to it"
            )


def _write(assigned: Sequence[tuple[Tensor, Tensor]], buffers: Sequence[Tensor]) -> None:
    memories = {torch_internals.storage_key(x) for x in buffers if torch_internals.has_storage(x)}
    with torch.no_grad():
        # A value that lies in a buffer, as in self.last = self.current, may be overwritten before it is read.
        values = [
            value.clone()
            if torch_internals.has_storage(value) and torch_internals.storage_key(value) in memories
            else value
            for _, value in assigned
        ]
        for (buffer, _), value in zip(assigned, values, strict=True):
            buffer.copy_(value)


def _is_of_its_form(name: str, buffer: Tensor, value: Any, buffers: Sequence[Tensor]) -> bool:
    """Whether `value` has the shape and dtype of the buffer; a table that grows with the length may have others.

    Such a table follows from nothing but `buffers`, so that each program can make its own.

    Raises:
        TraceError: it is nothing of this.
    """
    if not isinstance(value, Tensor):
        given = f"{value!r:.80}"
    elif (value.shape, value.dtype) == (buffer.shape, buffer.dtype):
        return True
    elif depend_on_calls([value], other_than=buffers):
        given = f"a tensor of {value.dtype} {list(value.shape)}"
    else:
        return False
    raise TraceError(
        f"forward assigns {given} to the buffer {name}, a tensor of {buffer.dtype} {list(buffer.shape)}, but a program "
        "has fixed shapes: assign a tensor of the same shape and dtype, such as a buffer of the largest size"
    )
