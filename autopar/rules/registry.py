"""The registry: which rule an op has.

Our own table is the union of plain mappings, one a topic, from an op's qualified name to its `Rule`.
Users add to it with `register_rule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.program import Op, Option
from autopar.rules import (
    creation,
    indexing,
    normalization,
    pointwise,
    products,
    reductions,
    spatial,
    special,
    views,
)
from autopar.rules.declaration import parse
from autopar.rules.derivation import derive_options
from autopar.rules.rule import Line, Rule, Types

__all__ = ["RuleMatch", "options_for", "register_rule", "registered_targets"]

_PARTS = (pointwise, products, reductions, views, indexing, normalization, spatial, creation, special)
_OWN_RULES: Mapping[str, Rule] = {target: rule for part in _PARTS for target, rule in part.RULES.items()}


@dataclass(frozen=True)
class RuleMatch:
    """What the rule of one op says about one call; the fields are those of `Line` and `Op`."""

    options: tuple[Option, ...]
    size_args: tuple[int, ...] = ()
    is_view: bool = False
    is_random: bool = False


_user_rules: dict[str, Rule] = {}  # what `register_rule` was called with; wins over our own table


def register_rule(
    target: str,
    declaration: str,
    *,
    size_args: tuple[int, ...] = (),
    is_view: bool = False,
    is_random: bool = False,
) -> None:
    """Tell autopar how an op of yours can be split.  A later call for the same op replaces the rule.

    Args:
        target: the op's qualified name, ``"namespace.name.overload"``, for instance
            ``"mylib.swiglu.default"``.
        declaration: one line in the language of `autopar.rules.declaration`.
        size_args: positions of arguments that hold the result's shape.
        is_view: the result shares memory with the first operand.
        is_random: the op draws random numbers.

    Raises:
        RuleError: the declaration can't be read, or `target` is not a qualified name.

    >>> register_rule("mylib.scaled_sum.default", "* h, h -> * | sum h")
    """
    if target.count(".") < 1 or " " in target or "::" in target:
        raise RuleError(
            f"{target!r} is no op's qualified name: write it as 'namespace.name.overload', "
            "for instance 'mylib.swiglu.default'"
        )
    parse(declaration)
    _user_rules[target] = Line(declaration, size_args, is_view, is_random)


def registered_targets() -> tuple[str, ...]:
    """The qualified names of all ops that have a rule, sorted."""
    return tuple(sorted({*_OWN_RULES, *_user_rules}))


def options_for(op: Op, operand_types: Types, result_types: Types) -> RuleMatch | None:
    """The ways to split `op` on one mesh axis, or None if no rule knows this op or this form of calling it.

    `operand_types` are in the order of `Op.operands`, `result_types` in that of `Op.results`; shapes are
    global. A match always has the options ``"-"`` and ``"~"``.
    """
    rule = _user_rules.get(op.target) or _OWN_RULES.get(op.target)
    line = rule if rule is None or isinstance(rule, Line) else rule(op, operand_types, result_types)
    if line is None:
        return None
    options = derive_options(
        line.declaration,
        op,
        operand_types,
        result_types,
        creates=bool(line.size_args),
        collectives=line.collectives,
    )
    return None if options is None else RuleMatch(options, line.size_args, line.is_view, line.is_random)
