"""Mixtures of experts as one op: recognized by what they compute, and trained as one device trains them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from autopar.errors import ConstraintError
from autopar.lower import ParallelModule
from autopar.lower.observe.step_report import StepReport
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.ops import family_of
from autopar.ops.experts import EXPERTS, read_body
from autopar.placement import local_shape
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.planning.imbalance import read_imbalance
from autopar.program import Op, Program, TensorType
from autopar.search import SearchRequest
from autopar.search.settings.labels import degrees
from autopar.trace.annotations.saves import SavesMeter
from autopar.verify.rehearsal import Run, join_runs, loss_of, run_ranks
from tests.models import make_mixtral, tokens, unevenly_masked
from tests.random_plans import random_plan
from tests.zoo import Subject, assert_parity, forced_plan, quick, quick_search, trained_alone

# It defines transformers::grouped_mm_fallback; before transformers 5 experts are Python loops.
pytest.importorskip("transformers.integrations.moe")
NUM_EXPERTS = 8
grouped: Any = torch.ops.transformers.grouped_mm_fallback  # torch's own product traces in bfloat16 only
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def make(name: str, products: str = "grouped_mm") -> tuple[nn.Module, dict[str, Tensor]]:
    """A small language model with experts."""
    torch.manual_seed(0)
    if name == "mixtral":
        return make_mixtral(layers=1, products=products)
    sizes = {**SIZES, "experts_implementation": products}
    ids = tokens(8, 8, 64)
    inputs = {"input_ids": ids, "labels": unevenly_masked(ids)}
    if name == "qwen":  # its balance loss is of the whole batch
        config: Any = transformers.Qwen3MoeConfig(
            **sizes, moe_intermediate_size=8, head_dim=4, num_experts=8, norm_topk_prob=True, output_router_logits=True
        )
        return transformers.Qwen3MoeForCausalLM(config), inputs
    if name == "gpt-oss":  # biases, and a gate whose halves alternate
        config = transformers.GptOssConfig(**sizes, head_dim=4, num_local_experts=4, sliding_window=4)
        return transformers.GptOssForCausalLM(config), inputs
    if name == "olmoe":
        return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes, num_experts=8)), inputs
    config = transformers.DeepseekV3Config(  # sigmoid scores in groups, a shared expert, a layer without experts
        **{**sizes, "num_key_value_heads": 4}, moe_intermediate_size=8, n_routed_experts=8, n_group=4, topk_group=2,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config), inputs


class Routed(nn.Module):
    """Experts whose routing is an input: [tokens, k] ids and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, 8, 16) / 4)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 16, 8) / 4)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """A scalar."""
        hidden = self.mix(x)
        return (hidden + self.experts(hidden, ids.reshape(-1), weights)).square().mean()

    def experts(self, hidden: Tensor, flat: Tensor, weights: Tensor) -> Tensor:
        in_order, order = torch.sort(flat)
        ends = torch.histc(in_order.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = grouped(hidden[order // weights.shape[1]], self.up, ends)
        made = grouped(functional.gelu(rows), self.down, ends)
        made = made * weights.reshape(-1)[order].unsqueeze(-1)
        return made[torch.argsort(order)].view(*weights.shape, -1).sum(1)


def routing(name: str) -> Tensor:
    """[16, 2] ids of experts."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(16, NUM_EXPERTS, generator=generator).topk(2).indices
    if name == "skewed":  # expert 3 gets nine tenths, some get none
        return torch.where(torch.rand(16, 2, generator=generator) < 0.9, 3, drawn % 4)
    if name == "all to one":
        return torch.full((16, 2), 6)
    if name == "one each":
        return torch.arange(NUM_EXPERTS).view(4, 2)
    return torch.arange(32).view(16, 2) % NUM_EXPERTS if name == "even" else drawn


@cache
def routed(name: str) -> Subject:
    torch.manual_seed(0)
    ids = routing(name)
    inputs = {"x": torch.randn(len(ids), 8).double(), "ids": ids, "weights": torch.rand(ids.shape).double()}
    return trained_alone(Routed().double(), inputs)


@cache
def subject(name: str) -> Subject:
    model, inputs = make(name)
    return trained_alone(model.double().train(), inputs)


def regions(who: Subject) -> list[Op]:
    return [op for layer in who.traced.program.layers for op in layer.ops if op.target == EXPERTS]


def searched(who: Subject, world_size: int, *constraints: str) -> Plan:
    return forced_plan(who.traced.program, world_size, *constraints)


SLOW = ("qwen", "gpt-oss", "deepseek")  # seconds to trace and to train on one device


def by_model(*cases: tuple[str, Any]) -> list[Any]:
    """The cases, of which those of some models are slow."""
    return [pytest.param(*case, marks=pytest.mark.slow if case[0] in SLOW else ()) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), by_model(("mixtral", 1), ("qwen", 2), ("gpt-oss", 2), ("deepseek", 1)))
def test_experts_of_a_model_are_one_op(name: str, count: int):
    who = subject(name)
    assert len(regions(who)) == count
    assert {"tokens", "experts", "dispatch", "ffn"} <= {option.factor for option in regions(who)[0].options}
    assert not [op for layer in who.traced.program.layers for op in layer.ops if "sort" in op.target]
    assert {read_body(str(op.args[6])).groups for op in regions(who)} == {(4, 2) if name == "deepseek" else (1, 1)}


@pytest.mark.slow
def test_experts_are_one_op_however_many_rows_there_are():
    """2^27 rows could be neither sorted nor compared in a test; nor in time for a plan."""
    wide = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_local_experts": 96}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**wide)).bfloat16()
        ids = torch.zeros(1 << 14, 1 << 12, dtype=torch.int64)
    program = trace_model(model, {"input_ids": ids}).program
    assert [op.target for layer in program.layers for op in layer.ops].count(EXPERTS) == 1


@pytest.mark.parametrize(
    ("name", "constraints"),
    by_model(("mixtral", ()), *((name, ("data=2", "zero=3")) for name in ("mixtral", "qwen", "gpt-oss", "deepseek"))),
)
def test_parity_of_models(name: str, constraints: tuple[str, ...]):
    who = subject(name)
    assert_parity(who, searched(who, 2, *constraints), priced=False)


@pytest.mark.parametrize(
    ("world_size", "constraints"),
    [(2, ("expert=2",)), (4, ("ep=4", "zero=3")), pytest.param(4, ("data=2", "expert=2"), marks=pytest.mark.slow)],
)
def test_experts_are_split_over_as_many_devices_as_demanded(world_size: int, constraints: tuple[str, ...]):
    who = subject("mixtral")
    plan = searched(who, world_size, *constraints)
    degree = 4 if "ep=4" in constraints else 2
    program = who.traced.program
    with_experts = [each for each in program.layers if any(op.target == EXPERTS for op in each.ops)]
    for layer in with_experts:
        strategy = plan.strategies[plan.layers[program.layers.index(layer)].strategy]
        assert degrees(strategy.labels, strategy.mesh)["expert"] == degree
    assert_parity(who, plan, priced=False)


class Filtered(nn.Module):
    """Its filters are stacks of matrices only to the eye."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.filter(x).square().mean()


def test_a_model_without_experts_has_none_to_split():
    program = trace_model(Filtered(), (torch.zeros(8, 8, 8),)).program
    with pytest.raises(ConstraintError, match="no stack of experts"):
        forced_plan(program, 2, "expert=2")


@pytest.mark.parametrize(("world_size", "degree"), [(6, 3), (8, 8)])
def test_a_degree_that_divides_no_experts_is_refused(world_size: int, degree: int):
    with pytest.raises(ConstraintError, match=rf"do not divide over {degree} devices: choose one of 1, 2, 4$"):
        searched(subject("mixtral"), world_size, f"expert={degree}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("mixtral with padding", ("expert=2", "context=2")),
        ("gpt-oss", ("expert=2", "context=2", "pipeline=2")),
    ],
)
def test_experts_with_context_and_stages(name: str, constraints: tuple[str, ...]):
    """Also with all tokens to one pair of experts (GPT-OSS), and with sequences of padding alone."""
    model, inputs = make(name.split()[0])
    if name == "gpt-oss":
        for layer in model.model.layers:
            layer.mlp.router.bias.data[2] += 10.0
    if "padding" in name:
        mask = torch.ones_like(inputs["input_ids"])
        mask[1:, 3:], mask[4:, 1:] = 0, 0
        labels = inputs["labels"].masked_fill(mask == 0, -100)
        labels[4:] = -100
        inputs = {**inputs, "labels": labels, "attention_mask": mask}
    who = trained_alone(model.double().train(), inputs)
    world_size = 2 ** len(constraints)
    request = SearchRequest(constraints=quick((*constraints, "microbatches=2")), schedules=schedule_actions)
    plan = quick_search(who.traced.program, world_size, request)
    assert "dispatch" in _factors(who.traced.program, plan)
    assert_parity(who, plan, priced=False)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_microbatches_are_exact(name: str):
    who = subject(name)
    plan = searched(who, 2, "microbatches=2", "data=2")
    assert plan.num_microbatches == 2
    assert_parity(who, plan, priced=False)


@pytest.mark.slow
def test_rows_of_a_random_plan_are_those_of_one_device():
    who = subject("mixtral")
    for seed in range(2):
        assert_parity(who, random_plan(who.traced.program, 4, seed), priced=False)


@pytest.mark.slow
def test_a_loss_that_is_no_sum_over_tokens_needs_the_whole_batch():
    """Fractions of tokens times mean probabilities: microbatches have others."""
    with pytest.raises(Exception, match="2 microbatches would not be exact"):
        searched(subject("qwen"), 2, "microbatches=2")


@pytest.mark.parametrize(("name", "world_size"), [
    ("one each", 2), ("skewed", 4), pytest.param("random", 2, marks=pytest.mark.slow),
    pytest.param("all to one", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_any_routing_by_tokens_and_by_experts(name: str, world_size: int):
    who = routed(name)
    assert len(regions(who)) == 1
    assert_parity(who, searched(who, world_size, f"data={world_size}"), priced=False)
    used: set[str] = set()
    for seed in range(24):
        plan = random_plan(who.traced.program, world_size, seed)
        new = _factors(who.traced.program, plan)
        if new - used:
            used |= new
            assert_parity(who, plan, priced=False)
    assert {"tokens", "experts", "dispatch", "ffn"} <= used


@pytest.mark.parametrize(("name", "world_size", "constraints"), [
    ("mixtral", 2, ("tensor=2",)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("mixtral", 4, ("tensor=2", "expert=2")),
        ("deepseek", 4, ("tensor=2", "data=2", "microbatches=2")), ("gpt-oss", 4, ("tensor=2", "expert=2", "zero=3")),
    )),
])  # fmt: skip
def test_tensor_shares_each_expert(name: str, world_size: int, constraints: tuple[str, ...]):
    """Gate and up projection are halves of one matrix, or alternate (GPT-OSS): each device has matching slices."""
    who = subject(name)
    plan = searched(who, world_size, *constraints)
    assert "ffn" in _factors(who.traced.program, plan)
    assert ("dispatch" in _factors(who.traced.program, plan)) == ("expert=2" in constraints)
    assert_parity(who, plan, priced=False)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_a_slice_of_experts_takes_its_part_of_work_and_memory(name: str):
    op, program = regions(subject(name))[0], subject(name).traced.program
    option = next(option for option in op.options if option.factor == "ffn")
    whole, results = ([program.type_of(value) for value in names] for names in (op.operands, op.results))
    cut = [TensorType(local_shape(k.shape, (p,), (4,)), k.dtype) for k, p in zip(whole, option.operands, strict=True)]
    family = family_of(op.target)
    given = tuple(results)
    one, part = (family.count_work(op, tuple(kinds), given) for kinds in (whole, cut))
    assert part.flops == one.flops / 4
    assert one.write_bytes / 4 < part.write_bytes < one.write_bytes
    trains = tuple(kind.is_floating for kind in whole)
    of_all, of_slice = (SavesMeter().saved(op, tuple(kinds), given, trains)[1] for kinds in (whole, cut))
    assert of_all + family.buffers(op, tuple(cut), given, trains, False).kept == pytest.approx(of_slice)
    assert of_slice < 0.8 * of_all


class Meeting(Routed):
    """Between its products each column depends on all others."""

    def experts(self, hidden: Tensor, flat: Tensor, weights: Tensor) -> Tensor:
        in_order, order = torch.sort(flat)
        ends = torch.histc(in_order.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = grouped(hidden[order // weights.shape[1]], self.up, ends)
        made = grouped(rows.softmax(-1), self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return made[torch.argsort(order)].view(*weights.shape, -1).sum(1)


def test_experts_whose_columns_meet_are_not_shared():
    inputs = {"x": torch.randn(16, 8), "ids": routing("random"), "weights": torch.rand(16, 2)}
    ops = [op for layer in trace_model(Meeting(), inputs).program.layers for op in layer.ops]
    (op,) = [op for op in ops if op.target == EXPERTS]
    assert "ffn" not in {option.factor for option in op.options}


class Compared(Routed):
    """The rows of a token read those before it: not row by row."""

    def experts(self, hidden: Tensor, flat: Tensor, weights: Tensor) -> Tensor:
        in_order, order = torch.sort(flat)
        ends = torch.histc(in_order.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = grouped(hidden[order // weights.shape[1]], self.up, ends)
        made = grouped(rows.cumsum(0), self.down, ends)
        return made[torch.argsort(order)].view(*weights.shape, -1).sum(1)


class Dropped(Routed):
    """Rows of the last expert take another one's matrix: ends that are not those of the experts."""

    def experts(self, hidden: Tensor, flat: Tensor, weights: Tensor) -> Tensor:
        in_order, order = torch.sort(flat)
        ends = torch.histc(in_order.float(), NUM_EXPERTS, 0, NUM_EXPERTS).cumsum(0, dtype=torch.int32)
        rows = grouped(hidden[order // weights.shape[1]], self.up, ends.flip(0))
        return (rows @ self.down[0])[torch.argsort(order)].view(*weights.shape, -1).sum(1)


@pytest.mark.parametrize("model", [Compared, Dropped])
def test_what_is_another_function_stays_as_it_is(model: type[Routed]):
    inputs = {"x": torch.randn(16, 8), "ids": routing("random"), "weights": torch.rand(16, 2)}
    ops = [op for layer in trace_model(copy.deepcopy(model()), inputs).program.layers for op in layer.ops]
    assert not [op for op in ops if op.target == EXPERTS]
    assert [op for op in ops if "grouped_mm" in op.target]


@pytest.mark.parametrize("factor", ["tokens", "experts", "dispatch"])
def test_a_report_counts_the_rows_of_every_expert(factor: str):
    who = routed("skewed")
    program = who.traced.program
    plans = (random_plan(program, 4, seed) for seed in range(64))
    plan = next(p for p in plans if factor in _factors(program, p))

    def measure(model: ParallelModule) -> StepReport:
        return model.report(lambda: loss_of(model(**who.inputs)).backward(), steps=1)

    rows = torch.bincount(routing("skewed").reshape(-1), minlength=NUM_EXPERTS).tolist()
    for report in run_ranks(who.model, who.traced, plan, measure):
        assert list(report.expert_rows.values()) == [tuple(rows)]
        assert f"the busiest gets {max(rows) / 4:.2f} times the mean" in str(report)
        assert dict(read_imbalance(report.expert_rows).busiest(NUM_EXPERTS))[8] == max(rows) / 4


def _factors(program: Program, plan: Plan) -> set[str]:
    return {
        factor
        for planned in plan.layers
        for op, factors in zip(
            program.kinds[planned.kind].ops, plan.strategies[planned.strategy].assignments, strict=True
        )
        if op.target == EXPERTS
        for factor in factors
    }


class Scored(Routed):
    """A router whose balance loss and z-loss are statistics of the whole batch."""

    def __init__(self, favored: float) -> None:
        super().__init__()
        self.router = nn.Linear(8, NUM_EXPERTS)
        self.router.bias.data[3] += favored

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        hidden = self.mix(x)
        logits = self.router(hidden)
        probabilities = logits.softmax(-1)
        weights, ids = probabilities.topk(2, dim=-1)
        share = functional.one_hot(ids, NUM_EXPERTS).sum(1).to(x.dtype).mean(0)
        extra = NUM_EXPERTS * (share * probabilities.mean(0)).sum() + logits.logsumexp(-1).square().mean()
        made = self.experts(hidden, ids.reshape(-1), weights / weights.sum(-1, keepdim=True))
        return (hidden + made).square().mean() + 0.01 * extra


@cache
def scored(favored: float) -> Subject:
    torch.manual_seed(0)
    return trained_alone(Scored(favored).double(), {"x": torch.randn(16, 8).double()})


@pytest.mark.parametrize(
    ("favored", "constraints"),
    [(0.0, ("expert=2",)), (3.0, ("data=2", "zero=3")), (50.0, ("data=2",)), (50.0, ("expert=2",))],
)
def test_balance_and_z_losses_are_those_of_the_whole_batch(favored: float, constraints: tuple[str, ...]):
    who = scored(favored)
    assert len(regions(who)) == 1
    assert_parity(who, searched(who, 2, *constraints), priced=False)


@pytest.mark.parametrize("factor", ["tokens", "experts", "dispatch"])
def test_a_router_that_gives_nan_spoils_what_it_spoils_on_one_device(factor: str):
    who = routed("skewed")
    program = who.traced.program
    plan = next(p for p in (random_plan(program, 2, seed) for seed in range(64)) if factor in _factors(program, p))
    inputs = {**who.inputs, "weights": who.inputs["weights"].clone()}
    inputs["weights"][3] = float("nan")
    spoiled = assert_spoiled_alike(who, plan, inputs)
    assert spoiled["up"].any()
    assert not spoiled["up"].all()


class Chosen(Routed):
    """A router without losses, and a result that is no NaN where only a token's experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, NUM_EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        weights, ids = self.router(x).softmax(-1).topk(2, dim=-1)
        return (self.mix(x.nan_to_num()) + self.experts(x, ids.reshape(-1), weights)).square().mean()


@cache
def chosen() -> Subject:
    torch.manual_seed(0)
    return trained_alone(Chosen().double(), {"x": torch.randn(16, 8).double()})


@pytest.mark.parametrize("factor", ["experts", "dispatch"])
def test_a_token_whose_scores_are_nan_goes_where_it_goes_on_one_device(factor: str):
    who = chosen()
    plans = (random_plan(who.traced.program, 4, seed) for seed in range(64))
    plan = next(p for p in plans if factor in _factors(who.traced.program, p))
    x = who.inputs["x"].clone()
    x[3] = float("nan")
    spoiled = assert_spoiled_alike(who, plan, {"x": x})
    of_experts = spoiled["up"].flatten(1)
    assert (of_experts.any(1) == of_experts.all(1)).all()
    assert of_experts.any(1).sum() == 2


@pytest.mark.slow
@pytest.mark.parametrize("constraints", [("expert=2",), ("expert=2", "context=2")])
def test_a_batch_of_padding_alone(constraints: tuple[str, ...]):
    """Its loss is NaN, and its gradients are zeros, as on one device."""
    model, inputs = make("mixtral", "batched_mm")
    mask = torch.ones_like(inputs["input_ids"])
    who = trained_alone(model.double().train(), {**inputs, "attention_mask": mask})
    plan = forced_plan(who.traced.program, 2 ** len(constraints), *constraints)
    padding = {**inputs, "labels": torch.full_like(mask, -100), "attention_mask": torch.zeros_like(mask)}
    assert not any(spoiled.any() for spoiled in assert_spoiled_alike(who, plan, padding).values())


def assert_spoiled_alike(who: Subject, plan: Plan, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss is NaN, and so are the same entries of gradients as on one device, which are returned as 1.0."""
    alone = copy.deepcopy(who.model)
    loss = loss_of(alone(**inputs))
    assert loss.isnan()
    loss.backward()
    spoiled = {name: nan_in(parameter) for name, parameter in alone.named_parameters()}

    def run(model: ParallelModule) -> Run:
        loss = loss_of(model(**inputs))
        assert loss.isnan()
        loss.backward()
        return Run((), {name: nan_in(parameter) for name, parameter in model.named_parameters()}, {}, {})

    found = join_runs(run_ranks(who.model, who.traced, plan, run), plan.num_groups).gradients
    assert all(torch.equal(found[name], spoiled[name]) for name in spoiled)
    return spoiled


def nan_in(parameter: nn.Parameter) -> Tensor:
    """1.0 where the gradient is NaN, else 0.0."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient.isnan().double()
    local = gradient.to_local().isnan().double()
    return DTensor.from_local(
        local, gradient.device_mesh, gradient.placements, run_check=False, shape=gradient.shape,
        stride=gradient.stride(),
    )  # fmt: skip
