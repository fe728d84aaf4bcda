"""One trace for all ranks of a test, and for all tests that need it: the first one makes it, the others read it.

Tracing is most of what a short test costs, and a third of all that the fast tests do.  The key of a trace is everything
that it can depend on: the pickled module with the values of all its tensors, the example inputs, and torch's settings.
What is not shared: models that can't be pickled, traces that fail or warn (each test is to see the warning), and models
whose forward depends on the rank, if they say so (`differs_by_rank = True`).  Scripts (`run_script`) share nothing:
there every rank traces by itself, as a user's does.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor, nn

import autopar.planning.call_traces
from autopar.ops.registry import registered_targets
from autopar.trace import Traced, trace

__all__ = ["share_traces", "sharing_traces"]

_TARGETS = registered_targets()


class _Seen(pickle.Pickler):
    """Writes tensors as their types, values and identities."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # or another tensor could get the address of one that is gone

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if type(obj) not in (Tensor, nn.Parameter):
            raise pickle.PicklingError(f"{type(obj)} may hold more than values")
        number = self._numbers.setdefault(id(obj), len(self._numbers))
        self._alive.append(obj)
        values = None if obj.is_meta else obj.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        kind = (type(obj).__name__, str(obj.dtype), tuple(obj.shape), obj.stride(), str(obj.device), obj.requires_grad)
        return (number, kind, values)


def _key(*seen: Any) -> str | None:
    if registered_targets() != _TARGETS:
        return None
    settings = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    file = io.BytesIO()
    try:
        _Seen(file).dump((seen, settings))
    except Exception:  # noqa: BLE001  (modules hold anything)
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()


def share_traces(folder: Path) -> None:
    """From now on `autopar.parallelize` and `trace_model` of this process share traces in `folder`."""
    autopar.planning.call_traces.trace = _sharing(folder)


@contextlib.contextmanager
def sharing_traces(folder: Path) -> Iterator[None]:
    """Inside, they do."""
    before = autopar.planning.call_traces.trace
    share_traces(folder)
    try:
        yield
    finally:
        autopar.planning.call_traces.trace = before


def _sharing(folder: Path) -> Callable[..., Traced]:
    def shared(model: nn.Module, args: Any, kwargs: Any, **settings: Any) -> Traced:
        key = None if getattr(model, "differs_by_rank", False) else _key(model, args, kwargs, settings)
        if key is None:
            return trace(model, args, kwargs, **settings)
        path = folder / key
        with filelock.FileLock(f"{path}.lock"):
            if path.exists():
                with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch's, of its own trees
                    return pickle.loads(path.read_bytes())
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                traced = trace(model, args, kwargs, **settings)
            if warned:
                for each in warned:
                    warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
                return traced
            with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):  # outputs may be anything
                path.write_bytes(pickle.dumps(traced))
            return traced

    return shared
