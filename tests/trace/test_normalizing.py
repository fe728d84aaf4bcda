"""What the normalizing passes write, case by case; each program is also run against its model."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from autopar.ops.attention import WINDOWS
from autopar.trace import trace
from autopar.trace.passes import constants
from tests.models import make_llama
from tests.scripts.torchtune_recipe import RotaryPositionalEmbeddings
from tests.trace.interpreter import check_equals_model


class Calls(nn.Module):
    """A linear layer, then whatever a test asks for."""

    def __init__(self, function, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, x, y=None):
        return self.function(self.linear(x), x if y is None else y)


def targets_of(program):
    return [op.target for layer in program.layers for op in layer.ops]


def run(function, *, training=True, width=8, **inputs):
    inputs = inputs or {"x": torch.randn(4, width)}
    return check_equals_model(Calls(function, width), inputs, training=training)


X = torch.linspace(-1, 1, 32).view(4, 8)
CLASSES = torch.tensor([1, 7, -100, 3])
WEIGHT = torch.linspace(0.5, 2, 8, dtype=torch.float64)

CLASS_LOSSES = {
    "mean": lambda h, y: F.cross_entropy(h, y),
    "sum": lambda h, y: F.cross_entropy(h, y, reduction="sum"),
    "none": lambda h, y: F.cross_entropy(h, y, reduction="none"),
    "ignore 3": lambda h, y: F.cross_entropy(h, y.clamp(min=0), ignore_index=3),
    "smoothing": lambda h, y: F.cross_entropy(h, y, label_smoothing=0.1),
    "weight": lambda h, y: F.cross_entropy(h, y, weight=WEIGHT),
    "weight, smoothing": lambda h, y: F.cross_entropy(h, y, weight=WEIGHT, label_smoothing=0.2),
    "two dims": lambda h, y: F.cross_entropy(h[..., None].expand(4, 8, 3), y[:, None].expand(4, 3)),
    "nll of log softmax": lambda h, y: F.nll_loss(F.log_softmax(h, -1), y),
    "nll of log softmax, weight": lambda h, y: F.nll_loss(F.log_softmax(h, 1), y, WEIGHT),
}
PLAIN_NLLS = {
    "mean": lambda h, y: F.nll_loss(h.sin(), y),
    "weight": lambda h, y: F.nll_loss(h.sin(), y, WEIGHT),
    "sum": lambda h, y: F.nll_loss(h.sin(), y, WEIGHT, reduction="sum"),
    "none": lambda h, y: F.nll_loss(h.sin(), y, WEIGHT, reduction="none"),
    "of log softmax over another dim": lambda h, y: F.nll_loss(F.log_softmax(h, 0), y),
}
PROBABILITY_LOSSES = {
    "mean": lambda h, y: F.cross_entropy(h, y.softmax(-1)),
    "sum": lambda h, y: F.cross_entropy(h, y.softmax(-1), reduction="sum"),
    "none": lambda h, y: F.cross_entropy(h, y.softmax(-1), reduction="none"),
    "smoothing, weight": lambda h, y: F.cross_entropy(h, y.softmax(-1), weight=WEIGHT, label_smoothing=0.1),
}
POSITION_LOSSES = {
    "mse": lambda h, y: F.mse_loss(h, y),
    "mse sum": lambda h, y: F.mse_loss(h, y, reduction="sum"),
    "l1": lambda h, y: F.l1_loss(h, y),
    "smooth l1": lambda h, y: F.smooth_l1_loss(h, y, beta=0.3),
    "huber": lambda h, y: F.huber_loss(h, y, delta=0.3),
    "bce": lambda h, y: F.binary_cross_entropy(h.sigmoid(), y.sigmoid(), weight=WEIGHT),
    "bce logits": lambda h, y: F.binary_cross_entropy_with_logits(h, y.sigmoid(), pos_weight=WEIGHT),
    "kl": lambda h, y: F.kl_div(h.log_softmax(-1), y.softmax(-1)),
    "kl batchmean": lambda h, y: F.kl_div(h.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "soft margin": lambda h, y: F.soft_margin_loss(h, y.sign()),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("loss", CLASS_LOSSES)
def test_cross_entropy_is_a_sum_of_terms(loss):
    program = run(CLASS_LOSSES[loss], x=X, y=CLASSES).program
    found = targets_of(program)
    assert found.count("autopar.cross_entropy") == 1
    assert ("autopar.cross_entropy_denominator" in found) == (loss not in ("sum", "none"))
    assert not any("log_softmax" in target or "nll_loss" in target for target in found)


def flattened(**settings):
    return lambda h, y: F.cross_entropy(h.view(2, 2, 8).flatten(0, 1), y.view(2, 2).view(-1), **settings)


FLATTENED = {  # -> whether positions keep their dims
    "mean": (flattened(), True),
    "sum, weight": (flattened(reduction="sum", weight=WEIGHT), True),
    "weight, smoothing": (flattened(weight=WEIGHT, label_smoothing=0.2), True),
    "cast": (lambda h, y: F.cross_entropy(h.view(2, 2, 8).view(4, 8).float(), y.view(2, 2).view(-1)), True),
    "nll": (lambda h, y: F.nll_loss(F.log_softmax(h.view(2, 2, 8).view(4, 8), -1), y.view(2, 2).view(-1)), True),
    "none": (flattened(reduction="none"), True),
    "moved classes": (lambda h, y: F.cross_entropy(h.view(2, 2, 8).mT, y.view(2, 2), reduction="none"), True),
    "in another order": (lambda h, y: F.cross_entropy(h.view(2, 2, 8).mT.reshape(4, 8), y.view(2, 2).flatten()), False),
    "classes of several dims": (lambda h, y: F.cross_entropy(h.view(2, 2, 8).view(2, 16), y.view(2, 2)[:, 1]), False),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("loss", FLATTENED)
def test_cross_entropy_of_flattened_positions(loss):
    """Batch and sequence stay dims of their own, which split one by one."""
    function, keeps = FLATTENED[loss]
    program = run(function, x=X, y=CLASSES).program
    losses = [op for layer in program.layers for op in layer.ops if op.target == "autopar.cross_entropy"]
    assert [len(program.values[op.operands[1]].type.shape) for op in losses] == [2 if keeps else 1]


@pytest.mark.parametrize("loss", PLAIN_NLLS)
def test_likelihood_of_other_scores_is_written_out(loss):
    found = targets_of(run(PLAIN_NLLS[loss], x=X, y=CLASSES).program)
    assert "aten.gather.default" in found
    assert "autopar.cross_entropy" not in found


@pytest.mark.parametrize("loss", PROBABILITY_LOSSES)
def test_cross_entropy_with_class_probabilities(loss):
    found = targets_of(run(PROBABILITY_LOSSES[loss], x=X, y=X.cos()).program)
    assert "aten.log_softmax.int" in found
    assert not any("cross_entropy" in target for target in found)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("loss", POSITION_LOSSES)
def test_other_losses_keep_no_reduction(loss):
    program = run(POSITION_LOSSES[loss], x=X, y=X.cos()).program
    assert any(target.startswith("aten.sum") for target in targets_of(program))
    assert not any(target.startswith("aten.mean") for target in targets_of(program))
    assert program.loss


@pytest.mark.parametrize("function", [
    lambda h, y: h.mean(), lambda h, y: h.mean(0), lambda h, y: h.mean((0, 1), keepdim=True),
    lambda h, y: h.mean(-1, dtype=torch.float64), lambda h, y: y.gt(0).long().float().mean() * h.mean(()),
])  # fmt: skip
def test_mean_is_a_sum_and_a_division(function):
    found = targets_of(run(function).program)
    assert not any("mean" in target for target in found)
    assert "aten.div.Tensor" in found


def test_dropout_of_every_kind():
    def function(h, y):
        return F.dropout(h, 0.3, True) + F.dropout(h, 0.0, True) + F.dropout(h, 0.5, False)

    program = run(function).program
    ops = [op for layer in program.layers for op in layer.ops if "dropout" in op.target]
    assert [(op.target, op.args[1], op.is_random) for op in ops] == [("autopar.dropout", 0.3, True)]
    assert ops[0].saved_extra_bytes == 32


def test_equal_random_ops_are_not_merged():
    program = run(lambda h, y: F.dropout(h, 0.5, True) * 2 + F.dropout(h, 0.5, True)).program
    assert targets_of(program).count("autopar.dropout") == 2


def test_equal_ops_are_merged():
    program = run(lambda h, y: (h + 1).sin() * (h + 1).sin()).program
    assert targets_of(program).count("aten.sin.default") == 1


def test_gradients_stop_where_the_user_stops_them():
    def function(h, y):
        with torch.no_grad():
            still = h * 2 + torch.ones_like(h)
            with torch.enable_grad():
                still = still.sin()
        return h * still + h.detach().cos(), still

    program = run(function).program
    still = program.values[program.outputs[1]]
    assert not still.requires_grad


def test_nothing_is_left_of_a_detach_without_gradient():
    assert "aten.detach.default" not in targets_of(run(lambda h, y: h + y.detach()).program)


@pytest.fixture(params=[1 << 24, 16])
def block(request, monkeypatch):
    """Masks are looked at whole, and in pieces that are smaller than they are."""
    monkeypatch.setattr(constants, "_BLOCK_ELEMENTS", request.param)


@pytest.mark.usefixtures("block")
def test_a_mask_built_from_positions_becomes_is_causal():
    def function(h, y):
        q = h.view(4, 1, 8, 1)
        row = torch.arange(8)
        boolean = (row[None, :] <= row[:, None]).expand(4, 1, 8, 8)
        bias = torch.full((8, 8), float("-inf"), dtype=h.dtype).triu(1)
        return F.scaled_dot_product_attention(q, q, q, boolean) + F.scaled_dot_product_attention(q, q.cos(), q, bias)

    traced = run(function)
    ops = [op for layer in traced.program.layers for op in layer.ops if "attention" in op.target]
    assert [op.args[3:] for op in ops] == [(None, 0.0, True), (None, 0.0, True)]
    assert not traced.constants


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("changed", [False, True])
def test_the_mask_of_packed_samples_is_causal_where_each_row_holds_one(changed):
    """What is computed for every sample from positions; a sample that holds two documents is not causal alone."""

    def function(h, y):
        q, row, sample = h.view(4, 1, 8, 1), torch.arange(8), torch.arange(4)[:, None, None]
        document = (torch.arange(8) // (8 - 4 * changed)).expand(4, 8)
        of_row, of_column = document[sample, row[None, :, None]], document[sample, row[None, None, :]]
        seen = (torch.ones((), dtype=torch.bool) & (of_row == of_column)) & (row[None, :] <= row[:, None])
        return F.scaled_dot_product_attention(q, q, q, seen.unsqueeze(1))

    traced = run(function)
    (op,) = [op for layer in traced.program.layers for op in layer.ops if "attention" in op.target]
    assert (op.args[3:] == (None, 0.0, True)) != changed
    assert bool(traced.constants) == changed


@pytest.mark.usefixtures("block")
def test_a_mask_that_hides_nothing_disappears():
    def function(h, y):
        q = h.view(4, 1, 8, 1)
        return F.scaled_dot_product_attention(q, q, q, torch.ones(4, 1, 8, 8, dtype=torch.bool))

    traced = run(function)
    ops = [op for layer in traced.program.layers for op in layer.ops if "attention" in op.target]
    assert [op.args[3:] for op in ops] == [(None, 0.0, False)]


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("mask", "is_causal"), [
    (lambda row: (row[None, :] <= row[:, None]) & (row[None, :] > row[:, None] - 3), True),
    (lambda row: (row[:, None] >= row[None, :]) & (row[:, None] - row[None, :] < 3), True),
    (lambda row: (row[None, :] < row[:, None] + 3) & (row[None, :] >= row[:, None] - 2), False),
    # In the queries' dtype: on processors without AVX-512, torch's kernel misreads a float32 mask beside float64.
    (lambda row: X.double().new_full((8, 8), -torch.inf).masked_fill((row[:, None] - row).abs() < 3, 0), False),
])  # fmt: skip
def test_a_window_is_known(mask, is_causal):
    def function(h, y):
        q = h.view(4, 1, 8, 1)
        return F.scaled_dot_product_attention(q, q, q, mask(torch.arange(8)).expand(4, 1, -1, 8), scale=0.5)

    traced = run(function)
    (op,) = [op for layer in traced.program.layers for op in layer.ops if "attention" in op.target]
    assert (op.target, op.args[3:]) == (WINDOWS, (0.5, 3, is_causal))
    assert not traced.constants


@pytest.mark.slow_after(1)
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("mask", [
    lambda row: (row[None, :] <= row[:, None]) & (row[None, :] != row[:, None] - 3),  # a hole
    lambda row: (row[None, :] < row[:, None] + 3) & (row[None, :] > row[:, None] - 4),  # further back than ahead
    lambda row: row[None, :] < row[:, None] + 2,
    lambda row: (row[None, :] <= row[:, None]).double() * 0.5,  # a bias
    lambda row: row[None, :] <= 3 + 0 * row[:, None],
    lambda row: (row <= 0)[None, :],  # one row for all
])  # fmt: skip
def test_other_masks_stay_and_are_one_small_constant(mask):
    def function(h, y):
        q = h.view(4, 1, 8, 1)
        seen = mask(torch.arange(8)).expand(4, 1, -1, 8)
        again = mask(torch.arange(8)).expand(4, 1, -1, 8)
        return F.scaled_dot_product_attention(q, q, q, seen) + F.scaled_dot_product_attention(q, q.cos(), q, again)

    traced = run(function)
    ops = [op for layer in traced.program.layers for op in layer.ops if "attention" in op.target]
    assert len({op.operands[3] for op in ops}) == 1
    (constant,) = traced.constants.values()
    assert constant.shape[:-2].numel() == 1


def test_a_mask_from_an_input_stays():
    def function(h, y):
        q = h.view(4, 1, 8, 1)
        return F.scaled_dot_product_attention(q, q, q, (y > -2).view(4, 1, 1, 8))

    traced = run(function)
    ops = [op for layer in traced.program.layers for op in layer.ops if "attention" in op.target]
    assert len(ops[0].operands) == 4


@pytest.mark.parametrize("combine", [
    lambda seen, kept: torch.ones_like(seen) & kept,
    lambda seen, kept: torch.logical_and(kept, seen >= seen),
    lambda seen, kept: ~((seen != seen) | ~kept),
    lambda seen, kept: (1.0 - kept.expand(4, 1, 8, 8).double()).masked_fill(~kept, -1e9),
])  # fmt: skip
def test_a_padding_mask_stays_small(combine):
    """What hides nothing from anybody adds no queries to it."""

    def function(h, y):
        q, row = h.view(4, 1, 8, 1), torch.arange(8)
        seen = row[:, None] >= row[None, :]
        return F.scaled_dot_product_attention(q, q, q, combine(seen, (y > -0.5).view(4, 1, 1, 8)).expand(4, 1, 8, 8))

    traced = run(function, x=X, y=X.flip(0))
    (attention,) = [op for layer in traced.program.layers for op in layer.ops if "attention" in op.target]
    assert traced.program.type_of(attention.operands[3]).shape == (4, 1, 1, 8)
    assert not traced.constants


@pytest.mark.parametrize("combine", [
    lambda seen, kept: seen & kept,  # causal
    lambda seen, kept: (seen | torch.ones_like(seen)) & (seen | kept),
])  # fmt: skip
def test_a_mask_that_hides_something_stays(combine):
    def function(h, y):
        q, row = h.view(4, 1, 8, 1), torch.arange(8)
        seen = row[:, None] >= row[None, :]
        return F.scaled_dot_product_attention(q, q, q, combine(seen, (y > -0.5).view(4, 1, 1, 8)))

    traced = run(function, x=X, y=X.flip(0))
    (attention,) = [op for layer in traced.program.layers for op in layer.ops if "attention" in op.target]
    assert traced.program.type_of(attention.operands[3]).shape == (4, 1, 8, 8)


def test_a_trained_bias_is_masked_once_for_all_samples():
    """Attention repeats it, and adds up its gradient."""

    def function(h, y):
        q, row = y.view(4, 1, 8, 1), torch.arange(8)
        seen = (row[:, None] >= row[None, :]).expand(4, 1, 8, 8)
        bias = h.sum(0).view(1, 1, 1, 8) * row[:, None]
        return F.scaled_dot_product_attention(q, q.cos(), q.sin(), torch.where(seen, bias, -1e9).contiguous())

    traced = run(function)
    (attention,) = [op for layer in traced.program.layers for op in layer.ops if "attention" in op.target]
    assert traced.program.type_of(attention.operands[3]).shape == (1, 1, 8, 8)
    assert traced.program.values[attention.operands[3]].requires_grad
    assert all(constant.shape[0] == 1 or constant.ndim < 4 for constant in traced.constants.values())


@pytest.mark.usefixtures("block")
def test_a_mask_that_scores_are_added_to_is_not_computed_for_each_sample():
    """As eager attention adds it: where it is expanded and then chosen by, one sample's stands for all."""

    def function(h, y):
        q, row = h.view(4, 1, 8, 1), torch.arange(8)
        seen = (row[:, None] >= row[None, :]).expand(4, 1, 8, 8)
        scores = q @ q.transpose(2, 3) + torch.where(seen, 0.0, -1e9)
        return scores.softmax(-1) @ q

    traced = run(function)
    (constant,) = traced.constants.values()
    assert constant.shape[:-2].numel() == 1


