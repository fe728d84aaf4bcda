"""A wait for a message that never comes ends when another rank has said why; what comes late is waited for."""

import threading
from datetime import timedelta
from typing import Any

import pytest

from autopar.lower.communication.message_waits import wait_for_message
from autopar.lower.communication.torch_groups import wait_for


class Message:
    """Stands for a message of gloo on its way."""

    def __init__(self, error: Exception | None = None) -> None:
        self.comes, self.error = threading.Event(), error

    def wait(self) -> None:
        assert self.comes.wait(30)
        if self.error is not None:
            raise self.error


def test_looks_until_the_message_comes() -> None:
    message: Any = Message()
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            message.comes.set()

    wait_for_message(message, 0.01, look)
    assert len(looks) >= 3


def test_what_a_look_raises_ends_the_wait_and_no_later_one() -> None:
    lost, next_one = Message(), Message()

    def look() -> None:
        raise ValueError("rank 1 failed")

    with pytest.raises(ValueError, match="rank 1 failed"):
        wait_for_message(lost, 0.01, look)  # pyright: ignore[reportArgumentType]
    next_one.comes.set()
    wait_for_message(next_one, 10.0, look)  # pyright: ignore[reportArgumentType]
    lost.comes.set()


def test_a_lost_connection_is_raised() -> None:
    message: Any = Message(RuntimeError("closed by peer"))
    message.comes.set()
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait_for_message(message, 10.0, lambda: None)


class Collective:
    """Stands for a collective of gloo that is done just after the first wait for it gave up."""

    def __init__(self, error: str = "") -> None:
        self.waits, self.error = 0, error

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError(f"Operation timed out after {timeout}!")
        if self.error:
            raise RuntimeError(self.error)


def test_a_collective_that_is_done_just_after_a_wait_gave_up_has_not_failed() -> None:
    done, lost = Collective(), Collective("closed by peer")
    wait_for(done, 1.0, lambda: None)  # pyright: ignore[reportArgumentType]
    assert done.waits == 2
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait_for(lost, 1.0, lambda: None)  # pyright: ignore[reportArgumentType]
