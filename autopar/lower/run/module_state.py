"""The state of a parallel module: DTensors for torch, whole tensors for files."""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import ModelError, RankError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.compat import local_tensor, storage_key
from autopar.lower.parameters.full_state import fit_to_store, whole_tensor
from autopar.lower.parameters.gradient_norm import GradientNorm, clip_gradients
from autopar.lower.parameters.known_meshes import is_known, is_of_stages, is_whole, read_whole
from autopar.lower.parameters.optimizer_state import whole_optimizer_state
from autopar.lower.parameters.other_stages import is_elsewhere
from autopar.lower.parameters.saved_files import SAVE_INSTEAD, SliceMetadata, StateDict, WholeMetadata, meet_for_file
from autopar.lower.parameters.skeleton import check_conversion, state_names
from autopar.lower.parameters.store import ParameterStore, written_member
from autopar.lower.run.attributes import Attributes
from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Executable
from autopar.lower.run.original_copy import copy_original
from autopar.lower.run.without_wrappers import WithoutWrappers
from autopar.placement import Axis

__all__ = ["ModuleState", "NamedInputs", "is_plain_value", "share_buffers"]

T = TypeVar("T")
_SAMPLED = 4096  # values of a parameter in a whole state; reading as many from memory takes microseconds
NamedInputs = Iterable[tuple[str, Tensor | float | str]]


