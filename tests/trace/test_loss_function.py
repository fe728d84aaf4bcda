"""A loss function outside of the model: the twin that computes it, and what can't be done."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2ForSequenceClassification

import autopar
from autopar.errors import ExampleInputsError, LossError, TraceError
from autopar.planning.call_traces import trace_model
from autopar.trace import LossFunction, put_loss_inside

X, Y = torch.linspace(-1, 1, 64).view(8, 8), torch.arange(8) % 4
CLUSTER = autopar.Cluster.of("cpu", devices_per_node=2)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, scale: float = 1.0, **more: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x * scale).relu())
        return y + more["bias"] if more else y


def put_inside(model: nn.Module, loss_fn: LossFunction, inputs: Any = (X,), target: Any = Y) -> tuple[nn.Module, Any]:
    return put_loss_inside(model, inputs, loss_fn, target)


def test_twin_shares_names_and_tensors_and_leaves_the_model_alone() -> None:
    model = Classifier()
    before = dict(vars(model))
    twin, inputs = put_inside(model, nn.CrossEntropyLoss())
    assert isinstance(twin, Classifier)
    assert type(twin).__name__ == "Classifier"
    assert [(n, id(p)) for n, p in twin.named_parameters()] == [(n, id(p)) for n, p in model.named_parameters()]
    assert list(twin.state_dict()) == list(model.state_dict())
    assert torch.equal(twin(**inputs), functional.cross_entropy(model(X), Y))
    assert torch.equal(twin(X, target=Y), twin(**inputs))
    assert torch.equal(twin(X, 2.0, bias=X[:, :4]), model(X, 2.0, bias=X[:, :4]))
    assert vars(model) == before
    assert type(model) is Classifier


class Unnamed(Classifier):
    def forward(self, x: Tensor, scale: float = 1.0, /, *more: Tensor, **options: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(x, scale, **options) + sum(more)


def test_arguments_without_names() -> None:
    """As of wrappers and containers, whose forward takes ``*args, **kwargs`` and passes them on."""
    model, bias = Unnamed(), torch.linspace(0, 1, 4)
    twin, inputs = put_inside(model, functional.cross_entropy, (X, 2.0, bias, bias))
    assert list(inputs) == ["x", "scale", "more_0", "more_1", "target"]
    expected = functional.cross_entropy(model(X, 2.0, bias, bias), Y)
    assert torch.equal(twin(**inputs), expected)
    assert torch.equal(twin(X, 2.0, bias, bias, target=Y), expected)
    assert torch.equal(twin(X, 2.0, bias, bias, bias=bias), model(X, 2.0, bias, bias, bias=bias))
    traced = trace_model(twin, inputs)
    assert [x.shape for x in traced.flatten_inputs((X, 2.0, bias, bias), {"target": Y})] == [(8, 8), (4,), (4,), (8,)]


def test_program_has_the_loss_and_the_models_own_parameter_names() -> None:
    model = Classifier()
    program = trace_model(*put_inside(model, functional.cross_entropy)).program
    assert set(program.parameters.values()) == set(dict(model.named_parameters()))
    assert program.outputs == (program.loss,)
    assert program.type_of(program.loss).shape == ()
    assert [op.target for layer in program.layers for op in layer.ops if "entropy" in op.target] == [
        "autopar.cross_entropy",
        "autopar.cross_entropy_denominator",
    ]


def test_forms_of_targets() -> None:
    def weighted(outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return (functional.cross_entropy(outputs, labels, reduction="none") * weights).sum()

    model, weights = Classifier(), torch.rand(8)
    expected = weighted(model(X), Y, weights)
    for target in ((Y, weights), [Y, weights], {"weights": weights, "labels": Y}):
        twin, inputs = put_inside(model, weighted, {"x": X}, target)
        assert torch.equal(twin(**inputs), expected)
        assert len(trace_model(twin, inputs).program.inputs) == 3


def test_hooks_and_a_forward_of_the_instance_belong_to_the_model() -> None:
    model = Classifier()
    seen: list[torch.Size] = []
    model.register_forward_hook(lambda _module, _args, outputs: seen.append(outputs.shape))
    model.forward = MethodType(lambda self, x: self.head(self.body(x)) * 2, model)
    twin, inputs = put_inside(model, functional.cross_entropy)
    assert torch.equal(twin(**inputs), functional.cross_entropy(model(X), Y))
    assert set(seen) == {torch.Size((8, 4))}
    ops = [op.target for layer in trace_model(twin, inputs).program.layers for op in layer.ops]
    assert "aten.mul.Tensor" in ops


class Distilled(nn.Module):
    """Whose loss reads what a hook kept."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.features = Classifier(), dict[str, Tensor]()
        self.student.body.register_forward_hook(lambda _module, _args, y: self.features.update(body=y))

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x).sum() + self.features["body"].pow(2).sum()


def test_what_hooks_keep_for_the_forward_is_the_traced_models_own() -> None:
    model = Distilled()
    program = trace_model(model, (X,)).program
    assert "aten.pow.Tensor_Scalar" in [op.target for layer in program.layers for op in layer.ops]
    assert not model.features


def test_outputs_of_any_class_reach_the_loss_function() -> None:
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=4, pad_token_id=0)
    model = GPT2ForSequenceClassification(config)
    ids = torch.ones(8, 8, dtype=torch.int64)
    twin, inputs = put_inside(model, lambda out, y: functional.cross_entropy(out.logits, y), {"input_ids": ids})
    program = trace_model(twin, inputs).program
    assert program.outputs == (program.loss,)


def test_copies_compute_with_their_own_parameters() -> None:
    twin, inputs = put_inside(Classifier(), functional.cross_entropy)
    other = copy.deepcopy(twin).double()
    loss = other(x=X.double(), target=Y)
    assert loss.dtype == torch.float64
    assert twin(**inputs).dtype == torch.float32


@pytest.mark.parametrize(
    ("loss_fn", "kind", "text"),
    [
        (lambda out, y: functional.cross_entropy(out, y, reduction="none"), LossError, r"tensor of shape \[8\].*mean"),
        (lambda out, y: (functional.cross_entropy(out, y), {}), LossError, "returns a tuple"),
        (lambda out, y: functional.cross_entropy(out.detach(), y), LossError, "depends on no parameter"),
        (nn.MSELoss(), LossError, "loss_fn fails on the model's outputs"),
        (lambda out, y: functional.cross_entropy(out[y > 0].sort(0)[0], y[y > 0]), TraceError, r"torch\.where"),
        (nn.Bilinear(4, 4, 1), LossError, "parameters of its own .weight, bias."),
    ],
    ids=["not reduced", "tuple", "detached", "failing", "data-dependent", "trained"],
)
def test_loss_functions_that_can_not_be_used(loss_fn: LossFunction, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        trace_model(*put_inside(Classifier(), loss_fn))


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(ExampleInputsError, match="pass example_target="):
        autopar.plan(Classifier(), CLUSTER, (X,), loss_fn=functional.cross_entropy)
    with pytest.raises(ExampleInputsError, match="both or neither"):
        autopar.plan(Classifier(), CLUSTER, (X,), example_target=Y)


def test_models_whose_arguments_clash() -> None:
    class Taken(Classifier):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return super().forward(x) + target

    with pytest.raises(LossError, match="argument 'target' already"):
        put_inside(Taken(), functional.cross_entropy, {"x": X, "target": Y})