def test_large_constants_that_repeat_are_kept_as_what_they_repeat(monkeypatch):
    monkeypatch.setattr(constants, "_BLOCK_ELEMENTS", 16)

    def function(h, y):
        ones, row = torch.ones(4, 8), torch.arange(8.0)
        outer = ones[:, None] * ones[:, :, None] * (row + 1)  # of every sample, [4, 8, 8], with a row for all
        return (h[:, None] * outer).sum(1)

    traced = run(function)
    (constant,) = traced.constants.values()
    assert constant.shape[-2:] == (8, 8)
    assert constant.untyped_storage().nbytes() == 8 * constant.element_size()
    assert torch.equal(constant[0], torch.arange(1.0, 9.0).expand(8, 8))


def test_bits_are_no_mask():
    """``x & 1`` is not x, although 1 is true."""
    one = torch.ones(8, dtype=torch.int64)
    program = run(lambda h, y: h * (y.mul(9).long() & one)).program
    assert any("and" in target for target in targets_of(program))


def test_what_has_no_gradient_is_expanded_last():
    def function(h, y):
        shown = (y > 0)[:, :1].expand(4, 8).logical_not().to(h.dtype) * 2
        return h * shown + h.sin() * h.sum(1, keepdim=True).expand(4, 8), shown

    program = run(function).program
    found = [program.type_of(op.results[0]).shape for layer in program.layers for op in layer.ops
             if op.target == "aten.mul.Tensor"]  # fmt: skip
    assert sorted(found) == [(4, 1), (4, 8), (4, 8)]
    # One for the output that is expanded, one to collect the gradient of what is.
    assert targets_of(program).count("aten.expand.default") == 2


