"""Parameters of a model on the meta device: the values that one device would have drawn, drawn a tensor at a time.

What one device does is, for every module, children first and in the order in which they are registered:

* a module that is built from nothing but its ``config`` attribute is built again;
* any other draws its own parameters by its ``reset_parameters()``, as torch's modules do when they are built; and when
  one that has a method ``_init_weights(module)`` is done, it calls that for every module in it;

and in the end the user's own ``initialize(module)``.  For models that are built in this way that is what building them
on the device gives, number for number.  A tied parameter has the value of the first module that has it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import MaterializationError
from autopar.lower.compat import module_tables
from autopar.lower.kernels.random import resume_generator
from autopar.lower.parameters.init_recorder import Tape, TapeError
from autopar.lower.parameters.skeleton import canonical_names

__all__ = ["Draws", "Initializer", "has_meta", "materialize", "record_draws"]

Initializer = Callable[[nn.Module], None]


def has_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer of `model` is on the meta device."""
    return any(x.is_meta for x in (*model.parameters(), *model.buffers()))


def materialize(
    model: nn.Module, device: torch.device | str = "cpu", *, initialize: Initializer | None = None
) -> nn.Module:
    """Give the parameters and buffers of `model` that are on the meta device values on `device`, in place.

    Draws from the generator of `device`, as building the model there does: modules in their order, by
    ``reset_parameters()``, by building those anew that take nothing but their ``config``, or by the model's own
    ``_init_weights(module)``.  `autopar.parallelize` draws the same values, each rank keeping its part.

    Args:
        model: any module; what is not on the meta device is left as it is.
        device: where the values are drawn and stay.
        initialize: called with every module, children first, after the module's own initialization.

    Returns:
        `model`.

    Raises:
        MaterializationError: nothing says what the values of a parameter or buffer are.

    Example:
        >>> with torch.device("meta"):
        ...     model = Model(config)
        >>> model = autopar.materialize(model)
    """
    draws = record_draws(model, initialize)
    parameters = dict(model.named_parameters())
    made: dict[int, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        old = parameters.get(name)
        if old is None:
            made[id(model.get_buffer(name))] = value.clone()
        else:
            made[id(old)] = nn.Parameter(value.clone(), requires_grad=old.requires_grad)

    draws.play(torch.device(device), keep)
    for module in model.modules():
        for table in (module_tables(module).parameters, module_tables(module).buffers):
            table.update({name: made[id(x)] for name, x in table.items() if id(x) in made})  # pyright: ignore
    return model


@dataclass(frozen=True)
class Draws:
    """How a model's tensors on the meta device get their values.

    Args:
        tape: what happens on one device.
        results: name of a parameter or buffer (of a tied one the first) -> its tensor on the tape.
        dtypes: the same names -> the dtype of the value.
        state: of the generator to draw from; None: as it stands.
    """

    tape: Tape
    results: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    state: Tensor | None = None

    def play(self, device: torch.device, deliver: Callable[[str, Tensor], None]) -> None:
        """Draw on `device` from its generator; `deliver` gets each whole tensor, which lives no longer than the call.

        Raises:
            MaterializationError: a value is missing in part.
        """

        def check(name: str, value: Tensor) -> None:
            if value.is_floating_point() and bool(value.isnan().any()):
                raise MaterializationError(
                    f"{name!r} is on the meta device, and its initialization leaves some of it without a value: write "
                    "to all of it, in reset_parameters() of its module or in initialize="
                )
            deliver(name, value.to(self.dtypes[name]))

        with nullcontext() if self.state is None else resume_generator(self.state, device):
            self.tape.play(self.results, device, check)


def record_draws(model: nn.Module, initialize: Initializer | None = None) -> Draws:
    """What one device would do to give the parameters and buffers of `model` that are on the meta device values.

    Nothing is computed, and the model is left as it was.

    Raises:
        MaterializationError: nothing says what the values of a parameter or buffer are.
    """
    tensors = dict(_meta_tensors(model))
    drawing = frozenset(id(m) for m in model.modules() if any(x.is_meta for x in (*m.parameters(), *m.buffers())))
    with Tape() as tape, _blank(model), _default_dtype(model):
        try:
            _Initializer(tape, drawing).build(model)
            if initialize is not None:
                model.apply(initialize)
        except TapeError as error:
            raise MaterializationError(
                f"the initialization of {type(model).__name__} can't be planned: {error}. Build it outside of "
                "torch.device('meta'), or initialize it in autopar.materialize's initialize= without looking at values"
            ) from error
        results = {name: _member(model, name) for name in tensors}
    missing = tape.missing(results)
    if missing:
        raise MaterializationError(_describe_missing(model, missing))
    return Draws(tape, results, {name: x.dtype for name, x in tensors.items()})


class _Initializer:
    """Does to modules what building them on one device does; `drawing` are the ids of those to be given values."""

    def __init__(self, tape: Tape, drawing: frozenset[int]) -> None:
        self._tape = tape
        self._drawing = drawing
        self._built: set[int] = set()
        self._initialized: set[int] = set()  # by a method `_init_weights` of a module around them

    def build(self, module: nn.Module) -> None:
        """`module`, everything inside it first."""
        if id(module) in self._built or id(module) not in self._drawing:
            return
        self._built.add(id(module))
        if self._rebuild(module):
            self._built.update(map(id, module.modules()))
            self._initialized.update(map(id, module.modules()))
            return
        for child in module.children():
            self.build(child)
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        own: Any = getattr(module, "_init_weights", None)
        if callable(own):
            for inner in _children_first(module):
                if id(inner) not in self._initialized:
                    self._initialized.add(id(inner))
                    own(inner)

    def _rebuild(self, module: nn.Module) -> bool:
        """Build another one from the same configuration and take its tensors, if that is all it is built from."""
        config = getattr(module, "config", None)
        if config is None or not _is_built_from_config(type(module)):
            return False
        mark = self._tape.mark()
        try:
            twin = type(module)(copy.deepcopy(config))
        except Exception:  # noqa: BLE001  (a constructor may do anything; then its modules are built one by one)
            self._tape.rewind(mark)
            return False
        if _shapes(twin) != _shapes(module):  # it was changed after it was built
            self._tape.rewind(mark)
            return False
        for path, inner in cast("Iterable[tuple[str, nn.Module]]", module.named_modules()):
            tables, other = module_tables(inner), module_tables(twin.get_submodule(path))
            tables.parameters.update(other.parameters)
            tables.buffers.update(other.buffers)
        return True


def _is_built_from_config(kind: type[nn.Module]) -> bool:
    _, *arguments = inspect.signature(kind.__init__).parameters.values()
    needed = [a.name for a in arguments if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    return needed == ["config"]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    members = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: x.shape for name, x in members}


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


@contextmanager
def _default_dtype(model: nn.Module) -> Generator[None]:
    """Inside, what is built is of the dtype that the model's parameters have."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtypes.pop() if len(dtypes) == 1 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _describe_missing(model: nn.Module, missing: list[str]) -> str:
    names = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    path = missing[0].rpartition(".")[0]
    kind = type(model.get_submodule(path)).__name__
    return (
        f"{names}: on the meta device, and nothing says what the values are: {kind}"
        f"{f' at {path!r}' if path else ''} gives none to {missing[0].rpartition('.')[2]!r} in reset_parameters(), and "
        "it can't be built again from a config. Write that method, pass initialize= (a function that gets each module "
        "and fills what is its own), or build the model outside of torch.device('meta')"
    )


def _meta_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors on the meta device, each by its first name."""
    first = canonical_names(model)
    yield from ((name, p) for name, p in model.named_parameters() if p.is_meta and first[name] == name)
    yield from ((name, b) for name, b in model.named_buffers() if b.is_meta)


def _member(model: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    tables = module_tables(model.get_submodule(path))
    tensor = tables.parameters.get(last)
    tensor = tables.buffers.get(last) if tensor is None else tensor
    if tensor is None:
        raise MaterializationError(f"the initialization of the model removes {name!r}, which has to get a value")
    return tensor.detach()


@contextmanager
def _blank(model: nn.Module) -> Generator[None]:
    """Inside, every parameter and buffer is a new one on the meta device, shared with no other module."""
    modules = list(model.modules())
    before = [(dict(t.parameters), dict(t.buffers)) for t in map(module_tables, modules)]
    try:
        for module in modules:
            tables = module_tables(module)
            for name, parameter in tables.parameters.items():
                tables.parameters[name] = None if parameter is None else _blank_parameter(parameter)
            for name, buffer in tables.buffers.items():
                tables.buffers[name] = None if buffer is None else torch.empty_like(buffer, device="meta")
        yield
    finally:
        for module, (parameters, buffers) in zip(modules, before, strict=True):
            tables = module_tables(module)
            for table, old in ((tables.parameters, parameters), (tables.buffers, buffers)):
                table.clear()
                table.update(old)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _blank_parameter(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
