"""Inputs and outputs of every structure, and the errors for those that don't fit."""

import dataclasses
import logging
import random
from collections import UserDict
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import autopar
from autopar.errors import ExampleInputsError, InputShapeError, ModelError, OutputError, TraceError
from autopar.planning.call_traces import trace_model
from autopar.trace import default_example_inputs, trace
from tests import models
from tests.trace.interpreter import check_equals_model, interpret

X = torch.randn(4, 8)


def line_of(text):
    with open(__file__) as lines:  # noqa: PTH123
        return 1 + next(number for number, line in enumerate(lines) if text in line and "line_of" not in line)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: object = None


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Opaque:
    """Looks like a cache: holds tensors, but is no container."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_output_structure_is_rebuilt():
    class Many(Module):
        def forward(self, x):
            h = self.linear(x)
            return {"a": [h, None, 3], "b": Result(h + 1, (h.sum(), "text")), "c": Pair(h, x), "d": Opaque(h)}

    model = Many()
    traced = trace(model, (X,), {})
    returned = traced.unflatten_outputs(interpret(traced, model, [X])[0])
    wanted = model(X)
    assert list(returned) == ["a", "b", "c", "d"]
    assert returned["a"][1:] == [None, 3]
    assert isinstance(returned["b"], Result)
    assert isinstance(returned["c"], Pair)
    assert returned["b"].extra[1] == "text"
    assert returned["c"].right is X
    assert torch.equal(returned["b"].hidden, wanted["b"].hidden)
    assert returned["d"] is None
    assert any("Opaque" in note and "'d'" not in note for note in traced.program.notes)
    with pytest.raises(OutputError, match="2 entries"):
        traced.unflatten_outputs([X, X])


def test_hugging_face_output_with_a_cache():
    model, inputs = models.make_llama(batch=2, layers=1)
    model.train()
    traced = trace(model, (), inputs)
    returned = traced.unflatten_outputs(list(range(len(traced.program.outputs))))
    assert isinstance(returned, transformers.modeling_outputs.CausalLMOutputWithPast)
    assert returned.past_key_values is None
    assert traced.program.outputs[returned.loss] == traced.program.loss
    assert any(" (DynamicCache) can't be carried" in note for note in traced.program.notes)


@pytest.mark.parametrize("make", [lambda h: Opaque(h), lambda h: {"cache": Opaque(h)}, lambda h: 3, lambda h: None])
def test_nothing_to_carry_out(make):
    class Closed(Module):
        def forward(self, x):
            return make(self.linear(x))

    with pytest.raises(OutputError, match="returns no tensor"):
        trace(Closed(), (X,), {})


def test_loss_is_found():
    class Losses(Module):
        def forward(self, x):
            h = self.linear(x)
            return {"count": x.sum(), "first": h.sum(), "loss": h.mean(), "logits": h}

    program = trace(Losses(), (X,), {}).program
    assert program.loss == program.outputs[2]

    class Unnamed(Module):
        def forward(self, x):
            h = self.linear(x)
            return x.sum(), h, h.mean()

    program = trace(Unnamed(), (X,), {}).program
    assert program.loss == program.outputs[2]

    class Without(Module):
        def forward(self, x):
            return self.linear(x)

    assert trace(Without(), (X,), {}).program.loss == ""


class Nested(Module):
    def forward(self, x, pair, *, scale=1.0, mode="plain", mask=None, **rest):
        h = self.linear(x) * scale + pair["left"] - pair["right"][0]
        return h if mask is None else h * mask + rest["shift"]


def nested_inputs():
    return {
        "x": X,
        "pair": {"left": X + 1, "right": (X + 2,)},
        "mode": "plain",
        "mask": X > 0,
        "shift": X + 3,
    }


def test_inputs_are_flattened_by_name():
    model = Nested()
    traced = trace(model, (), nested_inputs())
    assert traced.program.inputs == ("x", "pair_left", "pair_right_0", "mask", "rest_shift")
    given = nested_inputs()
    flat = traced.flatten_inputs((given["x"],), {
        "shift": given["shift"], "mask": given["mask"], "pair": {"right": (X + 2,), "left": X + 1},
        "scale": 1.0,
    })  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(flat, [X, X + 1, X + 2, X > 0, X + 3], strict=True))
    assert torch.equal(interpret(traced, model, flat)[0][0], model(**given))


@pytest.mark.parametrize(("change", "message"), [
    ({"x": torch.zeros(2, 8)}, r"'x' is \[2, 8\] float32, but .* \[4, 8\] float32"),
    ({"x": torch.zeros(4, 8).double()}, r"'x' is \[4, 8\] float64, but .* \[4, 8\] float32"),
    ({"mask": None}, "'mask' is absent, but the plan was made for a tensor"),
    ({"mode": "other"}, "'mode' is 'other', but the plan was made for absent"),
    ({"scale": X}, "'scale' is a tensor, but the plan was made for absent"),
    ({"pair": {"left": X, "right": (X, X)}}, r"'pair\.right\.1' is a tensor"),
    ({"pair": {"left": X}}, r"'pair\.right\.0' is absent"),
])  # fmt: skip
def test_other_inputs_are_refused(change, message):
    traced = trace(Nested(), (), nested_inputs())
    with pytest.raises(InputShapeError, match=message):
        traced.flatten_inputs((), nested_inputs() | change)


def test_missing_argument_in_a_later_call():
    traced = trace(Nested(), (), nested_inputs())
    with pytest.raises(InputShapeError, match="missing a required argument: 'pair'"):
        traced.flatten_inputs((X,), {})


def test_control_flow_on_data_names_the_users_line():
    class Branch(Module):
        def forward(self, x):
            h = self.linear(x)
            if h.sum() > 0:  # the line at fault
                return h
            return -h

    with pytest.raises(
        TraceError,
        match=rf"test_calls\.py:{line_of('# the line at fault')}: .*so the model is not one graph.*torch\.where",
    ):
        trace(Branch(), (X,), {})


def test_python_may_ask_for_what_follows_from_sizes():
    """As DINO finds out which of its crops are of one size."""

    class Crops(Module):
        def forward(self, *crops):
            sizes = torch.tensor([len(x) for x in crops])
            ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
            starts = [0, *ends.tolist()[:-1]]
            return [self.linear(torch.cat(crops[start:end])) for start, end in zip(starts, ends, strict=True)]

    crops = (X, X, X[:1], X[:1], X[:1])
    model = Crops()
    found, _ = interpret(trace(model, crops, {}), model, crops)
    for mine, wanted in zip(found, model(*crops), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_torch_prints_no_failure_of_its_own(caplog):
    class Joined(Module):
        def forward(self, x, y):
            return torch.cat([self.linear(x), y], 1)

    with pytest.raises(ExampleInputsError, match="Sizes of tensors must match"):
        trace(Joined(), (X, X[:1]), {})
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_numbers_from_data_name_the_users_line():
    class Item(Module):
        def forward(self, x):
            return self.linear(x) * x.sum().item()  # the item

    told = r"gives a number that depends on data; .*\.item\(\)"
    with pytest.raises(TraceError, match=rf"test_calls\.py:{line_of('# the item')}: .*{told}"):
        trace(Item(), (X,), {})


def test_numbers_that_are_only_logged_are_dropped_with_a_note():
    class Logs(Module):
        def forward(self, x):
            y = self.linear(x).sum()
            self.text = f"loss {y.item():.3f} of {x.int().sum().item():d}"  # the log
            self.last = y.item()
            return y

    program = trace(Logs(), (X,), {}).program
    assert [op.target for layer in program.layers for op in layer.ops] == ["aten.linear.default", "aten.sum.default"]
    line = line_of("# the log")
    assert [note.split(": ")[0].rsplit(":", 1)[1] for note in program.notes] == [str(line), str(line + 1)]
    assert "is dropped, as nothing is computed from it" in program.notes[0]
    assert f"{torch.ones(1).sum().item():.1f}" == "1.0"


@pytest.mark.parametrize(
    ("draw", "whose"), [(random.random, r"Python \(random\)"), (np.random.rand, r"NumPy \(np\.random\)")]
)
def test_random_numbers_of_the_host_are_refused(draw, whose):
    class Draws(Module):
        def forward(self, x):
            return self.linear(x) * draw()

    with pytest.raises(TraceError, match=rf"draws random numbers from the generator of {whose}, which.*torch\.rand"):
        trace(Draws(), (X,), {})


@pytest.mark.parametrize("by_call", [True, False])
def test_rolls_by_numbers_of_data_are_those_of_one_device(by_call):

    class Rolls(Module):
        def forward(self, x):
            h = self.linear(x)
            for _ in range(2):
                numbers = [int(place) if by_call else place.item() for place in h.mean(0).topk(2).indices]
                h = sum(torch.roll(h, -n, 1) + h.roll((n + 1, 1), (-1, 0)) for n in numbers)
            return h

    model = Rolls()
    traced = trace(model, (X,), {})
    for x in (X, X.flip(1), 2 - X):
        torch.testing.assert_close(interpret(traced, model, [x])[0][0], model(x), rtol=0, atol=0)


def test_rolls_by_what_is_no_sum_say_what_to_write():
    class Rolls(Module):
        def forward(self, x):
            h = self.linear(x)
            return torch.roll(h, h.mean(0).argmax().item() ** 3, 1)

    class Gathers(Module):
        def forward(self, x):
            h = self.linear(x)
            shifts = h.mean(0).topk(2).indices
            return sum(h.gather(1, ((torch.arange(h.shape[1]) + shift) % h.shape[1]).expand_as(h)) for shift in shifts)

    with pytest.raises(TraceError, match=r"test_calls\.py:\d+: torch\.roll by a number that depends on data, .*gather"):
        trace(Rolls(), (X,), {})
    gathers = Gathers()
    traced = trace(gathers, (X,), {})
    torch.testing.assert_close(interpret(traced, gathers, [X])[0][0], gathers(X))


class Holder:
    def __init__(self, x):
        self.parts, self.owner = [{"x": x}], object()


class NestedTensor:
    """As of DETR: images, and where they are padded."""

    def __init__(self, tensors, mask, size=3):
        self.tensors, self.masks, self.size = tensors, {"mask": mask}, size

    @property
    def decomposed(self):
        return self.tensors, self.masks["mask"]


def test_plain_objects_are_looked_into():
    class Detector(Module):
        def forward(self, samples):
            x, mask = samples.decomposed
            samples.seen = x
            return self.linear(x) * mask, samples.size

    given, other = (NestedTensor(torch.randn(X.shape), torch.rand(len(X), 1) > 0.5) for _ in range(2))
    traced = trace(Detector(), (given,), {})
    assert [traced.program.type_of(name).shape for name in traced.program.inputs] == [tuple(X.shape), (len(X), 1)]
    assert all(a is b for a, b in zip(traced.flatten_inputs((other,), {}), other.decomposed, strict=True))
    assert traced.unflatten_outputs(["a"]) == ("a", 3)
    assert not hasattr(given, "seen")
    assert any("sets attributes of an argument, a NestedTensor" in note for note in traced.program.notes)
    with pytest.raises(InputShapeError, match=r"argument 'samples.size' is 4, but the plan was made for 3"):
        traced.flatten_inputs((NestedTensor(*other.decomposed, 4),), {})


def test_dicts_of_a_class_of_their_own_are_looked_into():
    class Labeled(Module):
        def forward(self, x, labels):
            return sum((self.linear(x) - label["target"]).square().mean() for label in labels)

    class Described(UserDict):
        made_by: object = None

    labels = [transformers.BatchFeature({"target": torch.randn_like(X)}), Described({"target": torch.randn_like(X)})]
    labels[1].made_by = object()  # each batch has another one
    model = Labeled()
    traced = trace(model, (X, labels), {})
    targets = [label["target"] for label in labels]
    labels[1].made_by = object()
    assert all(a is b for a, b in zip(traced.flatten_inputs((X, labels), {})[1:], targets, strict=True))
    assert not any("sets attributes" in note for note in traced.program.notes)
    torch.testing.assert_close(interpret(traced, model, [X, *targets])[0][0], model(X, labels))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (Holder(X), "argument 'other' is a Holder, .* pass its tensors themselves"),
        (transformers.DynamicCache(), "argument 'other' is a DynamicCache, .*leave it out, and pass the whole text"),
        (Holder(1.0), None),
        (np.arange(3), r"argument 'other' is a NumPy array, .* pass torch\.from_numpy"),
        ({"sizes": np.float32(3.0)}, None),
    ],
)
def test_objects_with_tensors_inside_are_refused(argument, message):
    class Takes(Module):
        def forward(self, x, other):
            return self.linear(x)

    with pytest.raises(ExampleInputsError, match=message) if message else nullcontext():
        trace(Takes(), (X, argument), {})


def test_a_cache_that_is_asked_for_is_refused():
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    call = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    with pytest.raises(OutputError, match=r"use_cache=True asks for (past_key_values|cache),.*pass the whole text"):
        trace(model, (), {**call, "use_cache": True}, training=False)
    trace(model, (), call, training=False)


def test_distributions_and_losses_check_no_values():
    """As of a variational model; by default these look at every scale and probability."""

    class Variational(Module):
        def forward(self, x):
            mean, scale = torch.distributions.Normal(self.linear(x), 1.0).mean, self.linear(x).exp()
            posterior, prior = torch.distributions.Normal(mean, scale), torch.distributions.Normal(0.0, 1.0)
            chosen = torch.distributions.Categorical(logits=mean).log_prob(x.argmax(-1) % mean.shape[-1])
            loss = torch.distributions.kl_divergence(posterior, prior).mean() - chosen.mean()
            return loss + nn.GaussianNLLLoss()(mean, torch.zeros_like(mean), scale)

    program = trace(Variational(), (X,), {}).program
    assert program.loss
    with pytest.raises(ValueError, match="negative"):
        nn.GaussianNLLLoss()(X, X, -X.abs())


def test_attention_over_packed_sequences_splits_in_the_heads():
    from torch.nn.attention.varlen import varlen_attn

    class Packed(Module):
        def forward(self, x, ends):
            q = self.linear(x).view(-1, 2, 4)
            return varlen_attn(q, q, q, ends, ends, 8, 8).square().mean()

    ends = torch.tensor([0, 8, 16], dtype=torch.int32)
    program = trace(Packed(), (torch.randn(16, 8), ends), {}).program
    op = next(op for layer in program.layers for op in layer.ops if "varlen" in op.target)
    assert (op.rule_source, [x.factor for x in op.options]) == ("rule", ["-", "~", "h"])
    cluster = autopar.Cluster.of("h100", devices_per_node=2)
    assert autopar.plan(Packed(), cluster, (torch.randn(16, 8), ends)).world_size == 2


def test_shapes_from_data_are_refused():
    class Nonzero(Module):
        def forward(self, x):
            return self.linear(x)[x[:, 0] > 0]

    with pytest.raises(TraceError, match=r"test_calls\.py:\d+: .*depends on values"):
        trace(Nonzero(), (X,), {})


def test_inputs_that_do_not_bind():
    with pytest.raises(ExampleInputsError, match=r"missing a required argument: 'input'.*Linear\.forward\(input"):
        trace(nn.Linear(8, 8), (), {"inputs": X})
    with pytest.raises(ExampleInputsError, match="no tensor"):
        trace(Module(), (), {})


def test_inputs_that_the_model_chokes_on():
    class Narrow(Module):
        def forward(self, x):
            return self.linear(x)  # the narrow place

    with pytest.raises(
        ExampleInputsError, match=rf"test_calls\.py:{line_of('# the narrow place')}: .*\[4, 7\] float32"
    ):
        trace(Narrow(), (torch.zeros(4, 7),), {})


def test_dummy_inputs():
    class Declares(Module):
        dummy_inputs = {"x": X}  # noqa: RUF012

        def forward(self, x):
            return self.linear(x)

    assert default_example_inputs(Declares()) == {"x": X}
    with pytest.raises(ExampleInputsError, match=r"Linear\.forward\(input.*example_inputs="):
        default_example_inputs(nn.Linear(8, 8))


def test_writing_to_an_input_is_refused():
    class Writes(Module):
        def forward(self, x):
            x.add_(1)
            return self.linear(x)

    with pytest.raises(TraceError, match=r"writes to 'x'.*clone"):
        trace(Writes(), (X,), {})


def test_the_model_is_not_touched():
    model, inputs = models.make_gpt2(batch=2, layers=1)
    model.eval()
    before = {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    trace(model, (), inputs, training=True, dtype=torch.bfloat16)
    assert {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()} == before
    assert not model.training


def test_a_model_that_cannot_be_copied():
    class Locked(Module):
        def __init__(self):
            super().__init__()
            import threading

            self.lock = threading.Lock()
            self.register_buffer("scale", torch.full((8,), 2.0))
            self.tied = self.linear

        def forward(self, x):
            with self.lock:
                return self.tied(self.linear(x)) * self.scale

    model = Locked()
    traced = trace(model, (X,), {})
    assert torch.allclose(interpret(traced, model, [X])[0][0], model(X))
    assert traced.program.aliases == {"tied.weight": "linear.weight", "tied.bias": "linear.bias"}


class Wrapped(nn.Module):
    """A network under two names, whose batch statistics forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.encoder = nn.ModuleDict({"net": self.net})

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder["net"](x).sin().sum()


