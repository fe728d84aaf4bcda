"""Several documents in one row: recognized by what a mask is, and trained as one device trains them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from autopar.lower.communication.shards import Shards
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.kernels import KERNELS, resolve_target
from autopar.lower.kernels.ring_documents import _TokenPlaces
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.ops.attention import DOCUMENTS
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.program import Op
from autopar.search import SearchRequest
from autopar.verify import compare, verify
from autopar.verify.rehearsal import join_runs, run_ranks, run_single, train
from tests.models import tokens
from tests.random_plans import random_plan
from tests.zoo import STEPS, Subject, assert_parity, forced_plan, quick, quick_search, trained_alone

TOKENS = 24
LENGTHS = {
    "some": ([7, 10, 7], [1, 20, 3]),
    "one": ([24], [24]),
    "a document a token": ([1] * 24, [1] * 24),
    "odd": ([5, 1, 11, 7], [13, 11]),
}


def positions(lengths: tuple[list[int], ...], rows: int = 8) -> Tensor:
    """[rows, tokens] places of tokens in their documents, as transformers' DataCollatorWithFlattening makes them."""
    every = [torch.cat([torch.arange(n) for n in lengths[row % len(lengths)]]) for row in range(rows)]
    return torch.stack(every)


def make(name: str, rows: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "use_cache": False,
    }  # fmt: skip
    if name == "llama":
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    elif name == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=5))
    elif name == "qwen":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=8))
    else:
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    ids = tokens(rows, TOKENS, 64)
    return model.double().train(), {"input_ids": ids, "labels": ids}


@cache
def subject(name: str, packing: str = "some", rows: int = 8) -> Subject:
    model, inputs = make(name, rows)
    return trained_alone(model, {**inputs, "position_ids": positions(LENGTHS[packing], rows)})


def attentions(program: Any) -> list[Op]:
    return [op for layer in program.layers for op in layer.ops if "attention" in op.target]


def searched(who: Subject, world_size: int, *constraints: str, stages: bool = False) -> Plan:
    if not stages:
        return forced_plan(who.traced.program, world_size, *constraints)
    request = SearchRequest(constraints=quick(constraints), schedules=schedule_actions)
    return quick_search(who.traced.program, world_size, request)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen", "gpt2"))])
def test_no_mask_is_made(name: str):
    who = subject(name)
    found = attentions(who.traced.program)
    assert [op.target for op in found] == [DOCUMENTS] * 2
    assert all({"b", "h", "q"} <= {option.factor for option in op.options} for op in found)
    assert not [kind for kind in (v.type for v in who.traced.program.values.values()) if kind.shape[-2:] == (24, 24)]


SPLITS = {
    "data": (2, ("data=2",)),
    "heads": (2, ("tensor=2",)),
    "context": (2, ("context=2",)),
    "zero": (4, ("data=4", "zero=3", "recompute=full")),
    "context and heads": (4, ("context=2", "tensor=2")),
    "context of four": (4, ("context=4", "recompute=selective")),
    "microbatches": (2, ("data=2", "microbatches=2")),
}
FAST = ("heads", "context")
# How a model normalizes, and where its positions come in, matters to few of them.
SPLITS_OF = {"llama": SPLITS, "qwen": ("microbatches",), "gpt2": ("context of four",)}


@pytest.mark.parametrize(
    ("name", "split"),
    [pytest.param(name, split, marks=() if name == "llama" and split in FAST else pytest.mark.slow)
     for name, splits in SPLITS_OF.items() for split in splits],
)  # fmt: skip
def test_splits_train_as_one_device_does(name: str, split: str):
    world_size, constraints = SPLITS[split]
    who = subject(name)
    plan = searched(who, world_size, *constraints)
    program = who.traced.program
    if "context" in split:
        assert "context" in {
            label for planned, layer in zip(plan.layers, program.layers, strict=True)
            if any(op.target == DOCUMENTS for op in layer.ops) for label in plan.strategies[planned.strategy].labels
        }  # fmt: skip
    assert_parity(who, plan)


@pytest.mark.parametrize(
    ("packing", "constraints"),
    [
        ("a document a token", ("context=2",)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("odd", ("data=2",)), ("one", ("context=2",)))),
    ],
)
def test_any_packing(packing: str, constraints: tuple[str, ...]):
    who = subject("llama", packing)
    assert_parity(who, searched(who, 2, *constraints))


