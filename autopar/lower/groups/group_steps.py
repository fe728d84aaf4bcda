"""Steps of unlike groups: all ranks gather parameters, each group computes its own rows, all ranks reduce gradients.

A rank may be in several groups, of which one contains the other.  All ranks go through the lengths of rows in one
order, those of larger groups first.  So any two groups come in one order on all of their ranks, and no rank waits for
another that waits for it.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.errors import InputShapeError, LossError, MeshError
from autopar.lower.communication.call_consensus import PLANNING
from autopar.lower.communication.digests import digest_of
from autopar.lower.groups.coupling import Coupling
from autopar.lower.groups.group_layout import Group, check_lengths, count_rows, read_groups
from autopar.lower.groups.group_parts import GroupParts
from autopar.lower.groups.group_program import GroupProgram
from autopar.lower.groups.target_count import LossCount, loss_count
from autopar.lower.kernels.random import agree_base_seed, derive_seed
from autopar.lower.run.call_inputs import Call, CallInputs, LocalRows
from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Executable
from autopar.lower.run.run_step import release_later
from autopar.placement import Axis

__all__ = ["GroupSteps"]

# Of calls: with and without each of three optional inputs; each holds a program for every kind of group.
_MOST_FORMS = 8


class _GroupRow(NamedTuple):
    """One row of a group: the program's inputs, what counts in it, and what its loss is divided by."""

    tensors: Sequence[Tensor]
    sums: tuple[float, ...]
    divisor: float


