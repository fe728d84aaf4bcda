"""Derives the options of an op from a declaration and the op's shapes.

For one mesh axis on factor f:

* a tensor that has f is sliced: ``S(dim)``;
* an operand without f is ``B`` (its gradients are terms of a sum, one from each slice), or ``P`` if it is
  added once and f is summed (terms that add up to one bias), or ``R`` if every result is whole or
  no gradient can flow;
* a result without f is ``P`` if f is summed, ``R`` if a special kernel makes it whole; else f can't be split.

The slices must match, so their number divides the greatest common divisor of the sizes of all dims that
have f, or of their parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.ops.declaration import Argument, DimsPattern, ListPattern, LiteralPattern, TensorPattern, parse
from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Placement, shard
from autopar.program import Arg, KernelCollective, Op, Option, Ref, TensorType

__all__ = ["derive_options", "named_dims", "whole_options"]

_WHOLE = "_"


@dataclass(frozen=True)
class _Tensor:
    """One operand or result with its type and, for each dim, its factor (or "_")."""

    type: TensorType
    factors: tuple[str, ...]
    is_offset: bool = False
    is_same: bool = False
    argument: int = -1
    parts: tuple[tuple[str, int], ...] = ()

    def num_parts(self, factor: str) -> int:
        """The number of parts of the dim that has this factor."""
        return dict(self.parts).get(factor, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape


@dataclass(frozen=True)
class _Bound:
    """A declaration matched with the tensors of one op."""

    operands: tuple[_Tensor, ...]
    results: tuple[_Tensor, ...]
    summed: frozenset[str]
    blocked: frozenset[str]


def whole_options(num_operands: int, num_results: int) -> tuple[Option, Option]:
    """The two options that every op has: the whole op on every device, ``"-"`` and ``"~"``."""
    return (
        Option("-", (REPLICATE,) * num_operands, (REPLICATE,) * num_results),
        Option("~", (BROADCAST,) * num_operands, (BROADCAST,) * num_results),
    )


def derive_options(
    text: str,
    op: Op,
    operand_types: tuple[TensorType, ...],
    result_types: tuple[TensorType, ...],
    *,
    creates: bool = False,
    collectives: Mapping[str, tuple[KernelCollective, ...]] | None = None,
) -> tuple[Option, ...] | None:
    """Derive the options of `op` from the declaration `text`; None if the declaration doesn't fit this call.

    With `creates`, sizes are among the arguments and will be made local, so that a factor may occur in
    results only.  `collectives` maps each special kernel to its collectives.

    Raises:
        RuleError: `text` is malformed.
    """
    bound = _bind(text, op, operand_types, result_types)
    if bound is None:
        return None
    kernels = dict(parse(text).kernels)
    options = list(whole_options(len(operand_types), len(result_types)))
    for factor in _factors(bound):
        kernel = kernels.get(factor, "")
        option = _factor_option(bound, factor, kernel, (collectives or {}).get(kernel, ()), creates)
        if option is not None:
            options.append(option)
    if all(kind.is_floating for kind in result_types):
        options += _linear_options(text, op, bound, operand_types)
    return tuple(options)


# ---------------------------------------------------------------- binding patterns to tensors


def _bind(
    text: str, op: Op, operand_types: tuple[TensorType, ...], result_types: tuple[TensorType, ...]
) -> _Bound | None:
    declaration = parse(text)
    matches = _match_arguments(declaration.arguments, op)
    if matches is None or len(matches) != len(operand_types) or len(declaration.results) < len(result_types):
        return None
    shapes = [kind.shape for kind in operand_types]
    results = declaration.results[: len(result_types)]
    dims = _dims_argument(declaration.arguments, op, len(shapes[0]) if shapes else 0)
    rank = max(
        [_star_rank(pattern, len(shape)) for (_, pattern), shape in zip(matches, shapes, strict=True)]
        + [_star_rank(pattern, len(kind.shape)) for pattern, kind in zip(results, result_types, strict=True)],
        default=0,
    )
    operands: list[_Tensor] = []
    for (index, pattern), kind in zip(matches, operand_types, strict=True):
        factors = _expand(pattern, len(kind.shape), rank, frozenset())
        if factors is None:
            return None
        operands.append(_Tensor(kind, factors, pattern.is_offset, False, index, pattern.parts))
    named = frozenset(operands[0].factors[dim] for dim in dims) if operands else frozenset[str]()
    outputs: list[_Tensor] = []
    for pattern, kind in zip(results, result_types, strict=True):
        factors = _expand(pattern, len(kind.shape), rank, named)
        if factors is None:
            return None
        outputs.append(_Tensor(kind, factors, False, pattern.is_same, parts=pattern.parts))
    summed = set(declaration.summed)
    if "*" in summed:
        summed |= {f"d{index}" for index in range(rank)}
    if "@" in summed:
        summed |= named
    return _Bound(tuple(operands), tuple(outputs), frozenset(summed), frozenset() if "@" in summed else named)


def _match_arguments(arguments: tuple[Argument, ...], op: Op) -> list[tuple[int, TensorPattern]] | None:
    """(argument position, pattern) for each tensor operand in order, or None if the declaration allows no tensor where
    the call has one.
    """
    positions = {argument.keyword: index for index, argument in enumerate(arguments) if argument.keyword}
    numbered_args: list[tuple[int, Arg]] = list(enumerate(op.args))
    numbered_args += [(positions.get(name, len(arguments)), arg) for name, arg in op.kwargs]
    matches: list[tuple[int, TensorPattern]] = []
    for index, arg in numbered_args:
        pattern = arguments[index].pattern if index < len(arguments) else LiteralPattern()
        if isinstance(pattern, ListPattern) and isinstance(arg, tuple):
            items = pattern.items * len(arg) if len(pattern.items) == 1 else pattern.items
            if len(items) != len(arg):
                return None
            pairs = list(zip(items, arg, strict=True))
        else:
            pairs = [(pattern, arg)]
        for item, part in pairs:
            if isinstance(part, Ref) and isinstance(item, TensorPattern):
                matches.append((index, item))
            elif _has_ref(part):
                return None
    return matches


def _has_ref(arg: Arg) -> bool:
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(map(_has_ref, arg)))


def _dims_argument(arguments: tuple[Argument, ...], op: Op, rank: int) -> tuple[int, ...]:
    for index, argument in enumerate(arguments):
        if isinstance(argument.pattern, DimsPattern):
            dims = op.args[index] if index < len(op.args) else dict(op.kwargs).get("dim", dict(op.kwargs).get("dims"))
            return named_dims(argument.pattern.default if dims is None else dims, rank)
    return ()


def named_dims(arg: Arg, rank: int) -> tuple[int, ...]:
    """The dims, 0 <= dim < `rank`, of an argument such as ``-1``, ``(1, 2)`` or None (all)."""
    if rank == 0:
        return ()
    if arg is None or arg == ():
        return tuple(range(rank))
    parts = arg if isinstance(arg, tuple) else (arg,)
    return tuple(part % rank for part in parts if isinstance(part, int))


def _star_rank(pattern: TensorPattern, rank: int) -> int:
    return rank - len(pattern.dims) + 1 if "*" in pattern.dims else 0


def _expand(pattern: TensorPattern, rank: int, star_rank: int, named: frozenset[str]) -> tuple[str, ...] | None:
    """`pattern` as one factor (or "_") for each dim of a tensor of `rank` dims; None if it doesn't fit that rank."""
    dims = pattern.dims[-rank:] if pattern.is_offset and rank < len(pattern.dims) else pattern.dims
    dims = dims if rank else ()
    variadic = [index for index, dim in enumerate(dims) if dim in {"*", "...", "*-@"}]
    if not variadic:
        return dims if len(dims) == rank else None
    at, count = variadic[0], rank - len(dims) + 1
    if count < 0:
        return None
    block: tuple[str, ...] = (_WHOLE,) * count
    if dims[at] == "*":
        block = tuple(f"d{index}" for index in range(star_rank - count, star_rank))
    elif dims[at] == "*-@":
        stars = [f"d{index}" for index in range(star_rank)]
        remaining = [star for star in stars if star not in named]
        block = tuple(_WHOLE if star in named else star for star in stars) if count == star_rank else tuple(remaining)
        if len(block) != count:
            return None
    return dims[:at] + block + dims[at + 1 :]


