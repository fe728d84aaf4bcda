"""Distributions of lengths, from files, counts, formulas and clips."""

from pathlib import Path

import numpy as np
import pytest

from autopar.balance import Clip, Lengths
from autopar.errors import LengthError


def test_a_lognormal_distribution_has_the_mean_that_was_asked_for():
    lengths = Lengths.lognormal(mean=1024, sigma=1.0)
    assert lengths.mean == pytest.approx(1024, rel=0.01)
    assert np.log(lengths.quantile(0.5)) == pytest.approx(np.log(1024) - 0.5, abs=0.01)
    drawn = lengths.draw(20_000, seed=0)
    assert drawn.mean() == pytest.approx(1024, rel=0.05)
    assert (drawn == lengths.draw(20_000, seed=0)).all()
    assert Lengths.lognormal(1024, 1.5, least=128, most=8192).draw(1000, 0).min() >= 128


def test_a_histogram_draws_what_it_counts():
    drawn = Lengths.histogram({10: 3, 50: 1}).draw(10_000, seed=0)
    assert set(drawn.tolist()) == {10, 50}
    assert (drawn == 50).mean() == pytest.approx(0.25, abs=0.02)


def test_clips_count_patches():
    assert Clip(1, 256, 256).tokens == 256
    assert Clip(85, 512, 512, patch=(3.4, 16, 16), text=100).tokens == 32 * 32 * 25 + 100
    clips = Lengths.clips({Clip(1, 256, 256): 1, Clip(2, 128, 256): 1, Clip(16, 256, 256): 2})
    assert set(clips.draw(100, 0).tolist()) == {256, 16 * 256}


def test_files_hold_lengths_or_quantiles(tmp_path: Path):
    path = tmp_path / "lengths"
    path.write_text("5\n1\n3\n")
    assert (Lengths.read(path).tokens == [1, 3, 5]).all()
    path.write_text("corpus,quantile,tokens\nbooks,0,10\nbooks,0.5,20\nbooks,1,100\n")
    read = Lengths.read(path)
    assert (read.quantile(0.75), read.longest, read.clipped(30).longest) == (60, 100, 30)
    assert read.mean == pytest.approx(0.5 * 15 + 0.5 * 60)
    drawn = read.up_to(60).draw(10_000, 0)  # half of what is above 20 is left
    assert drawn.max() == 60
    assert (drawn <= 20).mean() == pytest.approx(2 / 3, abs=0.02)
    assert read.up_to(100).quantile(0.9) == read.quantile(0.9)
    with pytest.raises(LengthError, match="all sequences have more than 9 tokens"):
        read.up_to(9)
    assert "p50 20" in str(read)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a\n", "can't be read"),
        ("0\n3\n", "at least 1"),
        ("quantile,tokens\n0,5\n1,3\n", "must ascend"),
        ("corpus,quantile,tokens\na,0,1\nb,0,1\n", "2 corpora"),
        ("share,tokens\n0,5\n", "can't be read"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, text: str, message: str):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(LengthError, match=message):
        Lengths.read(path)
