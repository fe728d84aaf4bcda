"""Special kernels on shards against torch's own ops on the whole, forward and backward, in float64."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm as torch_batch_norm
from torch.nn.functional import cross_entropy as torch_cross_entropy

from autopar.errors import PlanMismatchError
from autopar.lower.communication.collectives import Collective
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.shards import Shards
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.kernels import KERNELS, OPS, resolve_target, run_ops
from autopar.lower.kernels.batch_norm import batch_norm
from autopar.placement import Axis
from autopar.program import Op, Ref
from tests.ranks import run_ranks

WORLDS = {
    "2": (2, (Axis(2, 1),)),
    "4": (4, (Axis(4, 1),)),
    "2x2": (4, (Axis(2, 2), Axis(2, 1))),
    "2x2 swapped": (4, (Axis(2, 1), Axis(2, 2))),
}


@pytest.fixture(params=WORLDS, ids=str)
def world(request: pytest.FixtureRequest) -> tuple[int, tuple[Axis, ...]]:
    return WORLDS[request.param]


def coordinate(axes: tuple[Axis, ...], rank: int) -> int:
    at = 0
    for axis in axes:
        at = at * axis.size + axis.coordinate(rank)
    return at


def in_order(results: list, axes: tuple[Axis, ...]) -> list:
    """Results by shard instead of by rank."""
    return [result for _, result in sorted(enumerate(results), key=lambda item: coordinate(axes, item[0]))]


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


LOSSES = {
    "plain": {},
    "smooth": {"label_smoothing": 0.3},
    "weights": {"weight": True},
    "smooth weights": {"label_smoothing": 0.3, "weight": True},
    "ignore 2": {"ignore_index": 2, "label_smoothing": 0.1, "weight": True},
}


def loss_case(name: str, class_dim: int = 1) -> tuple[Tensor, Tensor, dict]:
    torch.manual_seed(5)
    logits = torch.randn(3, 8, 5, dtype=torch.float64).mul_(20).movedim(1, class_dim).contiguous()
    target = torch.randint(0, 8, (3, 5))
    settings = {"weight": None, "ignore_index": -100, "label_smoothing": 0.0} | LOSSES[name]
    target[0, 1] = target[2, 3] = settings["ignore_index"]
    if settings["weight"]:
        settings["weight"] = torch.rand(8, dtype=torch.float64) + 0.5
    return logits, target, settings


def torch_loss(logits: Tensor, target: Tensor, class_dim: int, **settings) -> Tensor:
    return torch_cross_entropy(logits.movedim(class_dim, 1), target, **settings)


@pytest.mark.parametrize("class_dim", [1, 2])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_vocab_parallel_cross_entropy(world, name: str, reduction: str, class_dim: int):
    size, axes = world
    logits, target, settings = loss_case(name, class_dim)
    whole = logits.clone().requires_grad_()
    expected = torch_loss(whole, target, class_dim, reduction=reduction, **settings)
    incoming = torch.rand_like(expected)
    expected.backward(incoming)

    def run(c: Communicator) -> tuple[Tensor, Tensor, list[Collective], list[Collective]]:
        x = logits.chunk(size, class_dim)[coordinate(axes, c.rank)].clone().requires_grad_()
        with c.recording() as forward:
            loss = KERNELS["vocab_parallel_cross_entropy"](
                Shards(c, axes), x, target, settings["weight"], class_dim,
                settings["ignore_index"], settings["label_smoothing"], reduction,
            )  # fmt: skip
        with c.recording() as backward:
            loss.backward(incoming)
        return loss.detach(), x.grad, forward, backward

    results = simulate(size, run)
    for loss, _, forward, backward in results:
        assert_near(loss, expected.detach())
        count = 3 if settings["label_smoothing"] else 2
        one = target.numel() * 8  # float64 because the logits are
        assert forward == [Collective("all_reduce", axis, one * n) for n in (1, count) for axis in axes]
        assert backward == []
    assert_near(torch.cat([got for _, got, *_ in in_order(results, axes)], class_dim), whole.grad)


def test_cross_entropy_of_16_bit_logits_works_in_float32():
    axes = (Axis(2, 1),)
    logits, target, _ = loss_case("plain")
    narrow = logits.bfloat16()
    expected = torch_cross_entropy(narrow.float(), target, reduction="none")

    def run(c: Communicator) -> tuple[Tensor, Tensor, list[Collective]]:
        x = narrow.chunk(2, 1)[c.rank].clone().requires_grad_()
        with c.recording() as record:
            loss = KERNELS["vocab_parallel_cross_entropy"](Shards(c, axes), x, target, None, 1, -100, 0.0, "none")
        loss.sum().backward()
        return loss.detach(), x.grad, record

    for loss, gradient, record in simulate(2, run):
        assert loss.dtype is gradient.dtype is torch.bfloat16
        assert_near(loss, expected.bfloat16(), 0)
        assert [one.num_bytes for one in record] == [target.numel() * 4, target.numel() * 8]


def test_cross_entropy_of_classes_that_are_masked_out_on_one_device():
    logits, target, _ = loss_case("plain")
    logits[:, :4] = -torch.inf
    target = target.clamp(min=0) % 4 + 4
    expected = torch_cross_entropy(logits, target, reduction="sum")

    def run(c: Communicator) -> tuple[Tensor, Tensor]:
        x = logits.chunk(2, 1)[c.rank].clone().requires_grad_()
        loss = KERNELS["vocab_parallel_cross_entropy"](Shards(c, (Axis(2, 1),)), x, target)
        loss.backward()
        return loss.detach(), x.grad

    for loss, gradient in simulate(2, run):
        assert_near(loss, expected)
        assert torch.isfinite(gradient).all()


def test_class_weights_must_be_whole():
    logits, target, settings = loss_case("weights")
    with pytest.raises(ValueError, match=r"8 classes, but weights of shape \(4,\)"):
        simulate(2, lambda c: KERNELS["vocab_parallel_cross_entropy"](
            Shards(c, (Axis(2, 1),)), logits[:, :4], target, settings["weight"][:4]))  # fmt: skip


@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
@pytest.mark.parametrize("padding_idx", [-1, 0, 5])
def test_vocab_parallel_embedding(world, padding_idx: int, scale_grad_by_freq: bool):
    size, axes = world
    table = torch.randn(8, 3, dtype=torch.float64)
    ids = torch.tensor([[0, 5, 7, 5], [2, 0, 3, 5]])
    whole = table.clone().requires_grad_()
    expected = torch.ops.aten.embedding(whole, ids, padding_idx, scale_grad_by_freq)
    incoming = torch.rand_like(expected)
    expected.backward(incoming)

    def run(c: Communicator) -> tuple[Tensor, Tensor, list[Collective]]:
        rows = table.chunk(size)[coordinate(axes, c.rank)].clone().requires_grad_()
        with c.recording() as record:
            terms = KERNELS["vocab_parallel_embedding"](Shards(c, axes), rows, ids, padding_idx, scale_grad_by_freq)
            terms.backward(incoming)
        return terms.detach(), rows.grad, record

    results = in_order(simulate(size, run), axes)
    assert_near(sum(terms for terms, *_ in results), expected.detach())
    assert_near(torch.cat([got for _, got, _ in results]), whole.grad)
    assert all(record == [] for *_, record in results)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_an_index_or_a_target_out_of_range_raises_on_every_rank(wrong: int):
    table, ids = torch.randn(8, 4), torch.tensor([0, wrong, 3])

    def run(c: Communicator) -> None:
        shards, own = Shards(c, (Axis(2, 1),)), table.chunk(2)[c.rank]
        with pytest.raises(IndexError, match="index out of range"):
            KERNELS["vocab_parallel_embedding"](shards, own, ids)
        with pytest.raises(RuntimeError, match="out of bounds"):
            KERNELS["vocab_parallel_cross_entropy"](shards, own.T, torch.tensor([7, wrong, 1, 0]))
        KERNELS["vocab_parallel_cross_entropy"](shards, own.T, torch.tensor([7, wrong, 1, 0]), ignore_index=wrong)

    simulate(2, run)


def test_embedding_reads_do_not_change_the_table():
    table = torch.randn(4, 3)
    before = table.clone()
    ids = torch.tensor([0, 3])
    simulate(2, lambda c: KERNELS["vocab_parallel_embedding"](Shards(c, (Axis(2, 1),)), table[:2], ids))
    assert torch.equal(table, before)


NORMS = {"affine": (True, True), "plain": (False, False), "no running": (True, False)}


@pytest.mark.parametrize("cut_dim", [0, 2])
@pytest.mark.parametrize("name", NORMS)
def test_sync_batch_norm(world, name: str, cut_dim: int):
    size, axes = world
    is_affine, has_running = NORMS[name]
    torch.manual_seed(4)
    x = torch.randn(8, 3, 4, dtype=torch.float64) * torch.tensor([[[1.0], [5], [0.1]]]) + 3
    weight, bias = torch.rand(2, 3, dtype=torch.float64)
    running = list(torch.rand(2, 3, dtype=torch.float64)) if has_running else [None, None]
    incoming = torch.rand_like(x)

    def inputs(part: Tensor) -> list[Tensor | None]:
        affine = [t.clone().requires_grad_() if is_affine else None for t in (weight, bias)]
        return [part.clone().requires_grad_(), *affine]

    whole = inputs(x)
    expected = OPS["autopar.batch_norm"](*whole, *running, 0.2, 1e-5)
    expected[0].backward(incoming)

    def run(c: Communicator) -> tuple[tuple, list, list[list[Collective]]]:
        at = coordinate(axes, c.rank)
        own = inputs(x.chunk(size, cut_dim)[at])
        with c.recording() as forward:
            results = KERNELS["sync_batch_norm"](Shards(c, axes), *own, *running, 0.2, 1e-5)
        with c.recording() as backward:
            results[0].backward(incoming.chunk(size, cut_dim)[at])
        return results, own, [forward, backward]

    ranks = in_order(simulate(size, run), axes)
    assert_near(torch.cat([results[0] for results, *_ in ranks], cut_dim), expected[0])
    assert_near(torch.cat([own[0].grad for _, own, _ in ranks], cut_dim), whole[0].grad, 1e-11)
    for (_, *statistics), _, records in ranks:
        for got, want in zip(statistics, expected[1:], strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert_near(got, want)
        assert records == [[Collective("all_reduce", axis, 2 * 3 * 8) for axis in axes]] * 2
    if is_affine:  # gradients of weight and bias are terms
        for index in (1, 2):
            assert_near(sum(own[index].grad for _, own, _ in ranks), whole[index].grad, 1e-11)


def test_sync_batch_norm_keeps_a_small_variance_about_a_large_mean():
    x = torch.randn(64, 1) * 0.01 + 100
    running = [torch.full((1,), 99.0), torch.ones(1)]
    expected = torch_batch_norm(x.double(), None, None, training=True)

    def run(c: Communicator) -> Tensor:
        part = x.chunk(2)[c.rank]
        return KERNELS["sync_batch_norm"](Shards(c, (Axis(2, 1),)), part, None, None, *running, 0.1, 1e-5)[0]

    torch.testing.assert_close(torch.cat(simulate(2, run)).double(), expected, rtol=0, atol=0.05)


def test_batch_norm_writes_to_no_operand():
    running = [torch.zeros(3), torch.ones(3)]
    _, mean, var = OPS["autopar.batch_norm"](torch.randn(4, 3), None, None, *running, 0.1, 1e-5)
    assert torch.equal(running[0], torch.zeros(3))
    assert torch.equal(running[1], torch.ones(3))
    assert not torch.equal(mean, running[0])
    assert not torch.equal(var, running[1])


@pytest.mark.parametrize("name", LOSSES)
def test_whole_cross_entropy_and_its_denominator_make_the_mean(name: str):
    logits, target, settings = loss_case(name, class_dim=2)
    weight, ignored = settings["weight"], settings["ignore_index"]
    expected = torch_loss(logits, target, 2, **settings)
    args = (weight, 2, ignored, settings["label_smoothing"])
    terms = OPS["autopar.cross_entropy"](logits, target, *args, "none")
    total = OPS["autopar.cross_entropy"](logits, target, *args, "sum")
    denominator = OPS["autopar.cross_entropy_denominator"](target, weight, ignored, 8)
    assert terms.shape == target.shape
    assert_near(terms.sum(), total)
    assert_near(total / denominator, expected)


def test_class_weights_stay_wide_beside_narrow_logits() -> None:
    logits, target, weight = torch.randn(16, 6), torch.arange(16) % 6, torch.rand(6)
    expected = torch_cross_entropy(logits, target, weight, reduction="sum")
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float64, 1e-6)):
        found = OPS["autopar.cross_entropy"](logits.to(dtype), target, weight)
        assert_near(found, expected.to(found.dtype), tolerance)


def test_whole_cross_entropy_without_any_position_dim():
    logits = torch.randn(8)
    got = OPS["autopar.cross_entropy"](logits, torch.tensor(3), None, 0, -100, 0.0, "none")
    assert_near(got, torch_cross_entropy(logits, torch.tensor(3)), 1e-6)


def test_dropout_zeroes_its_share_scales_the_rest_and_repeats():
    x = torch.rand(200, 100, requires_grad=True)
    y = OPS["autopar.dropout"](x, 0.25, torch.Generator().manual_seed(7))
    y.sum().backward()
    kept = y.detach() != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.01
    assert_near(y.detach(), x.detach() * kept / 0.75, 1e-6)
    assert_near(x.grad, kept / 0.75, 1e-6)
    assert torch.equal(OPS["autopar.dropout"](x, 0.25, torch.Generator().manual_seed(7)), y)
    assert not torch.equal(OPS["autopar.dropout"](x, 0.25, torch.Generator().manual_seed(8)), y)


def test_dropout_of_nothing_and_of_everything():
    x = torch.rand(5, requires_grad=True)
    assert OPS["autopar.dropout"](x, 0.0) is x
    assert torch.equal(OPS["autopar.dropout"](x, 1.0), torch.zeros(5))


def test_targets_resolve_to_what_they_name():
    assert resolve_target("aten.linear.default") is torch.ops.aten.linear.default
    assert resolve_target("operator.getitem") is operator.getitem
    assert resolve_target("_operator.getitem") is operator.getitem
    assert resolve_target("autopar.dropout") is OPS["autopar.dropout"]
    assert resolve_target("abs") is abs
    assert resolve_target("math.floor")(1.5) == 1


@pytest.mark.parametrize("name", ["mylib.op.default", "aten.no_op.default", "autopar.nothing", "nothing"])
def test_an_unknown_target_is_named(name: str):
    with pytest.raises(PlanMismatchError, match=name):
        resolve_target(name)


def gloo_kernels() -> tuple[list[float], Tensor]:
    c = ProcessGroupCommunicator()
    axes = WORLDS["2x2"][1]
    logits, target, _ = loss_case("smooth")
    x = logits.chunk(4, 1)[c.rank].clone().requires_grad_()
    loss = KERNELS["vocab_parallel_cross_entropy"](Shards(c, axes), x, target, None, 1, -100, 0.3, "sum")
    loss.backward()
    return loss.item(), x.grad.tolist()


@pytest.mark.slow
def test_gloo_gives_what_simulated_ranks_give():
    logits, target, settings = loss_case("smooth")
    whole = logits.clone().requires_grad_()
    expected = torch_cross_entropy(whole, target, reduction="sum", **settings)
    expected.backward()
    results = run_ranks(gloo_kernels, 4)
    for loss, _ in results:
        assert loss == pytest.approx(expected.item(), rel=1e-12)
    got = torch.cat([torch.tensor(gradient, dtype=torch.float64) for _, gradient in results], 1)
    assert_near(got, whole.grad)


def test_a_sum_of_many_narrow_losses_does_not_overflow() -> None:
    logits = torch.zeros(20000, 64, dtype=torch.float16)
    target = torch.zeros(20000, dtype=torch.int64)
    found = OPS["autopar.cross_entropy"](logits, target, None, 1, -100, 0.0, "sum")
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(20000 * 4.15888, rel=1e-3)  # 83,178 is beyond float16's 65,504


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_reads_masks_of_other_dtypes(dtype: torch.dtype) -> None:
    query, key, value = (
        torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)
    )
    mask = torch.zeros(2, 1, 4, 4)
    mask[:, :, :, 2:] = torch.finfo(torch.float32).min
    found = resolve_target("aten.scaled_dot_product_attention.default")(query, key, value, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key[:, :, :2], value[:, :, :2])
    torch.testing.assert_close(found, expected)


def test_a_batch_norm_in_bf16_has_statistics_in_float32() -> None:
    x, weight, bias = torch.randn(8, 4, 6), torch.rand(4), torch.rand(4)
    mean, var = torch.zeros(4), torch.ones(4)
    expected, *_ = batch_norm(
        x.bfloat16().float(), weight.bfloat16().float(), bias.bfloat16().float(), mean, var, 0.1, 1e-5
    )
    narrow = weight.bfloat16().requires_grad_()
    y, new_mean, new_var = batch_norm(x.bfloat16(), narrow, bias.bfloat16(), mean, var, 0.1, 1e-5)
    y.float().square().sum().backward()
    assert (y.dtype, new_mean.dtype, new_var.dtype, narrow.grad.dtype) == (
        torch.bfloat16, torch.float32, torch.float32, torch.bfloat16,
    )  # fmt: skip
    torch.testing.assert_close(y.float(), expected, atol=0.03, rtol=0.02)


def test_on_gpus_attention_is_called_so_that_a_fast_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    packet = torch.ops.aten.scaled_dot_product_attention
    monkeypatch.setattr(packet, "default", lambda *args, **kwargs: calls.append((*args, kwargs)))
    query, key = torch.empty(2, 8, 4, 16, device="meta"), torch.empty(2, 2, 4, 16, device="meta")
    bias = torch.empty(4, 4, 8, device="meta").permute(2, 0, 1)[None]  # as T5's: heads are innermost
    attend = resolve_target("aten.scaled_dot_product_attention.default")
    attend(query, key, key, bias, enable_gqa=True)
    attend(query, key, key, enable_gqa=True)
    attend(query.bfloat16(), key.bfloat16(), key.bfloat16(), enable_gqa=True)
    for _, made_key, made_value, mask, options in calls[:2]:
        assert made_key.shape == made_value.shape == query.shape
        assert mask is None or mask.is_contiguous()
        assert options == {"enable_gqa": False}
    assert calls[2][1].shape == key.shape
    assert calls[2][-1] == {"enable_gqa": True}


def test_ops_that_follow_no_operand_run_where_the_values_are() -> None:
    ops = [
        Op("a", "aten.arange.default", (4,), (), ("steps",)),
        Op("b", "aten.add.Tensor", (Ref("x"), Ref("steps")), (), ("sum",)),
    ]
    assert run_ops(ops, {"x": torch.empty(4, device="meta")})["sum"].device.type == "meta"
    assert run_ops(ops, {"x": torch.ones(4)})["sum"].tolist() == [1, 2, 3, 4]
