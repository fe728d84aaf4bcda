"""Python's collector of cyclic garbage while a model is planned."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["collected_seldom"]

# New objects before the youngest are looked at, and how often that is before the older ones are.
_THRESHOLDS = 200_000, 20, 100


@contextmanager
def collected_seldom() -> Generator[None]:
    """In this context garbage in cycles is looked for seldom.

    A traced model and its candidates are millions of small objects, nearly all of them in use, beside those of torch:
    to look at all of them again and again takes a fifth of the time, and finds little.
    """
    before = gc.get_threshold()
    # Where the user has less of it than this already, also none (0), it stays so.
    gc.set_threshold(*(new if old and old < new else old for old, new in zip(before, _THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
