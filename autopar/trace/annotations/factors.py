"""Attaching to each op its factor options and what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autopar.ops import RuleMatch, family_of, options_for
from autopar.ops.derivation import whole_options
from autopar.program import Op, Ref, TensorType
from autopar.trace.annotations.discover import discover_options, has_linear_backward
from autopar.trace.annotations.saves import SavesMeter
from autopar.trace.gradients import differentiable
from autopar.trace.graph import Graph
from autopar.trace.torch_functions.custom_functions import decides_on_values, is_custom_function

__all__ = ["attach_factors"]

_Call = tuple[str, str, tuple[TensorType, ...], tuple[TensorType, ...]]  # target, arguments, operands, results


def attach_factors(graph: Graph) -> Graph:
    """Give every op its options and saves; ops that can't be split get a note."""
    live = differentiable(graph)
    meter = SavesMeter()
    unruled: dict[str, tuple[str, str]] = {}
    matches: dict[_Call, tuple[RuleMatch, str]] = {}
    facts: dict[object, dict[str, Any]] = {}

    def find(op: Op, call: _Call, needs: tuple[bool, ...]) -> dict[str, Any]:
        _, _, operands, results = call
        if call not in matches:
            matches[call] = _match(op, operands, results)
        match, source = matches[call]
        kept, plain = meter.saved(op, operands, results, needs), meter.saved_by_products(op, operands, needs)
        options = tuple(option.with_gradients_of(needs) for option in match.options)
        return {
            "options": options, "rule_source": source, "size_args": match.size_args, "is_view": match.is_view,
            "is_random": family_of(op.target).draws(op), "saves": kept.saves, "saved_extra_bytes": kept.extra_bytes,
            "temporary_bytes": tuple(kept.temporaries), "plain_saves": plain.saves,
            "plain_saved_extra_bytes": plain.extra_bytes, "plain_temporary_bytes": tuple(plain.temporaries),
        }  # fmt: skip

    def step(op: Op) -> list[Op]:
        operands = tuple(graph.types[name] for name in op.operands)
        results = tuple(graph.types[name] for name in op.results)
        call = (op.target, _shape_of_call(op), operands, results)
        kept = any(name in live for name in op.results)
        needs = tuple(kept and name in live for name in op.operands)
        if (call, needs) not in facts:
            facts[call, needs] = find(op, call, needs)
        made = replace(op, **facts[call, needs])
        if made.rule_source != "rule":
            unruled.setdefault(op.target, (op.source, made.rule_source))
        return [made]

    made = graph.rewrite(step)
    notes = tuple(note for target, (where, source) in unruled.items() for note in _notes(target, where, source))
    return replace(made, notes=made.notes + notes)


def _notes(target: str, where: str, source: str) -> Iterator[str]:
    if is_custom_function(target):
        how = "splits as running it on slices showed" if source == "discovered" else "runs whole on every device"
        yield f"{target} (at {where}) is a custom autograd.Function: it is one op with its own backward, and {how}"
    elif source == "whole":
        yield (
            f"{target} (at {where}) has no factor rule and none was discovered: it runs whole on every device; "
            "autopar.register_rule can teach one"
        )


def _shape_of_call(op: Op) -> str:
    """The arguments with the operands' names left out, but the pattern of equal ones kept."""
    order: dict[str, str] = {}
    for name in op.operands:
        order.setdefault(name, f"#{len(order)}")
    return repr(op.mapped_args(lambda arg: Ref(order[arg.name]) if isinstance(arg, Ref) else arg))


def _match(op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> tuple[RuleMatch, str]:
    result = options_for(op, operands, results)
    if result is not None:
        return result, "rule"
    discovered = () if decides_on_values(op.target) else discover_options(op, operands, results)
    options = discovered or whole_options(len(operands), len(results))
    if is_custom_function(op.target) and not has_linear_backward(op, operands, results):
        # Terms of a gradient must be added up before such a backward: it runs whole as R only.
        whole = replace(options[0], factor="~")
        options = tuple(whole if option.factor == "~" else option for option in options)
    return RuleMatch(options), "discovered" if discovered else "whole"