def test_attention_saves_no_matrix():
    def function(h, y):
        q = h.view(4, 1, 8, 1)
        return F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True)

    ops = [op for layer in run(function).program.layers for op in layer.ops if "attention" in op.target]
    assert ops[0].saves == (0, 1, 2, 3)
    assert ops[0].saved_extra_bytes == 4 * 8 * 4


def test_attention_without_a_fast_kernel_saves_its_scores():
    """Where a CPU has none: with dropout, or with a mask that takes a gradient."""

    def function(h, y):
        q = h.view(4, 1, 8, 1)
        plain = F.scaled_dot_product_attention(q, q.cos(), q.sin())
        dropped = F.scaled_dot_product_attention(q, q.cos(), q.sin(), dropout_p=0.5)
        biased = F.scaled_dot_product_attention(q, q.cos(), q.sin(), h.sum(0).view(1, 1, 1, 8).expand(4, 1, 8, 8) * 2)
        return plain + dropped + biased

    program = run(function).program
    plain, dropped, biased = (op for layer in program.layers for op in layer.ops if "attention" in op.target)
    scores, query = 4 * 8 * 8 * 8, 4 * 8 * 8
    assert (plain.plain_saves, plain.plain_saved_extra_bytes) == ((), 0)
    assert plain.saved_extra_bytes == dropped.saved_extra_bytes == biased.saved_extra_bytes == 4 * 8 * 4
    # Beside the values: query and key scaled, the scores; with dropout also what they are multiplied by, and become.
    assert biased.plain_saves == dropped.plain_saves == (2,)
    assert biased.plain_saved_extra_bytes == scores + 2 * query
    assert dropped.plain_saved_extra_bytes == 3 * scores + 2 * query


