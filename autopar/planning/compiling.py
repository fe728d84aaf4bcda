"""Whether layers are compiled: as the user chooses, or as the search predicts to be faster."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from torch.utils.cpp_extension import get_cxx_compiler

from autopar.errors import CompilerError, InfeasibleError
from autopar.plan import Plan
from autopar.program import Program
from autopar.search import SearchRequest
from autopar.search.plan_selection import preferred_s
from autopar.step.prices import Prices
from autopar.step.pricing import StepPricing

__all__ = ["check_compiler", "is_short_of_memory", "read_compile", "search_compiled"]

_WORTH_IT = 1.01  # times as fast; for less nobody waits for a compiler
_EAGER_CHOICES = ("recompute=selective",)
_NEARLY_FULL = 0.85  # of the memory limit: searches stop 5 to 10 % short of it, by the error of predictions
_PROGRAM_S, _OP_S = 2.0, 0.2
"""Estimated seconds of compiling: for each layer program, and for each of its ops, forward and backward."""


def read_compile(given: object) -> bool | None:
    """The argument `compile`.

    Raises:
        CompilerError: it is something else.
    """
    if given is not None and not isinstance(given, bool):
        raise CompilerError(f"compile={given!r:.40}: pass True, False, or None to let the search choose on GPUs")
    return given


def check_compiler(compiled: bool | None, device: str) -> bool | None:
    """`compiled` where layers run on devices of this type (``"cuda"``, ``"cpu"``); without a compiler None is False.

    Raises:
        CompilerError: they are to be compiled, and nothing is there that could.
    """
    if compiled is False or not (missing := _missing_compiler(device)):
        return compiled
    if compiled:
        raise CompilerError(
            f"compile=True, but {missing}, which torch.compile needs for {device}: install it, or pass compile=False"
        )
    return False


def _missing_compiler(device: str) -> str:
    if device != "cpu":
        return "" if importlib.util.find_spec("triton") else "the package triton is not installed"
    names = dict.fromkeys((get_cxx_compiler(), "g++", "clang++"))
    return "" if any(map(shutil.which, names)) else f"there is no C++ compiler ({', '.join(names)})"


def search_compiled(
    compiled: bool | None,
    find: Callable[[SearchRequest], Plan],
    program: Program,
    prices: Prices,
    request: SearchRequest,
) -> Plan:
    """The plan that `find` gives for `request`, with layers compiled as the user chooses; with None on GPUs if that is
    faster.

    Compiled layers may keep more for backward than eager ones that recompute cheap ops.  So where the compiled plan is
    short of memory, the eager one is searched for as well, which doubles the time.

    Notes say what compiling gains over running the same decisions eagerly, and about how long it takes.
    """
    is_open = compiled is None and prices.device != "cpu"
    if not (compiled or is_open):
        return find(_running(request, compiled=False))
    try:
        plan = find(_running(request, compiled=True))
    except InfeasibleError:
        if not is_open:
            raise
        return find(_running(request, compiled=False))
    seconds = [
        StepPricing(program, replace(plan.decisions, compiled=way), prices, request.training, request.schedules).step_s
        for way in (False, True)
    ]
    gain = seconds[0] / seconds[1]  # by the same prices, also where those of the plan are of layers that were timed
    if is_open and (gain < _WORTH_IT or is_short_of_memory(plan)):
        with suppress(InfeasibleError):  # then the compiled plan is all that fits
            rival_s = min(request.rival_s, preferred_s(plan) * _WORTH_IT)
            eager = find(replace(_running(request, compiled=False), rival_s=rival_s))
            if preferred_s(eager) < preferred_s(plan) * _WORTH_IT:
                return eager
    return replace(plan, notes=(*plan.notes, _note(plan, program, gain), *_left_to_the_compiler(request)))


def _left_to_the_compiler(request: SearchRequest) -> tuple[str, ...]:
    """A note, where constraints name what only eager layers do."""
    named = [text for text in request.constraints if text.replace(" ", "").endswith(_EAGER_CHOICES)]
    return (f"{'; '.join(named)}: in compiled layers the compiler chooses which ops run again",) if named else ()


def is_short_of_memory(plan: Plan) -> bool:
    """Whether another way to keep activations might be better because it uses less memory."""
    recomputes = any(strategy.recompute != "none" for strategy in plan.strategies)
    return recomputes or plan.peak_memory_bytes > _NEARLY_FULL * (plan.memory_limit_bytes or math.inf)


def _running(request: SearchRequest, *, compiled: bool) -> SearchRequest:
    return replace(request, training=request.training.running(compiled=compiled))


def _note(plan: Plan, program: Program, gain: float) -> str:
    ops = [len(program.kinds[planned.kind].ops) for planned in {(p.kind, p.strategy): p for p in plan.layers}.values()]
    compile_s = sum(_PROGRAM_S + _OP_S * count for count in ops)
    return (
        f"compiled layers: predicted to run {gain:.2f}x as fast as eager ones; compiling takes about "
        f"{compile_s:.0f} s once, for {len(ops)} layer programs"
    )
