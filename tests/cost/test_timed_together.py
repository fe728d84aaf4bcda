"""Layers that all ranks time at once, and the asking behind it."""

import pytest
import torch

from autopar.cost.measure.timing import mean_of
from autopar.cost.profile import LayerTime
from autopar.errors import AutoparError
from autopar.lower.communication.consensus import share_asking
from autopar.planning.timed_layers import LayerTimer
from autopar.planning.timed_together import LayerAnswers, asking_all
from tests.ranks import run_ranks
from tests.zoo import plan_for, subject


def _ask() -> tuple[list[object], str, list[int]]:
    rank = torch.distributed.get_rank()
    answered: list[int] = []

    def answer(question: int) -> int:
        answered.append(question)
        if question == rank == 1:
            raise ValueError("not me")
        return 10 * question + rank

    def lead(ask) -> list[object]:
        first = ask(3)
        with pytest.raises(AutoparError, match="rank 1 failed: ValueError: not me"):
            ask(1)
        return [first, ask(5)]

    found = share_asking(None, lead, answer)
    try:
        share_asking(None, lambda ask: ask(1), answer)
    except AutoparError as error:
        return found, str(error), answered
    return found, "", answered


@pytest.mark.slow
def test_all_ranks_answer_what_the_first_one_asks():
    first, second = run_ranks(_ask, 2)
    assert first == second
    found, error, answered = first
    assert found == [[30, 31], [50, 51]]
    assert "rank 1 failed: ValueError: not me" in error, "an error that nobody catches is every rank's"
    assert answered == [3, 1, 5, 1]


def test_the_slowest_rank_counts_and_one_that_cannot_run_a_layer_is_enough():
    program, plan = subject("plain_gpt", torch.float32).traced.program, plan_for("plain_gpt", 2)
    layer, strategy = program.layers[1], plan.strategies[plan.layers[1].strategy]
    ranks = [LayerTimer(program, torch.device("cpu"), budget_s=0.1) for _ in range(2)]
    answers = [LayerAnswers(timer) for timer in ranks]
    ranks[1].run = lambda lone: LayerTime(1e3, 1e-9)
    measure = asking_all(lambda asked: [answer(asked) for answer in answers], ranks[0])
    found = measure(layer, strategy, plan.num_microbatches)
    assert found is not None
    assert found.forward_s == 1e3, "the second rank is slower forward"
    assert 1e-9 < found.backward_s < 1e3, "the first one is slower backward"

    ranks[1].lower = lambda *args: None
    assert measure(layer, strategy, plan.num_microbatches) is None


def test_a_mean_is_of_all_but_the_slowest_tenth():
    assert mean_of([1.0] * 5 + [3.0] * 4 + [1000.0]).seconds == pytest.approx(17 / 9)