def test_constants_are_folded_and_shared():
    def function(h, y):
        table = torch.arange(8, dtype=h.dtype).sin()
        return h * table + y * torch.arange(8, dtype=h.dtype).sin() + torch.tensor([2.0]).to(h)

    traced = run(function)
    assert sorted(tuple(c.shape) for c in traced.constants.values()) == [(1,), (8,)]
    assert {traced.program.values[name].role for name in traced.constants} == {"constant"}


class Tables(nn.Module):
    """Everything but `moved` is read only; two layers read one cosine."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8.0))
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("moved", torch.ones(8))

    def forward(self, x):
        scale = torch.arange(8.0).exp()
        h = self.first(x) * torch.cos(self.table * scale) + self.moved.sin()
        h = self.second(h) * torch.cos(self.table * scale)
        h = F.scaled_dot_product_attention(h[None], h[None], h[None], self.mask[:6, :6]) + self.table
        self.moved.mul_(0.5)
        return h, torch.exp(self.table)


@pytest.mark.parametrize("training", [True, False])
def test_what_is_computed_from_buffers_alone_is_hoisted(training):
    traced = check_equals_model(Tables(), {"x": torch.randn(6, 8)}, training=training)
    program = traced.program
    assert sorted(op.target for op in program.hoisted) == [
        "aten.cos.default", "aten.mul.Tensor", "aten.slice.Tensor", "aten.slice.Tensor",
    ]  # fmt: skip
    assert [tuple(c.shape) for c in traced.constants.values()] == [(8,)], "what no buffer takes part in is known"
    assert {"aten.sin.default", "aten.exp.default"} <= set(targets_of(program)), "an updated buffer; an output"
    assert [op.args[3] is None for op in program.layers[-1].ops if "attention" in op.target] == [False]


class KeptTable(nn.Module):
    """Keeps a table of a buffer's, which calls read in another form."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.rand(8))

    def forward(self, x):
        self.kept = torch.outer(torch.arange(6), self.frequencies).cos()
        return self.linear(x * self.kept[None])


