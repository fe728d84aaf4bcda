"""The lines that planning shows and logs."""

from __future__ import annotations

import io
import logging
import random
import sys
import threading

import pytest
from rich.console import Console

from autopar.user_text.progress import phase, shown


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_each_phase_is_a_line_on_a_terminal_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    console = terminal()
    with caplog.at_level(logging.INFO, "autopar"), shown(console=console):
        with phase("tracing"):
            pass
        with phase("searching"), phase("inner"):
            pass
    lines = [line for line in text(console).splitlines() if line.endswith(" s")]
    assert [line.split(":")[1].strip() for line in lines] == ["tracing", "searching"]
    assert [message.partition(":")[0] for message in caplog.messages] == ["tracing", "inner", "searching"]


def test_nothing_is_shown_in_a_pipe_on_other_ranks_in_threads_or_afterwards() -> None:
    piped, console = Console(file=io.StringIO()), terminal()
    with shown(console=piped), phase("tracing"):
        pass
    with shown(here=lambda: False, console=console), phase("tracing"):
        pass

    def elsewhere() -> None:
        with phase("tracing"):
            pass

    with shown(console=console):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    with phase("tracing"):
        pass
    assert text(piped) == text(console) == ""


def test_a_phase_that_fails_is_no_line() -> None:
    console = terminal()
    with pytest.raises(ValueError, match="wrong"), shown(console=console), phase("tracing"):
        raise ValueError("wrong")
    assert " s" not in text(console).replace("\n", " ").split("...")[-1]


def test_python_draws_the_numbers_that_it_draws_without_autopar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    state = random.getstate()
    with shown():
        pass
    assert random.getstate() == state
