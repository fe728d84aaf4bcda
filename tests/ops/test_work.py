from dataclasses import replace

import pytest

from autopar.ops import count_work, family_of
from autopar.ops.family import Buffers
from autopar.program import Op, Ref
from tests.cost.ops import ATTENTION, LINEAR, MUL, op, tensor


def test_linear_counts_two_per_product_and_twice_that_backward():
    work = count_work(LINEAR, (tensor(2, 3, 5), tensor(7, 5)), (tensor(2, 3, 7),))
    assert (work.kind, work.flops, work.backward_flops) == ("matmul", 2 * 2 * 3 * 5 * 7, 4 * 2 * 3 * 5 * 7)
    assert (work.read_bytes, work.write_bytes) == (2 * (30 + 35), 2 * 42)


@pytest.mark.parametrize("saved", [0, 1])
def test_one_gradient_costs_one_product(saved):
    linear = op("aten.linear.default", 2, saves=(saved,))
    operands, results = (tensor(6, 5), tensor(7, 5)), (tensor(6, 7),)
    work = count_work(linear, operands, results)
    assert (work.backward_flops, work.num_backward_kernels) == (work.flops, 1)
    # What is saved is read; the gradient that it gives is that of the other operand.
    assert work.backward_read_bytes == operands[saved].num_bytes + results[0].num_bytes
    assert work.backward_write_bytes == operands[1 - saved].num_bytes


@pytest.mark.parametrize(
    ("target", "shapes", "result", "flops"),
    [
        ("aten.mm.default", ((3, 5), (5, 7)), (3, 7), 210),
        ("aten.bmm.default", ((2, 3, 5), (2, 5, 7)), (2, 3, 7), 420),
        ("aten.matmul.default", ((2, 3, 5), (5, 7)), (2, 3, 7), 420),
        ("aten.addmm.default", ((7,), (3, 5), (5, 7)), (3, 7), 210),
        ("aten.baddbmm.default", ((2, 3, 7), (2, 3, 5), (2, 5, 7)), (2, 3, 7), 420),
        ("aten.conv2d.default", ((1, 4, 8, 8), (6, 4, 3, 3)), (1, 6, 8, 8), 2 * 6 * 64 * 36),
        ("aten.conv_transpose2d.input", ((1, 4, 8, 8), (4, 6, 2, 2)), (1, 6, 16, 16), 2 * 4 * 64 * 24),
    ],
)
def test_products(target, shapes, result, flops):
    work = count_work(op(target, len(shapes)), tuple(tensor(*s) for s in shapes), (tensor(*result),))
    assert (work.kind, work.flops) == ("matmul", flops)


def test_einsum_counts_every_label():
    einsum = Op("e", "aten.einsum.default", ("bqd,bkd->bqk", (Ref("a"), Ref("b"))), (), ("y",))
    work = count_work(einsum, (tensor(2, 3, 5), tensor(2, 7, 5)), (tensor(2, 3, 7),))
    assert work.flops == 2 * 2 * 3 * 5 * 7


def test_causal_attention_is_half_and_backward_five_halves():
    query, key = tensor(2, 4, 16, 8), tensor(2, 4, 32, 8)
    full = count_work(op("aten.scaled_dot_product_attention.default", 3), (query, key, key), (query,))
    causal = count_work(ATTENTION, (query, key, key), (query,))
    assert full.flops == 4 * 2 * 4 * 16 * 32 * 8
    assert (causal.flops, causal.backward_flops) == (full.flops / 2, 1.25 * full.flops)
    assert (causal.length, causal.head_dim, causal.is_causal) == (32, 8, True)


def test_causal_as_a_positional_argument():
    refs = (Ref("q"), Ref("k"), Ref("v"))
    written = Op("a", ATTENTION.target, (*refs, None, 0.0, True), (), ("y",))
    query = tensor(1, 1, 8, 4)
    assert count_work(written, (query,) * 3, (query,)).is_causal


def test_elementwise_reads_and_writes_everything():
    work = count_work(MUL, (tensor(8), tensor(8)), (tensor(8),))
    assert (work.kind, work.num_bytes, work.backward_num_bytes) == ("bytes", 48, 16 + 32 + 32)


def test_an_unknown_op_is_counted_by_its_bytes():
    work = count_work(op("somebody.special.default", 1), (tensor(8),), (tensor(4),))
    assert (work.kind, work.flops, work.num_bytes) == ("bytes", 0, 24)


def test_a_sum_passes_gradients_on_and_reduces_broadcast_ones():
    add = op("aten.add.Tensor", 2)
    assert count_work(add, (tensor(4, 8), tensor(4, 8)), (tensor(4, 8),)).backward_num_bytes == 0
    assert count_work(add, (tensor(4, 8), tensor(8)), (tensor(4, 8),)).backward_num_bytes == 64 + 16


def test_views_are_free_unless_they_drop_or_repeat_elements():
    free = count_work(op("aten.transpose.int", 1, is_view=True), (tensor(4, 8),), (tensor(8, 4),))
    assert (free.kind, free.num_bytes, free.backward_num_bytes) == ("view", 0, 0)
    cut = count_work(op("aten.slice.Tensor", 1, is_view=True), (tensor(4, 8),), (tensor(2, 8),))
    assert (cut.num_bytes, cut.backward_num_bytes) == (0, 32 + 64)
    split = count_work(op("aten.split.Tensor", 1, is_view=True), (tensor(4, 8),), (tensor(2, 8), tensor(2, 8)))
    assert split.num_bytes == 0


def test_a_lookup_reads_rows_not_the_table():
    operands = (tensor(1000, 8), tensor(4, dtype="int64"))
    work = count_work(op("aten.embedding.default", 2), operands, (tensor(4, 8),))
    assert work.num_bytes == 2 * 64 + 32
    assert work.backward_write_bytes == 16000 + 64


@pytest.mark.parametrize(
    "target",
    ["autopar.dropout", "autopar.cross_entropy", "autopar.cross_entropy_denominator", "autopar.batch_norm"],
)
def test_ops_of_the_trace_are_counted(target):
    work = count_work(op(target, 2), (tensor(4, 8), tensor(4, dtype="int64")), (tensor(4, 8),))
    assert work.num_bytes > 0


def test_attention_on_gpus_repeats_heads_that_no_fast_kernel_shares():
    buffers = family_of(ATTENTION.target).buffers_on_gpus
    query, key, mask = tensor(2, 8, 16, 32), tensor(2, 2, 16, 32), tensor(1, 8, 16, 16)
    repeated = 2 * 2 * query.num_bytes  # keys and values, in float32
    wide = buffers(ATTENTION, [replace(each, dtype="float32") for each in (query, key, key)], (True,) * 3)
    assert (wide.kept, wide.backward) == (repeated, repeated)
    assert buffers(ATTENTION, (query, key, key), (True,) * 3) == Buffers()
    masked = buffers(ATTENTION, (query, key, key, mask), (True,) * 4)
    gradient_of_mask = 2 * 8 * 16 * 16 * 2
    assert (masked.kept, masked.backward) == (repeated / 2, repeated / 2 + gradient_of_mask)
