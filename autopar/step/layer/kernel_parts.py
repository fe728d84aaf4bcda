"""Which ops compute while a kernel's collectives are under way, and how many seconds they hide.

The kernel that sends tokens to their experts runs in three parts: tokens leave; experts compute those that arrive, and
their sums leave; the sums arrive.  What neither leads to the op nor follows from it, such as an expert that all tokens
share, can run in the two pauses between them.  Forward, tokens travel during the first pause and sums during the
second; backward, gradients of the sums travel during the second, and then those of the tokens during the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from autopar.ops import family_of
from autopar.placement import LOCAL
from autopar.step.layer.instructions import InParts, InPieces, Instruction, LocalProgram, Reshard, RunOp, Single
from autopar.step.prices import CollectiveCall, Prices

__all__ = ["hidden_in_pauses_s", "in_parts"]


def in_parts(local: LocalProgram) -> LocalProgram:
    """The local program with kernels in parts, as far as others have products to compute in their pauses."""
    for place, each in enumerate(local.instructions):
        if isinstance(each, RunOp) and _has_parts(each):
            local = _in_parts(local, place, each)
    return local


def _has_parts(run: RunOp) -> bool:
    kernels = family_of(run.op.target).kernels
    named = (kernels.get(option.kernel) for option in run.state.options if option.collectives)
    return any(kernel is not None and kernel.parts for kernel in named)


def _in_parts(local: LocalProgram, place: int, run: RunOp) -> LocalProgram:
    before, behind = local.instructions[:place], local.instructions[place + 1 :]
    needed, made = set(run.operands), set(run.results)
    for each in reversed(before):
        if needed & _makes(each):
            needed |= _reads(each)
    for each in behind:
        if made & _reads(each):
            made |= _makes(each)
    early = _movable_before(before, needed)
    late = _movable_behind(behind, made)
    moved = [*(each for each in before if id(each) in early), *(each for each in behind if id(each) in late)]
    if not any(map(_flops, moved)):
        return local
    return replace(
        local,
        instructions=(
            *(each for each in before if id(each) not in early),
            InParts(run, _halves([each for each in moved if not isinstance(each, InPieces | InParts)])),
            *(each for each in behind if id(each) not in late),
        ),
    )


def _movable_before(before: Sequence[Instruction], needed: Set[int]) -> set[int]:
    """Products without collectives that the op does not need, and what follows from them alone, by id."""
    following: set[int] = set()
    movable: set[int] = set()
    for each in before:
        if needed.isdisjoint(_makes(each)) and _is_alone(each) and (_flops(each) or following & _reads(each)):
            movable.add(id(each))
            following |= _makes(each)
    stays: set[int] = set()  # what is read by something that stays ahead of the op
    for each in reversed(before):
        if id(each) not in movable or stays & _makes(each):
            movable.discard(id(each))
            stays |= _reads(each)
    return movable


def _movable_behind(behind: Sequence[Instruction], made: Set[int]) -> set[int]:
    """What neither has a collective nor follows from the op, or from something that has one, by id."""
    stays, movable = set(made), set[int]()
    for each in behind:
        if stays & _reads(each) or not _is_alone(each):
            stays |= _makes(each)
        else:
            movable.add(id(each))
    return movable


def _halves(moved: Sequence[Single]) -> tuple[tuple[Single, ...], tuple[Single, ...]]:
    """Cut behind a product, so that both have as equal FLOPs as possible: as many bytes travel in one as in the other.

    Elementwise ops behind the product are in the second one with the product that reads them, so that a compiler can
    compute them again in backward.
    """
    flops = [_flops(each) for each in moved]
    cuts = [number for number in range(len(moved) + 1) if not number or flops[number - 1]]
    best = min(reversed(cuts), key=lambda cut: abs(sum(flops[:cut]) - sum(flops[cut:])))
    return tuple(moved[:best]), tuple(moved[best:])


def _singles(each: Instruction) -> Iterable[Single]:
    return each.singles if isinstance(each, InPieces | InParts) else (each,)


def _reads(each: Instruction) -> set[int]:
    return {
        index for one in _singles(each) for index in (one.operands if isinstance(one, RunOp) else (one.source,))
    }  # fmt: skip


def _makes(each: Instruction) -> set[int]:
    return {index for one in _singles(each) for index in (one.results if isinstance(one, RunOp) else (one.target,))}


def _is_alone(each: Instruction) -> bool:
    """Whether it runs without communicating, forward and backward."""
    if isinstance(each, InPieces | InParts):
        return False
    if isinstance(each, Reshard):
        return all({step.forward, step.backward} <= LOCAL for step in each.steps)
    return not (isinstance(each, RunOp) and any(option.collectives for option in each.state.options))


def _flops(each: Instruction) -> float:
    if not isinstance(each, RunOp):
        return 0.0
    state = each.state
    return family_of(each.op.target).count_work(each.op, state.work_types, state.result_types).flops


def hidden_in_pauses_s(
    calls: Sequence[tuple[CollectiveCall, int]], pauses_s: Mapping[tuple[str, int], float], prices: Prices
) -> list[float]:
    """Seconds of each of the kernel's calls, one time, that overlap with what is computed in its pauses.

    Args:
        calls: from `autopar.step.layer.op_states.kernel_calls`, and how often each runs.
        pauses_s: seconds of compute by phase and number of the pause.
        prices: of the cluster.
    """
    free_s = [
        (1.0 - prices.interference(call.kind, call.axis)) * prices.collective_s(call.kind, call.axis, call.num_bytes)
        if call.pause
        else 0.0
        for call, _ in calls
    ]
    shares: dict[tuple[str, int], float] = {}
    for key, pause_s in pauses_s.items():
        total_s = sum(own_s * times for own_s, times in _in_pause(key, calls, free_s))
        shares[key] = min(1.0, pause_s / total_s) if total_s else 0.0
    return [
        own_s * shares.get((call.phase, call.pause), 0.0) for own_s, (call, _) in zip(free_s, calls, strict=True)
    ]  # fmt: skip


def _in_pause(
    key: tuple[str, int], calls: Sequence[tuple[CollectiveCall, int]], seconds: Sequence[float]
) -> Iterator[tuple[float, int]]:
    for own_s, (call, times) in zip(seconds, calls, strict=True):
        if (call.phase, call.pause) == key:
            yield own_s, times
