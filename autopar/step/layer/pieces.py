"""Which collectives of a layer can overlap with products in pieces, and the local program in which they do.

A gather of rows (along a sequence that tensor parallelism shards between products, say) and the products that read what
it gives, or a product of a summed factor and the reduction of its terms, can be cut along rows: each row of a product
comes from one row of its operand, so pieces give the same numbers.  Backward the gradient of one is the other.

torch calls this async tensor parallelism (https://discuss.pytorch.org/t/209487), Megatron-LM overlap of
tensor-parallel communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.errors import PlanMismatchError
from autopar.ops import family_of
from autopar.ops.family import RowProduct
from autopar.step.activation_policies import activation_policy
from autopar.step.layer.instructions import InPieces, Instruction, LocalProgram, Reshard, RunOp, Single

__all__ = ["in_pieces", "most_pieces", "pieced_collectives", "row_product", "runs_once", "with_count"]

# (forward, backward) of a step, moved before products, or behind one.  What stands still in one of the two runs whole
# there.
_BEFORE = {("all_gather", "reduce_scatter"), ("none", "all_reduce")}
_BEHIND = {("reduce_scatter", "all_gather"), ("all_reduce", "none")}


def in_pieces(
    local: LocalProgram, layer: str, pieces: Sequence[tuple[str, int]], recompute: str = "none"
) -> LocalProgram:
    """The local program with the collectives of these values in pieces.

    Args:
        local: where they run whole.
        layer: its name, for messages.
        pieces: names of values that are moved to their copies, and into how many pieces.
        recompute: how the layer keeps activations.

    Raises:
        PlanMismatchError: a value has no such collective, or its rows don't divide.
    """
    if not pieces:
        return local
    collectives = pieced_collectives(local, recompute)
    moved = {local.values[each.source].value.name for each in local.singles if isinstance(each, Reshard)}
    still = {each.value.name for each in local.values} - moved  # as on a mesh of one device: there is nothing to cut
    chosen = [_cut(local, layer, name, count, collectives) for name, count in pieces if name not in still]
    taken = [id(run) for each in chosen for run in each.products]
    if len(taken) != len(set(taken)):
        raise PlanMismatchError(
            f"layer {layer}: in pieces {dict(pieces)} two collectives overlap one product: leave one of them out"
        )
    return replace(local, instructions=tuple(_instructions(local, chosen)))


def _cut(local: LocalProgram, layer: str, name: str, count: int, collectives: Mapping[str, InPieces]) -> InPieces:
    if name not in collectives:
        raise PlanMismatchError(
            f"layer {layer}: the collective of {name} can't run in pieces: its rows must go into or come from a "
            f"product that no other collective overlaps and that is not recomputed by itself; those of "
            f"{sorted(collectives) or 'no value here'} can"
        )
    cut = with_count(local, collectives[name], count)
    if cut is None:
        raise PlanMismatchError(f"layer {layer}: the rows of {name} can't be cut into {count} pieces of equal size")
    return cut


def with_count(local: LocalProgram, each: InPieces, count: int) -> InPieces | None:
    """The same in so many pieces; None if its rows don't divide."""
    dim = _piece_dim(local, each, count) if count > 1 else None
    return None if dim is None else replace(each, dim=dim, count=count)


def pieced_collectives(local: LocalProgram, recompute: str = "none") -> dict[str, InPieces]:
    """The collectives that can run in pieces, by the value that is moved; each in one piece so far."""
    uses = _Uses(local)
    collectives: dict[str, InPieces] = {}
    for each in local.singles:
        if not isinstance(each, Reshard) or len(each.steps) != 1 or each.purpose != "copy":
            continue
        value = local.values[each.source].value
        products = uses.products_of(each) if value.role == "op" and value.type.is_floating else ()
        if products:
            whole = InPieces(each, products, 0, 1)
            move = each if whole.moves_first else replace(each, before=products[0].index + 1)
            if whole.sharded_dim < len(value.type.shape) - 1:
                collectives[value.name] = replace(whole, move=move)
    return {name: each for name, each in collectives.items() if runs_once(each, recompute)}


