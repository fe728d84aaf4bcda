"""What a rank holds of parameters and gradients for the programs of its groups, in one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.reshard_ops import apply_backward, apply_forward
from autopar.lower.groups.group_program import Gradients, GroupProgram

__all__ = ["GroupParts"]


class GroupParts:
    """Parts of parameters and of their gradients, each once, whichever of the programs read it.

    A rank that is in groups of several degrees runs several programs.  Where they shard a parameter alike (most often
    not at all) they share its copy, and add up its gradient.
    """

    def __init__(self, programs: Sequence[GroupProgram], communicator: Communicator) -> None:
        """`programs` are those that this rank runs in the step; there may be none."""
        self._programs = programs
        self._communicator = communicator
        self.gradients: Gradients = {}

    @torch.no_grad()
    def fill(self, whole: Iterable[tuple[str, Tensor]], trained: frozenset[str]) -> None:
        """Give the programs their parts of the parameters, which come whole, and compute what is hoisted."""
        for name, tensor in whole:
            copies: dict[object, nn.Parameter] = {}
            for program in self._programs:
                steps = program.parts.get(name, ())
                if steps not in copies:
                    part = apply_forward(tensor, steps, self._communicator)
                    copies[steps] = nn.Parameter(part, requires_grad=name in trained)
                program.put(name, copies[steps])
        for program in self._programs:
            program.executor.begin_step()

    def free(self) -> None:
        """Give the parameters up; their gradients stay."""
        for program in self._programs:
            program.free()

    @torch.no_grad()
    def take_term(self, name: str) -> Tensor | None:
        """This rank's term of the gradient of a parameter, whole, which can be taken once; None: it has none."""
        keys = [key for key in self.gradients if key[0] == name]
        terms = [apply_backward(self.gradients.pop(key), key[1], self._communicator) for key in keys]
        return sum(terms[1:], terms[0]) if terms else None
