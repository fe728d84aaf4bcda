"""Steps of unlike groups: all ranks gather parameters, each group computes its own rows, all ranks reduce gradients."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.errors import InputShapeError
from autopar.lower.communication.call_consensus import PLANNING
from autopar.lower.communication.digests import digest_of
from autopar.lower.groups.coupling import Coupling
from autopar.lower.groups.group_layout import Group, read_groups
from autopar.lower.groups.group_program import GroupProgram
from autopar.lower.kernels.random import agree_base_seed, derive_seed
from autopar.lower.run.call_inputs import Call, CallInputs, LocalRows
from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Executable
from autopar.lower.run.run_step import release_later, spreading
from autopar.placement import Axis

__all__ = ["GroupSteps"]


class _Row(NamedTuple):
    """One row of a group: the program's inputs, and how many targets count."""

    tensors: Sequence[Tensor]
    targets: float


@dataclass(frozen=True)
class _Share:
    """What the group of this rank computes in a step."""

    group: Group
    program: GroupProgram
    rows: tuple[_Row, ...]
    numbers: tuple[int, int]  # what ranks compare: a digest of the rows, and the bits of the sum of targets

    @classmethod
    def of(cls, group: Group, program: GroupProgram, opened: LocalRows, device: torch.device) -> _Share:
        calls = (opened.row(number) for number in range(opened.rows))
        tensors = [[x.to(device) for x in program.executable.read_inputs(*call)] for call in calls]
        rows = tuple(_Row(own, program.count_targets(own)) for own in tensors)
        digest = zlib.crc32(repr([int(digest_of(x)) for own in tensors for x in own]).encode())
        return cls(group, program, rows, (digest, _bits(sum(row.targets for row in rows))))


