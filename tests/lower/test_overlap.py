"""What moves beside compute: gathers one layer ahead, reductions beside the backward of the layer before."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.lower import ParallelModule
from autopar.lower.parameters import layer_parameters as parameters
from autopar.verify.rehearsal import loss_of, run_ranks
from tests.zoo import plan_for, subject

Log = list[tuple[str, int]]


class Watch:
    """Notes on every rank (a thread) which layer's parameters start and end to be gathered, which gradients reduced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._local = threading.local()
        for kind in ("gather", "reduce"):
            name = f"start_{kind}"
            monkeypatch.setattr(parameters.LayerParameters, name, self._noting(kind, name))

    def begin(self, model: ParallelModule) -> Log:
        self._local.log = []
        self._local.layer = {id(runner.parameters): i for i, runner in enumerate(model.layer_runners)}
        return self._local.log

    def note(self, what: str, layer: Any) -> None:
        if hasattr(self._local, "log"):
            self._local.log.append((what, self._local.layer[id(layer)]))

    def _noting(self, kind: str, name: str) -> Any:
        start = getattr(parameters.LayerParameters, name)

        def noting(layer: Any, tensors: Sequence[Tensor | None]) -> Any:
            self.note(f"start {kind}", layer)
            handle = start(layer, tensors)
            flying = handle.handle if kind == "reduce" else handle
            if flying is not None:
                wait = flying.wait
                flying.wait = lambda: (self.note(f"wait {kind}", layer), wait())[1]
            return handle

        return noting


def log_of_backward(watch: Watch, name: str, constraints: tuple[str, ...]) -> Log:
    """What rank 0 notes in its second backward, or in the whole call if backward passes run inside of it."""
    who, plan = subject(name, torch.float32), plan_for(name, 2, ("data=2", *constraints), torch.float32)

    def step(model: ParallelModule) -> Log:
        loss_of(model(**who.inputs)).backward()  # the first backward tells which layers gather anew
        log = watch.begin(model)
        loss = loss_of(model(**who.inputs))
        if plan.num_microbatches == 1:
            log.clear()
        loss.backward()
        return list(log)

    logs = run_ranks(who.model, who.traced, plan, step)
    assert all(log == logs[0] for log in logs), "ranks start or wait in different orders"
    return logs[0]


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_zero_3_gathers_ahead_and_reduces_behind(monkeypatch: pytest.MonkeyPatch, recompute: str) -> None:
    log = log_of_backward(Watch(monkeypatch), "llama", ("zero=3", "microbatches=1", f"recompute={recompute}"))
    layers = sorted({layer for what, layer in log if what == "wait reduce"}, reverse=True)
    assert len(layers) >= 3
    gathers = [entry for entry in log if "gather" in entry[0]]
    assert len(set(gathers)) == len(gathers), "gathered twice"
    assert len(gathers) == 2 * len({layer for _, layer in gathers}), "gathered, but not waited for"
    for behind, layer in itertools.pairwise(layers):
        assert log.index(("start gather", layer)) < log.index(("start reduce", behind)), "gathered too late"
        assert log.index(("start reduce", layer)) < log.index(("wait reduce", behind)), "waited for too early"
    for behind, layer in zip(layers, layers[2:], strict=False):
        assert log.index(("wait gather", behind)) < log.index(("start gather", layer)), "gathered too early"
        assert log.index(("wait reduce", behind)) < log.index(("start reduce", layer)), "waited for too late"


def test_what_is_reduced_once_a_step_is_reduced_in_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of_backward(Watch(monkeypatch), "llama", ("zero=1", "microbatches=2"))
    reductions = [entry for entry in log if "reduce" in entry[0]]
    starts = [layer for what, layer in reductions if what == "start reduce"]
    assert starts == sorted(set(starts), reverse=True), "each layer once, the last layer first"
    for behind, layer in itertools.pairwise(starts):
        assert reductions.index(("start reduce", layer)) < reductions.index(("wait reduce", behind))
