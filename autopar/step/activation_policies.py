"""Ways to keep activations, a record each: what of a layer's saved tensors stays on the device until backward.

How a way runs is in `autopar.lower.program.recompute`; all else reads the records: constraints and edits their names,
plan checks, prices, memory, the search and the order of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.ops import is_cheap
from autopar.plan import LayerStrategy
from autopar.program import Op

__all__ = ["ActivationPolicy", "activation_policy", "policy_names", "register_activation_policy", "splits_backward"]


@dataclass(frozen=True)
class ActivationPolicy:
    """A way to keep activations (`LayerStrategy.recompute`).

    Args:
        name: as in plans, and in the constraint ``recompute=NAME``.
        reruns: whether backward computes an op's results again, from what other ops gave, in place of keeping them;
            None: what autograd saves is kept.  Results of random ops and of collectives can't be computed again so.
        keeps_inputs_only: whether the layer keeps its inputs alone, and its whole forward runs again in backward,
            collectives included.  All ops are rerun then.
        transfer_s: if what autograd saves leaves the device: seconds to move so many bytes away, and back again.
        is_searched: whether a search considers it if no constraint asks for it.
    """

    name: str
    reruns: Callable[[Op], bool] | None = None
    keeps_inputs_only: bool = False
    transfer_s: Callable[[float], float] | None = None
    is_searched: bool = True

    @property
    def stays(self) -> bool:
        """Whether what backward has at its start is what the layer kept on the device."""
        return not self.keeps_inputs_only and self.transfer_s is None

    def is_rerun(self, op: Op) -> bool:
        """Whether backward computes `op` again."""
        if op.is_random or any(option.collectives for option in op.options):
            return self.keeps_inputs_only
        return self.keeps_inputs_only or (self.reruns is not None and self.reruns(op))


_policies = {
    policy.name: policy
    for policy in (
        ActivationPolicy("none"),
        ActivationPolicy("selective", reruns=is_cheap),
        ActivationPolicy("full", keeps_inputs_only=True),
    )
}


def register_activation_policy(policy: ActivationPolicy) -> None:
    """Add a way to keep activations, or replace the one of this name, in every process that plans or runs with it.

    Raises:
        ValueError: it does more than one of: rerun ops, rerun the layer, move tensors.
    """
    if sum([policy.reruns is not None, policy.keeps_inputs_only, policy.transfer_s is not None]) > 1:
        raise ValueError(f"{policy.name!r}: give one of reruns=, keeps_inputs_only= and transfer_s=")
    _policies[policy.name] = policy


def policy_names() -> tuple[str, ...]:
    """The names of all ways to keep activations."""
    return tuple(_policies)


def activation_policy(name: str) -> ActivationPolicy:
    """The way to keep activations of this name; KeyError if there is none."""
    return _policies[name]


def splits_backward(strategy: LayerStrategy) -> bool:
    """Whether zero-bubble schedules can run a layer's backward in two parts: nothing is gathered or computed again for
    the second one.
    """
    return strategy.zero < 3 and not activation_policy(strategy.recompute).keeps_inputs_only
