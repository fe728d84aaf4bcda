"""Candidates of layers that several searches of one planning share: of compiled layers and of eager ones, with logits
made whole and in pieces, under other constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from autopar.search.layer_candidates import LayerCandidate

__all__ = ["KnownLayers"]

Candidates = tuple[LayerCandidate, ...]


@dataclass(eq=False)
class KnownLayers:
    """What was made before, by what it was made from.

    Layers and prices count by identity: `in_pieces` leaves all layers but the last as the same objects, and to compare
    layers op by op takes as long as making the candidates of small ones.
    """

    numbers: tuple[int, int] = (0, 0)
    """Of device groups and microbatches of the best pipeline of the last search that found one."""
    inner_sizes: frozenset[int] = frozenset()
    """Of the meshes of its usual layers."""
    _candidates: dict[Hashable, Candidates] = field(default_factory=dict[Hashable, Candidates])
    _memory_prices: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    _alive: dict[int, object] = field(default_factory=dict[int, object])

    def for_other_constraints(self) -> KnownLayers:
        """What a search under other constraints knows: the same candidates, but not where the best plan was, so that
        it finds what it finds alone.
        """
        return replace(self, numbers=(0, 0), inner_sizes=frozenset())

    def candidates(self, same: tuple[object, ...], key: Hashable, make: Callable[[], Candidates]) -> Candidates:
        """The candidates of this key for these same objects; they are made if they are not known."""
        whole = (self._identity(same), key)
        if whole not in self._candidates:
            self._candidates[whole] = make()
        return self._candidates[whole]

    def memory_price(self, same: tuple[object, ...], key: Hashable, price_s_per_byte: float) -> float:
        """The usual price of memory that was first named: it guides what are candidates, and with another one for each
        program none would be shared.
        """
        return self._memory_prices.setdefault((self._identity(same), key), price_s_per_byte)

    def _identity(self, same: tuple[object, ...]) -> tuple[int, ...]:
        """Numbers of these objects, which stay alive so that no others get them."""
        self._alive.update((id(each), each) for each in same)
        return tuple(map(id, same))
