"""What a layer keeps for its backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.placement import Layout, parse_layout
from autopar.plan import LayerStrategy, Plan
from autopar.planning.call_traces import trace_model
from autopar.step.layer.local_layer import place
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.layer_tensors.liveness import running_memory
from autopar.step.plan_check import check_fit
from autopar.step.training import TrainingSpec
from tests.random_plans import random_plan
from tests.zoo import subject


class Transposed(nn.Module):
    """Multiplies by a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.weight = nn.Parameter(torch.ones(1, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(torch.mm(x * self.scale, self.weight.squeeze(0)), x.new_zeros(4, 16))


def test_a_slice_of_a_view_of_a_parameter_is_a_tensor_of_its_own() -> None:
    program = trace_model(Transposed(), {"x": torch.ones(4, 8)}).program
    (layer,) = program.layers
    product = next(op for op in layer.ops if "mm" in op.target)
    columns = next(o.factor for o in product.options if o.results[0] == parse_layout("S(1)")[0])
    view = product.operands[1]
    whole: Layout = parse_layout("R")
    strategy = LayerStrategy(
        mesh=(2,),
        assignments=tuple((columns,) if op is product else ("-",) for op in layer.ops),
        time=(),
        inputs=(whole,) * len(layer.inputs),
        outputs=(whole,) * len(layer.outputs),
        copies=tuple(
            (name, parse_layout("S(1)") if name == view else whole)
            for name in dict.fromkeys(name for op in layer.ops for name in (*op.operands, *op.results))
        ),
        storage=(whole,) * len(layer.state),
    )
    memory = running_memory(place(program, layer, strategy, 1), ("none",), TrainingSpec())["none"]
    kept = {key: size for key, size in memory.saved.items() if key.startswith(f"{view}/")}
    assert list(kept.values()) == [16 * 8 / 2 * 4]


def test_an_input_that_arrives_in_slices_that_microbatches_do_not_have() -> None:
    program = subject("flat").traced.program
    plan = next(p for p in (random_plan(program, 4, seed, 4) for seed in range(50)) if p.strategies[-1].mesh == (4,))
    assert program.layers[-1].inputs[-1] in program.inputs
    cut = replace(plan.strategies[-1], inputs=(*plan.strategies[-1].inputs[:-1], parse_layout("S(0)")))
    rows = program.type_of(program.layers[-1].inputs[-1]).shape[0]
    assert rows % 4 == 0
    assert rows // 4 % 4
    decisions = replace(plan.decisions, strategies=(*plan.strategies[:-1], cut))
    check_fit(Plan(decisions), program, 4)
    placed = PlannedLayers(program, decisions).placed[-1]
    memory = running_memory(placed, ("none",), TrainingSpec())["none"]
    assert memory.inputs[placed.layer.inputs[-1]] == program.type_of(placed.layer.inputs[-1]).num_bytes / 4 / 4
