"""Traced programs, run op by op, compute what their models compute: outputs, gradients and buffers in
float64."""

import pytest

from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.trace import trace
from tests import models
from tests.trace.interpreter import check_equals_model

FACTORIES = sorted(name for name in vars(models) if name.startswith("make_"))


EVALUATED = ("make_gpt2", "make_plain_gpt", "make_unet")
# In eval mode nothing but dropout and batch norm is another op; one encoder and decoder besides, and experts.
ALSO_EVALUATED = ("make_t5", "make_mixtral")
# Seconds to trace, and trained by plans in `tests/parity`, which compare the same numbers.
TRAINED_ELSEWHERE = ("make_t5", "make_bart", "make_mixtral", "make_half_frozen", "make_vit")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("factory", "training"),
    [
        *((f, True) for f in FACTORIES if f not in TRAINED_ELSEWHERE),
        *((f, False) for f in EVALUATED),
        *(pytest.param(f, False, marks=pytest.mark.slow) for f in ALSO_EVALUATED),
    ],
)
def test_program_computes_what_the_model_computes(factory, training):
    model, inputs = getattr(models, factory)(batch=4)
    traced = check_equals_model(model, inputs, training=training)
    assert traced.program.loss
    assert traced.program.training is training


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    # `tests/parity/test_pipelines` trains the others in as many layers and microbatches.
    "name",
    ["deep_unet", "deep_crossing", pytest.param("deep_batch_normed", marks=pytest.mark.slow)],
)
def test_models_for_pipelines_have_layers_and_microbatches(name):
    model, inputs = models.make(name)
    program = trace(model, (), inputs).program
    assert len(program.layers) >= 6
    found = time_assignment(program, 4)
    assert isinstance(found, TimeAssignment) == (name != "deep_batch_normed"), found


@pytest.mark.parametrize(
    "factory",
    [models.make_bert, pytest.param(models.make_t5, marks=pytest.mark.slow)],
)
def test_little_crosses_layers_without_a_gradient(factory):
    """Masks of padded inputs, decoder's inputs; what depends on no input is a constant of the layers that read it."""
    model, inputs = factory(batch=4)
    program = trace(model, (), inputs).program
    crossing = {name for layer in program.layers for name in layer.inputs if program.values[name].role == "op"}
    still = {name for name in crossing if not program.values[name].requires_grad}
    assert still
    assert all(program.type_of(name).num_elements <= inputs["input_ids"].numel() for name in still)


@pytest.mark.slow
def test_a_position_bias_is_computed_once():
    """T5: the first layer of encoder and decoder computes it, all others read it, and gradients flow back."""
    model, inputs = models.make_t5(batch=4, layers=3)
    program = trace(model, (), inputs).program
    # GPUs have fast attention for masks without gaps between columns alone, which the model asks for.
    ops = {name: op for layer in program.layers for op in layer.ops for name in op.results}
    masks = [ops[op.operands[3]] for op in ops.values() if "attention" in op.target and len(op.operands) > 3]
    copies = [mask for mask in masks if mask.target == "aten.clone.default"]
    assert len(copies) == 6  # those with a bias; cross attention has none
    assert all(("memory_format", "torch.contiguous_format") in mask.kwargs for mask in copies)
    tables = {name for name, member in program.parameters.items() if "relative_attention_bias" in member}
    assert len(tables) == 2
    for table in tables:
        (first,) = [layer for layer in program.layers if table in layer.state]
        biases = {n for n in first.outputs if program.type_of(n).shape[0] == 1}
        readers = [layer for layer in program.layers if biases.intersection(layer.inputs)]
        assert len(readers) == 2
        assert all(program.values[name].requires_grad for name in biases)
