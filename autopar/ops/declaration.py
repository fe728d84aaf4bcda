"""The language of factor rules: one line describes the loops of an op over its tensors.

``"* h, f h, +f -> * f | sum h, plus 0"`` is the rule of ``linear(input, weight, bias)``.  Read it as
einsum, with the arguments in the order of the op's schema, then ``->`` and the results, then ``|`` and
remarks.

An argument or result is a list of dims, outermost first, separated by spaces:

==========  ==========================================================================================
``h``       a **factor**: one loop.  Equal names are the same loop in all tensors, so a device that has a
            slice of it in one tensor has the matching slice in the others.
``h/2``     the same in 2 consecutive parts: a device has its slice of each of them
``*``       any number of dims, each a factor of its own (called ``d0``, ``d1`` ... from the left).
            All ``*`` of a line are aligned at their last dim and broadcast, as in torch.
``_``       a dim that stays whole
``...``     any number of dims that stay whole
``()``      no dims: a scalar
==========  ==========================================================================================

An argument can also be

==========  ==========================================================================================
``#``       not a tensor: a number, a shape, None ...
``@``       an int or a sequence that names dims of the first tensor; these stay whole.  If it is missing it
            means all dims, or -1 for ``@-1``.
``[x, y]``  a list of tensors; a single ``[x]`` describes every tensor of the list
``+x``      a tensor that is added to the result once (a bias).  It may lack leading dims.
``mask: x`` the argument may also be given by the keyword ``mask``
==========  ==========================================================================================

A tensor argument may always be missing (None) or be a plain number instead; arguments after the last listed one
must hold no tensor.  A result can also be ``*-@``: the dims of ``*`` without those that ``@`` names (or with size
1 there).  A result that begins with ``=`` is equal on all devices, whichever slice a device works on.

Remarks, separated by commas:

==================  ==================================================================================
``sum h f``         these factors are summed: slices give terms of a sum.  ``sum *`` and ``sum @`` likewise.
``by v kernel``     splitting factor ``v`` needs that special kernel; results without ``v`` are whole
``plus 0 1``        linear in arguments 0 and 1 together (the others fixed): may run on terms of a sum
==================  ==================================================================================

A dim of size 1, where other dims with the same factor are larger, is broadcast: every device holds it whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import RuleError

__all__ = [
    "Argument",
    "Declaration",
    "DimsPattern",
    "ListPattern",
    "LiteralPattern",
    "TensorPattern",
    "parse",
]

_STAR_FACTOR = re.compile(r"d\d+")
_FACTOR = re.compile(r"[A-Za-z]\w*")
_WITH_PARTS = re.compile(r"([A-Za-z]\w*)/([1-9]\d*)")


@dataclass(frozen=True)
class TensorPattern:
    """The dims of one tensor: factor names, ``"_"``, ``"*"``, ``"..."`` or ``"*-@"``.

    `is_offset`: written ``+``, added once.  `is_same`: written ``=``, equal on all devices.  `parts` lists the factors
    that have several parts in this tensor, with their numbers.
    """

    dims: tuple[str, ...]
    is_offset: bool = False
    is_same: bool = False
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class LiteralPattern:
    """``#``: an argument that holds no tensor."""


@dataclass(frozen=True)
class DimsPattern:
    """``@``: an argument that names dims; if it is missing it means the dim `default`, or all dims if that is None."""

    default: int | None = None


@dataclass(frozen=True)
class ListPattern:
    """``[x, y]``: a list of tensors."""

    items: tuple[TensorPattern | LiteralPattern, ...]


Pattern = TensorPattern | LiteralPattern | DimsPattern | ListPattern


@dataclass(frozen=True)
class Argument:
    """One argument's pattern, and the keyword by which it may be given ("" if none)."""

    pattern: Pattern
    keyword: str = ""