class _LengthPart(NamedTuple):
    """The rows of one length that this rank computes, with the other ranks of a group."""

    group: Group
    program: GroupProgram
    rows: tuple[_GroupRow, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """What ranks compare: a digest of the rows, and the bits of the sums of what counts."""
        digest = zlib.crc32(repr([int(digest_of(x)) for row in self.rows for x in row.tensors]).encode())
        return digest, *(_bits(sum(own)) for own in zip(*(row.sums for row in self.rows), strict=True))


class _FormPrograms(NamedTuple):
    """What groups run in calls of one form: with the same optional inputs and other arguments, rows apart.

    Args:
        coupling: of the parameters that such calls read.
        counted: what the loss is divided by.
        programs: by tokens of a row.
    """

    coupling: Coupling
    counted: LossCount
    programs: Mapping[int, GroupProgram]

    def takes(self, opened: LocalRows) -> bool:
        """Whether calls with such rows, whose length groups have, are of this form."""
        with suppress(InputShapeError):
            self.programs[opened.row_tokens[0]].executable.read_inputs(*opened.row_like())
            return True
        return False


class GroupSteps:
    """Runs the training steps in which ranks pass rows of unlike lengths.

    The lengths of the rows that a rank passes say which groups it is in, and which plans they run.  Loss and gradients
    are those of all rows of all groups: the number of targets that count is known before the step, and each row counts
    by its share of it.

    Attributes:
        last: what the first row of this rank ran in the last such step, or would have, for whoever measures.
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
        self._given = tuple(degrees)
        self._degrees = dict(sorted(degrees.items(), key=lambda each: (-each[1], -each[0])))
        self._executables = executables
        self._compile_layers = compile_layers
        self._forms: list[_FormPrograms] = []  # in the same order on all ranks, the one that ran last in front

    @property
    def executors(self) -> tuple[Executor, ...]:
        """Of the groups' programs; none before the first such step."""
        return tuple(program.executor for form in self._forms for program in form.programs.values())

    def run(self, kind: str, inputs: CallInputs, call: Call) -> Any:
        """What the model returns in a step with this rank's rows, but None for all but the loss; None: not such a step.

        Every rank calls it, in every training step; `kind` names the step, with a place for its number.

        Raises:
            InputShapeError: on every rank: the groups can't be read from what ranks pass, or a group's differ.
            MeshError: likewise: inputs without rows differ between ranks.
            LossError: likewise: without an input that is missing, the model computes no loss that groups can share.
        """
        opened, groups = self._read(kind, inputs, call)
        if not groups:
            return None
        form = self._form(kind, opened, inputs.example_tokens)
        parts: list[_LengthPart] = []

        each = 1 + len(form.counted.sums)  # numbers of a program

        def find() -> Sequence[int]:
            parts.extend(self._parts(form, groups, opened))
            own = {part.program: part.numbers for part in parts}
            return [number for program in form.programs.values() for number in own.get(program, (0,) * each)]

        known = inputs.numbers_of_ranks(f"the rows of groups in {kind}", find)
        sums = [0.0] * len(form.counted.sums)
        for place, own in enumerate(groups.values()):
            _check_rows(own, [numbers[each * place] for numbers in known])
            for group in own:
                bits = known[group.start][each * place + 1 : each * (place + 1)]
                sums = [total + _number(x) for total, x in zip(sums, bits, strict=True)]
        divisor = form.counted.divisor_of(sums)
        self.last = form.programs[opened.row_tokens[0]].executor
        calls = self._first.communicator.calls
        if calls is None:
            return self._compute(form, parts, divisor)
        with calls.failing():
            outputs = self._compute(form, parts, divisor)
        calls.watch_backward(outputs)
        return outputs

    def _read(self, kind: str, inputs: CallInputs, call: Call) -> tuple[LocalRows, Mapping[int, Sequence[Group]]]:
        """This rank's rows, and the groups of each length of rows: none if all ranks pass rows of one length."""
        opened: list[LocalRows] = []

        def find() -> Sequence[int]:
            rows = inputs.open(*call)
            opened.append(rows)
            other = next((tokens for tokens in rows.row_tokens if tokens not in self._degrees), rows.row_tokens[0])
            form = zlib.crc32(rows.form_of_rows().encode())
            counts = count_rows(rows.row_tokens[: rows.rows], self._degrees)
            return other, form, rows.is_jagged, _digest_of_shared(rows), *counts

        known = inputs.numbers_of_ranks(f"the lengths of rows in {kind}", find)
        tokens = [numbers[0] for numbers in known]
        if len(set(tokens)) == 1 and not any(is_jagged for _, _, is_jagged, *_ in known):
            return opened[0], {}
        check_lengths(tokens, self._degrees)
        for rank, (_, form, _, shared, *_) in enumerate(known):
            if form != known[0][1]:
                raise InputShapeError(
                    f"ranks 0 and {rank} pass inputs of other names, dtypes or dims, not only rows of other lengths "
                    f"(rank {self._first.communicator.rank}: {opened[0].form_of_rows()}): pass the same entries "
                    "everywhere"
                )
            if shared != known[0][3]:
                raise MeshError(
                    f"the rows of all ranks share the inputs without rows, here {_shared(opened[0])}, but those of "
                    f"ranks 0 and {rank} differ: pass the same everywhere. Only images that masked_scatter puts in the "
                    "text may belong to some of the rows, as [rows, images, ...], which autopar.balanced gives"
                )
        stages = self._first.executable.plan.num_groups
        return opened[0], read_groups([counts for _, _, _, _, *counts in known], self._degrees, stages)

    def _form(self, kind: str, opened: LocalRows, tokens: int) -> _FormPrograms:
        """What groups run in this call, made of every degree on every rank when such a call first comes."""
        known = next((form for form in self._forms if form.takes(opened)), None)
        if known is not None:
            self._forms.remove(known)
            self._forms.insert(0, known)
            return known
        calls = self._first.communicator.calls
        names = ", ".join(opened.call.named)
        made = (
            self._lower(opened, tokens)
            if calls is None
            else calls.enter(f"{PLANNING}groups in {kind} with {names}", lambda: (self._lower(opened, tokens), ()), ())
        )
        self._forms.insert(0, made)
        del self._forms[_MOST_FORMS:]
        return made

    def _lower(self, opened: LocalRows, tokens: int) -> _FormPrograms:
        first = self._first
        # As long as a row of the example, where it is known which dims have tokens.
        made = self._executables(*opened.row_like(tokens), (1, tokens))
        planned = loss_count(first.executable.program)
        known = [loss_count(executable.program) for executable in made]
        counted = [each for each in known if each is not None and _is_like(each, planned)]
        if len(counted) < len(made):
            raise LossError(
                f"ranks pass rows of unlike lengths with the inputs {list(opened.call.named)}, from which the model "
                "computes no loss that is divided by what inputs count as with the example's, which groups of devices "
                "need: pass its labels in every step, or rows of one length"
            )
        coupling = Coupling(made[0].program, first.store, first.communicator, first.stages)
        programs = {
            tokens: GroupProgram(
                each, own, first.store, first.communicator, first.stages, compile_layers=self._compile_layers
            )
            for tokens, each, own in zip(self._given, made, counted, strict=True)
        }
        return _FormPrograms(coupling, counted[0], {tokens: programs[tokens] for tokens in self._degrees})

    def _parts(
        self, form: _FormPrograms, groups: Mapping[int, Sequence[Group]], opened: LocalRows
    ) -> Iterator[_LengthPart]:
        """What this rank computes, in order."""
        rank, device = self._first.communicator.rank, self._first.communicator.device
        for tokens, own in groups.items():
            program = form.programs[tokens]
            for group in own:
                if rank in group.ranks:
                    calls = (opened.row(n) for n in range(opened.rows) if opened.row_tokens[n] == tokens)
                    rows = ([x.to(device) for x in program.executable.read_inputs(*call)] for call in calls)
                    sums = ((row, program.sums_of(row)) for row in rows)
                    counted = program.counted
                    yield _LengthPart(
                        group, program, tuple(_GroupRow(row, own, counted.divisor_of(own)) for row, own in sums)
                    )

    def _compute(self, form: _FormPrograms, parts: Sequence[_LengthPart], divisor: float) -> Any:
        coupling, talk = form.coupling, self._first.communicator
        trained = coupling.trained
        seed = agree_base_seed(talk) if any(program.is_random for program in form.programs.values()) else 0
        group_parts = GroupParts([part.program for part in parts], talk)
        group_parts.fill(coupling.gather(), frozenset(trained))
        # One device divides by 0 as well where nothing counts.
        loss = torch.full((), 0.0 if divisor else math.nan, dtype=torch.float64, device=talk.device)
        for group, program, all_rows in parts:
            rows = [row for row in all_rows if row.divisor and divisor]
            if not rows:
                continue
            weights = [row.divisor / divisor for row in rows]
            own_seed = derive_seed(seed, group.start, group.degree)
            own = program.run([row.tensors for row in rows], weights, own_seed, group_parts.gradients)
            if own is not None and talk.rank % self._first.executable.plan.group_size == group.start:
                loss = loss + own
        group_parts.free()
        gradients = coupling.reduce(group_parts.take_term)
        loss = talk.all_reduce(loss, Axis(talk.world_size, 1))
        return self._outputs(form, loss, gradients)

    def _outputs(self, form: _FormPrograms, loss: Tensor, gradients: Mapping[str, Tensor]) -> Any:
        coupling, executable = form.coupling, next(iter(form.programs.values())).executable
        program = executable.program
        dtype: torch.dtype = getattr(torch, program.type_of(program.loss).dtype)
        trained = coupling.trained
        others = coupling.trained_elsewhere
        given = [gradients.get(name) for name in trained] + [torch.zeros_like(p, requires_grad=False) for p in others]
        whole = release_later(loss.to(dtype), given, [*trained.values(), *others])
        return executable.unflatten_outputs([whole if name == program.loss else None for name in program.outputs])


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


def _is_like(counted: LossCount, planned: LossCount | None) -> bool:
    """Whether the loss is known to add up over rows as that of the call that groups were planned for does."""
    return counted.of_targets or (planned is not None and counted.form == planned.form)


def _shared(rows: LocalRows) -> list[str]:
    """The inputs that have no rows of this rank."""
    return [name for name in rows.call.named if name not in rows.local]


def _digest_of_shared(rows: LocalRows) -> int:
    return zlib.crc32(repr([int(digest_of(rows.call.named[name])) for name in _shared(rows)]).encode())


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