@pytest.mark.parametrize(
    ("packing", "world_size", "constraints"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("some", 2, ("context=2",)),
            ("odd", 4, ("context=2", "tensor=2")),
            ("a document a token", 8, ("context=4", "data=2")),
        )),
    ],
)  # fmt: skip
def test_windows_beside_documents(packing: str, world_size: int, constraints: tuple[str, ...]):
    who = subject("mistral", packing)
    found = attentions(who.traced.program)
    assert [(op.target, op.kwargs) for op in found] == [(DOCUMENTS, (("window", 5),))] * 2
    assert_parity(who, searched(who, world_size, *constraints))


@pytest.mark.slow
def test_a_single_row_splits_by_context():
    """As DataCollatorWithFlattening makes it."""
    who = subject("llama", "odd", 1)
    plan = searched(who, 2, "context=2")
    assert_parity(who, plan)


def only_with(who: Subject, kernel: str) -> Subject:
    """Without the other ways to split the rows of attention by documents."""

    def change(op: Op) -> Op:
        return replace(op, options=tuple(option for option in op.options if option.kernel in ("", kernel)))

    program = who.traced.program
    layers = tuple(replace(layer, ops=tuple(map(change, layer.ops))) for layer in program.layers)
    return replace(who, traced=replace(who.traced, program=replace(program, layers=layers)))


@pytest.mark.parametrize(
    ("name", "packing", "rows", "world_size", "constraints"),
    [
        ("llama", "odd", 1, 2, ("context=2",)),
        *(pytest.param(name, packing, 8, *split, marks=pytest.mark.slow)
          for name, packing, *split in (
              ("mistral", "some", 2, ("context=2",)),
              ("llama", "a document a token", 4, ("context=2", "data=2", "zero=3")),
              ("mistral", "one", 2, ("context=2", "recompute=full")),
              ("mistral", "odd", 4, ("context=2", "sequence=2")),
          )),
    ],
)  # fmt: skip
def test_slices_of_all_operands_train_as_one_device_does(
    name: str, packing: str, rows: int, world_size: int, constraints: tuple[str, ...]
):
    kernel = "neighbor_documents" if name == "mistral" else "ring_documents"
    who = only_with(subject(name, packing, rows), kernel)
    plan = searched(who, world_size, *constraints)
    kinds = {layer.kind for layer in who.traced.program.layers if any(op.target == DOCUMENTS for op in layer.ops)}
    used = {
        factor for planned in plan.layers if planned.kind in kinds
        for factors in plan.strategies[planned.strategy].assignments for factor in factors
    }  # fmt: skip
    assert "r" in used
    assert_parity(who, plan)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_stages(name: str):
    who = subject(name)
    assert_parity(who, searched(who, 2, "pipeline=2", "microbatches=4", stages=True))


@pytest.mark.slow
def test_a_random_plan():
    who = subject("llama")
    assert_parity(who, random_plan(who.traced.program, 4, 0), priced=False)


@pytest.mark.slow
def test_one_plan_serves_any_boundaries():
    """A plan for one packing trains with another as one device does with that."""
    who = subject("llama", "one")
    plan = searched(who, 2, "context=2")
    others = {**who.inputs, "position_ids": positions(LENGTHS["some"])}
    expected = run_single(who.model, others, STEPS, in_double=True)
    runs = run_ranks(who.model, who.traced, plan, lambda model: train(model, others, STEPS))
    report = compare(expected, join_runs(runs, plan.num_groups), plan.world_size)
    assert report.loss_error <= 1e-12
    assert report.worst_gradient[1] <= 1e-9
    assert expected.losses != who.alone.losses


@pytest.mark.slow
def test_verify_takes_packed_rows():
    who = subject("llama")
    report = verify(who.model, searched(who, 2, "data=2"), who.inputs)
    assert report.worst_gradient[1] <= 1e-9


# ---------------------------------------------------------------- masks that users write


