"""The declaration language: what a line means, and what a malformed one says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autopar.errors import RuleError
from autopar.ops import RuleMatch, options_for, register_rule
from autopar.ops import registry as registry_module
from autopar.ops.declaration import parse
from autopar.program import Op, Ref, TensorType


@pytest.fixture(autouse=True)
def _forget_registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry_module, "_registered", {})


def shown(
    target: str,
    args: tuple,
    operands: list[tuple[int, ...]],
    *results: tuple[int, ...],
    kwargs=(),
    dtypes=None,
) -> set[str]:
    """The options as text, ``"f B,S(0) -> S(1) /8"``."""
    found = found_for(target, args, operands, *results, kwargs=kwargs, dtypes=dtypes)
    assert found is not None
    return {
        f"{o.factor} {','.join(map(str, o.operands))} -> {','.join(map(str, o.results))}"
        + (f" /{o.extent}" if o.extent else "")
        + (f" by {o.kernel}" if o.kernel else "")
        for o in found.options
    }


def found_for(target, args, operands, *results, kwargs=(), dtypes=None) -> RuleMatch | None:
    names = tuple(f"r{i}" for i in range(len(results)))
    kinds = dtypes or ["float32"] * len(operands)
    types = tuple(TensorType(shape, kind) for shape, kind in zip(operands, kinds, strict=True))
    return options_for(
        Op("op", target, args, tuple(kwargs), names), types, tuple(TensorType(r, "float32") for r in results)
    )


X, W, B = Ref("x"), Ref("w"), Ref("b")


def test_linear_is_the_line_that_the_documentation_shows():
    assert shown("aten.linear.default", (X, W, B), [(4, 16, 8), (6, 8), (6,)], (4, 16, 6)) == {
        "- R,R,R -> R",
        "~ B,B,B -> B",
        "+0 P,B,P -> P",
        "d0 S(0),B,B -> S(0) /4",
        "d1 S(1),B,B -> S(1) /16",
        "f B,S(0),S(0) -> S(2) /6",
        "h S(2),S(1),P -> P /8",
    }


def test_vocabulary_embedding_uses_its_kernel_and_gives_terms():
    assert "v S(0),R -> P /12 by vocab_parallel_embedding" in shown(
        "aten.embedding.default", (X, W), [(12, 8), (4, 6)], (4, 6, 8), dtypes=["float32", "int64"]
    )


def test_vocabulary_cross_entropy_communicates_once_for_the_maximum_and_once_for_the_sums():
    found = found_for(
        "autopar.cross_entropy",
        (X, W, None, 1, -100, 0.1, "sum"),
        [(4, 12), (4,)],
        (),
        dtypes=["float32", "int64"],
    )
    assert found is not None
    option = next(o for o in found.options if o.kernel)
    assert [str(p) for p in option.operands + option.results] == ["S(1)", "R", "R"]
    assert [(c.kind, c.phase, c.operand, c.drop_dims, c.count) for c in option.collectives] == [
        ("all_reduce", "forward", 0, (1,), 1),
        ("all_reduce", "forward", 0, (1,), 3),
    ]


def test_synchronised_batch_norm_communicates_two_numbers_per_channel_each_way():
    found = found_for("autopar.batch_norm", (X, None, None, None, None, 0.1, 1e-5), [(4, 6, 8)], (4, 6, 8))
    assert found is not None
    kernels = {o.factor: o for o in found.options if o.kernel}
    assert set(kernels) == {"d0", "d2"}
    assert [(c.phase, c.operand, c.drop_dims, c.count) for c in kernels["d0"].collectives] == [
        ("forward", 0, (0, 2), 2),
        ("backward", 0, (0, 2), 2),
    ]


def test_grouped_query_heads_are_bounded_by_the_key_heads():
    q, k = (2, 32, 64, 16), (2, 8, 64, 16)
    assert "d1 S(1),S(1),S(1) -> S(1) /8" in shown("aten.scaled_dot_product_attention.default", (X, W, B), [q, k, k], q)


def test_query_rows_of_causal_attention_need_a_kernel():
    target, shape = "aten.scaled_dot_product_attention.default", (2, 8, 64, 16)

    def rows(*rest, columns=64):
        others = (2, 8, columns, 16)
        found = found_for(target, (X, W, B, *rest), [shape, others, others], shape)
        assert found is not None
        return [(o.kernel, o.extent, [str(p) for p in o.operands]) for o in found.options if o.factor == "q"]

    assert rows() == [("", 64, ["S(2)", "B", "B"])]
    assert rows(None, 0.0, True) == [("context_attention", 32, ["S(2)", "B", "B"])]  # halves of slices are exchanged
    assert rows(None, 0.1, True) == []
    assert rows(None, 0.0, True, columns=80) == []


def test_broadcast_dims_of_size_one_stay_whole():
    assert "d0 S(0),B -> S(0) /4" in shown("aten.mul.Tensor", (X, W), [(4, 6), (1, 6)], (4, 6))


def test_a_dim_of_size_one_everywhere_is_no_factor():
    assert shown("aten.relu.default", (X,), [(1,)], (1,)) == {"- R -> R", "~ B -> B"}


def test_adding_a_number_to_terms_is_not_linear_but_scaling_by_one_is():
    assert "+ P -> P" not in shown("aten.add.Tensor", (X, 1.0), [(4,)], (4,))
    assert "+ P,P -> P" in shown("aten.add.Tensor", (X, W), [(4,), (4,)], (4,))
    assert "+ P -> P" in shown("aten.mul.Tensor", (X, 2.0), [(4,)], (4,))


def test_heads_are_the_outer_part_of_a_merged_dim():
    assert shown("aten.view.default", (X, (4, 16, 8, 3)), [(4, 16, 24)], (4, 16, 8, 3)) == {
        "- R -> R",
        "~ B -> B",
        "+ P -> P",
        "d0 S(0) -> S(0) /4",
        "d1 S(1) -> S(1) /16",
        "d2 S(2) -> S(2) /8",
    }


def test_sizes_among_the_arguments_are_named():
    found = found_for("aten.full.default", ((4, 6), 1.0), [], (4, 6))
    assert found is not None
    assert found.size_args == (0,)
    assert [o.factor for o in found.options] == ["-", "~", "d0", "d1"]


def test_an_unknown_op_and_a_tensor_in_an_unknown_place_have_no_rule():
    assert found_for("mylib.strange.default", (X,), [(4,)], (4,)) is None
    assert found_for("aten.relu.default", (X, W), [(4,), (4,)], (4,)) is None
    assert found_for("aten.layer_norm.default", (X, (4,)), [(2, 4)], (2, 4), kwargs=[("strange", W)]) is None


def test_keyword_operands_are_found_by_name():
    options = shown("aten.layer_norm.default", (X, (8,)), [(4, 8), (8,)], (4, 8), kwargs=[("weight", W)])
    assert "d0 S(0),B -> S(0) /4" in options


def test_a_user_registers_a_rule_and_it_wins_over_ours():
    register_rule("mylib.scaled_sum.default", "* h, h -> * | sum h")
    assert "h S(1),S(0) -> P /6" in shown("mylib.scaled_sum.default", (X, W), [(4, 6), (6,)], (4,))
    register_rule("aten.relu.default", "... -> ...")
    assert shown("aten.relu.default", (X,), [(4,)], (4,)) == {"- R -> R", "~ B -> B"}


@pytest.mark.parametrize("target", ["scaled_sum", "my lib.op.default", "mylib::op.default"])
def test_a_target_that_is_no_qualified_name_is_refused(target: str):
    with pytest.raises(RuleError, match=r"namespace\.name\.overload"):
        register_rule(target, "* -> *")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("* h, f h", "no '->'"),
        ("* h -> *", r"\['h'\] vanish: add '\| sum h'"),
        ("* h -> * h | sum h", r"\['h'\] are summed, but a result has them"),
        ("* h -> * | sum h k", r"name \['k'\], which no argument has"),
        ("* h -> * | add h", "can't read the remark 'add h'"),
        ("* -> ()", r"the dims '\*' vanish"),
        ("* ... -> *", "more than one of"),
        ("a-b -> a", "not a list of dims"),
        ("* d0 -> * d0", "choose others"),
        ("a, -> a", "not a list of dims"),
        ("a -> a | plus x", "can't read the remark"),
    ],
)
def test_a_malformed_line_says_what_to_write(line: str, message: str):
    with pytest.raises(RuleError, match=message):
        parse(line)


def test_rules_load_without_torch():
    code = "import sys, autopar.ops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