def runs_once(each: InPieces, recompute: str) -> bool:
    """Whether backward recomputes none of the products by itself."""
    policy = activation_policy(recompute)
    return policy.keeps_inputs_only or not any(policy.is_rerun(run.op) for run in each.products)


class _Uses:
    """Where the local values of a program are made and read."""

    def __init__(self, local: LocalProgram) -> None:
        self._local = local
        self._readers: dict[int, list[Single]] = {}
        self._made: dict[int, int] = dict.fromkeys((*local.inputs, *local.state), -1)
        self._makers: dict[int, RunOp] = {}
        for position, each in enumerate(local.singles):
            read = each.operands if isinstance(each, RunOp) else (each.source,)
            for index in dict.fromkeys(read):
                self._readers.setdefault(index, []).append(each)
            made = each.results if isinstance(each, RunOp) else (each.target,)
            self._made.update(dict.fromkeys(made, position))
            if isinstance(each, RunOp):
                self._makers.update(dict.fromkeys(made, each))

    def products_of(self, move: Reshard) -> tuple[RunOp, ...]:
        """The products that alone read what a move gives, or the one that makes what it alone moves; else none."""
        kinds = move.steps[0].forward, move.steps[0].backward
        if kinds in _BEHIND and len(self._readers[move.source]) == 1 and move.source not in self._local.outputs:
            maker = self._makers.get(move.source)
            return (maker,) if maker is not None and row_product(maker) is not None else ()
        if kinds not in _BEFORE or move.target in self._local.outputs:
            return ()
        reading = self._readers.get(move.target, ())
        products = tuple(run for run in reading if isinstance(run, RunOp) and _reads_rows(run, move.target))
        now = self._made[move.target]
        is_ready = all(self._made[index] <= now for run in products for index in run.operands)
        return products if len(products) == len(reading) and is_ready else ()


def row_product(run: RunOp) -> RowProduct | None:
    """How an op is a product that works row by row with one matrix; None if it is none."""
    product = family_of(run.op.target).row_products.get(run.op.target)
    types = run.state.operand_types
    if product is None or run.op.kwargs or any(option.kernel for option in run.state.options):
        return None
    if len(types) <= product.added:
        product = replace(product, added=-1)
    rows, matrix = types[product.rows], types[product.matrix]
    is_vector = product.added < 0 or len(types[product.added].shape) == 1
    same = rows.shape[:-1] == run.state.result_types[0].shape[:-1] and rows.dtype == matrix.dtype
    return product if len(rows.shape) > 1 and len(matrix.shape) == 2 and is_vector and same else None


def _reads_rows(run: RunOp, index: int) -> bool:
    """Whether a product reads this local value as its rows, and nowhere else."""
    product = row_product(run)
    return product is not None and [n for n, each in enumerate(run.operands) if each == index] == [product.rows]


def most_pieces(local: LocalProgram, each: InPieces, most: int) -> int:
    """The largest number of pieces up to `most` into which its rows can be cut; 1: they can't."""
    return next((count for count in range(most, 1, -1) if with_count(local, each, count)), 1)


def _piece_dim(local: LocalProgram, each: InPieces, count: int) -> int | None:
    """The dim of rows to cut: the first one that divides, last the sharded one, whose pieces lie apart."""
    shape = local.values[each.move.target if each.moves_first else each.move.source].type.shape
    sharded, size = each.sharded_dim, each.move.steps[0].axis.size
    dims = [dim for dim in range(len(shape) - 1) if dim != sharded]
    if any(shape[dim] % count == 0 and shape[dim] for dim in dims):
        return next(dim for dim in dims if shape[dim] % count == 0 and shape[dim])
    return sharded if sharded >= 0 and shape[sharded] and shape[sharded] % (count * size) == 0 else None


def _instructions(local: LocalProgram, chosen: Sequence[InPieces]) -> Iterator[Instruction]:
    """Each where its first part ran; products that read what is gathered come up to the first of them."""
    begin = {(each.move.target if each.moves_first else each.products[0].results[0]): each for each in chosen}
    inside = {each.move.target for each in chosen} | {run.results[0] for each in chosen for run in each.products}
    for each in local.singles:
        key = each.results[0] if isinstance(each, RunOp) else each.target
        if key in begin:
            yield begin[key]
        elif key not in inside:
            yield each
