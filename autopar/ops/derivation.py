"""From a declaration and an op's shapes to its options.

For one mesh axis on factor f:

* a tensor that has f is sliced: ``S(dim)``;
* an operand without f: ``B`` (its gradients are terms of a sum, one from each slice), or ``P`` if it is
  added once and f is summed (terms that add up to one bias), or ``R`` if every result comes out whole or
  no gradient can flow;
* a result without f: ``P`` if f is summed, ``R`` if a special kernel makes it whole, else f can't be split.

The slices must match, so their number divides the greatest common divisor of the sizes of the dims that
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
    """One operand or result with its shape and, per dim, the factor it carries (or "_")."""

    type: TensorType
    factors: tuple[str, ...]
    is_offset: bool = False
    is_same: bool = False
    argument: int = -1
    parts: tuple[tuple[str, int], ...] = ()

    def num_parts(self, factor: str) -> int:
        """Into how many parts of the dim that has it each slice of the factor falls."""
        return dict(self.parts).get(factor, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape


@dataclass(frozen=True)
class _Bound:
    """A declaration laid over the tensors of one op."""

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
    """The options of `op` by the declaration `text`; None if the declaration doesn't fit this call.

    `creates` says that sizes are among the arguments and will be made local, so that a factor may be in
    results only. `collectives` gives what each special kernel communicates.

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
    result = _match_arguments(declaration.arguments, op)
    if result is None or len(result) != len(operand_types) or len(declaration.results) < len(result_types):
        return None
    shapes = [kind.shape for kind in operand_types]
    results = declaration.results[: len(result_types)]
    dims = _dims_argument(declaration.arguments, op, len(shapes[0]) if shapes else 0)
    rank = max(
        [_star_rank(pattern, len(shape)) for (_, pattern), shape in zip(result, shapes, strict=True)]
        + [_star_rank(pattern, len(kind.shape)) for pattern, kind in zip(results, result_types, strict=True)],
        default=0,
    )
    operands: list[_Tensor] = []
    for (index, pattern), kind in zip(result, operand_types, strict=True):
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
    """(argument position, pattern) for each tensor operand in order, or None if a tensor is in a wrong
    place.
    """
    positions = {argument.keyword: index for index, argument in enumerate(arguments) if argument.keyword}
    given: list[tuple[int, Arg]] = list(enumerate(op.args))
    given += [(positions.get(name, len(arguments)), arg) for name, arg in op.kwargs]
    results: list[tuple[int, TensorPattern]] = []
    for index, arg in given:
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
                results.append((index, item))
            elif _has_ref(part):
                return None
    return results


def _has_ref(arg: Arg) -> bool:
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(map(_has_ref, arg)))


def _dims_argument(arguments: tuple[Argument, ...], op: Op, rank: int) -> tuple[int, ...]:
    for index, argument in enumerate(arguments):
        if isinstance(argument.pattern, DimsPattern):
            given = op.args[index] if index < len(op.args) else dict(op.kwargs).get("dim", dict(op.kwargs).get("dims"))
            return named_dims(argument.pattern.default if given is None else given, rank)
    return ()


def named_dims(arg: Arg, rank: int) -> tuple[int, ...]:
    """The dims, 0 <= dim < `rank`, that an argument such as ``-1``, ``(1, 2)`` or None (all) names."""
    if rank == 0:
        return ()
    if arg is None or arg == ():
        return tuple(range(rank))
    parts = arg if isinstance(arg, tuple) else (arg,)
    return tuple(part % rank for part in parts if isinstance(part, int))


def _star_rank(pattern: TensorPattern, rank: int) -> int:
    return rank - len(pattern.dims) + 1 if "*" in pattern.dims else 0


def _expand(pattern: TensorPattern, rank: int, star_rank: int, named: frozenset[str]) -> tuple[str, ...] | None:
    """`pattern` as one factor (or "_") per dim of a tensor with `rank` dims; None if it has no such rank."""
    dims = pattern.dims[-rank:] if pattern.is_offset and rank < len(pattern.dims) else pattern.dims
    dims = dims if rank else ()
    open_at = [index for index, dim in enumerate(dims) if dim in {"*", "...", "*-@"}]
    if not open_at:
        return dims if len(dims) == rank else None
    at, count = open_at[0], rank - len(dims) + 1
    if count < 0:
        return None
    block: tuple[str, ...] = (_WHOLE,) * count
    if dims[at] == "*":
        block = tuple(f"d{index}" for index in range(star_rank - count, star_rank))
    elif dims[at] == "*-@":
        stars = [f"d{index}" for index in range(star_rank)]
        left = [star for star in stars if star not in named]
        block = tuple(_WHOLE if star in named else star for star in stars) if count == star_rank else tuple(left)
        if len(block) != count:
            return None
    return dims[:at] + block + dims[at + 1 :]


# ---------------------------------------------------------------- factors to options


def _factors(bound: _Bound) -> list[str]:
    seen = dict.fromkeys(factor for tensor in bound.operands + bound.results for factor in tensor.factors)
    return [factor for factor in seen if factor != _WHOLE and factor not in bound.blocked]


def _carrying_dims(bound: _Bound, factor: str) -> list[tuple[int, ...]]:
    """Per operand, then per result, the dims that carry `factor` (broadcast ones don't)."""
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
            t.shape[dim] // t.num_parts(factor)
            for t, own in zip(bound.operands + bound.results, dims, strict=True)
            for dim in own
        )
    )
    if extent <= 1 or any(len(own) > 1 for own in dims) or (not creates and not any(dims[:num_operands])):
        return None
    results: list[Placement] = []
    for tensor, own in zip(bound.results, dims[num_operands:], strict=True):
        if own:
            results.append(shard(own[0], tensor.num_parts(factor)))
        elif factor in bound.summed:
            results.append(PARTIAL)
        elif kernel or tensor.is_same:
            results.append(REPLICATE)
        else:
            return None
    is_whole = all(placement == REPLICATE for placement in results)
    operands: list[Placement] = []
    for tensor, own in zip(bound.operands, dims[:num_operands], strict=True):
        if own:
            operands.append(shard(own[0], tensor.num_parts(factor)))
        elif tensor.is_offset and factor in bound.summed:
            operands.append(PARTIAL)
        else:
            operands.append(REPLICATE if is_whole or not tensor.type.is_floating else BROADCAST)
    return Option(factor, tuple(operands), tuple(results), extent, kernel, collectives)


def _linear_options(text: str, op: Op, bound: _Bound, operand_types: tuple[TensorType, ...]) -> list[Option]:
    """``"+"`` where all tensors are terms, ``"+0"`` where argument 0 is and the others are whole."""
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
