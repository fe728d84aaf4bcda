"""Keys and values of the tokens of a text, by layer, which Hugging Face's models read and add to in each call."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from autopar.lower.compat import register_container

__all__ = ["TokenCache"]


class TokenCache:
    """Has what models ask of ``transformers.Cache``, with room for a fixed number of tokens.

    A program takes its tensors and gives those of the next call: nothing is written in place.

    Args:
        capacity: number of tokens that there is room for.
        position: the place of the next token, 0-dimensional int64; None in the first call, which fills all places up to
            its number of tokens.
        rows: of which row before each row continues the text, ``[rows]``, in beam search; None: its own.
        tensors: per layer keys and values, ``[rows, heads, capacity, width]``.
    """

    is_carried: ClassVar[bool] = True  # for `autopar.trace`: devices keep their parts of it
    is_compileable: ClassVar[bool] = False
    is_croppable: ClassVar[bool] = False

    def __init__(
        self, capacity: int = 0, position: Tensor | None = None, rows: Tensor | None = None, *tensors: Tensor
    ) -> None:
        """See the class."""
        self.capacity = capacity
        self.position = position
        self.rows = rows
        self.tensors = list(tensors)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the new tokens of a layer; what its queries may attend to."""
        new = (key_states, value_states)
        if self.position is None:
            assert len(self.tensors) == 2 * layer_idx
            missing = self.capacity - key_states.shape[2]
            self.tensors += [functional.pad(x, (0, 0, 0, missing)) for x in new]
            return new
        places = slice(2 * layer_idx, 2 * layer_idx + 2)
        before = self.tensors[places]
        if self.rows is not None:
            before = [x.index_select(0, self.rows) for x in before]
        keys, values = (x.index_copy(2, self.position[None], y) for x, y in zip(before, new, strict=True))
        self.tensors[places] = keys, values
        return keys, values

    def __len__(self) -> int:
        return len(self.tensors) // 2

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """How many places are filled, as a tensor once the first call has been."""
        del layer_idx
        return 0 if self.position is None else self.position

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many places queries see, and the first of them."""
        del layer_idx
        return (query_length if self.position is None else self.capacity), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """`capacity`."""
        del layer_idx
        return self.capacity

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue row ``beam_idx[i]`` in row i from the next call on."""
        self.rows = beam_idx if self.rows is None else self.rows[beam_idx]


register_container(
    TokenCache,
    lambda cache: [cache.capacity, cache.position, cache.rows, *cache.tensors],
    lambda parts: TokenCache(*parts),
)