# ---------------------------------------------------------------- factors to options


def _factors(bound: _Bound) -> list[str]:
    factors = dict.fromkeys(factor for tensor in bound.operands + bound.results for factor in tensor.factors)
    return [factor for factor in factors if factor != _WHOLE and factor not in bound.blocked]


def _carrying_dims(bound: _Bound, factor: str) -> list[tuple[int, ...]]:
    """For each operand, then each result, the dims that have `factor` and aren't broadcast."""
    tensors = bound.operands + bound.results
    largest = max(
        size for tensor in tensors for size, name in zip(tensor.shape, tensor.factors, strict=True) if name == factor
    )
    return [
        tuple(
            dim
            for dim, (size, name) in enumerate(zip(tensor.shape, tensor.factors, strict=True))
            if name == factor and (size != 1 or largest == 1)
        )
        for tensor in tensors
    ]


def _factor_option(
    bound: _Bound, factor: str, kernel: str, collectives: tuple[KernelCollective, ...], creates: bool
) -> Option | None:
    dims = _carrying_dims(bound, factor)
    num_operands = len(bound.operands)
    extent = math.gcd(
        *(
            tensor.shape[dim] // tensor.num_parts(factor)
            for tensor, tensor_dims in zip(bound.operands + bound.results, dims, strict=True)
            for dim in tensor_dims
        )
    )
    has_repeated = any(len(tensor_dims) > 1 for tensor_dims in dims)
    if extent <= 1 or has_repeated or (not creates and not any(dims[:num_operands])):
        return None
    results: list[Placement] = []
    for tensor, tensor_dims in zip(bound.results, dims[num_operands:], strict=True):
        if tensor_dims:
            results.append(shard(tensor_dims[0], tensor.num_parts(factor)))
        elif factor in bound.summed:
            results.append(PARTIAL)
        elif kernel or tensor.is_same:
            results.append(REPLICATE)
        else:
            return None
    is_whole = all(placement == REPLICATE for placement in results)
    operands: list[Placement] = []
    for tensor, tensor_dims in zip(bound.operands, dims[:num_operands], strict=True):
        if tensor_dims:
            operands.append(shard(tensor_dims[0], tensor.num_parts(factor)))
        elif tensor.is_offset and factor in bound.summed:
            operands.append(PARTIAL)
        else:
            operands.append(REPLICATE if is_whole or not tensor.type.is_floating else BROADCAST)
    return Option(factor, tuple(operands), tuple(results), extent, kernel, collectives)


def _linear_options(text: str, op: Op, bound: _Bound, operand_types: tuple[TensorType, ...]) -> list[Option]:
    """The options on terms of a sum: ``"+"`` if all tensors are terms, ``"+0"`` if only argument 0 is."""
    options: list[Option] = []
    for positions in parse(text).linear:
        terms = [operand.argument in positions for operand in bound.operands]
        is_present = all(any(operand.argument == index for operand in bound.operands) for index in positions)
        if not is_present or not all(
            kind.is_floating for kind, is_term in zip(operand_types, terms, strict=True) if is_term
        ):
            continue
        placements = tuple(
            PARTIAL if is_term or operand.is_offset else BROADCAST
            for is_term, operand in zip(terms, bound.operands, strict=True)
        )
        name = "+" if all(terms) else "+" + "".join(map(str, positions))
        options.append(Option(name, placements, (PARTIAL,) * len(bound.results)))
    if len({option.factor for option in options}) != len(options):
        raise RuleError(f"rule {text!r} for {op.target}: two 'plus' remarks name the same arguments")
    return options