def test_buffers_under_two_names_are_updated_once() -> None:
    traced = check_equals_model(Wrapped(), {"x": torch.randn(4, 8)})
    assert {traced.program.parameters[name] for name in traced.program.updates} == {
        "net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked",
    }  # fmt: skip


def test_checkpointed_blocks_are_traced_through():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Module):
        def forward(self, x):
            h = checkpoint(self.linear, x, use_reentrant=False)
            return F.relu(checkpoint(self.linear, h, use_reentrant=True))

    model = Checkpointed()
    traced = trace(model, (X,), {})
    out = interpret(traced, model, [X])[0][0]
    assert torch.equal(out, model(X))
    assert out.requires_grad


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_plan_says_that_the_search_decides_what_is_recomputed_not_the_model(use_reentrant):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(2, 8, dtype=torch.long))
    before = trace(model, (), batch, training=True).program.notes
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    (note,) = set(trace(model, (), batch, training=True).program.notes) - set(before)
    assert "recompute=full" in note


def test_eager_experts_name_the_form_that_works() -> None:
    models.skip_before_transformers_5("experts are modules of their own, and have one form only")
    model, inputs = models.make_mixtral(layers=1, products="eager")
    told = r"mixtral\.py:\d+: eager experts look up in Python .* model\.set_experts_implementation\('grouped_mm'\)"
    with pytest.raises(TraceError, match=told):
        trace(model, (), inputs)
    type(model)._can_set_experts_implementation_cached_value = False  # as of models with one form only
    try:
        with pytest.raises(TraceError, match="MixtralForCausalLM has no other form of them"):
            trace(model, (), inputs)
    finally:
        del type(model)._can_set_experts_implementation_cached_value