def test_what_leaves_is_hoisted_where_what_is_hoisted_reads_it():
    program = check_equals_model(KeptTable(), {"x": torch.randn(2, 6, 8)}, training=True).program
    assert [op.target for op in program.hoisted] == ["aten.outer.default", "aten.cos.default", "aten.unsqueeze.default"]
    assert len(program.outputs) == 2


def test_a_program_does_not_depend_on_what_buffers_hold():
    from autopar.trace import trace

    with torch.device("meta"):
        unknown = Tables()
    known, other = (trace(model, (torch.randn(6, 8),), {}) for model in (Tables(), unknown))
    assert known.program == other.program
    assert known.program.fingerprint == other.program.fingerprint


def test_an_empty_cache_leaves_nothing():
    program = run(lambda h, y: torch.cat([torch.tensor([]).to(h), h], -1)).program
    assert targets_of(program) == ["aten.linear.default"]


def write(h, *slices):
    made = h.new_zeros(len(h), 12)
    for start, stop in slices:
        made[:, start:stop] = h[:, : stop - start]
    return made


@pytest.mark.parametrize("slices", [((0, 4), (4, 12)), ((7, 12), (0, 7))])
def test_slices_that_fill_a_tensor_are_a_cat(slices):
    targets = targets_of(run(lambda h, y: write(h, *slices)).program)
    assert "aten.cat.default" in targets
    assert not {"aten.slice_scatter.default", "aten.new_zeros.default"} & set(targets)


