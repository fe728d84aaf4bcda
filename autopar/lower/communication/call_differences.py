"""How the records of two ranks differ that came to the same call, in words that name ranks, call and remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from autopar.errors import AutoparError, InputShapeError, MeshError, RankError

__all__ = ["FOLLOWS", "PLANNING", "WITH_GRADIENT", "difference", "gone_on"]

PLANNING = "the planning for "  # before the kind of a call that runs for the first time with such inputs
FOLLOWS = "what follows from "  # before what of the values of inputs a program is for, among plain arguments
WITH_GRADIENT = " requires_grad"  # behind the shape and dtype of an input that wants one
_NAMED = 8  # inputs in an error: a state has thousands
_BATCHES = (
    "Pass the whole batch on every rank, not a share of it (no DistributedSampler, equal seeds to shuffle), or its own "
    "rows with autopar.parallelize(..., inputs='local'), and call the model on all ranks equally often"
)
_ROWS = (
    "With inputs='local' these two have the same model.data_rank, and must pass the same rows: sample with "
    "num_replicas=model.data_parallel_size and rank=model.data_rank, not with those of processes, and shuffle with "
    "equal seeds"
)


def difference(
    me: int, mine: dict[str, Any], rank: int, theirs: dict[str, Any], *, has_peers: bool, is_in_step: bool
) -> AutoparError | None:
    """The error of two ranks whose records of a call (`CallConsensus`) differ; None: they are alike.

    Args:
        me: this rank.
        mine: its record.
        rank: the other one.
        theirs: its record.
        has_peers: only these ranks and their peers have the same inputs.
        is_in_step: their default random generators stood at the same place in the first call.
    """
    remedy = _ROWS if has_peers else _BATCHES
    error = (
        _unlike_arguments(me, mine, rank, theirs, remedy)
        or _unlike_calls(me, mine, rank, theirs)
        or _unlike_training(me, mine, rank, theirs)
    )
    if error is not None:
        return error
    if mine["inputs"] != theirs["inputs"]:
        call, digests = mine["inputs"]
        unlike = [name for name in digests if digests[name] != theirs["inputs"][1].get(name)]
        return _unlike_batches(me, call, rank, unlike, remedy)
    if is_in_step and mine["random"] != theirs["random"]:
        return RankError(
            f"the default random generators of ranks {me} and {rank} are out of step in {mine['call']}: since the "
            "call before one of them has drawn more numbers, or was seeded anew, so that what is drawn next (a "
            "batch, a shuffle) differs. Draw on every rank alike; on one rank alone, inside "
            "torch.random.fork_rng() or from a torch.Generator of its own"
        )
    return None


def _unlike_arguments(
    me: int, mine: dict[str, Any], rank: int, theirs: dict[str, Any], remedy: str
) -> AutoparError | None:
    """Where arguments of a call differ that are known before it runs."""
    if _what(mine) != _what(theirs):
        return None
    forms, their_forms = ([form for _, form in record["forms"]] for record in (mine, theirs))
    if mine["call"] != theirs["call"]:  # who plans lists inputs in the order of the call, not of the program
        forms, their_forms = sorted(forms), sorted(their_forms)
    if forms != their_forms:
        what, instead = _unlike_forms(forms, their_forms)
        return InputShapeError(
            f"ranks were given inputs of different {what}: rank {me} came to {mine['call']} with {_forms_text(mine)}, "
            f"rank {rank} to {theirs['call']} with {_forms_text(theirs)}. {instead}"
        )
    own, other = _plain(mine, theirs), _plain(theirs, mine)
    if own != other:
        unlike = [name for name in {**own, **other} if own.get(name) != other.get(name)][:_NAMED]
        if all(name.startswith(FOLLOWS) for name in unlike):
            return _unlike_batches(me, mine["call"], rank, unlike, remedy)
        here, there = (", ".join(f"{name}={each.get(name, 'absent')}" for name in unlike) for each in (own, other))
        return InputShapeError(
            f"ranks were given different plain arguments: rank {me} came to {mine['call']} with {here}, rank {rank} to "
            f"{theirs['call']} with {there}. A plain argument is part of the program: pass the same on every rank, or "
            "a tensor"
        )
    unlike = [name for name, digest in mine["host"].items() if digest != theirs["host"].get(name, digest)]
    if unlike and mine["call"].removeprefix(PLANNING) == theirs["call"].removeprefix(PLANNING):
        return _unlike_batches(me, mine["call"], rank, unlike, remedy)
    return None


def _plain(record: dict[str, Any], other: dict[str, Any]) -> dict[str, str]:
    """The plain arguments of one of two records; who plans does not know yet what forward reads."""
    is_known = record["call"] == other["call"]
    return {name: text for name, text in record["plain"].items() if is_known or not name.startswith(FOLLOWS)}


def _unlike_calls(me: int, mine: dict[str, Any], rank: int, theirs: dict[str, Any]) -> AutoparError | None:
    if mine["call"] == theirs["call"]:
        return None
    if mine["call"].removeprefix(PLANNING) == theirs["call"].removeprefix(PLANNING):
        new = me if mine["call"].startswith(PLANNING) else rank
        return InputShapeError(
            f"rank {new} has to plan for its inputs, and rank {me + rank - new} has a plan for its own, where "
            f"rank {me} came to {mine['call']} and rank {rank} to {theirs['call']}: their shapes are equal, but a "
            f"plain argument is not, or the values of an input that forward reads in Python. {_BATCHES}"
        )
    return RankError(
        f"rank {me} came to {mine['call']} when rank {rank} came to {theirs['call']}: all ranks must make the "
        "same calls in the same order, also to evaluate, to clip gradients or to gather the state"
    )


def _unlike_training(me: int, mine: dict[str, Any], rank: int, theirs: dict[str, Any]) -> AutoparError | None:
    """Where ranks did something else with gradients since the call before."""
    if mine["backward"] != theirs["backward"]:
        who = me if theirs["backward"] else rank
        return RankError(
            f"rank {who} came to {mine['call']} without a backward() since the call before, rank {me + rank - who} "
            "ran one: call it on every rank or on none"
        )
    if [*mine["steps"][:2]] != [*theirs["steps"][:2]]:
        here, there = (f"{count} of them{last}" for count, _, last in (mine["steps"], theirs["steps"]))
        return RankError(
            f"ranks made unlike steps of optimizers, so that their parameters differ: before {mine['call']} rank {me} "
            f"had made {here}, rank {rank} {there}. Call optimizer.step() on every rank or on none, with the same "
            "learning rates and other hyperparameters (give a scheduler numbers that are alike on all ranks)"
        )
    if mine["gradients"] != theirs["gradients"]:
        return RankError(
            f"rank {me} came to {mine['call']} with gradients of {mine['gradients']} parameters, rank {rank} with "
            f"those of {theirs['gradients']}, to which this step adds: call zero_grad() on every rank or on none, and "
            "set gradients to None on all ranks alike"
        )
    return None


def gone_on(ahead: int, behind: int, failure: str) -> str:
    """What is wrong where a rank went on after a call in which another one failed."""
    return (
        f"rank {behind} failed in a call of which rank {ahead} had done its part, so that their parameters may differ: "
        f"{failure}"
    )


def _unlike_batches(me: int, call: str, rank: int, unlike: Sequence[str], remedy: str) -> MeshError:
    what, is_state = "batches", call.startswith("load_state_dict")
    if is_state:
        what, remedy = "values", "Load the same file on every rank"
    names = ", ".join(map(repr, unlike[:_NAMED])) + (
        f" and {len(unlike) - _NAMED} more" if len(unlike) > _NAMED else ""
    )
    return MeshError(
        f"ranks were given different {what} in {call}: {names} of rank {me} differs from that of rank {rank}. {remedy}"
    )


def _unlike_forms(forms: Sequence[str], others: Sequence[str]) -> tuple[str, str]:
    """In what these inputs differ, and the remedy."""
    shapes, other_shapes = ([form.partition("]")[0] for form in each] for each in (forms, others))
    if shapes != other_shapes:
        return "shapes", _BATCHES
    if [form.removesuffix(WITH_GRADIENT) for form in forms] != [form.removesuffix(WITH_GRADIENT) for form in others]:
        return "dtypes", "Convert them on every rank alike"
    return "kinds", "Call requires_grad_() on the input on every rank or on none"


def _what(record: dict[str, Any]) -> str:
    """What the rank does, whether it had to plan for it or not, and how often it was done before."""
    return re.sub(r"\d+", "", record["call"].removeprefix(PLANNING))


def _forms_text(record: dict[str, Any]) -> str:
    return ", ".join(f"{name!r} {form}" for name, form in record["forms"]) or "no tensors"