class Sharing(nn.Module):
    """Two matrices, and two buffers, one of which is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        for name in ("sums", "row"):
            self.register_buffer(name, torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 4] -> a scalar."""
        hidden = self.second(self.first(x)) + self.row[0]
        with torch.no_grad():
            self.sums.add_(hidden.mean(0))
        return hidden.square().mean()


def test_tensors_that_share_memory_are_refused():
    def slices_of_one(model: Any) -> None:
        flat = torch.randn(32)
        model.first.weight.data, model.second.weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)

    def shares(model: Any) -> None:
        model.second.weight.data = model.first.weight.data

    def shares_detached(model: Any) -> None:
        model.row = model.second.weight.detach()

    def shares_written(model: Any) -> None:
        model.row = model.sums[1:]

    def one_parameter(model: Any) -> None:
        model.second.weight = model.first.weight

    for change, pair in (
        (shares, "'first.weight' and 'second.weight'"),
        (shares_detached, "'row' and 'second.weight'|'second.weight' and 'row'"),
        (shares_written, "'sums' and 'row'"),
    ):
        model = Sharing()
        change(model)
        with pytest.raises(ModelError, match=f"({pair}) are different tensors that share memory.*clone"):
            trace_model(model, {"x": torch.randn(8, 4)})
    for change in (slices_of_one, one_parameter):
        model = Sharing()
        change(model)
        trace_model(model, {"x": torch.randn(8, 4)})


