"""``python -m autopar.explain`` as a user types it: plans, questions, and what wrong questions are answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.explain import parallel_calls
from autopar.explain.alternatives import Alternative, faster
from autopar.explain.cli import main
from autopar.explain.planner import Answer, Planner
from autopar.explain.question import Question
from autopar.plan import Plan

TARGET = "tests.explain.targets:make"
QUICK = ("--why-seconds", "0", "--constraint", "pipeline=1")


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a question that must succeed prints."""
    assert main([*arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def ask_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found = json.loads(ask(capsys, *arguments, "--json"))
    assert found["autopar_explain"] == 1
    return found


def test_a_plan_is_explained_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = ask(capsys, TARGET, "--cluster", "4xh100", *QUICK)
    for part in (
        "Plan for 4 x H100-80GB", "Why this plan", "time spent on", "Layer kinds", "Runners-up",
        "prices, by share of the step: published", "planning took trace",
    ):  # fmt: skip
        assert part in text


def test_json_has_the_plan_and_where_its_time_goes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    arguments = (TARGET, "--cluster", "4xh100", *QUICK, "--save", str(path), "--what-if", "nodes=2")
    found = ask_json(capsys, *arguments)
    plan = Plan.from_json(json.dumps(found["plan"]))
    assert plan == Plan.load(path)
    assert sum(seconds for _, seconds in found["explanation"]["shares"]) == pytest.approx(plan.step_time_s)
    in_kinds = sum(seconds for kind in found["explanation"]["kinds"] for _, seconds in kind["seconds"])
    assert in_kinds == pytest.approx(plan.step_time_s + plan.overlapped_s)
    other = found["what_if"][0]
    assert other["changed"] == "nodes=2"
    assert other["plan"]["decisions"]["world_size"] == 8
    assert other["difference"]["step_time_s"][0] == plan.step_time_s


@pytest.mark.slow
def test_lengths_of_a_file_make_a_family(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(["8"] * 95 + ["900"]))
    asked = ("--cluster", "2xh100", *QUICK, "--constraint", "data=2", "--no-compile", "--lengths", str(path))
    page = tmp_path / "page.html"
    text = ask(capsys, "tests.models:make_llama", *asked, "--html", str(page))
    assert 'id="worst-batch-figure"' in page.read_text()
    joined = " ".join(text.split())
    assert "expected step time" in joined
    assert "the best plan for all of them" in joined
    assert "beyond a row's" in joined
    assert main([TARGET, "--cluster", "2xh100", *QUICK, "--lengths", str(tmp_path / "none.txt")]) == 1
    assert "LengthError: the file of lengths" in capsys.readouterr().err


def test_json_has_what_the_docs_say(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--cluster", "2xh100", "--constraint", "pipeline=1", "--constraint", "tensor=2")
    found = ask_json(capsys, TARGET, *asked, "--why-seconds", "0.01", "--what-if", "memory=40GiB")
    # The first of them begins, and is stopped.
    assert {row["problem"].partition(":")[0] for row in found["forced"]} == {"stopped", "not searched"}
    docs = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    described = set(re.findall(r"`(\w+)`", docs[docs.index("## JSON") :]))
    del found["plan"], found["what_if"][0]["plan"]  # those are the plan's own format
    assert {"explanation", "forced", "what_if"} < found.keys()
    assert found["explanation"]["links"]
    assert found["explanation"]["runners_up"]
    assert keys_of(found) - {"autopar_explain"} <= described | {"plan"}
    assert sum(share for _, share in found["explanation"]["sources"]) == pytest.approx(1.0)
    assert all(runner["loses"] >= 0 for runner in found["explanation"]["runners_up"])


def keys_of(data: Any) -> set[str]:
    """The names of everything inside."""
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return set(data if isinstance(data, dict) else ()).union(*map(keys_of, parts))


def test_what_crosses_links_takes_the_time_that_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask_json(capsys, TARGET, "--cluster", "4xh100", "--constraint", "tensor=4", *QUICK)
    shares = dict(found["explanation"]["shares"])
    on_links = sum(row["seconds"] for row in found["explanation"]["links"])
    assert on_links > 0
    assert on_links == pytest.approx(shares["activation communication"] + shares["parameter communication"])


@pytest.mark.slow
def test_forced_choices_are_the_plans_that_constraints_give_and_never_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (TARGET, "--cluster", "4xh100", "--constraint", "pipeline=1", "--constraint", "tensor=1")
    found = ask_json(capsys, *arguments, "--why-seconds", "60")
    rows = {row["constraint"]: row["step_s"] for row in found["forced"]}
    assert {"zero=0", "zero=3", "recompute=none", "recompute=full"} <= rows.keys()
    asked = ask_json(capsys, *arguments, "--constraint", "zero=3", "--why-seconds", "0")
    assert rows["zero=3"] == asked["plan"]["prediction"]["step_time_s"]
    assert all(
        seconds >= found["plan"]["prediction"]["step_time_s"] * (1 - 1e-9)
        for seconds in rows.values()
        if seconds is not None
    )
    assert rows["recompute=full"] > found["plan"]["prediction"]["step_time_s"]


def test_what_ifs_that_can_use_the_first_search_begin_behind_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "answers"
    answer = Planner.answer

    def logged(planner: Planner, question: Question, **options: Any) -> Answer:
        name = f"{question.cluster.num_nodes} {' '.join(question.constraints)}"
        with log.open("a") as file:  # also from copies of the process
            file.write(f"begin {name}\n")
        found = answer(planner, question, **options)
        with log.open("a") as file:
            file.write(f"end {name}\n")
        return found

    monkeypatch.setattr(Planner, "answer", logged)
    monkeypatch.setattr(parallel_calls, "_spare_cores", lambda: 2)
    asked = ("--what-if", "zero=3", "--what-if", "nodes=2", "--what-if", "zero=1")
    found = ask_json(capsys, TARGET, "--cluster", "2xh100", *QUICK, *asked)
    assert [row["changed"] for row in found["what_if"]] == ["zero=3", "nodes=2", "zero=1"]
    lines = log.read_text().splitlines()
    first = "1 pipeline=1"
    assert lines.index("begin 2 pipeline=1") < lines.index(f"end {first}")
    assert all(lines.index(f"begin {first} zero={level}") > lines.index(f"end {first}") for level in (1, 3))


def test_the_plan_is_printed_before_what_ifs_are_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TARGET, "--cluster", "2xh100", *QUICK, "--what-if", "nothing: zero=3"]) == 1
    out, err = capsys.readouterr()
    assert "Plan for 2 x H100-80GB" in out
    assert "'nothing' matches no parameter" in err


def test_a_forced_choice_that_is_faster_is_named() -> None:
    one, two, staged = (
        SimpleNamespace(step_time_s=seconds, stages=stages) for seconds, stages in ((1.0, ()), (2.0, ()), (1.9, (1, 2)))
    )
    rows = [
        Alternative("zero=3", one), Alternative("zero=0", two), Alternative("tensor=2", problem="no"),
        Alternative("pipeline=2", staged),  # by less than predictions are off
    ]  # fmt: skip
    assert faster(rows, two) == (rows[0],)


def test_a_sweep_has_a_plan_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask_json(capsys, TARGET, "--cluster", "1x2xh100", "--sweep", "nodes=1,2", "--constraint", "pipeline=1")
    assert [row["plan"]["decisions"]["world_size"] for row in found["sweep"]] == [2, 4]
    assert found["sweep"][0]["efficiency"] == pytest.approx(1.0)
    assert "efficiency" in ask(
        capsys, TARGET, "--cluster", "1x2xh100", "--sweep", "nodes=1", "--constraint", "pipeline=1"
    )


@pytest.mark.slow
def test_an_edited_plan_is_priced_and_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    ask(capsys, TARGET, "--cluster", "4xh100", *QUICK, "--save", str(path))
    same = ask_json(capsys, TARGET, "--cluster", "4xh100", *QUICK, "--check", str(path))
    assert same["fits"]
    assert same["step_time_s"][0] == pytest.approx(same["step_time_s"][1], rel=1e-9)
    edited = json.loads(path.read_text())
    for strategy in edited["decisions"]["strategies"]:
        strategy["recompute"] = "full"
    path.write_text(json.dumps(edited))
    found = ask_json(capsys, TARGET, "--cluster", "4xh100", *QUICK, "--check", str(path))
    assert found["step_time_s"][1] > found["step_time_s"][0]
    assert "step time +" in ask(capsys, TARGET, "--cluster", "4xh100", *QUICK, "--check", str(path))


def test_a_page_and_a_trace_of_an_edited_plan_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan, page, trace = (str(tmp_path / name) for name in ("plan.json", "page.html", "trace.json"))
    asked = (TARGET, "--cluster", "4xh100", "--constraint", "pipeline=1", "--constraint", "data=4")
    ask(capsys, *asked, "--edit", plan, "--set", "recompute=full")
    found = ask_json(capsys, *asked, "--check", plan, "--html", page, "--trace", trace)
    assert f'id="step-time" value="{found["step_time_s"][1]}"' in Path(page).read_text()
    events = json.loads(Path(trace).read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(found["step_time_s"][1] * 1e6)
    assert "recompute" in {event["cat"] for event in spans}


def test_the_answer_is_printed_and_saved_before_the_page_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.explain.cli.write_report", interrupt)
    saved, trace, page = (tmp_path / name for name in ("plan.json", "trace.json", "page.html"))
    written = ("--save", str(saved), "--trace", str(trace), "--html", str(page))
    with pytest.raises(KeyboardInterrupt):
        main([TARGET, "--cluster", "4xh100", *QUICK, *written])
    assert "planning took trace" in capsys.readouterr().out
    assert trace.exists()
    with pytest.raises(KeyboardInterrupt):
        main([TARGET, "--cluster", "4xh100", *QUICK, "--check", str(saved), "--html", str(page)])
    assert f"{saved}: it runs on this model" in capsys.readouterr().out


def test_two_plans_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, constraint in zip(paths, ("tensor=4", "data=4"), strict=True):
        ask(capsys, TARGET, "--cluster", "4xh100", *QUICK, "--constraint", constraint, "--save", path)
    found = ask_json(capsys, "--diff", *paths)["difference"]
    assert any(each["what"] == "mesh" and "tensor" in each["first"] for each in found["decisions"])
    assert "no decision differs" in ask(capsys, "--diff", paths[0], paths[0])
    assert "Plan for 4 x H100-80GB" in ask(capsys, paths[0])


def test_a_config_of_a_language_model_is_a_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    config.save_pretrained(tmp_path)
    arguments = (str(tmp_path / "config.json"), "--cluster", "2xa100", "--batch", "4", "--seq", "32", *QUICK)
    assert ask_json(capsys, *arguments)["plan"]["prediction"]["samples_per_step"] == 4


REMOTE_CODE = {"auto_map": {"AutoModelForCausalLM": "someone/model--modeling.Model"}}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "their_own", **REMOTE_CODE}, "without the code that its auto_map names, which is never run"),
        ({"model_type": "their_own"}, "no model that transformers"),
        ({"model_type": ["llama"]}, "no model that transformers"),
        ({"model_type": "llama", "hidden_size": "wide"}, "no model that transformers"),
        ({"model_type": "llama", "hidden_size": -64, "num_attention_heads": 4}, "no model that transformers"),
    ],
)
def test_a_config_runs_no_foreign_code_and_nobody_is_asked_to(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: dict[str, Any],
    told: str,
) -> None:
    pytest.importorskip("transformers")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "no")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main([str(path), "--cluster", "2xa100", "--batch", "4", "--seq", "32"]) == 1
    assert told in capsys.readouterr().err
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "name a model"),
        ((TARGET,), "--cluster 8x8xh100"),
        ((TARGET, "--cluster", "8by8"), "nodes x devices per node x device"),
        ((TARGET, "--cluster", "4xh200x"), "known devices are"),
        (("tests.explain.targets:made", "--cluster", "4xh100"), "no function of that name"),
        (("tests.explain.targets:make_nothing", "--cluster", "4xh100"), "return a model"),
        (("no.such.module:make", "--cluster", "4xh100"), "can't be imported"),
        ((".module:make", "--cluster", "4xh100"), "package.module:factory"),
        (("torch.nn:Linear", "--cluster", "4xh100"), "needs in_features, out_features: write a function"),
        (("torch:rand", "--cluster", "4xh100"), "write a function around it"),
        (("builtins:dict", "--cluster", "4xh100"), "write a function around it"),
        (("absent.py:make", "--cluster", "4xh100"), "no file"),
        (("absent.json", "--cluster", "4xh100"), "can't be read"),
        (("gpt", "--cluster", "4xh100"), "names no model"),
        ((TARGET, "--cluster", "4xh100", "--seq", "8"), "give it parameters batch and seq"),
        ((TARGET, "--cluster", "4xh100", "--memory", "lots"), "not an amount of memory"),
        ((TARGET, "--cluster", "4xh100", "--constraint", "tenser=2"), "tensor"),
        ((TARGET, "--cluster", "4xh100", "--sweep", "nodes"), "name=value,value"),
        ((TARGET, "--cluster", "4xh100", "--sweep", "link.inter=fast"), "link.inter=100GB/s"),
        ((TARGET, "--cluster", "4xh100", "--sweep", "batch=few"), "not a positive whole number"),
        (("--diff", "a.json", "b.json"), "can't be read"),
        (("tests/explain/targets.py", "--cluster", "4xh100"), "such as tests/explain/targets.py:make"),
        (("absent.json", "--cluster", "4xh100"), "file.py:factory"),
        ((TARGET, "--cluster", "absent.json"), "8x8xh100"),
        ((TARGET, "--cluster", "4xh100", "--what-if", "memory=plenty"), "'70GiB'"),
        ((TARGET, "--cluster", "4xh100", "--html", "tests"), "name a file in it"),
        ((TARGET, "--cluster", "4xh100", "--diff", "a.json", "b.json", "--check", "p.json"), "one after the other"),
        ((TARGET, "--cluster", "4xh100", "--check", "absent.json"), "--save absent.json"),
        ((TARGET, "--cluster", "4xh100", "--set", "zero=3"), "--edit plan.json --set"),
        ((TARGET, "--cluster", "4xh100", "--rehearse"), "--check plan.json --rehearse"),
        ((TARGET, "--cluster", "4xh100", "--edit", "absent.json", "--set", "blocks.0: zero=4"), "zero=0|1|2|3"),
        ((TARGET, "--html", "page.html"), "TARGET --cluster 8x8xh100"),
        ((TARGET, "--cluster", "4xh100", "--html", "no/such/folder/page.html"), "there is no folder"),
        ((TARGET, "--cluster", "4xh100", "--check", __file__), "a plan is JSON"),
        ((TARGET, "--cluster", "4xh100", *QUICK, "--edit", "absent.json", "--set", "block.0: zero=3"), "blocks.0"),
    ],
)
def test_wrong_questions_say_what_to_type(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert main(list(arguments)) == 1
    output = capsys.readouterr()
    assert told in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--bacth", "8"), "did you mean --batch?"),
        (("--batch", "0"), "such as 64"),
        (("--seq", "long"), "such as 64"),
    ],
)
def test_wrong_options_say_what_to_type(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([TARGET, "--cluster", "4xh100", *arguments])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("text", ["4x8xh100+4x8xa100", "4x8xh100, 8xh200"])
def test_clusters_of_unlike_nodes_are_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main([TARGET, "--cluster", text]) == 1
    assert "clusters of unlike nodes can't be planned for yet" in capsys.readouterr().err
