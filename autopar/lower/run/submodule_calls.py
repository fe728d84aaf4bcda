"""Calls of submodules of a parallel module, as programs of their own or on whole parameters."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import ConstraintError, PlanMismatchError, SubmoduleError
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.compat import map_leaves, named_tensors
from autopar.lower.parameters.known_meshes import as_computed
from autopar.lower.run.attributes import Attributes
from autopar.lower.run.carried_tensor import CarriedTensor
from autopar.lower.run.module_inspection import ModuleInspection

__all__ = ["SAME_INPUTS", "SubmoduleCalls", "plain_input", "read_input"]

SAME_INPUTS = ", whose inputs are the same on every rank"  # of calls of submodules, also with local inputs


class SubmoduleCalls(ModuleInspection):
    """The base of `ParallelModule` that runs parts of it."""

    _attributes: Attributes

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], part: str = "") -> Any:
        raise NotImplementedError

    def _run_part(self, part: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The forward of a submodule, on inputs that every rank passes whole, also with local inputs.

        Every rank runs it on whole parameters, gathered for the call, if it gets no tensors (the parametrization that
        computes a weight), and with pipeline stages without gradients.
        """
        self._first_steps.interrupt()
        args, kwargs = map_leaves(plain_input, (tuple(args), dict(kwargs)))
        with self.global_inputs():
            is_pipeline = self._executor.stages.is_pipeline
            if not named_tensors(args, kwargs) or (is_pipeline and not torch.is_grad_enabled()):
                return self._run_on_whole(args, kwargs, part)
            if not is_pipeline:
                return self._run(args, kwargs, part)
            try:
                return self._run(args, kwargs, part)
            except (ConstraintError, PlanMismatchError) as error:
                raise SubmoduleError(
                    f"{part!r} alone can't be cut into the model's pipeline stages ({error}): call it under "
                    "torch.no_grad(), let forward() return what it gives, or plan without stages ('pipeline=1')"
                ) from error

    def _differentiable(self, name: str, whole: Tensor) -> Tensor:
        """The whole parameter of this name, with gradients that reach it."""
        part = self._own_part(name)
        return as_computed(part, whole) if part.requires_grad and torch.is_grad_enabled() else whole

    def _own_part(self, name: str) -> Any:
        table, last = self._store.slot(name)
        return table[last]

    def _run_on_whole(self, args: Sequence[Any], kwargs: Mapping[str, Any], part: str) -> Any:
        self._enter(f"{part!r}{SAME_INPUTS} {{}}", lambda: (None, named_tensors(args, kwargs)))
        names = [name for name in self._store.stored if name.startswith(f"{part}.")]
        whole = {name: self._differentiable(name, self._whole(name, self._own_part(name))) for name in names}
        like = self.get_submodule(part)
        made = self._executors.submodule(part, whole | {f"{part}.{n}": x for n, x in like.named_buffers()})
        self._attributes.give(part, made)
        return made(*args, **kwargs)

    @contextmanager
    def global_inputs(self) -> Generator[None]:
        """A context in which every rank passes the whole batch, also with ``inputs="local"``: to sample a text, say.

        Example:
            >>> with model.global_inputs():
            ...     text = model.sample(prompt)
        """
        inputs = self.call_inputs
        before = inputs is not None and inputs.is_local
        try:
            if inputs is not None:
                inputs.is_local = False
            yield
        finally:
            if inputs is not None:
                inputs.is_local = before


def read_input(x: Any, *, but: tuple[type[LateTensor], ...] = ()) -> Any:
    """`x`, whole if it is an output that has not been read; what goes from call to call in parts stays, and `but`."""
    return x.whole() if isinstance(x, LateTensor) and not isinstance(x, (CarriedTensor, *but)) else x


def plain_input(x: Any) -> Any:
    """An input that this or another call gave out as something else than a plain whole tensor."""
    return x.full_tensor() if isinstance(x, DTensor) else read_input(x)
