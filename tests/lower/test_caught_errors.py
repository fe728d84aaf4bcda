"""A loop that skips a batch with ``except (RuntimeError, IndexError): continue`` skips it on every rank."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError, PipelineError, RankError
from autopar.lower.communication.consensus import portable
from autopar.lower.communication.failures import naming_failures
from autopar.objects.caught_errors import also_caught_as
from tests.end_to_end.harness import assert_near, launch, parallelize, state_of


@pytest.mark.parametrize(
    ("cause", "caught"),
    [
        (IndexError("a"), IndexError), (KeyError("a"), KeyError), (NotImplementedError("a"), RuntimeError),
        (torch.linalg.LinAlgError("a"), RuntimeError), (UnicodeEncodeError("ascii", "a", 0, 1, "no"), ValueError),
    ],
)  # fmt: skip
def test_what_ranks_hear_of_is_caught_as_its_cause(cause: Exception, caught: type[Exception]) -> None:
    for heard in (portable(cause), also_caught_as(PipelineError, cause)("a text")):
        assert isinstance(heard, AutoparError)
        again = pickle.loads(pickle.dumps(type(heard)(f"rank 1 failed: {heard}")))
        assert type(again) is type(heard)
        assert isinstance(again, caught)
        assert str(again) == f"rank 1 failed: {heard}"


def test_a_stage_that_fails_is_caught_as_its_cause() -> None:
    with pytest.raises(IndexError) as found, naming_failures("rank 1", "a text"):
        raise IndexError("out of range")
    assert isinstance(found.value, PipelineError)
    assert type(found.value).__name__ == "PipelineError"


def test_what_is_no_ones_or_is_so_already_stays_as_it_is() -> None:
    assert also_caught_as(RankError, Exception("a")) is RankError
    assert also_caught_as(RankError, KeyboardInterrupt()) is RankError
    assert also_caught_as(also_caught_as(RankError, ValueError("a")), ValueError("b")) is not RankError


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.table(words)).tanh()).square().mean()


def skip_bad_batches(constraint: str) -> None:
    torch.manual_seed(0)
    single = Words().double()
    batches = torch.randint(8, (4, 4, 3))
    batches[1, 0, 0] = 100  # a row that one rank has
    model = parallelize(copy.deepcopy(single), {"words": batches[0]}, constraints=[constraint])
    skipped: list[int] = []
    for run in (single, model):
        optimizer = torch.optim.SGD(run.parameters(), 0.1)
        for number, words in enumerate(batches):
            try:
                loss = run(words)
                loss.backward()
                optimizer.step()
            except (RuntimeError, IndexError):
                skipped.append(number)
                continue
            finally:
                optimizer.zero_grad()
    assert skipped == [1, 1], (dist.get_rank(), skipped)
    assert_near(state_of(model), state_of(single), 1e-9)


@pytest.mark.slow
def test_bad_batches_are_skipped_on_every_rank() -> None:
    launch(2, *(partial(skip_bad_batches, each) for each in ("data=2", "tensor=2", "pipeline=2")))
