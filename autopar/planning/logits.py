"""Whether logits are computed whole or in pieces of tokens: as the user chooses, or as the search prefers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from autopar.errors import ConstraintError, InfeasibleError
from autopar.plan import Plan
from autopar.planning.compiling import is_short_of_memory, search_compiled
from autopar.planning.splitting import noted, splittable
from autopar.program import Program
from autopar.search import SearchRequest
from autopar.search.plan_selection import preferred_s
from autopar.search.settings.constraints import parse_constraints
from autopar.search.settings.request import DeferredGaps, NoMatchError
from autopar.step.prices import Prices
from autopar.step.variants.logits import PIECE_TOKENS, in_pieces, logits_bytes

__all__ = ["search_plan"]

_WORTH_IT = 1.02  # times as fast: less than the error of predictions doesn't pay for logits without gradients
_NOTICEABLE = 0.02  # of a device's memory
# Of a device's memory: if whole logits take as much though all devices share them, plans with them are short of memory,
# and stages leave them to a few devices.  Pieces win then, so they are searched first: what is left of the search with
# whole logits is what can still beat them.
_DECISIVE = 0.05


def search_plan(
    compiled: bool | None,
    find: Callable[[Program, SearchRequest], Plan],
    program: Program,
    prices: Prices,
    request: SearchRequest,
    num_devices: int,
    *,
    seeks_gap: bool = True,
) -> Plan:
    """The plan that `find` gives, with layers compiled (`search_compiled`) and logits made as the user says.

    Unasked, logits are made in pieces only where whole ones take a noticeable part of a device's memory and the plan
    with them is short of it, or nothing fits, and the plan is faster by prediction: who reads logits of pieces gets
    them without gradients.  That searches again.

    The optimality gap is sought of the plan that is taken alone, and not at all without `seeks_gap`: it stays infinite.

    Raises:
        ConstraintError: pieces are demanded, and there is nothing to cut; or outputs are to be whole in every step.
        InfeasibleError: nothing fits.
    """
    gaps = DeferredGaps()
    program = splittable(program, request, num_devices)
    plan = _search_plan(compiled, find, program, prices, replace(request, gaps=gaps), num_devices)
    return noted(gaps.fill_in(plan) if seeks_gap else plan, program)


def _search_plan(
    compiled: bool | None,
    find: Callable[[Program, SearchRequest], Plan],
    program: Program,
    prices: Prices,
    request: SearchRequest,
    num_devices: int,
) -> Plan:
    way = parse_constraints(request.constraints, num_devices).get("logits")
    whole_outputs = request.training.gathers_outputs

    def search(own: Program, compiled: bool | None = compiled, rival_s: float = math.inf) -> Plan:
        limited = replace(request, rival_s=rival_s)
        return search_compiled(compiled, lambda each: find(own, each), own, prices, limited)

    if way not in (None, "whole"):
        made = in_pieces(program, PIECE_TOKENS if way == "pieces" else int(str(way)))
        if not made.piece_tokens:
            raise ConstraintError(
                f"logits={way}: this model has no linear layer whose result goes to a cross entropy, with nothing else "
                "but a logsumexp reading what is between, and a loss to train: leave it out"
            )
        if whole_outputs and made.late:
            raise ConstraintError(
                f"logits={way} and outputs='whole' contradict each other: logits in pieces are whole only when they "
                "are read. Leave one of them out"
            )
        return _noted(search(made), made)
    size = logits_bytes(program) if way is None and not whole_outputs else 0
    allowed = prices.memory_bytes if request.memory_limit_bytes is None else request.memory_limit_bytes
    if size and size / num_devices >= _DECISIVE * allowed:
        return _pieces_first(search, program, compiled)
    try:
        plan = search(program)
    except InfeasibleError:
        if not size:
            raise
        made = in_pieces(program, PIECE_TOKENS)
        return _noted(search(made), made)
    limit = plan.memory_limit_bytes or prices.memory_bytes
    if size / plan.group_size < _NOTICEABLE * limit or not is_short_of_memory(plan):
        return plan
    made = in_pieces(program, PIECE_TOKENS)
    with suppress(InfeasibleError):
        # Whole logits may be what left no room for what compiled layers keep, so the choice is open again.
        in_pieces_plan = search(made, plan.compiled or compiled, preferred_s(plan) / _WORTH_IT)
        gain = preferred_s(plan) / preferred_s(in_pieces_plan)
        if gain >= _WORTH_IT:
            return _noted(in_pieces_plan, made, f"; predicted {gain:.2f}x as fast as with whole logits")
    return plan


def _pieces_first(
    search: Callable[[Program, bool | None, float], Plan], program: Program, compiled: bool | None
) -> Plan:
    """The plan with logits in pieces, or the one with whole logits if that is nearly as fast."""
    made = in_pieces(program, PIECE_TOKENS)
    plan = search(made, compiled, math.inf)
    # What is slower is passed over, so it is not known how much slower whole logits are.
    gain = f"; predicted at least {_WORTH_IT:.2f}x as fast as with whole logits"
    try:
        whole = search(program, plan.compiled or compiled, preferred_s(plan) * _WORTH_IT)
        if preferred_s(whole) < _WORTH_IT * preferred_s(plan):
            return whole
    except NoMatchError:
        pass
    except InfeasibleError:
        gain = ""
    return _noted(plan, made, gain)


def _noted(plan: Plan, program: Program, gain: str = "") -> Plan:
    read = " and ".join(repr(late.result) for late in program.late)
    later = (
        f"; output {read} is computed when it is read, which must be before the optimizer's step, and has no "
        "gradients: 'logits=whole' for those"
    )
    note = f"logits in pieces of {program.piece_tokens} tokens of a device{gain}{later if read else ''}"
    return replace(plan, notes=(*plan.notes, note))