class GroupSteps:
    """Runs the training steps in which ranks pass rows of unlike lengths.

    The length of the rows that a rank passes says which plan its group runs.  Loss and gradients are those of all rows
    of all groups: the number of targets that count is known before the step, and each row counts by its share of it.

    Attributes:
        last: what this rank's group ran in the last such step, for whoever measures.
    """

    last: Executor | None = None

    def __init__(
        self,
        first: Executor,
        degrees: Mapping[int, int],
        executables: Callable[[Sequence[Any], Mapping[str, Any], tuple[int, int]], Sequence[Executable]],
        *,
        compile_layers: bool,
    ) -> None:
        """Nothing is lowered yet.

        Args:
            first: the executor of the steps that all ranks run together; it says where parameters are.
            degrees: tokens of a row -> how many ranks compute it together.
            executables: for a call, and its rows and tokens, what such groups run, in the order of `degrees`: a row.
            compile_layers: as in `Executor`.
        """
        self._first = first
        self._degrees = dict(degrees)
        self._executables = executables
        self._compile_layers = compile_layers
        self._coupling: Coupling | None = None
        self._programs: dict[int, GroupProgram] = {}  # by tokens of a row

    @property
    def executors(self) -> tuple[Executor, ...]:
        """Of the groups' programs; none before the first such step."""
        return tuple(program.executor for program in self._programs.values())

    def run(self, kind: str, inputs: CallInputs, call: Call) -> list[Tensor | None] | None:
        """The outputs of a step with this rank's rows, of which all but the loss are None; None: not such a step.

        Every rank calls it, in every training step; `kind` names the step, with a place for its number.

        Raises:
            InputShapeError: on every rank: the groups can't be read from what ranks pass, or a group's differ.
        """
        opened, groups = self._read(kind, inputs, call)
        if not groups:
            return None
        self._lower(kind, call, (opened.rows, opened.tokens))
        own = next(group for group in groups if self._first.communicator.rank in group.ranks)
        program = self._programs[opened.tokens]
        shares: list[_Share] = []

        def find() -> Sequence[int]:
            shares.append(_Share.of(own, program, opened, self._first.communicator.device))
            return shares[0].numbers

        known = inputs.numbers_of_ranks(f"the rows of groups in {kind}", find)
        _check_rows(groups, [digest for digest, _ in known])
        total = sum(_number(known[group.start][1]) for group in groups)
        calls = self._first.communicator.calls
        if calls is None:
            return self._compute(shares[0], total)
        with calls.failing():
            outputs = self._compute(shares[0], total)
        calls.watch_backward(outputs)
        return outputs

    def _read(self, kind: str, inputs: CallInputs, call: Call) -> tuple[LocalRows, tuple[Group, ...]]:
        """This rank's rows, and the groups by what all ranks pass: none if all pass rows of one length."""
        opened: list[LocalRows] = []

        def find() -> Sequence[int]:
            opened.append(inputs.open(*call))
            return opened[0].tokens, opened[0].rows, zlib.crc32(opened[0].form_of_rows().encode())

        known = inputs.numbers_of_ranks(f"the lengths of rows in {kind}", find)
        if all(tokens == known[0][0] for tokens, _, _ in known):
            return opened[0], ()
        stages = self._first.executable.plan.num_groups
        groups = read_groups([tokens for tokens, _, _ in known], self._degrees, stages)
        for rank, (_, _, form) in enumerate(known):
            if form != known[0][2]:
                raise InputShapeError(
                    f"ranks 0 and {rank} pass inputs of other names, dtypes or dims, not only rows of other lengths "
                    f"(rank {self._first.communicator.rank}: {opened[0].form_of_rows()}): pass the same entries "
                    "everywhere"
                )
        _check_rows(groups, [rows for _, rows, _ in known])
        return opened[0], groups

    def _lower(self, kind: str, call: Call, size: tuple[int, int]) -> None:
        """Make what groups run, of every degree on every rank, when it is first needed."""
        if self._programs:
            return
        first = self._first

        def make() -> None:
            made = self._executables(*call, size)
            self._coupling = Coupling(first.executable.program, first.store, first.communicator, first.stages)
            self._programs = {
                tokens: GroupProgram(
                    each, first.store, first.communicator, first.stages, compile_layers=self._compile_layers
                )
                for tokens, each in zip(self._degrees, made, strict=True)
            }

        calls = first.communicator.calls
        if calls is None:
            make()
        else:
            calls.enter(f"{PLANNING}groups in {kind}", lambda: (make(), ()), ())

    def _compute(self, share: _Share, total: float) -> list[Tensor | None]:
        coupling, talk, program = self._coupling, self._first.communicator, share.program
        self.last = program.executor
        assert coupling is not None
        trained = coupling.trained
        seed = agree_base_seed(talk) if program.is_random else 0
        program.fill(coupling.gather(), frozenset(trained))
        # One device divides by 0 as well where no target counts.
        loss = torch.full((), 0.0 if total else math.nan, dtype=torch.float64, device=talk.device)
        rows = [row for row in share.rows if row.targets]
        if rows:
            weights = [row.targets / total for row in rows]
            own = program.run([row.tensors for row in rows], weights, derive_seed(seed, share.group.start))
            if own is not None and talk.rank % self._first.executable.plan.group_size == share.group.start:
                loss = loss + own
        program.free()
        gradients = coupling.reduce(program.take_term)
        loss = talk.all_reduce(loss, Axis(talk.world_size, 1))
        return self._outputs(loss, gradients)

    def _outputs(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> list[Tensor | None]:
        program = self._first.executable.program
        coupling = self._coupling
        assert coupling is not None
        dtype: torch.dtype = getattr(torch, program.type_of(program.loss).dtype)
        is_half = any(value.type.dtype == "float16" for value in program.values.values())
        trained = coupling.trained
        whole = release_later(
            loss.to(dtype), [gradients.get(name) for name in trained], list(trained.values()),
            spreading(self._first), is_scaled=is_half,
        )  # fmt: skip
        return [whole if name == program.loss else None for name in program.outputs]


def _check_rows(groups: Sequence[Group], known: Sequence[int]) -> None:
    """Raise on every rank unless the ranks of each group pass the same: `known` by rank is what they pass."""
    for group in groups:
        for rank in group.ranks:
            if known[rank] != known[group.start]:
                raise InputShapeError(
                    f"ranks {_listed(group)} compute rows of one length together, and pass the same rows, but those of "
                    f"ranks {group.start} and {rank} differ: pass the batches that autopar.balanced gives, with the "
                    "same loader on every rank"
                )


def _listed(group: Group) -> str:
    """``"0 to 1"``, with stages ``"0 to 1 and 4 to 5"``."""
    size = group.degree
    parts = [group.ranks[first : first + size] for first in range(0, len(group.ranks), size)]
    return " and ".join(f"{part[0]} to {part[-1]}" for part in parts)


def _bits(number: float) -> int:
    """A float64 as an int64, for what carries integers only."""
    return struct.unpack("q", struct.pack("d", number))[0]


def _number(bits: int) -> float:
    return struct.unpack("d", struct.pack("q", bits))[0]
