"""Meshes that several threads come to know at once, as simulated ranks do."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autopar.lower.parameters import known_meshes


class _Mesh:
    """Equal to itself only, as the meshes of simulated ranks are."""


class _Yielding(dict[int, Any]):
    """Lets other threads go on within a loop over it, as Python does where it collects garbage there."""

    def values(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for each in super().values():
            time.sleep(1e-5)
            yield each


def test_threads_come_to_know_meshes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def know(own: list[Any]) -> None:
        start.wait()
        try:
            for mesh in own:
                known_meshes.know_mesh(mesh, None, None)
        except RuntimeError as error:
            errors.append(error)

    monkeypatch.setattr(known_meshes, "_KNOWN", _Yielding())
    errors: list[RuntimeError] = []
    meshes = [[_Mesh() for _ in range(10)] for _ in range(8)]
    start = threading.Barrier(len(meshes))
    threads = [threading.Thread(target=know, args=(own,)) for own in meshes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert set(known_meshes._KNOWN) == {id(mesh) for own in meshes for mesh in own}
