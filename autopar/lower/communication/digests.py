"""Short numbers that differ where tensors differ, in value or in order, for ranks to compare."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from autopar.host.accelerators import pins_memory

__all__ = ["digest_each", "digest_generators", "digest_of", "digest_tensors", "digest_texts", "start_reading"]

_WORDS = 1 << 16  # number of weights
_PIECE = 1 << 22  # words at a time: their products take 32 MiB


def digest_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """A short text that differs (but for chance) where names, shapes, dtypes or values differ, on any device."""
    return digest_texts(digest_each(named))


def digest_each(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """The names, each with a text that differs (but for chance) where shapes, dtypes or values differ."""
    return [(name, f"{tuple(x.shape)} {x.dtype} {'meta' if x.is_meta else int(digest_of(x))}") for name, x in named]


def digest_texts(texts: Iterable[tuple[str, str]]) -> str:
    """A short text that differs (but for chance) where pairs of texts do."""
    digest = hashlib.sha256()
    for name, text in texts:
        digest.update(f"{name} {text}\n".encode())
    return digest.hexdigest()[:16]


@torch.no_grad()
def digest_of(x: Tensor) -> Tensor:
    """A digest of the bits of `x` and their order: an int64 scalar on its device, which the host does not wait for."""
    repeats = [dim for dim, stride in enumerate(x.stride()) if stride == 0 and x.shape[dim]]
    for dim in repeats:
        x = x.narrow(dim, 0, 1)
    flat = x.detach().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # one element may be contiguous with any stride
    if flat.device.type == "cpu":
        return torch.tensor(zlib.crc32(flat.view(torch.uint8).numpy().data), device="cpu")
    return weighted_sum(flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32)))


def start_reading(digests: Sequence[Tensor], device: torch.device) -> Callable[[], list[int]]:
    """Copy `digests` to the host, which does not wait; what is returned gives them.

    On an accelerator that waits, if need be, until the device has begun what was started after this.  Where the host's
    memory can't be pinned, the host waits at once.
    """
    if device.type == "cpu" or not digests:
        return lambda: [int(digest) for digest in digests]
    joined = torch.stack([digest.to(device, non_blocking=True) for digest in digests])
    if not pins_memory(device.type):
        waited_for = [int(digest) for digest in joined.cpu()]
        return lambda: waited_for
    host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True, device="cpu").copy_(joined, non_blocking=True)
    event = torch.Event(device)
    event.record()

    def read() -> list[int]:
        event.synchronize()
        return [int(digest) for digest in host]

    return read


def digest_generators(device: torch.device) -> int:
    """A number that tells where torch's default generators of the host and of `device` stand."""
    digest = zlib.crc32(torch.get_rng_state().numpy().data)
    if device.type != "cpu":
        digest = zlib.crc32(torch.get_device_module(device).get_rng_state(device).numpy().data, digest)
    return digest


def weighted_sum(words: Tensor) -> Tensor:
    """``[n]`` -> a scalar, modulo 2**64: each word times a weight of its place; what is long, block by block."""
    weights = _weights(words.device)
    whole = words.numel() // _WORDS * _WORDS
    blocks = [(part.view(-1, _WORDS) * weights).sum(1) for part in torch.split(words[:whole], _PIECE)]
    sums = torch.cat([*blocks, (words[whole:] * weights[: words.numel() - whole]).sum().view(1)])
    return sums[0] if sums.numel() == 1 else weighted_sum(sums)


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers of 63 random bits: where words differ in high bits only, the products still differ by place."""
    drawn = torch.randint(1 << 62, (_WORDS,), generator=torch.Generator().manual_seed(0), device="cpu")
    return (2 * drawn + 1).to(device)
