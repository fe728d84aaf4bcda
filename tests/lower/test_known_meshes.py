"""Meshes that several threads come to know at once, as simulated ranks do."""

import gc
import threading
import time
from typing import Any

import pytest

from autopar.lower.parameters import known_meshes


class _Mesh:
    """Equal to itself only, as the meshes of simulated ranks are."""


def test_threads_come_to_know_meshes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_way(phase: str, info: dict[str, int]) -> None:
        time.sleep(1e-4)  # another thread goes on wherever Python collects: within a loop over a dict, too

    def know(own: list[Any]) -> None:
        start.wait()
        try:
            for mesh in own:
                known_meshes.know_mesh(mesh, None, None)
        except RuntimeError as error:
            errors.append(error)

    monkeypatch.setattr(known_meshes, "_KNOWN", {})
    errors: list[RuntimeError] = []
    meshes = [[_Mesh() for _ in range(200)] for _ in range(8)]
    start = threading.Barrier(len(meshes))
    threads = [threading.Thread(target=know, args=(own,)) for own in meshes]
    threshold = gc.get_threshold()
    gc.callbacks.append(give_way)
    gc.set_threshold(1, 1, 1)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(give_way)
    assert not errors
    assert set(known_meshes._KNOWN) == {id(mesh) for own in meshes for mesh in own}