class Masked(nn.Module):
    """Attention with a mask of its own."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.mask = mask

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        mask = self.mask(ids, places <= places[:, None])
        return scaled_dot_product_attention(q, k, v, mask).square().mean()


def same(ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def near(ids: Tensor, lower: Tensor) -> Tensor:
    """A window that the input says, which may be 0."""
    places = torch.arange(len(lower))
    return same((ids == 2).cumsum(1)) & lower & (places[:, None] - places < ids[0, 0])


MASKS = {
    "causal": (lambda ids, lower: same(ids) & lower, True),
    "both ways": (lambda ids, lower: same(ids), True),
    "additive": (lambda ids, lower: torch.where(same(ids) & lower, 0.0, -torch.inf), True),
    "after a token": (lambda ids, lower: same((ids == 2).cumsum(1)) & lower, True),
    "window of 4": (lambda ids, lower: same((ids == 2).cumsum(1)) & lower & ~lower.tril(-4), True),
    "window to both sides": (lambda ids, lower: same((ids == 2).cumsum(1)) & ~lower.tril(-4) & ~lower.T.triu(4), True),
    "window of what comes again": (lambda ids, lower: same(ids) & lower & ~lower.tril(-4), False),
    "window of the input's": (near, False),
    "padding": (lambda ids, lower: same(ids) & lower & (ids != 2)[:, None, None], False),
    "others": (lambda ids, lower: ~same(ids) | torch.eye(len(lower), dtype=torch.bool), False),
    "a bias": (lambda ids, lower: torch.where(same(ids) & lower, 0.5, -torch.inf), False),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recognized_by_what_they_let_through(name: str):
    mask, is_known = MASKS[name]
    inputs = {"x": torch.randn(4, TOKENS, 8).double(), "ids": torch.randint(0, 3, (4, TOKENS))}
    program = trace_model(Masked(mask).double(), inputs).program
    assert [op.target == DOCUMENTS for op in attentions(program)] == [is_known]
    if is_known:  # the same id may come again behind others
        who = trained_alone(Masked(mask).double(), inputs)
        assert_parity(who, searched(who, 2, "data=2"))


class Bounded(nn.Module):
    """Documents by where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        document = torch.searchsorted(cu_seqlens, torch.arange(x.shape[1]), right=True)
        lower = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return scaled_dot_product_attention(q, k, v, (document[:, None] == document[None]) & lower).square().mean()


def test_boundaries_in_one_tensor():
    inputs = {"x": torch.randn(1, TOKENS, 8).double(), "cu_seqlens": torch.tensor([0, 5, 6, 17, 24])}
    who = trained_alone(Bounded().double(), inputs)
    assert [op.target for op in attentions(who.traced.program)] == [DOCUMENTS]
    for constraints in (("context=2",), ("tensor=2",)):
        assert_parity(who, searched(who, 2, *constraints))


@pytest.mark.parametrize("window", [4096, 100])
def test_long_windows_are_shortened_with_their_rows(window: int):
    rows = 1 << 14
    inputs = {
        "x": torch.empty(1, rows, 8, device="meta"),
        "ids": torch.empty(1, rows, dtype=torch.int64, device="meta"),
    }

    def near(ids: Tensor, lower: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        return same((ids == 50256).cumsum(1)) & lower & (places > (places - window)[:, None])

    (op,) = attentions(trace_model(Masked(near), inputs).program)
    assert (op.target, op.kwargs) == (DOCUMENTS, (("window", window),))


@pytest.mark.parametrize("rows", [4096, 131072])
def test_long_rows_are_shortened_to_be_looked_at(rows: int):
    inputs = {
        "x": torch.empty(1, rows, 8, device="meta"),
        "ids": torch.empty(1, rows, dtype=torch.int64, device="meta"),
    }
    in_order = Masked(lambda ids, lower: same((ids == 50256).cumsum(1)) & lower)
    assert [op.target for op in attentions(trace_model(in_order, inputs).program)] == [DOCUMENTS]


# ---------------------------------------------------------------- the kernels


def by_mask(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, scale: float | None, is_causal: bool, window: int) -> Tensor:
    mask = same(ids) & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril() if is_causal else same(ids)
    mask = mask.tril(window - 1).triu(1 - window) if window else mask
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, mask, scale=scale)


def joined(gradients: tuple[Tensor, ...], are_slices: bool) -> Tensor:
    return torch.cat(gradients, 2) if are_slices else torch.stack(gradients).sum(0)


