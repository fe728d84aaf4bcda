"""Runs a Program op by op with torch on one device, and compares it with the model that it was traced
from."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar.lower.kernels import OPS
from autopar.program import Arg, Op, Program, Ref
from autopar.trace import Traced, trace
from autopar.trace.compat.torch_internals import overload


def interpret(traced: Traced, model: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The program's outputs and the new contents of buffers (module name -> tensor)."""
    program = traced.program
    members = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values: dict[str, Tensor] = dict(zip(program.inputs, inputs, strict=True))
    values |= dict(traced.constants)
    values |= {value: members[name] for value, name in program.parameters.items()}
    for op in program.hoisted:
        _run(op, values, program)
    for layer in program.layers:
        known = {name: values[name] for name in (*layer.inputs, *layer.state)}  # a layer reads nothing else
        for op in layer.ops:
            _run(op, known, program)
        values.update({name: known[name] for name in layer.outputs})
    updates = {program.parameters[buffer]: values[new] for buffer, new in program.updates.items()}
    return [values[name] for name in program.outputs], updates


def _run(op: Op, known: dict[str, Tensor], program: Program) -> None:
    """Add the results of `op`, which must be of the types that the program says."""
    function = OPS.get(op.target) or overload(op.target)
    args = [_value(arg, known) for arg in op.args]
    returned = function(*args, **{key: _value(arg, known) for key, arg in op.kwargs})
    results = returned if isinstance(returned, list | tuple) else (returned,)
    results = [r for r in results if isinstance(r, Tensor)]
    known.update(zip(op.results, results, strict=False))
    for name, result in zip(op.results, results, strict=False):
        kind = program.type_of(name)
        assert (tuple(result.shape), str(result.dtype)) == (kind.shape, f"torch.{kind.dtype}"), (op, result)
        assert program.values[name].requires_grad == result.requires_grad, (op, name)


def _value(arg: Arg, values: Mapping[str, Tensor]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, tuple):
        return [_value(part, values) for part in arg]
    if isinstance(arg, str) and arg.startswith("torch."):
        return getattr(torch, arg.removeprefix("torch."))
    return arg


def check_well_formed(program: Program) -> None:
    """The laws of a Program that every consumer relies on."""
    known = {name for name, value in program.values.items() if value.role != "op"}
    for op in program.hoisted:
        assert all(program.values[name].role in ("buffer", "constant") for name in op.operands)
        assert not program.updates.keys() & set(op.operands)
    for layer in program.layers:
        assert layer.ops
        reads = {name for op in layer.ops for name in op.operands}
        made = {name for op in layer.ops for name in op.results}
        assert set(layer.inputs) | set(layer.state) == reads - made
        assert known.issuperset(layer.inputs)
        assert all(program.values[name].role in ("parameter", "buffer", "constant") for name in layer.state)
        assert all(program.values[name].role in ("op", "input") for name in layer.inputs)
        known |= set(layer.outputs)
        for op in layer.ops:
            assert op.options
            for option in op.options:
                assert (len(option.operands), len(option.results)) == (len(op.operands), len(op.results))
            assert all(0 <= index < len(op.operands) + len(op.results) for index in op.saves)
    assert known.issuperset(program.outputs)
    assert known.issuperset(program.updates.values())
    for kind in program.kinds:
        for layer in program.layers:
            if layer.kind == kind.kind:
                assert [op.target for op in layer.ops] == [op.target for op in kind.ops]
                for part in ("inputs", "state", "outputs"):
                    types = [[program.type_of(n) for n in getattr(one, part)] for one in (kind, layer)]
                    assert types[0] == types[1]


def to_double(tree: Any) -> Any:
    """Floating tensors as float64, and copies of the others."""
    return pytree.tree_map(
        lambda t: (t.double() if t.is_floating_point() else t.clone()) if isinstance(t, Tensor) else t, tree
    )


def check_equals_model(model: nn.Module, inputs: dict[str, Any], *, training: bool = True, seed: int = 0) -> Traced:
    """Trace in float64, run both, and compare outputs, gradients and buffers."""
    model = model.double().train(training)
    inputs = to_double(inputs)
    state = copy.deepcopy(model.state_dict())
    traced = trace(model, (), inputs)
    check_well_formed(traced.program)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), f"tracing changed {name}"

    torch.manual_seed(seed)
    found, updates = interpret(traced, model, traced.flatten_inputs((), inputs))
    found_grads = _gradients(found, model)
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    torch.manual_seed(seed)
    returned = model(**inputs)
    rebuilt = traced.unflatten_outputs(found)
    wanted = _tensors(returned)
    assert type(rebuilt) is type(returned)
    assert len(_tensors(rebuilt)) == len(wanted)
    for have, want in zip(_tensors(rebuilt), wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-11, atol=1e-12)
    wanted_grads = _gradients(wanted, model)
    assert wanted_grads.keys() == found_grads.keys()
    for name, want in wanted_grads.items():
        torch.testing.assert_close(found_grads[name], want, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    for name, tensor in model.named_buffers():
        torch.testing.assert_close(updates.get(name, before[name]), tensor, rtol=1e-6, atol=1e-7)
    return traced


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _gradients(outputs: Sequence[Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Gradients of a weighted sum of all outputs, by parameter."""
    total = sum(
        (t.double() * torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).view(t.shape)).sum()
        for t in outputs
        if t.requires_grad
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    return {name: grad for name, grad in zip(trained, grads, strict=True) if grad is not None}