@dataclass(frozen=True)
class Declaration:
    """A parsed line; `summed` may contain ``"*"`` and ``"@"``, `kernels` are pairs of a factor and its kernel."""

    text: str
    arguments: tuple[Argument, ...]
    results: tuple[TensorPattern, ...]
    summed: frozenset[str]
    kernels: tuple[tuple[str, str], ...]
    linear: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def parse(text: str) -> Declaration:
    """Parse one declaration.

    Raises:
        RuleError: the line is malformed, no result has a factor that isn't summed, or a result has a summed factor.
    """
    head, bar, tail = text.partition("|")
    left, arrow, right = head.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->': write for instance '* h, f h -> * f | sum h'")
    arguments = tuple(_parse_argument(part, text) for part in _split(left))
    results = tuple(_parse_tensor(part, text) for part in _split(right))
    summed: set[str] = set()
    kernels: list[tuple[str, str]] = []
    linear: list[tuple[int, ...]] = []
    for word, *rest in (remark.split() for remark in tail.split(",") if bar and remark.strip()):
        if word == "sum" and rest:
            summed.update(rest)
        elif word == "by" and len(rest) == 2:
            kernels.append((rest[0], rest[1]))
        elif word == "plus" and rest and all(index.isdigit() for index in rest):
            linear.append(tuple(map(int, rest)))
        else:
            raise RuleError(
                f"rule {text!r}: can't read the remark {' '.join([word, *rest])!r}: "
                "it is none of 'sum <factors>', 'by <factor> <kernel>', 'plus <argument numbers>'"
            )
    declaration = Declaration(text, arguments, results, frozenset(summed), tuple(kernels), tuple(linear))
    _check(declaration)
    return declaration


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets; an empty text has no parts."""
    parts = re.split(r",(?![^\[]*\])", text)
    return [part.strip() for part in parts] if text.strip() else []


def _parse_argument(text: str, line: str) -> Argument:
    keyword, colon, rest = text.rpartition(":")
    rest = rest.strip()
    pattern: Pattern
    if rest.startswith("["):
        items = (_parse_argument(item, line).pattern for item in _split(rest[1:-1]))
        pattern = ListPattern(tuple(item for item in items if isinstance(item, TensorPattern | LiteralPattern)))
    elif rest == "#":
        pattern = LiteralPattern()
    elif match := re.fullmatch(r"@(-?\d+)?", rest):
        pattern = DimsPattern(int(match[1]) if match[1] else None)
    else:
        pattern = _parse_tensor(rest, line)
    return Argument(pattern, keyword.strip() if colon else "")


def _parse_tensor(text: str, line: str) -> TensorPattern:
    is_offset, is_same = text.startswith("+"), text.startswith("=")
    words = text[1:].split() if is_offset or is_same else text.split()
    dims = () if words == ["()"] else tuple(words)
    with_parts = [match for match in map(_WITH_PARTS.fullmatch, dims) if match]
    dims = tuple(dim.partition("/")[0] if _WITH_PARTS.fullmatch(dim) else dim for dim in dims)
    invalid = [dim for dim in dims if dim not in {"_", "*", "...", "*-@"} and not _FACTOR.fullmatch(dim)]
    if invalid or not words:
        raise RuleError(f"rule {line!r}: {text!r} is not a list of dims: write factor names, '_', '*', '...' or '()'")
    if sum(dim in {"*", "...", "*-@"} for dim in dims) > 1:
        raise RuleError(
            f"rule {line!r}: {text!r} has more than one of '*' and '...', so it is ambiguous which dims they stand for"
        )
    return TensorPattern(dims, is_offset, is_same, tuple((match[1], int(match[2])) for match in with_parts))


def _check(declaration: Declaration) -> None:
    line = declaration.text
    operand_dims = {dim for argument in declaration.arguments for dim in _dims(argument.pattern)}
    kept = {dim for result in declaration.results if not result.is_same for dim in result.dims}
    kernel_factors = {factor for factor, _ in declaration.kernels}
    named = {dim for dim in operand_dims if _FACTOR.fullmatch(dim)}
    if lost := named - kept - declaration.summed - kernel_factors:
        raise RuleError(
            f"rule {line!r}: {sorted(lost)} vanish: add '| sum {' '.join(sorted(lost))}' if slices give "
            "terms of a sum, or write '_' if the dim can't be split"
        )
    if summed_and_kept := declaration.summed & kept & named:
        raise RuleError(f"rule {line!r}: {sorted(summed_and_kept)} are summed, but a result has them")
    if unknown := (declaration.summed | kernel_factors) - operand_dims - {"@", "*"}:
        raise RuleError(f"rule {line!r}: the remarks name {sorted(unknown)}, which no argument has")
    if "*" in operand_dims and not ({"*", "*-@"} & kept or "*" in declaration.summed):
        raise RuleError(f"rule {line!r}: the dims '*' vanish: add '| sum *', or write '...' if they can't be split")
    if clash := {dim for dim in named if _STAR_FACTOR.fullmatch(dim)} and "*" in operand_dims | kept:
        raise RuleError(f"rule {line!r}: names such as 'd0' are reserved for the dims of '*'; choose others ({clash})")


def _dims(pattern: Pattern) -> tuple[str, ...]:
    if isinstance(pattern, TensorPattern):
        return pattern.dims
    if isinstance(pattern, ListPattern):
        return tuple(dim for item in pattern.items for dim in _dims(item))
    return ()