class ModuleState(WithoutWrappers):
    """The base of `ParallelModule` that has to do with its parameters and buffers."""

    _communicator: Communicator
    _store: ParameterStore
    _executor: Executor
    _gradient_norm: GradientNorm
    _asking: StateDictOptions | None = None
    _own_names: frozenset[str] = frozenset()  # of the attributes that the original does not have
    _changed_part: str = ""  # a part of the original that is not what its class says

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module: DTensors, for torch.distributed.checkpoint; `full_state_dict` is for files.

        With pipeline stages it has no entry for parameters of other stages, unless it is asked for by torch's
        ``get_model_state_dict`` with ``full_state_dict=True``, which then gives all of them.
        """
        options = self._asking
        if options is None:
            return self._own_state(args, kwargs)
        if options.full_state_dict:
            state = OrderedDict[str, Any]() if kwargs.get("destination") is None else kwargs["destination"]
            whole = self.full_state_dict(0 if options.cpu_offload else None)
            state.update({kwargs.get("prefix", "") + name: x for name, x in whole.items()})
        else:
            state = self._own_state(args, kwargs)
        if options.ignore_frozen_params:  # torch takes out every parameter that is frozen, also where there is none
            for name, parameter in super().named_parameters(kwargs.get("prefix", "").rstrip(".")):
                if not parameter.requires_grad:
                    state.setdefault(name, parameter)
        return state

    @contextmanager
    def _giving_state(self, options: StateDictOptions) -> Generator[None]:
        """Inside, `state_dict` is what torch makes a state by these options of; every rank calls it."""
        vars(self)["_asking"] = options
        try:
            yield
        finally:
            del vars(self)["_asking"]

    def _own_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prefix = kwargs.get("prefix", "")
        if not args and kwargs.get("destination") is None:
            kwargs["destination"] = StateDict(whole=weakref.WeakMethod(self._whole_state), prefix=prefix)
        untyped: Any = super()
        state = untyped.state_dict(*args, **kwargs)
        notes, own = getattr(state, "_metadata", None), prefix[:-1]
        if not isinstance(state, StateDict) and notes and own in notes:  # the state of a module around this one
            meet = weakref.WeakMethod(self._meet_for_whole_file)
            has_stages = self._executor.stages.is_pipeline
            notes[own] = SliceMetadata(notes[own]) if has_stages else WholeMetadata(notes[own], meet)
        return state

    def _meet_for_whole_file(self) -> None:
        """Wait for all ranks to write a file, if each has all of this module; else parts of it are gathered anyway."""
        calls = self._communicator.calls
        if calls is not None and all(is_whole(x) for x in self.parameters() if isinstance(x, DTensor)):
            meet_for_file(calls, (), is_needed=False)

    def _state_of_part(self, part: str, state: Mapping[str, Any]) -> StateDict:
        """`state`, that of the submodule `part`, as `state_dict` gives its own."""
        return StateDict(state, whole=weakref.WeakMethod(self._whole_state), part=f"{part}.")

    def _whole_state(self, state: StateDict) -> dict[str, Any]:
        """`state`, what `state_dict` has given, with whole tensors of all stages, on the host; every rank calls it,
        unless all tensors are whole.
        """
        has_stages, calls = self._executor.stages.is_pipeline, self._communicator.calls
        has_parts = has_stages or not all(is_whole(x) for x in state.values() if isinstance(x, DTensor))
        if calls is not None:
            meet_for_file(calls, self.parameters(), is_needed=has_parts)
        if not has_parts:
            return _on_host(state, _storage_of, lambda _, x: local_tensor(x))
        return self._gather_state(state, "torch.save of state_dict() {}")

    def _gather_state(self, state: StateDict, kind: str) -> dict[str, Any]:
        """As `_whole_state`, where ranks have parts, to do what `kind` says."""
        prefix, part = state.prefix, state.part

        def name_of(key: str) -> str:
            return part + key.removeprefix(prefix)

        with self._together(kind), torch.no_grad():
            if not self._executor.stages.is_pipeline:
                return _on_host(
                    state, _storage_of, lambda key, x: read_whole(x) if is_known(x) else self._whole(name_of(key), x)
                )
            stored, first = self._store.stored, self._store.first_name
            names = [name.removeprefix(part) for name in state_names(self, stored) if name.startswith(part)]
            self._check_own({part + name: state.get(prefix + name) for name in names if part + name in stored})
            every = {key: state.get(key) for key in (*(prefix + name for name in names), *state)}
            return _on_host(
                every, lambda key, _: first.get(name_of(key), key), lambda key, x: self._whole(name_of(key), x)
            )

    def _check_own(self, state: Mapping[str, Any]) -> None:
        """Raise ModelError if an entry is not as stages share it, so that ranks would wait for each other."""
        for name, x in state.items():
            stored = self._store.stored[name]
            is_as_stored = isinstance(x, DTensor) and tuple(x.shape) == stored.shape and x.dtype == stored.dtype
            if self._executor.stages.group in stored.groups and not is_as_stored:
                raise ModelError(
                    f"{name} of a state_dict() that is saved or loaded was replaced or removed, or has "
                    "another dtype, and other pipeline stages can't know that: change what full_state_dict() gives"
                )

    def full_state_dict(self, rank: int | None = None) -> dict[str, Tensor]:
        """`state_dict` with whole plain tensors, of all stages, on every rank.  Every rank must call it.

        Args:
            rank: only this rank gets it, on the CPU, and others an empty dict: for models larger than a device.
        """
        with self._together("full_state_dict {}"):
            return self._full_state_dict(rank)

    def _full_state_dict(self, rank: int | None) -> dict[str, Tensor]:
        own = super().state_dict(keep_vars=True)
        tensors: dict[str, Tensor | None] = {}
        for name in state_names(self, self._store.stored):
            first = self._store.first_name.get(name, name)
            if first not in tensors:
                whole = self._whole(name, own.get(name))
                tensors[first] = whole if rank is None else whole.cpu() if rank == self._communicator.rank else None
            tensors[name] = tensors[first]
        return {name: whole for name, whole in tensors.items() if whole is not None}

    def full_optimizer_state_dict(self, optimizer: Optimizer, rank: int | None = None) -> dict[str, Any]:
        """``optimizer.state_dict()`` with whole plain tensors, on every rank.  Every rank must call it.

        ``optimizer.load_state_dict`` takes it, of this model's optimizer by any plan and of one of the original model.

        Args:
            optimizer: of this model's parameters.
            rank: only this rank gets it, on the CPU, and others an empty dict.

        Example:
            >>> state = {"model": model.full_state_dict(0), "optimizer": model.full_optimizer_state_dict(optimizer, 0)}
            >>> if dist.get_rank() == 0:
            ...     torch.save(state, "checkpoint.pt")
        """
        keeps = rank is None or rank == self._communicator.rank
        with self._together("full_optimizer_state_dict {}"):
            state = whole_optimizer_state(optimizer, optimizer.state_dict(), keeps=keeps, on_host=rank is not None)
        return state if keeps else {}

    @contextmanager
    def _saving_whole(self) -> Generator[bool]:
        """Inside, the first rank's `state_dict` is the whole one; gives whether this is that rank, which is to write.

        Every rank comes out when the first one has.
        """
        whole, calls, is_writer = self.full_state_dict(rank=0), self._communicator.calls, self._communicator.rank == 0
        with nullcontext() if calls is None else calls.failing():
            if is_writer:
                vars(self)["state_dict"] = partial(_same, whole)
            attributes: Attributes = vars(self)["_attributes"]
            try:
                with attributes.kept():  # diffusers, for one, notes its version in the config
                    yield is_writer
            finally:
                vars(self).pop("state_dict", None)
            done = torch.zeros(1, device=self._communicator.device)
            self._communicator.all_reduce(done, Axis(self._communicator.world_size, 1))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; entries may be DTensors laid out as the parameters, or whole plain tensors.

        Entries of parameters that other stages hold are passed over.  If there are whole tensors, or it is what another
        parallel module's ``state_dict()`` has given, every rank calls it.

        Raises:
            MeshError: whole tensors differ between ranks.
        """
        if isinstance(state_dict, StateDict):
            source = state_dict.source
            if isinstance(source, ModuleState) and source._is_cut_otherwise(self):
                kind = "load_state_dict {} of a state_dict() with other stages"
                state_dict = source._gather_state(state_dict, kind)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _is_cut_otherwise(self, other: ModuleState) -> bool:
        """Whether its ``state_dict()`` may lack what a rank of `other` loads: its stages are not those of `other`."""
        mine, theirs = self._store.stored, other._store.stored
        return self._executor.stages.is_pipeline and any(
            name not in theirs or theirs[name].groups != stored.groups for name, stored in mine.items()
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """What torch calls, also where a module around this one loads its state."""
        self._fit(state_dict, prefix)
        untyped: Any = super()
        untyped._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _fit(self, state: dict[str, Any], prefix: str) -> None:
        """Put this rank's parts in the place of the entries of `state`, which is a copy."""
        group, stored = self._executor.stages.group, self._store.stored
        given = {name: self._read_past_stages(state[prefix + name]) for name in stored if prefix + name in state}
        whole = [(name, _sample(x)) for name, x in given.items() if is_plain_value(x)]
        if whole:
            self._enter("load_state_dict {}", lambda: (None, whole))
        own = dict(super().named_parameters(remove_duplicate=False))
        for name, entry in stored.items():
            value = given.get(name)
            if group in entry.groups:
                if value is not None:
                    state[prefix + name] = fit_to_store(self._store, self._communicator, name, value)
            elif not whole or (value is not None and value.shape == own[name].shape):
                state[prefix + name] = own[name]

    def _read_past_stages(self, value: Any) -> Any:
        """An entry that is sharded over ranks of several stages, whole: to read it takes all of them, and the ranks of
        one stage load it.
        """
        if not self._executor.stages.is_pipeline or not isinstance(value, DTensor):
            return value
        is_shared = is_known(value) and not is_of_stages(value)
        return read_whole(cast("DTensor", value.detach())).cpu() if is_shared else value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        check_conversion(self, fn)
        untyped: Any = super()
        return untyped._apply(fn, recurse)

    def _enter(
        self, kind: str, prepare: Callable[[], tuple[T, NamedInputs]], compared_first: NamedInputs | None = None
    ) -> T:
        """Begin something that all ranks do, and make sure of that; see `CallConsensus.enter`."""
        calls = self._communicator.calls
        return prepare()[0] if calls is None else calls.enter(kind, prepare, compared_first)

    @contextmanager
    def _together(self, kind: str) -> Generator[None]:
        """Inside, all ranks do `kind`; an error in it is one of all ranks."""
        self._enter(kind, lambda: (None, ()))
        calls = self._communicator.calls
        with nullcontext() if calls is None else calls.failing():
            yield

    def _meet(self, what: str, within_s: float, instead: str) -> None:
        """Wait for all ranks to do `what`, which is no call; `instead` says what else to do.

        Raises:
            RankError: a rank makes another call, has ended, or does not come within `within_s` seconds.
        """
        calls = self._communicator.calls
        if calls is not None:
            with calls.failing():
                if not calls.meets(what, within_s):
                    raise RankError(f"{what} takes all ranks, but only some came to it: {instead}")

    def __copy__(self) -> NoReturn:
        """Raise ModelError: two modules can't share the parameters of one."""
        raise ModelError(f"copy.copy of a parallelized {type(self).__name__} is not possible: use copy.deepcopy")

    def __reduce_ex__(self, protocol: object) -> Any:
        """In a file it is a module of the original's class with whole values; every rank saves it.

        Raises:
            ModelError: a part of the original is not what its class says.
        """
        if self._changed_part:
            raise ModelError(
                f"a parallelized {type(self).__name__} can't be pickled, as {self._changed_part!r} of the original is "
                f"compiled or has a forward of its own, beside that of its class. To save its state, {SAVE_INSTEAD}"
            )
        values = self._whole_state(self._own_state((), {}))
        original: Any = type(self).__bases__[0]
        return operator.getitem, ([copy_original(self, original, values, self._own_names)], 0)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before, as
        one device would.

        `torch.nn.utils.clip_grad_norm_` of all of `parameters()` does the same, with more collectives.

        Raises:
            RuntimeError: `error_if_nonfinite` and the norm is not finite.
        """
        named = super().named_parameters()
        gradients = [(name, p.grad) for name, p in named if p.grad is not None and not is_elsewhere(p)]
        with self._together("clip_grad_norm_ {}"):
            return clip_gradients(gradients, self._gradient_norm, max_norm, norm_type, error_if_nonfinite)

    def _whole(self, name: str, value: Tensor | None) -> Tensor:
        return whole_tensor(self._store, self._executor.stages, self._communicator, name, value)


def _on_host(
    state: Mapping[str, Any], key_of: Callable[[str, Any], Any], read: Callable[[str, Any], Tensor]
) -> dict[str, Any]:
    """`state` with whole tensors in the place of DTensors, and of None, which other stages have; `read` is called once
    for each key, so that tied weights stay one tensor.
    """
    whole: dict[Any, Tensor] = {}

    def entry(name: str, x: Any) -> Any:
        if x is not None and not isinstance(x, DTensor):
            return x
        key = key_of(name, x)
        if key not in whole:
            whole[key] = read(name, x).detach().cpu()
        return whole[key]

    return {name: entry(name, x) for name, x in state.items()}


def _storage_of(_: str, x: DTensor) -> Any:
    local = local_tensor(x)
    return storage_key(local), local.storage_offset(), local.shape


def share_buffers(module: nn.Module, executable: Executable, communicator: Communicator) -> Callable[[], None]:
    """What gives every rank the first one's values of the buffers that steps update; every rank calls it.

    Where a step fails, some ranks may have updated them already.
    """
    program, module_of = executable.program, weakref.ref(module)  # the module has the communicator

    @torch.no_grad()
    def share() -> None:
        module = module_of()
        if module is None:
            return
        for name in (program.parameters[buffer] for buffer in program.updates):
            buffer = written_member(module, name)
            buffer.copy_(communicator.broadcast(buffer, Axis(communicator.world_size, 1)))

    return share


def is_plain_value(x: object) -> bool:
    """Whether it is a plain tensor, which is to be the same on every rank."""
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and not x.is_meta


def _sample(x: Tensor) -> Tensor:
    """Some thousand of its values, which tell checkpoints apart; to compare all takes seconds for a large model."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLED)]


def _same(state: Mapping[str, Tensor], *_: Any, **__: Any) -> dict[str, Tensor]:
    return dict(state)
