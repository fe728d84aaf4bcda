"""Whether a model keeps the sequences of a packed row apart, as far as its program shows it."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ops import family_of
from autopar.ops.attention import DOCUMENTS
from autopar.program import Op, Program

__all__ = ["why_not_packed"]

_MASK = 3  # the first operand of attention behind q, k and v


def why_not_packed(program: Program) -> str:
    """The reason why packed sequences would attend to each other; ``""`` if nothing shows that they would.

    It shows where the program has attention, but none with a mask, or numbers of documents, that follow from what a
    batch holds.  Whether a mask is the right one, and what ops other than attention do, it can't say.
    """
    if not any(name.endswith("position_ids") for name in program.inputs):
        return (
            "packed rows have position_ids, which begin at 0 in each sequence, but the example inputs of the model "
            f"have none (only {', '.join(program.inputs)}), so nothing keeps the sequences of a row apart: parallelize "
            "it with position_ids if it separates sequences by them, or pass packs=False for a row for each sequence"
        )
    made_by = {result: op for layer in program.layers for op in layer.ops for result in op.results}
    attention = [op for layer in program.layers for op in layer.ops if family_of(op.target).is_attention]
    if not attention or any(_separates(program, op, made_by) for op in attention):
        return ""
    return (
        f"in a packed row sequences would attend to each other: attention ({attention[0].target}) has no mask that "
        "follows from position_ids. Causal language models of transformers make one only without a cache: set "
        "model.config.use_cache = False before autopar.parallelize; for a model that can't separate them pass "
        "packs=False for a row for each sequence"
    )


def _separates(program: Program, op: Op, made_by: dict[str, Op]) -> bool:
    if op.target == DOCUMENTS:
        return True
    return any(name in program.inputs for name in _ancestors(op.operands[_MASK:], made_by))


def _ancestors(names: tuple[str, ...], made_by: dict[str, Op]) -> Iterator[str]:
    """These values and all that they are computed from."""
    pending, seen = list(names), set(names)
    while pending:
        name = pending.pop()
        yield name
        before = made_by[name].operands if name in made_by else ()
        pending += [each for each in dict.fromkeys(before) if each not in seen]
        seen.update(before)
