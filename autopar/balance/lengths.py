"""How long sequences are: a distribution of lengths in tokens, from a file, a histogram, a formula or video clips."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from autopar.errors import LengthError

__all__ = ["Clip", "Lengths", "read_lengths"]

_DRAWN = 10_001  # quantiles of a formula: the last one is 1 - 0.5e-4, beyond which a clip or a batch hardly looks
_SHOWN = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Clip:
    """A video clip, or an image (one frame), cut into patches: one token each.

    Args:
        frames: how many.
        height: in pixels.
        width: in pixels.
        patch: frames, rows and columns of pixels that make a token; frames need not be a whole number (a codec that
            joins 3.4 frames).  What is left over at the ends is dropped, but for one frame.
        text: tokens of text that go with it.
    """

    frames: int
    height: int
    width: int
    patch: tuple[float, int, int] = (1, 16, 16)
    text: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        frames, rows, columns = self.patch
        return (self.height // rows) * (self.width // columns) * max(int(self.frames / frames), 1) + self.text


@dataclass(frozen=True, eq=False)
class Lengths:
    """A distribution of the number of tokens of a sequence, as quantiles that are joined by straight lines.

    Args:
        quantiles: ascending, from 0 to 1.
        tokens: at each of them, ascending.

    Example:
        >>> lengths = Lengths.lognormal(mean=1024, sigma=1.5, least=128, most=8192)
        >>> batch = lengths.draw(512, seed=0)
    """

    quantiles: np.ndarray
    tokens: np.ndarray

    def __post_init__(self) -> None:
        """Check that it is a distribution."""
        if len(self.quantiles) != len(self.tokens) or not len(self.tokens):
            raise LengthError("a distribution of lengths needs as many quantiles as tokens, and at least one of each")
        if np.any(np.diff(self.quantiles) < 0) or np.any(np.diff(self.tokens) < 0):
            raise LengthError("quantiles and tokens of a distribution of lengths must ascend: sort the file by them")
        if (
            not math.isfinite(self.tokens[-1])
            or self.tokens[0] < 1
            or not 0 <= self.quantiles[0] <= self.quantiles[-1] <= 1
        ):
            raise LengthError(
                f"lengths are numbers of tokens, at least 1, at quantiles of 0 to 1, but these go from "
                f"{self.tokens[0]:g} to {self.tokens[-1]:g} at {self.quantiles[0]:g} to {self.quantiles[-1]:g}"
            )

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        """That of sequences which have these lengths."""
        tokens = np.sort(np.fromiter(lengths, dtype=np.float64))
        return cls(np.linspace(0.0, 1.0, len(tokens)) if len(tokens) > 1 else np.ones(len(tokens)), tokens)

    @classmethod
    def histogram(cls, counts: Mapping[int, float]) -> Lengths:
        """`counts`: length -> how many sequences have it, or their share."""
        ordered = sorted((length, count) for length, count in counts.items() if count)
        tokens = np.repeat([length for length, _ in ordered], 2).astype(float)
        ends = np.cumsum([count for _, count in ordered]) / sum(count for _, count in ordered)
        return cls(np.sort(np.concatenate([[0.0], ends[:-1], ends[:-1], [1.0]])), tokens)

    @classmethod
    def lognormal(cls, mean: float, sigma: float, least: int = 1, most: int = 1 << 20) -> Lengths:
        """A lognormal distribution of this mean, `sigma` being that of the logarithm, clipped to `least` .. `most`."""
        normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
        inside = (np.arange(_DRAWN) + 0.5) / _DRAWN
        tokens = np.exp([normal.inv_cdf(q) for q in inside])
        return cls(np.linspace(0.0, 1.0, _DRAWN), np.clip(np.rint(tokens), least, most))

    @classmethod
    def clips(cls, clips: Mapping[Clip, float]) -> Lengths:
        """`clips`: clip -> how many there are, or their share."""
        counts: dict[int, float] = {}
        for clip, count in clips.items():
            counts[clip.tokens] = counts.get(clip.tokens, 0.0) + count
        return cls.histogram(counts)

    @classmethod
    def read(cls, path: str | Path) -> Lengths:
        """From a file of lengths, one a line, or of quantiles: CSV with columns ``quantile`` and ``tokens``.

        Raises:
            LengthError: the file can't be read, or holds something else.
        """
        return read_lengths(path)

    @property
    def mean(self) -> float:
        """Of the straight lines between quantiles."""
        if len(self.tokens) == 1:
            return float(self.tokens[0])
        return float(np.trapezoid(self.tokens, self.quantiles) / (self.quantiles[-1] - self.quantiles[0]))

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return int(self.tokens[-1])

    def quantile(self, share: float) -> float:
        """The length that this share of sequences does not exceed."""
        return float(np.interp(share, self.quantiles, self.tokens))

    def clipped(self, most: int) -> Lengths:
        """The same with every longer sequence cut to `most` tokens."""
        return Lengths(self.quantiles, np.minimum(self.tokens, most))

    def up_to(self, most: int) -> Lengths:
        """The same without the sequences of more than `most` tokens.

        Raises:
            LengthError: all have more.
        """
        if self.tokens[0] > most:
            raise LengthError(f"all sequences have more than {most:,} tokens: the shortest has {self.tokens[0]:,.0f}")
        inside: np.ndarray = self.tokens <= most
        longest = min(most, self.longest)
        share = float(np.interp(longest, self.tokens, self.quantiles))
        if not share:
            return Lengths.of([longest])
        quantiles: np.ndarray = np.concatenate([self.quantiles[inside], [share]])
        return Lengths(quantiles / share, np.concatenate([self.tokens[inside], [longest]]))

    def draw(self, count: int, seed: int | np.random.Generator) -> np.ndarray:
        """``[count]`` lengths drawn at random; an equal seed gives equal lengths."""
        generator = np.random.default_rng(seed)
        return np.rint(np.interp(generator.random(count), self.quantiles, self.tokens)).astype(np.int64)

    def __str__(self) -> str:
        """Its mean and some quantiles."""
        shown = ", ".join(f"p{100 * share:g} {self.quantile(share):,.0f}" for share in _SHOWN)
        return f"mean {self.mean:,.0f} tokens, {shown}, longest {self.longest:,}"


def read_lengths(path: str | Path) -> Lengths:
    """See `Lengths.read`."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise LengthError(f"the file of lengths {str(path)!r} is empty: write one length a line")
        if "tokens" in lines[0]:
            rows = list(csv.DictReader(lines))
            corpora = sorted({row["corpus"] for row in rows if "corpus" in row})
            if len(corpora) > 1:
                raise LengthError(
                    f"the file of lengths {str(path)!r} holds {len(corpora)} corpora ({', '.join(corpora)}): keep one"
                )
            columns: Sequence[list[float]] = [[float(row[name]) for row in rows] for name in ("quantile", "tokens")]
            return Lengths(np.array(columns[0]), np.array(columns[1]))
        return Lengths.of(int(line) for line in lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LengthError(
            f"the file of lengths {str(path)!r} can't be read: {error}. Write one length a line, or a CSV with the "
            "columns quantile and tokens"
        ) from error