@pytest.mark.parametrize("slices", [((0, 4),), ((0, 4), (5, 12)), ((0, 6), (5, 12))])
def test_slices_that_leave_a_gap_or_meet_are_written(slices):
    assert "aten.slice_scatter.default" in targets_of(run(lambda h, y: write(h, *slices)).program)


def test_a_slice_over_one_that_was_written_whole_is_written():
    """Also where the first call leaves out the dim and the bounds."""

    def function(h, y):
        whole = torch.slice_scatter(h.new_zeros(h.shape), h)
        whole[:2] = h[2:4]
        return whole

    assert targets_of(run(function).program).count("aten.slice_scatter.default") == 1


def test_several_results():
    def function(h, y):
        a, b = h.split(4, 1)
        values, indices = h.topk(2)
        return a.max(1).values, b, values, indices, h.unbind(1)[3]

    run(function)


def test_lists_of_one_tensor():
    def function(h, y):
        (whole,), (row,), (grid,) = h.chunk(1, 1), h[:1].unbind(0), torch.meshgrid(h[0], indexing="ij")
        return whole.sum(1), h.split(8, 1)[0], row * 2, grid + 1

    run(function)


def test_covariances():
    run(lambda h, y: (torch.cov(h), torch.corrcoef(h.T), h[0].cov(), torch.cov(h, correction=0), torch.corrcoef(h[0])))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.plain = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
        self.still = nn.BatchNorm1d(8).eval()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        self.count.add_(x.sum(0))
        with torch.no_grad():
            self.count.mul_(0.5)
        return self.norm(self.plain(x)) * self.still(x) + self.count


