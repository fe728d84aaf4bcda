"""Random numbers that a model draws on the host while it is traced: its program would have the same in each step."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from autopar.errors import TraceError

__all__ = ["refuse_host_draws"]


@contextmanager
def refuse_host_draws() -> Generator[None]:
    """Raise TraceError if what runs inside draws from the global generators of Python or NumPy."""
    before = _states()
    yield
    drawn = [name for name, state in _states().items() if state != before[name]]
    if drawn:
        raise TraceError(
            f"the model's forward draws random numbers from the generator of {' and '.join(drawn)}, which a traced "
            "program would not draw again in each step. Draw them with torch, as in torch.rand(...), without deciding "
            "on them in Python, or outside of the model and pass them as an input; layers that are left out at random "
            "(layerdrop) and masks of SpecAugment (mask_time_prob, mask_feature_prob) can be switched off"
        )


def _states() -> dict[str, object]:
    state: Any = np.random.get_state(legacy=True)
    return {"Python (random)": random.getstate(), "NumPy (np.random)": (state[1].tobytes(), *state[2:])}
