"""The small derived facts of a Program."""

import pickle

import pytest
import torch

from autopar.placement import REPLICATE, shard
from autopar.program import Layer, Op, Option, Program, Ref, TensorType, Value, itemsize_bytes, iter_refs


def make_op(name: str) -> Op:
    return Op(
        name=name,
        target="aten.index.Tensor",
        args=(Ref("x"), (Ref("i"), None, Ref("x")), 2, "mean"),
        kwargs=(("out", Ref("y")), ("dim", (0, 1))),
        results=(name,),
        options=(Option("b", (shard(0), REPLICATE), (shard(0),)),),
    )


def make_layer(name: str, kind: int) -> Layer:
    return Layer(name, kind, (make_op(f"{name}.op"),), ("x",), (), (f"{name}.op",))


def test_a_type_that_another_process_made_is_found_by_hash():
    """Hashes of strings differ between processes, so a cached one must stay where it was made."""
    kind = TensorType((2, 3), "float32")
    assert hash(kind) == hash(TensorType((2, 3), "float32")) != hash(TensorType((3, 2), "float32"))
    copied = pickle.loads(pickle.dumps(kind))
    assert "_hash" in vars(kind)
    assert "_hash" not in vars(copied)
    assert copied == kind


def make_program() -> Program:
    values = {"x": Value("x", TensorType((4, 6), "bfloat16"), "input", False)}
    layers = tuple(make_layer(name, kind) for name, kind in [("a", 1), ("b", 0), ("c", 1), ("d", 2)])
    return Program(values, layers, ("x",), {}, {}, ("d.op",))


def test_operands_come_in_order_with_repeats_and_from_nested_arguments():
    assert make_op("o").operands == ("x", "i", "x", "y")
    assert list(iter_refs((1, None, "x", (Ref("a"), ("b", Ref("c")))))) == ["a", "c"]


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16",
     "int8", "uint8", "bool", "complex64", "complex128"],
)  # fmt: skip
def test_dtypes_are_as_torch_has_them(dtype: str):
    known = getattr(torch, dtype)
    assert itemsize_bytes(dtype) == known.itemsize
    assert TensorType((), dtype).is_floating == (known.is_floating_point or known.is_complex)


def test_sizes():
    assert TensorType((4, 6), "bfloat16").num_elements == 24
    assert TensorType((4, 6), "bfloat16").num_bytes == 48
    assert TensorType((), "int64").num_bytes == 8
    assert TensorType((3, 0), "int64").num_bytes == 0


def test_kinds_are_the_first_layer_of_each_in_order():
    assert [layer.name for layer in make_program().kinds] == ["b", "a", "d"]
    assert make_program().type_of("x") == TensorType((4, 6), "bfloat16")


def test_programs_are_values():
    first, second = make_program(), make_program()
    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(AttributeError):
        first.loss = "x"