@pytest.mark.parametrize("training", [True, False])
def test_norms_and_buffers(training):
    traced = check_equals_model(Norms(), {"x": torch.randn(6, 8)}, training=training)
    program = traced.program
    updated = {program.parameters[name] for name in program.updates}
    assert "count" in updated
    assert ("norm.running_mean" in updated) == training
    assert ("norm.num_batches_tracked" in updated) == training


class PositionTables(nn.Module):
    """Tables of positions, computed without gradients and without autocast inside, as transformers 4 writes them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("rates", torch.rand(4))

    @torch.no_grad()
    def table(self, function, x):
        rates = self.rates[None, :, None].float().expand(len(x), -1, 1)
        places = torch.arange(x.shape[1])[None, None, :].expand(len(x), 1, -1).float()
        with torch.autocast("cpu", enabled=False):
            angles = (rates @ places).transpose(1, 2)
            return function(torch.cat((angles, angles), -1)).to(x.dtype)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.linear(x)
        return x * self.table(torch.cos, x) + x * self.table(torch.sin, x)


def test_regions_inside_of_regions_keep_their_own_bodies():
    check_equals_model(PositionTables(), {"x": torch.randn(2, 6, 8)})


def test_mixed_precision_is_in_the_types():
    from autopar.trace import trace

    model = Calls(lambda h, y: F.cross_entropy(h, y))
    traced = trace(model, (), {"x": X, "y": CLASSES}, dtype=torch.bfloat16)
    program = traced.program
    assert program.type_of("linear_weight").dtype == "bfloat16"
    assert program.type_of("x").dtype == "bfloat16"
    assert program.type_of(program.loss).dtype == "bfloat16"
    assert traced.flatten_inputs((), {"x": X, "y": CLASSES})[0].dtype is torch.bfloat16
    assert model.linear.weight.dtype is torch.float32


def test_autocast_inside_the_model():
    class Autocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                low = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                return low.float() + self.linear(x)

    from autopar.trace import trace

    program = trace(Autocast(), (X,), {}).program
    assert "bfloat16" in {program.type_of(op.results[0]).dtype for layer in program.layers for op in layer.ops}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_weight_norm_is_written_out(dim):
    """Its kernel reads beyond slices that don't belong together: nobody may try them."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6), dim=dim)

        def forward(self, x):
            return self.linear(x)

    program = check_equals_model(Normed(), {"x": X}, training=True).program
    assert {op.rule_source for layer in program.layers for op in layer.ops} == {"rule"}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu")])
