"""What a rule is: a `Line`, or a function that writes the line for one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autopar.program import Arg, KernelCollective, Op, TensorType

__all__ = ["Line", "Rule", "Types", "argument", "lines"]

Types = tuple[TensorType, ...]


@dataclass(frozen=True)
class Line:
    """A declaration with what the language doesn't say.

    Args:
        declaration: see `autopar.rules.declaration`.
        size_args: positions of arguments that hold the (first) result's global shape; they become local.
        is_view: the result shares memory with the first operand.
        is_random: the op draws random numbers.
        collectives: kernel name -> what that special kernel communicates.
    """

    declaration: str
    size_args: tuple[int, ...] = ()
    is_view: bool = False
    is_random: bool = False
    collectives: Mapping[str, tuple[KernelCollective, ...]] = field(
        default_factory=dict[str, tuple[KernelCollective, ...]], hash=False
    )


# The function gets the op, its operands' and its results' types, and returns None for a call that it can't
# describe.
Rule = Line | Callable[[Op, Types, Types], Line | None]


def lines(
    table: Mapping[str, str],
    *,
    size_args: tuple[int, ...] = (),
    is_view: bool = False,
    is_random: bool = False,
) -> dict[str, Rule]:
    """Rules from declarations.  A key names one or more ops of ATen, ``"name"`` or ``"name.overload"``,
    blank-separated.
    """
    return {
        f"aten.{name if '.' in name else name + '.default'}": replace(
            Line(declaration), size_args=size_args, is_view=is_view, is_random=is_random
        )
        for names, declaration in table.items()
        for name in names.split()
    }


def argument(op: Op, index: int, keyword: str, default: Arg = None) -> Arg:
    """The argument at position `index` of the schema, wherever it was given, or `default` if it was left
    out.
    """
    if index < len(op.args):
        return op.args[index]
    return dict(op.kwargs).get(keyword, default)
