"""Parameters of other pipeline stages: what a rank has in their place.

Each rank runs the script that was written for one device.  Of a parameter that it has no part of, it knows the shape,
and whatever asks for more is told where the parameter is.  Loops over the parameters of a submodule pass it by; where
nothing that is trained would be left, ``parameters()`` gives one without elements, as optimizers want one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from autopar.errors import StageError
from autopar.lower.compat import leaves_of, module_tables
from autopar.lower.parameters.store import ParameterStore
from autopar.lower.run.stage_map import StageMap

__all__ = ["OtherStageParameter", "find_others", "stand_in"]


class OtherStageParameter:
    """Stands for a parameter that only ranks of other pipeline stages have.

    It has the shape and the dtype, but no values: whatever needs these raises StageError.
    """

    def __init__(self, name: str, like: nn.Parameter, ranks: range) -> None:
        """For the parameter `name`, like that of the original, which `ranks` have."""
        facts = {"shape": like.shape, "ndim": like.ndim, "dtype": like.dtype, "requires_grad": like.requires_grad}
        vars(self).update(facts, _name=name, _ranks=ranks, is_leaf=True)

    def numel(self) -> int:
        """The number of its elements."""
        return self.shape.numel()

    nelement = numel

    def dim(self) -> int:
        """The number of its dims."""
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Its shape, or the size of `dim`."""
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        """Whether its elements are."""
        return self.dtype.is_floating_point

    def __repr__(self) -> str:
        return f"<{self._name}, {list(self.shape)}, on {_ranks_text(self._ranks)}>"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse(f"its {attribute}")

    def __setattr__(self, attribute: str, value: object) -> None:
        self._refuse(f"a change of its {attribute}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        own = next(x for x in leaves_of((args, kwargs or {})) if isinstance(x, cls))
        own._refuse(getattr(func, "__name__", "a function"))

    def _refuse(self, what: str) -> NoReturn:
        own = vars(self)
        raise StageError(
            f"the parameter {own['_name']!r} is on {_ranks_text(own['_ranks'])} only, in the stages that read it, but "
            f"{what} was asked for on another rank. Its values are "
            f"model.full_state_dict()[{own['_name']!r}], which every rank calls; loops over model.named_parameters() "
            "get those of this rank. Or plan without stages ('pipeline=1'), for scripts that need all of them"
        )


def _ranks_text(ranks: range) -> str:
    return f"ranks {ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else f"rank {ranks.start}"


def _refusing(operator: str) -> Callable[..., NoReturn]:
    def refuse(self: OtherStageParameter, *_: object) -> NoReturn:
        self._refuse(operator)  # pyright: ignore[reportPrivateUsage]

    return refuse


for _operator in ("add", "sub", "mul", "truediv", "matmul", "pow", "neg", "abs", "getitem", "setitem", "iter", "len",
                  "float", "int", "lt", "gt", "le", "ge"):  # fmt: skip
    setattr(OtherStageParameter, f"__{_operator}__", _refusing(f"__{_operator}__"))


class _Parameters(dict[str, nn.Parameter | None]):
    """The parameters of a module, with `others` where attributes are looked up; loops get None for these."""

    others: Mapping[str, OtherStageParameter]

    def __getitem__(self, name: str) -> Any:
        own = super().__getitem__(name)
        return self.others.get(name) if own is None else own

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def find_others(module: nn.Module, store: ParameterStore, stages: StageMap) -> dict[str, OtherStageParameter]:
    """What stands for the parameters of `module`, the original, that this rank has no part of, by name."""
    size, made = stages.plan.group_size, dict[str, OtherStageParameter]()
    for name, stored in store.stored.items():
        if stages.group not in stored.groups:
            first = store.first_name[name]
            ranks = range(stored.groups[0] * size, (stored.groups[0] + 1) * size)
            made[name] = made[first] if first in made else OtherStageParameter(name, module.get_parameter(name), ranks)
    return made


def stand_in(root: Any, others: Mapping[str, OtherStageParameter]) -> None:
    """Have attributes of the modules of `root` give `others`, by name."""
    by_module: dict[str, dict[str, OtherStageParameter]] = {}
    for name, other in others.items():
        path, _, last = name.rpartition(".")
        by_module.setdefault(path, {})[last] = other
    for path, some in by_module.items():
        module = root.get_submodule(path)
        table = _Parameters(module_tables(module).parameters)
        table.others = some
        module.__dict__["_parameters"] = table
    trained = [name for name, other in others.items() if other.requires_grad]
    for path, module in root.named_modules() if trained else ():
        if path and any(name.startswith(f"{path}.") for name in trained):
            vars(module)["parameters"] = MethodType(_parameters, module)


def _parameters(self: Any, recurse: bool = True) -> Iterator[nn.Parameter]:
    """As of any module, for the stages of this rank; if nothing of it is trained here, there is one more.

    Loops over names, which sort parameters by them, get no more than there are.
    """
    own: list[nn.Parameter] = [parameter for _, parameter in self.named_parameters(recurse=recurse)]
    yield from own
    root = self.__dict__["_parallel_root"]()
    if recurse and root is not None and not any(parameter.requires_grad for parameter in own):
        yield root.nothing_of(self)
