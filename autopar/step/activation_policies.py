"""Ways to keep activations, a record each: what of a layer's saved tensors stays on the device until backward.

A plan may also name the very ops of a layer that backward computes again (`rerun_policy_name`; `rerun_front` finds the
best ones): such a way is a record made from its name.

How a way runs is in `autopar.lower.program.recompute`; all else reads the records: constraints and edits their names,
plan checks, prices, memory, the search and the order of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from autopar.ops import is_cheap
from autopar.plan import LayerStrategy
from autopar.program import Op

__all__ = [
    "ActivationPolicy", "activation_policy", "can_rerun", "matching_policies", "policy_names",
    "register_activation_policy", "renamed_policy", "rerun_ops", "rerun_policy_name", "splits_backward",
]  # fmt: skip


@dataclass(frozen=True)
class ActivationPolicy:
    """A way to keep activations (`LayerStrategy.recompute`).

    Args:
        name: as in plans, and in the constraint ``recompute=NAME``.
        reruns: whether backward computes an op's results again, from what other ops gave, in place of keeping them;
            None: what autograd saves is kept.  Results of random ops, collectives and special kernels can't be computed
            again so.
        keeps_inputs_only: whether the layer keeps its inputs alone, and its whole forward runs again in backward,
            collectives included.  All ops are rerun then.
        offloads: whether what is kept stays in the host's memory between forward and backward: it is copied there while
            the next layer's forward runs, and back while the backward of the layer behind does.
        is_searched: whether a search considers it if no constraint asks for it.
    """

    name: str
    reruns: Callable[[Op], bool] | None = None
    keeps_inputs_only: bool = False
    offloads: bool = False
    is_searched: bool = True

    def is_rerun(self, op: Op, *, has_kernel: bool = False) -> bool:
        """Whether backward computes `op` again; `has_kernel`: a special kernel runs it."""
        if self.keeps_inputs_only or self.reruns is None:
            return self.keeps_inputs_only
        return can_rerun(op) and not has_kernel and self.reruns(op)


def can_rerun(op: Op) -> bool:
    """Whether an op alone can be computed again, where no special kernel runs it: not if it draws random numbers."""
    return not op.is_random


_RERUN, _OFFLOAD = "rerun:", "+offload"
_policies = {
    policy.name: policy
    for policy in (
        ActivationPolicy("none"),
        ActivationPolicy("selective", reruns=is_cheap),
        ActivationPolicy("full", keeps_inputs_only=True),
        ActivationPolicy("offload", offloads=True),
        ActivationPolicy("selective+offload", reruns=is_cheap, offloads=True),
        ActivationPolicy("full+offload", keeps_inputs_only=True, offloads=True),
    )
}


def register_activation_policy(policy: ActivationPolicy) -> None:
    """Add a way to keep activations, or replace the one of this name, in every process that plans or runs with it.

    Raises:
        ValueError: it reruns both ops and the layer.
    """
    if policy.reruns is not None and policy.keeps_inputs_only:
        raise ValueError(f"{policy.name!r}: give one of reruns= and keeps_inputs_only=")
    _policies[policy.name] = policy


def policy_names() -> tuple[str, ...]:
    """The names of all ways to keep activations."""
    return tuple(_policies)


def activation_policy(name: str) -> ActivationPolicy:
    """The way to keep activations of this name; KeyError if there is none."""
    return _rerunning(name) if name.startswith(_RERUN) else _policies[name]


def rerun_policy_name(ops: Iterable[str], *, offloads: bool = False) -> str:
    """The name of the way that computes the ops of these names again: ``"rerun:mul_1,silu"``."""
    return _RERUN + ",".join(ops) + (_OFFLOAD if offloads else "")


def rerun_ops(name: str) -> tuple[str, ...]:
    """The ops that a policy names; none of one that has a name of its own."""
    listed = name.removeprefix(_RERUN).removesuffix(_OFFLOAD)
    return tuple(filter(None, listed.split(","))) if name.startswith(_RERUN) else ()


def renamed_policy(name: str, names: Mapping[str, str]) -> str:
    """The same policy for a layer whose ops are called by `names` of these."""
    ops = rerun_ops(name)
    offloads = name.endswith(_OFFLOAD)
    return rerun_policy_name((names.get(op, op) for op in ops), offloads=offloads) if ops else name


@lru_cache(maxsize=4096)
def _rerunning(name: str) -> ActivationPolicy:
    ops = frozenset(rerun_ops(name))
    return ActivationPolicy(name, reruns=lambda op: op.name in ops, offloads=name.endswith(_OFFLOAD), is_searched=False)


def matching_policies(recompute: str, *, offloads: bool) -> tuple[str, ...]:
    """The names of the ways that recompute as the policy `recompute` does (as any does, if ""), and offload or not."""
    named = _policies[recompute] if recompute else None
    return tuple(
        name
        for name, policy in _policies.items()
        if policy.offloads == offloads
        and (named is None or (policy.reruns, policy.keeps_inputs_only) == (named.reruns, named.keeps_inputs_only))
    )


def splits_backward(strategy: LayerStrategy, *, compiled: bool) -> bool:
    """Whether zero-bubble schedules can run a layer's backward in two parts: nothing is gathered or computed again for
    the second one, no product runs in pieces, and no compiler made one of it.
    """
    if strategy.pieces:  # the gradients of rows and matrix are one function's
        return False
    return strategy.zero < 3 and not compiled and not activation_policy(strategy.recompute).keeps_inputs_only
