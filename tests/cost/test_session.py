"""What is missing is measured, and ranks agree on it whatever each finds in its own files."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.cost import Curve, Point, Profile, measure
from autopar.cost.measure import Alone, measure_profile
from autopar.cost.measure.machine import describe_software
from autopar.cost.measure.missing import load_shared, measure_missing, missing_probes
from autopar.cost.measure.probe import Measurement, Probe, Sample
from autopar.cost.measure.ranks import max_over_ranks
from autopar.errors import ProfileError
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from tests.ranks import run_ranks

CPU = torch.device("cpu")


class _Counted:
    """Probes of made-up numbers; those in `together` make all ranks meet, those in `broken` fail on rank 1."""

    def __init__(self, ranks, keys: str, together: str = "", broken: str = "") -> None:
        self.measured: list[str] = []
        self.probes = [
            Probe((key,), 2, lambda _, key=key: self._measure(ranks, key, together, broken),
                  is_local=key not in together)
            for key in keys
        ]  # fmt: skip

    def _measure(self, ranks, key: str, together: str, broken: str):
        if key in broken and ranks.rank == 1:
            raise RuntimeError(f"no {key} here")
        if key in together:
            max_over_ranks(ranks, [0.0])
        self.measured.append(key)
        for amount in (1.0, 2.0):
            yield Measurement(key, amount, Sample(amount + ranks.rank, 0.1 * ranks.rank))


def test_what_has_fewer_points_or_is_asked_for_again_is_missing() -> None:
    probes = _Counted(Alone(CPU), "abcd").probes
    found = measure_missing(Alone(CPU), probes[:3], None, 1.0)
    curves = {**found.curves, "b": Curve(found.curves["b"].points[:1])}
    names = [probe.keys[0] for probe in missing_probes(probes, replace(found, curves=curves), {"c"})]
    assert names == ["b", "c", "d"]


def test_a_budget_that_is_spent_stops_only_who_asks_for_it(tmp_path) -> None:
    counted = _Counted(Alone(CPU), "abcd")
    found = measure_missing(Alone(CPU), counted.probes, None, 1e-9, tmp_path / "p.json", stops=True)
    assert set(found.curves) == {"a"}
    whole = measure_missing(Alone(CPU), counted.probes, found, 1e-9)
    assert set(whole.curves) == set("abcd")


def _with_own_files(folder: str):
    ranks = ProcessGroupCommunicator()
    path = Path(folder) / f"{ranks.rank}.json"
    two = (Point(1.0, 9.0), Point(2.0, 9.0))
    has = dict.fromkeys("ab" if ranks.rank == 0 else "cdef", Curve(two))
    Profile("cpu", 2, "2026", describe_software(CPU), has).save(path)
    counted = _Counted(ranks, "abcdef", together="ef", broken="c")
    found = load_shared(ranks, path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        profile = measure_missing(ranks, missing_probes(counted.probes, found), found, 1.0, path)
    if ranks.rank == 0:
        Path(folder, "damaged.json").write_text("{")
    with warnings.catch_warnings(record=True):
        damaged = load_shared(ranks, Path(folder, "damaged.json"))
    with pytest.raises(ProfileError) as refused:
        load_shared(ranks, Path(folder) if ranks.rank == 0 else path)  # rank 0's is a folder
    return profile.to_json(), counted.measured, [str(w.message) for w in warned], damaged, str(refused.value)


@pytest.mark.slow
def test_ranks_with_different_files_measure_the_same_and_agree(tmp_path) -> None:
    first, second = run_ranks(_with_own_files, 2, str(tmp_path))
    text, measured, warned, damaged, refused = first
    assert text == second[0]
    profile = Profile.from_json(text)
    assert set(profile.curves) == set("abdef"), "c failed on one rank"
    assert [point.seconds for point in profile.curves["a"].points] == [9.0, 9.0], "rank 0 had it"
    assert [(p.seconds, p.spread) for p in profile.curves["e"].points] == [(2.0, 0.1), (3.0, 0.1)], "the slowest counts"
    assert measured == ["c", "d", "e", "f"]
    assert second[1] == ["d", "e", "f"]
    assert "c can't be measured here: another rank says why" in warned[0]
    assert "c can't be measured here: RuntimeError: no c here" in second[2][0]
    assert damaged is None
    assert second[3] is None
    assert "folder" in refused or "directory" in refused
    assert refused == second[4]
    assert Profile.load(tmp_path / "0.json") == profile
    assert set(Profile.load(tmp_path / "1.json").curves) == set("cdef"), "only rank 0 writes"


def test_a_file_that_cannot_be_written_is_a_warning_once(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"not kept, .*file/p\.json can't be written") as warned:
        profile = measure_missing(
            Alone(CPU), _Counted(Alone(CPU), "abc").probes, None, 1.0, tmp_path / "file" / "p.json"
        )
    assert len(warned) == 1
    assert set(profile.curves) == set("abc")


def test_a_cache_that_cannot_be_read_is_a_warning(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(measure, "quick_probes", lambda *_: _Counted(Alone(CPU), "a").probes)
    (tmp_path / "file").touch()
    with pytest.warns(
        UserWarning, match=r"cached measurements are not used.*Not a directory.*file/cache/profile-cpu-1-"
    ):
        found = measure_profile(budget_s=0.1, cache_dir=tmp_path / "file" / "cache")
    assert set(found.curves) == {"a"}
