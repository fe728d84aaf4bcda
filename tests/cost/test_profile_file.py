"""The format of a profile, and a file of it that several processes change."""

import errno
import os
import warnings

import filelock
import pytest

from autopar.cost import Curve, Point, Profile
from autopar.cost.profile import LayerTime, Reading, Readings
from autopar.cost.profile_file import keep, read, update
from autopar.errors import MissingPriceError
from autopar.placement import Axis
from tests.ranks import forking_context


def _profile(**more) -> Profile:
    curves = {"optimizer": Curve((Point(1e3, 2e-6, 0.01), Point(1e6, 1e-4)), "2026-01-01T00:00:00+00:00")}
    return Profile("cpu", 2, "2026-01-01T00:00:00+00:00", {"torch": "2"}, curves, **more)


def test_a_profile_survives_its_text() -> None:
    readings = {"interference/all_reduce/2/1": Readings((Reading(1e3, 0.0, 0.1), Reading(1e6, 0.5)), "2026")}
    profile = _profile(readings=readings)
    profile = profile.with_layers({"decoder b=1": LayerTime(1e-3, 2e-3, 0.05, "2026")})
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.interference("all_reduce", Axis(4, 1)) == 0.5
    assert profile.interference("broadcast", Axis(2, 1)) is None


def test_text_of_another_version_is_refused_with_the_command_that_makes_a_new_one() -> None:
    old = _profile().to_json().replace('"autopar_profile": 4', '"autopar_profile": 1')
    with pytest.raises(MissingPriceError, match=r"autopar_profile is 1, not 4.*python -m autopar\.profile"):
        Profile.from_json(old)


@pytest.mark.parametrize("text", ["", "{ damaged", "[]", '{"autopar_profile": 4}', "\x00\x01"])
def test_a_damaged_file_is_none_and_kept_aside(tmp_path, text) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"profile\.json can't be used.*kept as .*profile\.json\.damaged"):
        assert read(path) is None
    assert (tmp_path / "profile.json.damaged").read_text() == text
    with warnings.catch_warnings(action="error"):
        assert update(path, lambda found: found or _profile()) == read(path) == _profile()


def _fail(error: Exception):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), filelock.Timeout("it.lock"), NotImplementedError()]
)
def test_a_profile_that_cannot_be_kept_is_one_warning_with_path_and_reason(tmp_path, monkeypatch, error) -> None:
    monkeypatch.setattr(Profile, "save", _fail(error))
    path = tmp_path / "profile.json"
    with pytest.warns(UserWarning, match=rf"profile\.json can't be written: {type(error).__name__}.*") as warned:
        written = [keep(path, lambda found: found or _profile()) for _ in range(2)]
    assert written == [False, False]
    assert len(warned) == 1
    assert str(error) in str(warned[0].message)
    monkeypatch.undo()
    assert keep(path, lambda found: found or _profile())
    assert read(path) == _profile()


def test_saving_writes_through_no_link(tmp_path) -> None:
    kept, path = tmp_path / "kept", tmp_path / "profile.json"
    kept.write_text("mine")
    part = tmp_path / f"profile.json.{os.getpid()}.part"
    part.symlink_to(kept)
    _profile().save(path)
    assert kept.read_text() == "mine"
    assert Profile.load(path) == _profile()
    assert not path.is_symlink()
    assert not part.is_symlink()


def _add_layers(path: str, name: str) -> None:
    for index in range(5):
        layer = {f"{name} {index}": LayerTime(1.0, 1.0)}
        update(path, lambda found, layer=layer: (found or _profile()).with_layers(layer))


@pytest.mark.slow
def test_what_processes_add_at_the_same_time_is_all_there(tmp_path) -> None:
    path = str(tmp_path / "profile.json")
    processes = [forking_context().Process(target=_add_layers, args=(path, name)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(Profile.load(path).layers) == 15
