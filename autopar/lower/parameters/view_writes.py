"""Views of a DTensor that had to be gathered: they follow the tensor that they are of, and it follows them.

A view of a part often lies in the part's memory, as on one device.  Where it needs entries that other ranks hold
(``p.view(-1)``, ``p[3:5]``), torch gathers them, and the view has memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.compat import local_tensor, set_local_tensor, storage_key
from autopar.lower.parameters.known_meshes import laid_as, read_whole

__all__ = ["GATHERED_VIEW", "note_views", "note_write", "refresh", "write_through"]

View = Callable[[Any], Any]
GATHERED_VIEW = "autopar_gathered_view"
"""The attribute of a DTensor that has memory of its own where it would share that of another on one device."""


class _Writes:
    """How often a DTensor of a parallel module was written to: torch counts no writes to their parts."""

    count = 0


@dataclass
class _Origin:
    """What a view is of: `views` of `root`, one after the other; it shows what `root` was after `seen` writes.

    `has_graph`: a backward may need it as it is.
    """

    root: DTensor
    views: tuple[View, ...]
    seen: int
    has_graph: bool

    def of(self, whole: Tensor) -> Tensor:
        """The view of a whole tensor."""
        for view in self.views:
            whole = view(whole)
        return whole

    @cached_property
    def is_view(self) -> bool:
        """Whether it is one on one device, and not a copy."""
        root = self.root
        like = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device="meta")
        return storage_key(self.of(like)) == storage_key(like)


def note_views(source: DTensor, view: View, result: Any) -> None:
    """`result`, a tensor or several, is what ``view(source)`` gave: remember it of what has memory of its own."""
    results: Sequence[Any] = result if type(result) in (list, tuple) else [result]
    has_graph = torch.is_grad_enabled() and source.requires_grad
    for place, each in enumerate(results):
        if not isinstance(each, DTensor) or each is source:
            continue
        before: _Origin | None = vars(source).get(GATHERED_VIEW)
        if before is not None or storage_key(local_tensor(each)) != storage_key(local_tensor(source)):
            own = view if each is result else _nth(view, place)
            root, views = (source, ()) if before is None else (before.root, before.views)
            vars(each)[GATHERED_VIEW] = _Origin(root, (*views, own), _Writes.count, has_graph)


def _nth(view: View, place: int) -> View:
    return lambda whole: list(view(whole))[place]


def note_write() -> None:
    """Some DTensor was written to: gathered views may show what is no more."""
    _Writes.count += 1


def refresh(view: DTensor) -> None:
    """If what `view` is a gathered view of has changed, show that.  Every rank calls it."""
    origin: _Origin = vars(view)[GATHERED_VIEW]
    if origin.seen != _Writes.count and not origin.has_graph and origin.is_view:
        with torch.no_grad():
            set_local_tensor(view, local_tensor(laid_as(origin.of(read_whole(origin.root)), view)))
    origin.seen = _Writes.count


def write_through(changed: DTensor) -> None:
    """`changed` was written to: if it is a gathered view, write the same to what it is a view of."""
    note_write()
    origin: _Origin | None = vars(changed).get(GATHERED_VIEW)
    if origin is None or not origin.is_view:
        return
    with torch.no_grad():
        whole = read_whole(origin.root).clone()
        origin.of(whole).copy_(read_whole(changed))
        local_tensor(origin.root).copy_(local_tensor(laid_as(whole, origin.root)))
    origin.seen = _Writes.count