@pytest.mark.parametrize("window", [0, 3, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("size", "scale"), [(4, None), (6, 0.3)])
@pytest.mark.parametrize("axes", [(), (Axis(2, 1),), (Axis(3, 1),), (Axis(2, 2), Axis(2, 1))], ids=str)
def test_kernels_against_a_mask(axes: tuple[Axis, ...], size: int, scale: float | None, is_causal: bool, window: int):
    torch.manual_seed(1)
    shapes = ((2, 4, TOKENS, 4), (2, 2, TOKENS, 4), (2, 2, TOKENS, size))
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    ids = torch.stack([torch.randint(0, 4, (TOKENS,)), torch.arange(TOKENS) // 9])
    ids = ids.sort(1).values if window else ids
    expected = by_mask(*leaves, ids, scale, is_causal, window)
    incoming = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, leaves, incoming)]
    if not axes:
        out = resolve_target(DOCUMENTS)(*leaves, ids, scale, is_causal, bool(window), window=window)
        found = [out, *torch.autograd.grad(out, leaves, incoming)]
    else:
        world_size = 1
        for axis in axes:
            world_size *= axis.size

        def on_rank(c: Any) -> list[Tensor]:
            shards = Shards(c, axes)
            query = leaves[0].detach().chunk(shards.count, 2)[shards.index].clone().requires_grad_()
            own = [query, *(x.detach().clone().requires_grad_() for x in leaves[1:])]
            out = KERNELS["context_documents"](shards, *own, ids, scale, is_causal, bool(window), window=window)
            grads = torch.autograd.grad(out, own, incoming.chunk(shards.count, 2)[shards.index])
            return [out.detach(), *grads]

        ranks = simulate(world_size, on_rank)
        terms = zip(*(each[1:] for each in ranks), strict=True)
        rows = torch.cat([each[0] for each in ranks], 2)
        found = [rows, *map(joined, terms, (True, False, False))]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


PACKINGS = {
    "short ones": [2, 3, 1, 4, 2, 3, 3, 2, 4],
    "a long one among short ones": [2, 1, 15, 1, 3, 2],
    "one": [24],
    "a token each": [1] * 24,
    "long ones": [11, 13],
}


@pytest.mark.parametrize(
    ("kernel", "window", "is_causal"),
    [("ring_documents", 0, True), ("ring_documents", 0, False), ("neighbor_documents", 1, True),
     ("neighbor_documents", 4, True), ("neighbor_documents", 7, True)],
)  # fmt: skip
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_slices_of_all_operands_against_a_mask(
    world_size: int, packing: str, kernel: str, window: int, is_causal: bool
):
    if window - 1 > TOKENS // world_size:
        pytest.skip("the window reaches over more than a slice")
    torch.manual_seed(1)
    shapes = ((2, 4, TOKENS, 4), (2, 2, TOKENS, 4), (2, 2, TOKENS, 6))
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    numbers = torch.repeat_interleave(torch.arange(len(PACKINGS[packing])), torch.tensor(PACKINGS[packing]))
    ids = torch.stack([numbers, torch.arange(TOKENS) // 9])
    expected = by_mask(*leaves, ids, 0.3, is_causal, window)
    incoming = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, leaves, incoming)]

    def on_rank(c: Any) -> list[Tensor]:
        shards = Shards(c, (Axis(world_size, 1),))
        own = [x.detach().chunk(world_size, 2)[shards.index].clone().requires_grad_() for x in leaves]
        out = KERNELS[kernel](shards, *own, ids, 0.3, is_causal, True, window=window)
        return [out.detach(), *torch.autograd.grad(out, own, incoming.chunk(world_size, 2)[shards.index])]

    found = [torch.cat(each, 2) for each in zip(*simulate(world_size, on_rank), strict=True)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shared_documents_are_equal_work_and_others_stay(world_size: int):
    """Pairs of a row and a column that each device computes, of documents that divide; and what is sent of the rest."""
    rows = 48 // world_size
    lengths = (24, 1, 1, 2, 2, 2, 12, 1, 3)

    def work(c: Any) -> tuple[int, int]:
        places = _TokenPlaces(torch.arange(48), lengths, Shards(c, (Axis(world_size, 1),)), rows, is_causal=True)
        shared = [length for _, length in places._split[1]]
        assert 24 in shared
        assert not {1} & set(shared)
        tiles = [tile for source in range(world_size) for tile in places.tiles(source)]
        pairs = [t.rows.numel() * (t.columns.shape[1] + 1) // 2 if t.is_causal else t.rows.numel() * t.columns.shape[1]
                 for t in tiles]  # fmt: skip
        return sum(pairs), sum(places.given[1])

    found = simulate(world_size, work)
    total = sum(pairs for pairs, _ in found)
    assert max(pairs for pairs, _ in found) <= 1.05 * total / world_size
