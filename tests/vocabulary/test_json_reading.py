"""Files of anybody: whatever a plan, profile or cluster holds, reading it gives a value that works, or one error."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Curve, Point, Profile
from autopar.cost.collective_prices import COLLECTIVES
from autopar.cost.profile import LayerTime, Reading, Readings
from autopar.cost.profile_file import load_profile
from autopar.errors import AutoparError, MeshError, MissingPriceError, PlanFormatError, ProfileError
from autopar.placement import Axis
from autopar.plan import Plan, Stage
from autopar.profile.table import print_profile
from autopar.schedules.action_lists import StageCost
from autopar.user_text.json_reading import read_json
from tests.cost.ops import LINEAR, tensor
from tests.vocabulary.plans import small_plan

HOSTILE = (
    "null", "true", "-1", "0", "1", "7", "0.5", "-0.5", "1e308", "1e-308", "1e999", "NaN", "Infinity", "-Infinity",
    "9223372036854775807", "9223372036854775808", "9" * 5000, '""', '"text"', '"1"', '"\\ud800"',
    f'"S({"9" * 5000})"',
    "[]", "[1]", "[-1]", '["x"]', "[[1, 2, 3]]", "{}", '{"x": 1}', '{"x": {}}', "[" * 2000 + "]" * 2000,
)  # fmt: skip


def use_plan(plan: Plan) -> None:
    """What is asked of a plan before anything is known of the model."""
    assert str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    plan.to_json().encode()


def use_profile(profile: Profile) -> None:
    """Print it, write it, and price by it."""
    print_profile(profile, Console(file=io.StringIO()))
    profile.to_json().encode()
    use_cluster(Cluster.of("cpu", devices_per_node=2), profile)


def use_cluster(cluster: Cluster, profile: Profile | None = None) -> None:
    """Price by it."""
    prices = ClusterPrices(cluster, profile)
    x, weight = tensor(512, 512), tensor(512, 512)
    seconds = [prices.memory_bytes]
    if "bfloat16" in cluster.device.flops_per_s:
        found = prices.op_s(LINEAR, (x, weight), (x,), True)
        seconds += [found.forward_s, found.backward_s]
    seconds += [prices.collective_s(kind, Axis(2, 1), 1e6) for kind in COLLECTIVES]
    assert all(0 <= each < math.inf for each in seconds), seconds


def staged_plan() -> Plan:
    """`small_plan` in two stages."""
    plan, stages = small_plan(), (Stage(0, 1, 0), Stage(1, 2, 1))
    strategies = tuple(replace(strategy, mesh=(2, 1)) for strategy in plan.strategies)
    decisions = replace(plan.decisions, stages=stages, schedule="1f1b", strategies=strategies)
    prediction = replace(plan.prediction, stages=(StageCost(forward_s=0.1), StageCost(forward_s=0.2)))
    return replace(plan, decisions=decisions, prediction=prediction, memory_limit_bytes=math.inf)


def whole_profile() -> Profile:
    """A profile with every kind of entry."""
    points = (Point(1e3, 2e-6, 0.01),)
    keys = ("collective/all_reduce/2/1", "matmul/bfloat16/64x64/forward", "op/aten.add/64/forward")
    readings = {"interference/all_reduce/2/1": Readings((Reading(1e3, 0.5, 0.1),), "2026-01-01T00:00:00+00:00")}
    curves = {key: Curve(points, "2026-01-01T00:00:00+00:00") for key in keys}
    return Profile("cpu", 2, "2026-01-01", {"torch": "2"}, curves, readings, {"decoder": LayerTime(1e-3, 2e-3)})


@dataclass(frozen=True)
class Format:
    """A kind of file: how it is written and read, what is done with it, and the error for what is none."""

    text: str
    read: Callable[[str], Any]
    use: Callable[[Any], None]
    error: type[AutoparError]


FORMATS = {
    "plan": Format(staged_plan().to_json(), Plan.from_json, use_plan, PlanFormatError),
    "profile": Format(whole_profile().to_json(), Profile.from_json, use_profile, MissingPriceError),
    "cluster": Format(Cluster.of("h100", 2).to_json(), Cluster.from_json, use_cluster, MeshError),
}


def places_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places_in(value, (*path, key))


def changed(text: str, path: tuple[Any, ...], value: str | None) -> str:
    """The JSON `text` with another value in one place, or None."""
    data = json.loads(text)
    *above, last = path
    inside = data
    for key in above:
        inside = inside[key]
    if value is None:
        del inside[last]
        return json.dumps(data)
    inside[last] = "<here>"
    return json.dumps(data).replace('"<here>"', value)


def renamed(text: str, path: tuple[Any, ...], key: str) -> str:
    data = json.loads(text)
    *above, last = path
    inside = data
    for each in above:
        inside = inside[each]
    inside[key] = inside.pop(last)
    return json.dumps(data)


def problem(form: Format, text: str) -> str:
    """What goes wrong with `text`, but for the error that is meant to."""
    try:
        form.use(form.read(text))
    except form.error as error:
        return "" if 20 < len(str(error)) < 2000 else f"a message of {len(str(error))} characters"
    except Exception as error:  # noqa: BLE001  (that is what is looked for)
        return f"{type(error).__name__}: {error!s:.200}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_hostile_value_anywhere_is_read_or_refused(name: str) -> None:
    form = FORMATS[name]
    assert not problem(form, form.text)
    wrong = {
        (path, value and value[:30]): found
        for path in places_in(json.loads(form.text))
        for value in (None, *HOSTILE)
        if (found := problem(form, changed(form.text, path, value)))
    }
    assert not wrong


@pytest.mark.parametrize(
    "key",
    [
        "matmul/a", "matmul/a/b/c", "matmul/a/0x0/c", "attention/a/b/c", "op/a/0/b", f"op/a/{'9' * 5000}/b", "\ud800",
        "collective/all_reduce", "collective/all_reduce/2/x", "collective/all_reduce/0/1", "collective/all_reduce/2/-1",
    ],
)  # fmt: skip
def test_hostile_keys_of_a_profile_are_refused_or_harmless(key: str) -> None:
    form = FORMATS["profile"]
    assert not problem(form, renamed(form.text, ("curves", "collective/all_reduce/2/1"), key))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_text_is_read_or_refused(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    start = data.draw(st.integers(0, len(form.text)))
    stop = data.draw(st.integers(start, min(len(form.text), start + 40)))
    inserted = data.draw(st.text(st.sampled_from('{}[]",:-09eE.\\uN ntf\x00'), max_size=6) | st.sampled_from(HOSTILE))
    assert not problem(form, form.text[:start] + inserted + form.text[stop:])


@pytest.mark.parametrize(
    ("load", "error"), [(Plan.load, PlanFormatError), (Cluster.load, MeshError), (load_profile, ProfileError)]
)
def test_a_path_that_holds_no_text_is_named(load: Callable[[Any], Any], error: type[AutoparError], tmp_path: Path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "bytes.json", "null\0byte.json", "long" * 100):
        with pytest.raises(error, match=f"{re.escape(repr(str(path)))}.* can't be read"):
            load(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("9" * 5000, "the number 99999999999999999999... is too large"),
        (f"-{2**63}", "too large"),
        ("[1e400]", "the number 1e400 is too large"),
        ("NaN", "NaN is not a usable number"),
        ("[" * 100_000, "nested too deeply"),
        ('["\\ud800"]', "surrogates not allowed"),
        ('{"a": 1', "line 1 column 8"),
    ],
)
def test_what_is_no_usable_json_is_a_value_error_that_says_why(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_json(text)


def test_what_json_can_say_is_read() -> None:
    assert read_json('{"a": [1, -2.5e3, Infinity, "\\ud83d\\ude00", true, null]}') == {
        "a": [1, -2500.0, math.inf, "\U0001f600", True, None]
    }
    assert read_json(str(2**63 - 1)) == 2**63 - 1
