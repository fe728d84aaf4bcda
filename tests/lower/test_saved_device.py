"""What lies on the host while it is saved is loaded on the device that it was of."""

from __future__ import annotations

import io

import torch
from torch import nn

from autopar.lower.parameters.saved_device import saved_on


def places_in_file(value: object) -> list[str]:
    """Where the file of `value` says that each of its tensors was."""
    file, places = io.BytesIO(), []
    torch.save(value, file)
    file.seek(0)
    torch.load(file, map_location=lambda storage, place: places.append(place) or storage, weights_only=False)
    return places


def test_a_file_says_which_type_of_device_a_tensor_was_on() -> None:
    marked = nn.Parameter(saved_on(torch.randn(3), "cuda"))
    assert places_in_file({"a": marked, "b": torch.ones(2)}) == ["cuda", "cpu"]
    file = io.BytesIO()
    torch.save(marked, file)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu"), marked)


def test_what_is_on_its_device_is_saved_as_ever() -> None:
    assert places_in_file(saved_on(torch.randn(3), "cpu")) == ["cpu"]


def test_memory_that_is_used_again_is_of_the_host() -> None:
    for _ in range(100):  # some of these get the memory of earlier ones
        assert places_in_file(saved_on(torch.randn(8), "cuda")) == ["cuda"]
        assert places_in_file(torch.randn(8)) == ["cpu"]