def test_recurrent_cells_are_written_out(cell, bias):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell(8, 6, bias=bias)

        def forward(self, x):
            state, made = None, []
            for _ in range(3):
                state = self.cell(x, state)
                made.append(state[0] if isinstance(state, tuple) else state)
            return torch.stack(made, 1)

    program = check_equals_model(Steps(), {"x": X}, training=True).program
    assert {op.rule_source for layer in program.layers for op in layer.ops} == {"rule"}


def test_masks_that_the_model_makes_are_not_compared_with_a_causal_one():
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, x, y, padding):
            causal = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
            return self.inner(x, y, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)

    inputs = {"x": torch.randn(2, 5, 8), "y": torch.randn(2, 4, 8), "padding": torch.arange(10).view(2, 5) > 8}
    check_equals_model(Translator(), inputs, training=True)


def test_a_cache_that_nothing_reads_changes_no_name() -> None:
    """A plan, which goes by names, then fits the model with and without ``use_cache``."""

    def names(*, use_cache: bool) -> list[str]:
        model, inputs = make_llama()
        model.config.use_cache = use_cache
        return [name for layer in trace(model, (), inputs).program.layers for op in layer.ops for name in op.results]

    assert names(use_cache=True) == names(use_cache=False)


def test_names_of_dropped_values_change_no_type() -> None:
    """Values that folding took out of the program leave gaps in numbers, which others get."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.tables = nn.ModuleList(RotaryPositionalEmbeddings(4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear, table in zip(self.linears, self.tables, strict=True):
                query, key = (table(linear(y).view(*x.shape[:2], 4, 4)) for y in (x, x.sin()))
                x = x + (query * key).flatten(2)
            return x.sum()

    check_equals_model(Layers(), {"x": torch.randn(2, 6, 16)})


class FirstStates(nn.Module):
    """Two scans that begin with a state of one number for each row."""

    def __init__(self, rows):
        super().__init__()
        self.linear, self.rows = nn.Linear(8, 512), rows

    def forward(self, x):
        states = torch.zeros(self.rows, 512).to(x.dtype), torch.ones(self.rows, 1).expand(-1, 512).to(x.dtype) * 3 - 1
        return sum((self.linear(x[:1]) * state + state.cos()).sum() for state in states)


def test_large_tensors_of_one_number_are_created_where_they_are_read():
    """As a constant, the first state of a scan would be in memory throughout a step, whole on every device."""
    for rows, created in ((2048, 2), (16, 0)):
        traced = check_equals_model(FirstStates(rows), {"x": torch.randn(4, 8)})
        assert targets_of(traced.program).count("aten.full.default") == created
        assert all(constant.numel() < 2048 * 512 for constant in traced.constants.values())
