"""Products: matrix products, convolutions, attention, embedding, einsum."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import Op
from autopar.rules.rule import Line, Rule, Types, argument, lines

__all__ = ["RULES"]

_TABLE = {
    "linear": "* h, f h, +f -> * f | sum h, plus 0",
    "mm": "m k, k n -> m n | sum k, plus 0, plus 1",
    "bmm": "b m k, b k n -> b m n | sum k, plus 0, plus 1",
    "addmm": "+m n, m k, k n -> m n | sum k",
    "baddbmm": "+b m n, b m k, b k n -> b m n | sum k",
    "mv": "m k, k -> m | sum k",
    "addmv": "+m, m k, k -> m | sum k",
    "dot vdot": "k, k -> () | sum k",
    "outer ger": "m, n -> m n",
    "linalg_vecdot": "*, *, @-1 -> *-@ | sum @",
    "embedding": "v h, * -> * h | sum v, by v vocab_parallel_embedding",
    "bilinear": "* _, * _, f _ _, f -> * f",
    "cdist": "* m _, * n _ -> * m n",
    "linalg_inv inverse linalg_cholesky linalg_matrix_exp matrix_exp": "* _ _ -> * _ _",
    "linalg_det det logdet": "* _ _ -> *",
    "cosine_similarity": "*, *, @1 -> *-@",
}


def _matmul(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    left, right = (
        "k" if len(kind.shape) == 1 else side for kind, side in zip(operand_types, ("* m k", "* k n"), strict=True)
    )
    result = {("k", "k"): "()", ("* m k", "k"): "* m", ("k", "* k n"): "* n"}.get((left, right), "* m n")
    return Line(f"{left}, {right} -> {result} | sum k, plus 0, plus 1")


def _einsum(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """The equation says it all, but a letter that repeats within one operand (a diagonal) is kept whole."""
    equation = op.args[0]
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").replace("...", "*").partition("->")
    operands = left.split(",")
    if not arrow:  # the implicit result: letters that occur once, in alphabetic order
        right = "*" * ("*" in left) + "".join(sorted(c for c in set(left) - {"*", ","} if left.count(c) == 1))
    whole = {letter for text in operands for letter in text if text.count(letter) > 1}
    summed = sorted(set(left) - set(right) - whole - {",", "*"})
    if "*" in left and "*" not in right:
        return None

    def dims(text: str) -> str:
        return " ".join("_" if letter in whole else letter for letter in text) or "()"

    line = f"#, [{', '.join(map(dims, operands))}] -> {dims(right)}"
    return Line(line + (f" | sum {' '.join(summed)}" if summed else ""))


def _convolution(num_spatial: int, groups_at: int) -> Rule:
    """A convolution: batch, output channels, and input channels (summed).  Groups tie channels together."""

    def rule(op: Op, operand_types: Types, result_types: Types) -> Line | None:
        return _convolution_line(
            op, operand_types, num_spatial, argument(op, groups_at, "groups", 1), is_transposed=False
        )

    return rule


def _transposed(num_spatial: int) -> Rule:
    def rule(op: Op, operand_types: Types, result_types: Types) -> Line | None:
        return _convolution_line(op, operand_types, num_spatial, argument(op, 6, "groups", 1), is_transposed=True)

    return rule


def _general_convolution(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """aten.convolution: (input, weight, bias, stride, padding, dilation, transposed, output_padding,
    groups).
    """
    num_spatial = len(operand_types[1].shape) - 2
    return _convolution_line(op, operand_types, num_spatial, op.args[8], is_transposed=op.args[6] is True)


def _convolution_line(
    op: Op, operand_types: Types, num_spatial: int, groups: object, *, is_transposed: bool
) -> Line | None:
    space = " _" * num_spatial
    if len(operand_types[0].shape) != num_spatial + 2:  # no batch dim
        return Line(f"_{space}, _ _{space}, _ -> _{space}")
    if groups != 1:
        return Line(f"n _{space}, _ _{space}, _ -> n _{space}")
    weight = "c o" if is_transposed else "o c"
    return Line(f"n c{space}, {weight}{space}, +o -> n o{space} | sum c")


def _attention(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal): each query row is computed on its
    own.

    ``*`` holds the batch and the heads; with `enable_gqa` k and v have fewer heads, and their number
    bounds the slices. A causal mask counts rows from the first, so the query rows stay whole then.
    """
    dropout, is_causal = argument(op, 4, "dropout_p", 0.0), argument(op, 5, "is_causal", False)
    query = "_" if is_causal else "q"
    return Line(f"* {query} _, * _ _, * _ _, attn_mask: * {query} _ -> * {query} _", is_random=dropout != 0.0)


def _recurrent(has_cell: bool) -> Rule:
    """lstm, gru, rnn (x, state, parameters, has_biases, num_layers, dropout, train, bidirectional,
    batch_first).

    States are [layers, batch, hidden]; the batch splits, time does not.
    """

    def rule(op: Op, operand_types: Types, result_types: Types) -> Line | None:
        if len(operand_types[0].shape) != 3:
            return None
        x = "b _ _" if argument(op, 8, "batch_first") else "_ b _"
        state = "_ b _"
        states = "[_ b _]" if has_cell else state
        results = f"{x}, {state}, {state}" if has_cell else f"{x}, {state}"
        draws = argument(op, 6, "train") is True and argument(op, 5, "dropout") != 0.0
        return Line(f"{x}, {states}, [...] -> {results}", is_random=draws)

    return rule


def _grouped_mm(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """Rows of x, grouped by their ends, times one matrix a group: (x [rows, k], w [groups, k, n], ends
    [groups]).
    """
    if [len(kind.shape) for kind in operand_types] != [2, 3, 1]:
        return None
    return Line("_ k, _ k n, offs: _ -> _ n | sum k")


RULES: Mapping[str, Rule] = {
    **lines(_TABLE),
    "aten.lstm.input": _recurrent(has_cell=True),
    **{f"aten.{name}.input": _recurrent(has_cell=False) for name in ("gru", "rnn_tanh", "rnn_relu")},
    "aten._grouped_mm.default": _grouped_mm,
    "transformers.grouped_mm_fallback.default": _grouped_mm,
    "aten.matmul.default": _matmul,
    "aten.einsum.default": _einsum,
    "aten.convolution.default": _general_convolution,
    **{f"aten.conv{n}d.{overload}": _convolution(n, 6) for n in (1, 2, 3) for overload in ("default", "padding")},
    **{f"aten.conv_transpose{n}d.{'default' if n == 1 else 'input'}": _transposed(n) for n in (1, 2, 3)},
    "aten.scaled_dot_product_attention.default": _attention,
}
