"""The registry of op records.

autopar's records are the `FAMILIES` of the files in this folder.  Users add to them with `register_rule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from autopar.errors import RuleError
from autopar.ops.declaration import parse
from autopar.ops.derivation import derive_options
from autopar.ops.family import OpFamily, Types, packet_name
from autopar.ops.memory_order import Order, followed, new, part
from autopar.ops.work import Work
from autopar.program import Op, Option

__all__ = [
    "LAUNCHING_NAMESPACE", "RuleMatch", "count_work", "family_of", "is_cheap", "is_fused", "options_for",
    "own_families", "register_rule", "registered_targets", "result_order", "with_rule",
]  # fmt: skip

_FILES = (import_module(f"autopar.ops.{file.name}") for file in iter_modules([str(Path(__file__).parent)]))
_FAMILIES = tuple(family for file in _FILES for family in getattr(file, "FAMILIES", ()))
_OWN: Mapping[str, OpFamily] = {target: family for family in _FAMILIES for target in family.rules}
_PACKETS: Mapping[str, OpFamily] = {packet_name(target): family for target, family in reversed(_OWN.items())}

LAUNCHING_NAMESPACE = "autopar_launching"
"""Of custom functions that launch kernels by themselves, which a compiler can't look into."""

_INTERNAL_FIELDS = {"rules", "kernels", "function", "takes_generator"}  # they name functions of `lower.kernels`

_registered: dict[str, OpFamily] = {}  # records of `register_rule`, which take precedence over autopar's own


@dataclass(frozen=True)
class RuleMatch:
    """The result of applying an op's rule to one call; the fields are those of `Op`."""

    options: tuple[Option, ...]
    size_args: tuple[int, ...] = ()
    is_view: bool = False
    is_random: bool = False


def own_families() -> tuple[OpFamily, ...]:
    """All of autopar's own records."""
    return _FAMILIES


def family_of(target: str) -> OpFamily:
    """The record of the op with this qualified name."""
    return _registered.get(target) or _own_family(target)


@lru_cache(maxsize=4096)
def _own_family(target: str) -> OpFamily:
    unknown = OpFamily(
        {},
        is_cheap=target.startswith(("aten.", "autopar.", "prims.")),
        runs_apart=target.startswith(f"{LAUNCHING_NAMESPACE}."),
    )
    return _OWN.get(target) or _PACKETS.get(packet_name(target)) or unknown


def register_rule(
    target: str,
    declaration: str,
    *,
    size_args: tuple[int, ...] = (),
    is_view: bool = False,
    is_random: bool = False,
    **traits: Any,
) -> None:
    """Declare how a custom op can be split, and optionally its other properties.

    A later call for the same op replaces the earlier one.

    Args:
        target: the op's qualified name, ``"namespace.name.overload"``, for instance ``"mylib.swiglu.default"``.
        declaration: one line in the language of `autopar.ops.declaration`.
        size_args: positions of arguments that hold the result's shape.
        is_view: the result shares memory with the first operand.
        is_random: the op draws random numbers.
        traits: further fields of `autopar.ops.OpFamily`, for instance ``is_cheap``, ``count_work`` or ``saves``; fields
            that are left out are as in autopar's record of the op, or have the defaults of an unknown op.

    Raises:
        RuleError: the declaration can't be read, `target` is not a qualified name, or a trait has an unknown name.

    Example:
        >>> autopar.register_rule("mylib.scaled_sum.default", "* h, h -> * | sum h", is_cheap=True)
    """
    if target.count(".") < 1 or " " in target or "::" in target:
        raise RuleError(
            f"{target!r} is not the qualified name of an op: write it as 'namespace.name.overload', "
            "for instance 'mylib.swiglu.default'"
        )
    known = {field.name for field in fields(OpFamily)} - _INTERNAL_FIELDS
    if unknown := sorted(traits.keys() - known):
        raise RuleError(
            f"{target} can't be given {', '.join(unknown)}: the properties of an op are {', '.join(sorted(known))}"
        )
    parse(declaration)
    own = _own_family(target)
    record = replace(
        own, rules={target: declaration}, size_args=size_args, is_view=is_view, is_random=is_random or own.is_random
    )
    _registered[target] = replace(record, **traits)


