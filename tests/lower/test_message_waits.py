"""A wait for a message that never comes ends when another rank has said why, and further messages are waited for."""

import threading
from typing import Any

import pytest

from autopar.lower.communication.message_waits import wait_for_message


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
