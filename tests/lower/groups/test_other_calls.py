"""Steps of unlike groups in calls with other inputs than the example: an optional one is missing, or there for once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InputShapeError, LossError, MeshError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.planning.group_plans import plan_groups, why_no_groups
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.verify.rehearsal import keep_double_program, planner_for
from tests.lower.runs import build, loss_of
from tests.zoo import quick_prices

TOKENS = 16


class _Kinds(nn.Module):
    """Reads parameters of its own for an input that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.kinds, self.head = nn.Embedding(32, 12), nn.Embedding(2, 12), nn.Linear(12, 32)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(
        self, input_ids: Tensor, kinds: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        hidden = self.embedding(input_ids)
        if kinds is not None:
            hidden = hidden + self.kinds(kinds)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        logits = self.head(hidden)
        if labels is None:
            return None, logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def _call(rows: int, tokens: int, *, has_kinds: bool) -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (rows, tokens))
    kinds = {"kinds": ids % 2} if has_kinds else {}
    return {"input_ids": ids, **kinds, "labels": ids.roll(1, 1)}


def _alone(model: nn.Module, rows: list[dict[str, Tensor]], **shared: Tensor) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients of one device, with all rows in one."""
    model.zero_grad()
    whole = {name: torch.cat([each[name].flatten() for each in rows])[None] for name in rows[0]}
    loss = loss_of(model(**whole, **shared))
    loss.backward()
    return loss.item(), {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("asked", "has_kinds"),
    [
        ("pipeline=1", True),
        ("pipeline=1", False),
        pytest.param("pipeline=2", True, marks=pytest.mark.slow),
        pytest.param("pipeline=2", False, marks=pytest.mark.slow),
    ],
)
def test_optional_inputs_may_be_there_in_some_steps_only(asked: str, has_kinds: bool) -> None:
    torch.manual_seed(0)
    world = 8 if asked == "pipeline=2" else 4
    model, prices = _Kinds().double(), quick_prices(world)

    def trace(rows: int, tokens: int) -> Program:
        call = _call(rows, tokens, has_kinds=has_kinds)
        return keep_double_program(trace_model(model, call, num_layers=world // 4)).program

    first = _call(4, TOKENS, has_kinds=has_kinds)
    traced = keep_double_program(trace_model(model, first, num_layers=world // 4))
    request = SearchRequest(constraints=(asked,), schedules=schedule_actions)
    plan = search(traced.program, world, prices, request)
    planned = plan_groups(traced.program, plan, [np.array([TOKENS, 8, 8])], trace, prices, request)
    assert {(row.degree, row.tokens) for row in planned.rows} >= {(2, TOKENS), (1, 8)}
    plan = replace(plan, groups=planned.plans)
    planner = planner_for(model, traced, plan, [], keep_double_program, training=True)
    for other in (False, True):  # simulated ranks can't trace
        planner.groups((), _call(4, TOKENS, has_kinds=other), (4, TOKENS))
    steps = [
        [_call(1, TOKENS, has_kinds=own), _call(1, 8, has_kinds=own), _call(2, 8, has_kinds=own)]
        for own in (has_kinds, not has_kinds, has_kinds)
    ]
    places = [0, 0, 1, 2] * (world // 4)

    def rank(talk: Communicator) -> Any:
        made: Any = build(model, traced, plan, talk, planner=planner)
        made.call_inputs = call_inputs(model, first, traced.program, made.data_split, talk, is_local=True)
        found: list[Any] = []
        for rows in steps:
            made.zero_grad()
            loss = loss_of(made(**rows[places[talk.rank]]))
            loss.backward()
            own = {name: p.grad for name, p in made.named_parameters()}
            found.append((loss.item(), {name: None if x is None else made._whole(name, x) for name, x in own.items()}))
        rows = steps[0]
        with pytest.raises(LossError, match="pass its labels in every step"):
            made(**{name: x for name, x in rows[places[talk.rank]].items() if name != "labels"})
        own = rows[places[talk.rank]]
        with pytest.raises(InputShapeError, match="pass the same entries everywhere"):
            made(**(own if talk.rank else {name: x for name, x in own.items() if name != "labels"}))
        return found

    expected = [_alone(model, rows) for rows in steps]
    for found in simulate(world, rank):
        for (loss, gradients), (loss_alone, gradients_alone) in zip(found, expected, strict=True):
            assert loss == pytest.approx(loss_alone, rel=1e-12)
            assert {n for n, x in gradients.items() if x is None} == {
                n for n, x in gradients_alone.items() if x is None
            }
            for name, x in gradients_alone.items():
                if x is not None:
                    torch.testing.assert_close(gradients[name], x, rtol=0, atol=1e-12)


class _Illustrated(nn.Module):
    """Puts images in the text, in the order of the text of all rows, after `change` of what it sees of all of them."""

    def __init__(self, change: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.change = change
        self.embedding, self.see, self.head = nn.Embedding(32, 12), nn.Linear(6, 12), nn.Linear(12, 32)

    def forward(self, input_ids: Tensor, labels: Tensor, images: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        seen = self.change(self.see(images))
        hidden = hidden.masked_scatter((input_ids == 0)[:, :, None].expand_as(hidden), seen)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class _Averaged(_Illustrated):
    """Adds a mean of all images to the text, with and without any."""

    def forward(self, input_ids: Tensor, labels: Tensor, images: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        seen = self.see(images)
        hidden = hidden.masked_scatter((input_ids == 0)[:, :, None].expand_as(hidden), seen) + seen.mean(0)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class _Centered(nn.Module):
    """Subtracts the mean of each place over all rows, which slices of places, but not of rows, can compute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 12), nn.Linear(12, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        return nn.functional.cross_entropy(self.head(hidden - hidden.mean(0)).flatten(0, 1), labels.flatten())


def _why_not(model: nn.Module) -> str:
    ids = torch.ones(4, TOKENS, dtype=torch.int64)
    images = {"images": torch.zeros(6, 6)} if isinstance(model, _Illustrated) else {}
    program = trace_model(model, {"input_ids": ids, "labels": ids, **images}).program
    request = SearchRequest()
    return why_no_groups(program, search(program, 4, quick_prices(4), request), request)


def test_rows_that_are_not_independent_have_no_groups() -> None:
    assert "rows can't be computed one by one (4 microbatches would not be exact" in _why_not(_Centered())


IMAGES: dict[str, tuple[_Illustrated, bool]] = {
    "by itself": (_Illustrated(), True),
    "taken apart": (_Illustrated(lambda seen: torch.cat(seen[:, None].unbind())), True),
    "in another order": (_Illustrated(lambda seen: torch.cat(seen[:, None].unbind()[::-1])), False),
    "some of them": (_Illustrated(lambda seen: torch.cat([*seen[:, None].unbind()[1:], seen[:1]])), False),
    "flipped": (_Illustrated(lambda seen: seen.flip(0)), False),
    "less the mean of all": (_Illustrated(lambda seen: seen - seen.mean(0)), False),
    "running sums": (_Illustrated(lambda seen: seen.cumsum(0)), False),
    "a mean in the text": (_Averaged(), False),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", IMAGES)
def test_images_are_of_their_row_if_each_is_computed_by_itself(case: str) -> None:
    model, are_of_rows = IMAGES[case]
    reason = _why_not(model)
    assert ("is no sum over rows that are computed with their own images alone" in reason) == (not are_of_rows)
    assert not (are_of_rows and reason)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 12), nn.Linear(12, 32)

    def forward(self, input_ids: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        logits = self.head(self.embedding(input_ids) * scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_inputs_without_rows_are_those_of_all_groups() -> None:
    torch.manual_seed(0)
    model, prices = _Scaled().double(), quick_prices(4)

    def call(rows: int, tokens: int) -> dict[str, Tensor]:
        return {**_call(rows, tokens, has_kinds=False), "scale": torch.rand(12).double()}

    def trace(rows: int, tokens: int) -> Program:
        return keep_double_program(trace_model(model, call(rows, tokens))).program

    first = call(4, TOKENS)
    traced = keep_double_program(trace_model(model, first))
    request = SearchRequest(constraints=("pipeline=1",))
    plan = search(traced.program, 4, prices, request)
    groups = plan_groups(traced.program, plan, [np.array([TOKENS, 8, 8])], trace, prices, request).plans
    plan = replace(plan, groups=groups)
    planner = planner_for(model, traced, plan, [], keep_double_program, training=True)
    planner.groups((), first, (4, TOKENS))
    rows = [{**call(count, tokens), "scale": first["scale"]} for count, tokens in ((1, TOKENS), (1, 8), (2, 8))]

    def rank(talk: Communicator) -> float:
        made: Any = build(model, traced, plan, talk, planner=planner)
        made.call_inputs = call_inputs(model, first, traced.program, made.data_split, talk, is_local=True)
        own = rows[[0, 0, 1, 2][talk.rank]]
        with pytest.raises(
            MeshError, match=r"inputs without rows, here \['scale'\], but those of ranks 0 and 3 differ"
        ):
            made(**(own | {"scale": own["scale"] + (talk.rank == 3)}))
        return loss_of(made(**own)).item()

    alone = _alone(
        model, [{name: x for name, x in each.items() if name != "scale"} for each in rows], scale=first["scale"]
    )
    assert simulate(4, rank) == pytest.approx([alone[0]] * 4, rel=1e-12)
