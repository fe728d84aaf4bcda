"""Edit a plan from the command line: ``--edit plan.json --set "model.layers.*: recompute=full"``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autopar.errors import QuestionError
from autopar.placement import Layout
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program
from autopar.search.layer.layout_choices import storage_layout
from autopar.step.activation_policies import policy_names
from autopar.step.layer.local_layer import place
from autopar.step.layer.planned_layers import own_strategy

__all__ = ["Edit", "apply_edits", "parse_edit"]

_HOW = (
    "write LAYERS: recompute={ways}, LAYERS: zero=0|1|2|3 or LAYERS: like=LAYER, such as "
    '--set "model.layers.*: recompute=full"; without "LAYERS:" it is for all layers'
)


@dataclass(frozen=True)
class Edit:
    """What the layers that match `pattern` are to do: `key` = `value`; `text` is the option as typed."""

    text: str
    pattern: str
    key: str
    value: str


def parse_edit(text: str) -> Edit:
    """Read ``"model.layers.*: recompute=full"``.

    Raises:
        QuestionError: it has another form.
    """
    match = re.fullmatch(r"\s*(?:([^:=]+?)\s*:)?\s*(\w+)\s*=\s*(\S+)\s*", text)
    choices = {"recompute": policy_names(), "zero": ("0", "1", "2", "3"), "like": ()}
    if match is None or match[2] not in choices or (choices[match[2]] and match[3] not in choices[match[2]]):
        raise QuestionError(f"--set {text!r}: {_HOW.format(ways='|'.join(policy_names()))}")
    return Edit(text, match[1] or "*", match[2], match[3])


def apply_edits(plan: Plan, program: Program, edits: Iterable[Edit]) -> Plan:
    """`plan` with the edits, one after the other; nothing is predicted of it.

    Layers keep their mesh and the factors of their ops.  Another ZeRO level changes how parameters are stored:
    from 0 to more they are sharded over all axes on which compute reads them whole, and back.

    Args:
        plan: that fits `program`.
        program: the traced model.
        edits: see `parse_edit`.

    Raises:
        QuestionError: an edit matches no layer, or names one to be like that is of another kind.
    """
    for edit in edits:
        plan = _apply(plan, program, edit)
    return plan


def _apply(plan: Plan, program: Program, edit: Edit) -> Plan:
    numbers = [number for number, layer in enumerate(plan.layers) if fnmatchcase(layer.name, edit.pattern)]
    if not numbers:
        names = [layer.name for layer in plan.layers]
        known = ", ".join(difflib.get_close_matches(edit.pattern, names, 3, 0.4) or names[:3])
        raise QuestionError(f"--set {edit.text!r}: no layer is called {edit.pattern!r}; there are {known} ...")
    strategies, layers = list(plan.strategies), list(plan.layers)
    for number in numbers:
        old = layers[number].strategy
        new = _changed(plan, program, number, edit)
        if new not in strategies:
            strategies.append(new)
        index = old if strategies[old] == new else strategies.index(new)
        layers[number] = replace(layers[number], strategy=index)
    used = sorted({layer.strategy for layer in layers})
    return plan.with_decisions(
        strategies=tuple(strategies[index] for index in used),
        layers=tuple(replace(layer, strategy=used.index(layer.strategy)) for layer in layers),
    )


def _changed(plan: Plan, program: Program, number: int, edit: Edit) -> LayerStrategy:
    layer = program.layers[number]
    strategy = plan.strategies[plan.layers[number].strategy]
    if edit.key == "recompute":
        return replace(strategy, recompute=edit.value)
    if edit.key == "like":
        return _strategy_of(plan, number, edit)
    level = int(edit.value)
    if (level > 0) != (strategy.zero > 0):
        strategy = replace(strategy, storage=_storage(plan, program, layer, strategy, is_cut=level > 0))
    return replace(strategy, zero=level)


def _strategy_of(plan: Plan, number: int, edit: Edit) -> LayerStrategy:
    """The strategy of the layer that `edit` names."""
    named = [layer for layer in plan.layers if layer.name == edit.value]
    same_kind = [layer.name for layer in plan.layers if layer.kind == plan.layers[number].kind]
    if not named or named[0].kind != plan.layers[number].kind:
        raise QuestionError(
            f"--set {edit.text!r}: {plan.layers[number].name} can be like layers of its kind only: "
            f"{', '.join(same_kind[:4])}{' ...' if len(same_kind) > 4 else ''}"
        )
    return plan.strategies[named[0].strategy]


def _storage(
    plan: Plan, program: Program, layer: Layer, strategy: LayerStrategy, *, is_cut: bool
) -> tuple[Layout, ...]:
    """How the layer's parameters are stored if they are sharded over all axes that read them whole, or over none."""
    own = own_strategy(program, layer, strategy)
    placed = place(program, layer, own, plan.num_microbatches)
    axes = tuple(range(len(strategy.mesh))) if is_cut else ()
    shared = {name for name, _ in plan.shared_storage}
    result = list(strategy.storage)
    for position, name in enumerate(layer.state):
        flow = placed.flows[name]
        if flow.is_parameter and name in placed.copies and program.parameters.get(name) not in shared:
            result[position] = storage_layout(placed.copies[name], flow.value.type, strategy.mesh, axes)
    return tuple(result)
