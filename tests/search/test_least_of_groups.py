"""What layers take at least, known before candidates are made, and which candidates runs of layers have."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.program import Program
from autopar.search import SearchRequest, TrainingSpec
from autopar.search.chain import candidate_sets
from autopar.search.chain.candidate_sets import CandidateSet, make_candidate_set
from autopar.search.chain.least_seconds import least_layers, least_of, remember_least
from autopar.search.search_context import SearchContext, shared_storage_choices
from autopar.search.settings.constraints import LayerDemands, parse_constraints
from autopar.step.variants.logits import in_pieces
from tests.search.across_programs import decoder_model

PRICES = ClusterPrices(Cluster.of("h100", devices_per_node=2, nodes=2), None)
REQUEST = SearchRequest(training=TrainingSpec().running(compiled=True))
# A batch of 16 rows of 512 tokens, and matrices of 1024 x 4096.
PROGRAM = decoder_model(6, 16, 512, 4096, hidden=1024, ffn=4096, heads=16, kv_heads=4)


def context(groups: int, demands: LayerDemands | None = None, own: Program = PROGRAM) -> SearchContext:
    every = (demands or LayerDemands(),) * len(own.layers)
    return SearchContext(own, 4 // groups, PRICES, REQUEST, parse_constraints((), 4), every, groups)


def candidates(of: SearchContext, count: int) -> CandidateSet:
    assignment = of.time_assignment(count)
    assert not isinstance(assignment, str)
    made = make_candidate_set(of, count, dict(assignment.factors), next(iter(shared_storage_choices(of))))
    assert made is not None
    return made


def known(of: SearchContext, count: int) -> npt.NDArray[np.float64]:
    """What is known beyond what the compute of layers says; 0 where that is nothing."""
    ideal = replace(of, request=replace(of.request, known=type(of.request.known)()))
    least, ideal_s = least_layers(of, count), least_layers(ideal, count)
    return np.where(least > ideal_s, least, 0.0)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "REQUEST", replace(REQUEST, known=type(REQUEST.known)()))


@pytest.mark.slow
def test_all_devices_speak_for_groups_with_as_large_microbatches() -> None:
    whole = least_of(candidates(context(1), 1))
    remember_least(context(1), 1, whole, float(whole[1].sum()))
    for groups, count in ((2, 2), (2, 4)):
        own = least_of(candidates(context(groups), count))
        said = known(context(groups), count)
        assert said[1] == pytest.approx(0.99 * groups * whole[1])
        assert own[1].sum() >= said[1].sum()
    assert not known(context(4), 2).any(), "these are microbatches of half the size for each"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("best", "demands"),
    [
        (1.3, LayerDemands()),
        (math.inf, LayerDemands()),
        (1.0, LayerDemands((("data", 2),))),
        (1.0, LayerDemands(zero=3)),
    ],
)
def test_they_do_not_where_it_may_be_wrong(best: float, demands: LayerDemands) -> None:
    """Where parameters take long, the fastest in compute are no candidates; data degrees and gathers are others."""
    whole = least_of(candidates(context(1), 1))
    remember_least(context(1, demands), 1, whole, best * float(whole[1].sum()))
    assert not known(context(2, demands), 2).any()
    assert known(context(1, demands), 1) == pytest.approx(whole), "with as many devices it holds"


def test_layers_are_known_with_logits_in_pieces_and_under_other_demands() -> None:
    """Layers without demands can be as those that have some; all but the last are the same with pieces."""
    pieces = in_pieces(PROGRAM, 64)
    own = least_of(candidates(context(2, own=pieces), 2))
    remember_least(context(2, own=pieces), 2, own)
    assert known(context(2), 2)[:, :-1] == pytest.approx(own[:, :-1])
    assert known(context(2, LayerDemands(zero=3)), 2)[:, :-1] == pytest.approx(0.99 * own[:, :-1])
    assert not known(context(2), 1).any(), "fewer microbatches may be faster"


@pytest.mark.slow
def test_runs_of_layers_have_no_candidates_that_are_clearly_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    middle = len(PROGRAM.layers) // 2
    few = candidates(context(1), 1)
    monkeypatch.setattr(candidate_sets, "_REPEATED", math.inf)
    nothing = replace(REQUEST, known=type(REQUEST.known)())
    every = candidates(replace(context(1), request=nothing), 1)
    assert len(few.candidates[0]) == len(every.candidates[0]), "the first layer is single"
    assert 0 < len(few.candidates[middle]) < len(every.candidates[middle])
    assert least_of(few) == pytest.approx(least_of(every), rel=1e-9)