def registered_targets() -> tuple[str, ...]:
    """The qualified names of all ops that have a rule, sorted."""
    return tuple(sorted({*_registered, *(target for target, family in _OWN.items() if family.rules[target])}))


def options_for(op: Op, operand_types: Types, result_types: Types) -> RuleMatch | None:
    """The ways to split `op` on one mesh axis, or None if no rule covers this op or this form of its call.

    `operand_types` are in the order of `Op.operands`, `result_types` in that of `Op.results`; shapes are
    global.  A match always has the options ``"-"`` and ``"~"``.
    """
    family = family_of(op.target)
    rule = family.rules.get(op.target)
    declarations = rule(op, operand_types, result_types) if callable(rule) else rule
    if declarations is None:
        return None
    collectives = {name: kernel.collectives(op, operand_types) for name, kernel in family.kernels.items()}
    by_factor: dict[str, Option] = {}
    for declaration in (declarations,) if isinstance(declarations, str) else declarations:
        options = derive_options(
            declaration, op, operand_types, result_types, creates=bool(family.size_args), collectives=collectives
        )
        if options is None:
            return None
        allowed = (_with_kernel_limits(op, operand_types, option, family) for option in options)
        by_factor.update((option.factor, option) for option in allowed if option is not None)
    return RuleMatch(tuple(by_factor.values()), family.size_args, family.is_view, family.draws(op))


def with_rule(op: Op, operand_types: Types, result_types: Types) -> Op:
    """`op` with the options and flags of its rule, which must cover this form of its call; see `options_for`."""
    match = options_for(op, operand_types, result_types)
    assert match is not None
    return replace(op, options=match.options, size_args=match.size_args, is_view=match.is_view)


def _with_kernel_limits(op: Op, operand_types: Types, option: Option, family: OpFamily) -> Option | None:
    """The option with an extent that allows only slices that its kernel supports; None if there are none."""
    if not option.kernel:
        return option
    kernel = family.kernels[option.kernel]
    option = replace(option, traveling=kernel.traveling, is_on_one_axis=kernel.is_on_one_axis)
    unit = kernel.unit
    extent = option.extent // unit if option.extent % unit == 0 else 1
    max_slices = option.extent // max(1, kernel.least(op, operand_types))
    if extent > max_slices:  # every divisor of the extent must be a legal number of slices
        extent = max((divisor for divisor in range(1, max_slices + 1) if extent % divisor == 0), default=1)
    return option if extent == option.extent else replace(option, extent=extent) if extent > 1 else None


def is_cheap(op: Op) -> bool:
    """Whether selective recomputation runs `op` again in backward instead of saving its result.

    Never an op that a special kernel would communicate for again, nor one that draws random numbers: drawing them
    again needs the generator's state.
    """
    family = family_of(op.target)
    return family.is_cheap and not op.is_random and not any(map(family.communicates, op.options))


def is_fused(op: Op) -> bool:
    """Whether a compiler fuses `op` with neighboring fusible ops into one kernel; random ops stay apart."""
    family = family_of(op.target)
    return (family.fuses or family.is_pointwise or op.is_view) and not op.is_random


def count_work(op: Op, operands: Types, results: Types) -> Work:
    """Count the work of `op` on operands and results of these local types."""
    family = family_of(op.target)
    work = family.count_work(op, operands, results)
    if work.is_counted_in_flops:
        return replace(work, width=results[0].shape[-1] if results[0].shape else 1)
    width = operands[0].shape[family.row_dim(op)] if operands and operands[0].shape else 1
    is_with_number = len(operands) == 1 and len(op.args) == 2 and any(isinstance(a, int | float) for a in op.args)
    return replace(work, width=width, is_with_number=is_with_number)


def result_order(op: Op, shape: tuple[int, ...], order: Order, result: tuple[int, ...]) -> tuple[bool, Order]:
    """Whether the (first) result is a view of the first operand, and the order of its elements in memory.

    Args:
        op: the op that computes it.
        shape: local shape of the first operand.
        order: of the first operand.
        result: local shape of the result.
    """
    family = family_of(op.target)
    place = family.place or (part if op.is_view else followed if family.is_pointwise else new)
    return place(op, shape, order, result)