def test_recurrent_modules_cause_no_warnings(recwarn):
    trace(nn.LSTM(4, 4), (), {"input": torch.randn(3, 2, 4)})
    assert not [str(each.message) for each in recwarn if "during export" in str(each.message)]


@pytest.mark.parametrize(
    ("dtypes", "said"),
    [
        ((torch.float64, torch.int64), "linear takes tensors of one dtype, not of float64, float32, float32"),
        ((torch.int64, torch.int64), "linear takes tensors of one dtype, not of int64, float32, float32"),
        (
            (torch.float32, torch.int32),
            r"cross_entropy_loss takes classes as int64, not as int32: pass labels.long\(\)",
        ),
        ((torch.float32, torch.bool), "cross_entropy_loss takes classes as int64, not as bool"),
    ],
)
def test_dtypes_that_fail_in_mid_step_are_found_when_tracing(dtypes, said):
    class Classifier(Module):
        def forward(self, x, y):
            return F.cross_entropy(self.linear(x), y)  # the line of dtypes

    batch = (torch.zeros(4, 8, dtype=dtypes[0]), torch.zeros(4, dtype=dtypes[1]))
    with pytest.raises(RuntimeError):
        Classifier()(*batch)
    line = line_of("the line of dtypes")
    with pytest.raises(ExampleInputsError, match=rf"test_calls.py:{line}: .*{said}.* It got x \[4, 8\]"):
        trace(Classifier(), batch, {})
    assert trace(Classifier(), (X, torch.zeros(4, 8)), {}).program.outputs  # classes as probabilities


def test_sparse_inputs_are_refused() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return torch.spmm(edges, self.up(x)).square().mean()

    x, edges = torch.randn(6, 4), torch.eye(6)
    with pytest.raises(ExampleInputsError, match=r"input 'edges' is sparse \(torch.sparse_coo\).* edges.to_dense\(\)"):
        trace(Graph(), (x, edges.to_sparse()), {})
    trace(Graph(), (x, edges), {})
