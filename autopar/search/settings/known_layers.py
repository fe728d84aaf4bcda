"""What several searches of one planning share about layers: those of compiled layers and of eager ones, with logits
made whole and in pieces, under other constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

__all__ = ["KnownLayers"]

Made = TypeVar("Made")


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
    piece_tokens: int = 0
    """Of its program (`Program.piece_tokens`)."""
    flat_s: float = 0.0
    """Of a step of the fastest plan without stages that this search found, as simulated; 0: stages were no faster."""
    _made: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])
    _memory_prices: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    _alive: dict[int, object] = field(default_factory=dict[int, object])

    def for_other_constraints(self) -> KnownLayers:
        """What a search under other constraints knows: the same candidates, but not where the best plan was, so that
        it finds what it finds alone.
        """
        return replace(self, numbers=(0, 0), inner_sizes=frozenset(), flat_s=0.0)

    def get(self, same: tuple[object, ...], key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` made for this key and these same objects; it is called if nothing is known."""
        whole = (self._identity(same), key)
        if whole not in self._made:
            self._made[whole] = make()
        return self._made[whole]

    def memory_price(self, same: tuple[object, ...], key: Hashable, price_s_per_byte: float) -> float:
        """The usual price of memory that was first named: it guides what are candidates, and with another one for each
        program none would be shared.
        """
        return self._memory_prices.setdefault((self._identity(same), key), price_s_per_byte)

    def _identity(self, same: tuple[object, ...]) -> tuple[int, ...]:
        """Numbers of these objects, which stay alive so that no others get them."""
        self._alive.update((id(each), each) for each in same)
        return tuple(map(id, same))
