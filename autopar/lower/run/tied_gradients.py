"""Gradients of what layers in several device groups read: each group has its own term."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.communicator import Communicator
from autopar.lower.compat import local_part_of
from autopar.lower.run.stage_map import StageMap
from autopar.lower.run.step_runner import StepRunner

__all__ = ["exchanged_sum", "sum_over_groups"]


def sum_over_groups(step: StepRunner, gradients: dict[str, Tensor]) -> None:
    """Replace this rank's terms of gradients that other device groups have terms of by their sums.

    Args:
        step: whose gradients they are.
        gradients: by name of parameter or input, changed.
    """
    executor = step.executor
    program, store = executor.executable.program, executor.store
    trained = step.trained
    differentiated = {program.parameters[x] for x in program.parameters if x in step.values.differentiated}
    for name in sorted(differentiated & trained.keys()):
        groups = store.stored[name].groups
        if len(groups) > 1:
            part, device = local_part_of(trained[name]), executor.communicator.device
            own = local_part_of(gradients[name]) if name in gradients else torch.zeros_like(part, device=device)
            with step.naming(f"the exchange of the gradients of {name!r}"):
                total = exchanged_sum(executor.communicator, executor.stages, own, groups)
                gradients[name] = store.wrap(name, total)
    for name, x in step.values.differentiable_inputs.items():  # every rank has the whole batch
        own = gradients.get(name)
        talk = executor.communicator
        with step.naming(f"the sum of the gradients of input {name!r}"):
            own = torch.zeros_like(x, requires_grad=False) if own is None else own
            gradients[name] = talk.all_reduce(own, executor.stages.axis, "sum")


def exchanged_sum(talk: Communicator, stages: StageMap, x: Tensor, groups: Sequence[int]) -> Tensor:
    """The sum of the tensors that these device groups have here, in their order: the same bits on each.

    Of each pair the lower one sends first: NCCL runs the messages of a pair in one order, both directions together.
    """
    sent: list[Handle] = []
    came: dict[int, Handle] = {}
    for other in groups:
        if stages.group < other:
            sent.append(talk.start_send(x, stages.axis, other))
        if stages.group != other:
            came[other] = talk.start_receive(tuple(x.shape), x.dtype, stages.axis, other)
        if stages.group > other:
            sent.append(talk.start_send(x, stages.axis, other))
    terms = [x if group == stages.group else came[group].wait() for group in groups]
    for handle in sent:
        handle.wait()
    total = terms[0].clone()
    for term in terms[1:]:
        total.add_(term)
    return total
