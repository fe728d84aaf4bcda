"""The page's section about lengths has the numbers of the plan, and bars of ranks that add up to the step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.balance.expectation import draw_batches, expected_step
from autopar.balance.lengths import Lengths
from autopar.explain.report.length_section import length_sections
from autopar.plan.prediction import RowCost
from tests.balance.assignments import plan_of


def test_it_has_what_the_plan_expects(tmp_path: Any) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(["4"] * 90 + ["9"] * 8 + ["16"] * 2))
    lengths = Lengths.read(path)
    long, short = (plan_of(RowCost(*sizes, token_s=1.0, pair_s=0.1, step_s=2.0)) for sizes in ((2, 2, 16), (4, 2, 8)))
    expected = expected_step([long, short], long, lengths, draw_batches(lengths, 9))
    plan = replace(long, prediction=replace(long.prediction, lengths=expected))
    answer: Any = SimpleNamespace(plan=plan, question=SimpleNamespace(lengths=str(path)))
    (section,) = length_sections(answer)
    family, gains = section.tables
    assert [row[0].value for row in family.rows] == [16, 8]  # type: ignore[union-attr]
    assert sum(row[2].value for row in family.rows) == pytest.approx(1)  # type: ignore[union-attr]
    *parts, (_, whole) = gains.rows
    assert sum(row[1].value for row in parts) == pytest.approx(whole.value)  # type: ignore[union-attr]
    assert whole.value == pytest.approx(expected.static_s - expected.step_time_s)  # type: ignore[union-attr]
    curve, usual, worst = section.figures
    assert (curve.data[0]["x"][0], curve.data[0]["x"][-1]) == (4, 16)
    longest = [max(map(sum, zip(*(bar["x"] for bar in figure.data), strict=True))) for figure in (usual, worst)]
    assert longest[0] <= longest[1]
    assert f"{longest[1] + 2000:,.0f} ms" in worst.description  # with what is spent once a step
    assert not list(length_sections(SimpleNamespace(plan=plan, question=SimpleNamespace(lengths=None))))  # type: ignore[arg-type]
