"""Every op of whole traced models is run on slices, in just the form in which the trace calls it, and has a price."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.ops import RuleMatch, count_work
from autopar.planning.call_traces import trace_model
from autopar.program import Arg, Op, Program, Ref, TensorType
from tests.models import ZOO, make
from tests.ops.harness import Sample, check_options


def as_sample(op: Op, program: Program) -> Sample:
    """`op` with tensors drawn for its operands: normal numbers in float64, integers 0 and 1."""
    args = tuple(draw(arg, program) for arg in op.args)
    kwargs = {name: draw(arg, program) for name, arg in op.kwargs}
    fixed = tuple(i for i, name in enumerate(op.operands) if not program.values[name].requires_grad)
    return Sample(op.target, args, kwargs, op.is_random, fixed=fixed)


def draw(arg: Arg, program: Program) -> Any:
    if isinstance(arg, Ref):
        return draw_tensor(program.type_of(arg.name))
    if isinstance(arg, tuple):
        return [draw(part, program) for part in arg]
    if isinstance(arg, str) and arg.startswith("torch."):
        return torch.float64 if arg.startswith("torch.float") else getattr(torch, arg.removeprefix("torch."))
    return arg


def draw_tensor(kind: TensorType) -> torch.Tensor:
    if kind.is_floating:
        return torch.randn(kind.shape, dtype=torch.float64)
    return torch.randint(0, 2, kind.shape).to(getattr(torch, kind.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_op_of_a_model_splits_as_the_program_says_and_has_a_price(name: str):
    program = trace_model(*make(name, torch.float32)).program
    checked: set[tuple[object, ...]] = set()
    for op in (op for layer in program.layers for op in layer.ops):
        kinds = tuple(program.type_of(operand) for operand in op.operands)
        key = (op.target, kinds, tuple(arg for arg in op.args if not isinstance(arg, Ref | tuple)))
        if key not in checked:
            checked.add(key)
            match = RuleMatch(op.options, op.size_args, op.is_view, op.is_random)
            assert check_options(as_sample(op, program), match) >= 2
    assert len(checked) > 5
    for cluster in ("cpu", "h100"):
        check_prices(program, ClusterPrices(Cluster.of(cluster)))


def check_prices(program: Program, prices: ClusterPrices) -> None:
    """Every op costs something, and says what that rests on."""
    for op in (op for layer in program.layers for op in layer.ops):
        operands, results = (tuple(map(program.type_of, names)) for names in (op.operands, op.results))
        has_gradient = any(program.values[name].requires_grad for name in op.results)
        time = prices.op_s(op, operands, results, has_gradient)
        assert time.source in {"layers", "scaled", "measured", "published", "calibrated", "estimate"}
        assert time.forward_s > 0 or count_work(op, operands, results).kind == "view", op.target
        assert time.backward_s >= 0
