"""Traced programs, run op by op, compute what their models compute: outputs, gradients and buffers in
float64."""

import pytest

from tests import models
from tests.trace.interpreter import check_equals_model

FACTORIES = sorted(name for name in vars(models) if name.startswith("make_"))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_program_computes_what_the_model_computes(factory, training):
    model, inputs = getattr(models, factory)(batch=4)
    traced = check_equals_model(model, inputs, training=training)
    assert traced.program.loss
    assert traced.program.training is training
