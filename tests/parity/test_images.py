"""Images and videos that are split in space: convolutions with halos, what is between them, and what is refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import ConstraintError, InfeasibleError
from autopar.ops import is_cheap
from autopar.ops.halos import space_dim
from autopar.plan import Plan
from autopar.search import SearchRequest
from tests.zoo import Subject, assert_parity, forced_plan, quick_search, rehearse, trained_alone


class Stack(nn.Module):
    """Convolutions with and without halos, one of them wide, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 4, 2, stride=2)
        self.wide = nn.Conv2d(4, 4, 7, padding=3, groups=4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        hidden = self.patch(image)
        hidden = hidden + functional.gelu(self.wide(hidden))
        return functional.cross_entropy(self.head(self.down(hidden).mean((2, 3))), target)


class UNet(nn.Module):
    """Two levels with group norm, a skip connection and resizing, as U-Nets and autoencoders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.down, self.inner = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8)
        self.up, self.last = nn.Conv2d(8, 8, 3, padding="same"), nn.Conv2d(16, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        skip = functional.silu(self.norm(self.first(image)))
        hidden = functional.silu(self.inner(self.down(skip)))
        hidden = self.up(functional.interpolate(hidden, scale_factor=2.0, mode="nearest"))
        return functional.mse_loss(self.last(torch.cat([hidden, skip], 1)), image)


class Video(nn.Module):
    """A video of 3 frames, whose rows are split as its frames don't divide; batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.second = nn.Conv3d(4, 2, (1, 3, 3), padding=(0, 1, 1))

    def forward(self, video: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.first(video)))
        hidden = functional.max_pool3d(hidden, (1, 3, 3), (1, 2, 2), (0, 1, 1))
        return self.second(hidden).square().mean()


class CausalVAE(nn.Module):
    """A small autoencoder of videos: convolutions that are causal in time, and that pad one side before a stride.

    Some are padded twice, by the same mode or by two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 4, 3), nn.GroupNorm(2, 4)
        self.down = nn.Conv3d(4, 4, (1, 3, 3), (1, 2, 2))
        self.slower = nn.Conv3d(4, 6, (3, 1, 1), (2, 1, 1))
        self.middle = nn.Conv3d(6, 4, 3, padding=1, padding_mode="reflect")
        self.up = nn.ConvTranspose3d(4, 4, (2, 4, 4), 2, (0, 1, 1))
        self.last = nn.Conv3d(4, 2, 3)

    def forward(self, video: Tensor) -> Tensor:
        hidden = functional.silu(
            self.norm(self.first(functional.pad(functional.pad(video, (0, 0, 0, 0, 2, 0)), (1, 1, 1, 1))))
        )
        hidden = self.down(functional.pad(hidden, (0, 1, 0, 1)))
        hidden = self.slower(functional.pad(hidden, (0, 0, 0, 0, 1, 0), mode="replicate"))
        hidden = self.up(functional.silu(self.middle(hidden)))
        hidden = functional.pad(functional.pad(hidden, (0, 0, 0, 0, 2, 0), mode="replicate"), (1, 1, 1, 1))
        hidden = self.last(hidden)
        return functional.mse_loss(hidden, video)


class Decoder(nn.Module):
    """Resizing of every kind that splits in space."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.up = (
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
            nn.ConvTranspose2d(4, 3, 3, 2, 1, 1),
        )

    def forward(self, image: Tensor) -> Tensor:
        hidden = functional.interpolate(self.inner(image), scale_factor=2.0, mode="bilinear")
        hidden = functional.interpolate(hidden.tanh(), scale_factor=2.0, mode="bicubic")
        rows, columns = hidden.shape[2:]
        hidden = functional.interpolate(hidden.tanh(), (2 * rows, columns + 1))
        return self.up(functional.interpolate(hidden, scale_factor=3.0, mode="nearest-exact")).square().mean()


@cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    image = torch.randn(1, 3, 32, 16, dtype=torch.float64)
    if name == "convnext":
        config = transformers.ConvNextConfig(
            image_size=32, hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, patch_size=2, num_labels=3
        )
        model: nn.Module = transformers.ConvNextForImageClassification(config)
        inputs = {"pixel_values": image, "labels": torch.tensor([1])}
    elif name == "swin":
        model = transformers.SwinForImageClassification(
            transformers.SwinConfig(
                image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4, num_labels=3,
                drop_path_rate=0.0,
            )
        )  # fmt: skip
        inputs = {"pixel_values": image[..., :16, :], "labels": torch.tensor([1])}
    elif name == "resnet":
        config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
        model, inputs = (
            transformers.ResNetForImageClassification(config),
            {"pixel_values": image, "labels": torch.tensor([1])},
        )
    elif name == "stack":
        model, inputs = Stack(), {"image": image, "target": torch.tensor([2])}
    elif name == "unet":
        model, inputs = UNet(), {"image": image}
    elif name == "decoder":
        model, inputs = Decoder(), {"image": image[:, :, :16, :3]}
    elif name in ("vae", "vae-in-time"):
        sizes = (4, 16, 8) if name == "vae" else (16, 6, 6)
        model, inputs = CausalVAE(), {"video": torch.randn(1, 2, *sizes, dtype=torch.float64)}
    else:
        model, inputs = Video(), {"video": torch.randn(1, 2, 3, 16, 6, dtype=torch.float64)}
    return trained_alone(model.double().train(), inputs)


def plan_of(name: str, num_devices: int, *constraints: str) -> Plan:
    return forced_plan(subject(name).traced.program, num_devices, *constraints)


def dims_split(plan: Plan) -> list[set[int]]:
    """Per layer the dims that are split in space."""
    factors = [{factor for op in plan.strategies[e.strategy].assignments for factor in op} for e in plan.layers]
    return [{space_dim(factor) for factor in each} - {0} for each in factors]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        *((name, 2) for name in ("stack", "unet", "video", "vae", "vae-in-time", "decoder")),
        *((name, 4) for name in ("unet", "video")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("convnext", 2), ("resnet", 4))),
    ],
)
def test_one_image_trains_as_on_one_device(name: str, num_devices: int) -> None:
    plan = plan_of(name, num_devices, f"context={num_devices}")
    dim = 3 if name in ("video", "vae") else 2
    assert {dim} in dims_split(plan)
    assert all(each <= {dim} for each in dims_split(plan))
    assert_parity(subject(name), plan)
    gathered = [each for each in rehearse(subject(name), plan).collectives[0] if each.kind == "all_gather"]
    # Parameters and the result of the pooling are gathered, nothing as large as the image.
    assert all(each.num_bytes <= _parameter_bytes(name) for each in gathered)


@pytest.mark.parametrize("name", ["vae", "vae-in-time"])
def test_all_convolutions_of_an_autoencoder_of_videos_are_split(name: str) -> None:
    who, plan = subject(name), plan_of(name, 2, "context=2")
    convolutions = {
        (op.name, factor)
        for each in plan.layers
        for op, (factor,) in zip(
            who.traced.program.kinds[each.kind].ops, plan.strategies[each.strategy].assignments, strict=True
        )
        if "conv" in op.target
    }
    assert len(convolutions) == 6
    assert {factor for _, factor in convolutions} == {"space3" if name == "vae" else "space2"}


def _parameter_bytes(name: str) -> int:
    return sum(parameter.nbytes for parameter in subject(name).model.parameters())


@pytest.mark.slow
def test_shifted_windows_train_as_on_one_device() -> None:
    """Rolls exchange rows with neighbors; they are not gathered."""
    who, plan = subject("swin"), plan_of("swin", 2, "context=2")
    rolls = {
        factors
        for each in plan.layers
        for op, factors in zip(
            who.traced.program.kinds[each.kind].ops, plan.strategies[each.strategy].assignments, strict=True
        )
        if "roll" in op.target
    }
    assert rolls == {("d1",)}
    assert_parity(who, plan)


def test_two_images_on_four_devices() -> None:
    """Batch and space are split on two axes."""
    who = trained_alone(UNet().double(), {"image": torch.randn(2, 3, 16, 4, dtype=torch.float64)})
    plan = forced_plan(who.traced.program, 4, "data=2", "context=2")
    assert {axis for each in plan.strategies for axis in each.labels} == {"data", "context"}
    assert_parity(who, plan)


@pytest.mark.parametrize("name", ["unet", "decoder"])
def test_an_image_on_two_axes(name: str) -> None:
    """Rows come from neighbors on the inner axis, or on the outer one."""
    plan = plan_of(name, 4, "mesh=2x2", "context=4")
    assert any(
        {op.count(factor) for op in plan.strategies[each.strategy].assignments for factor in op if space_dim(factor)}
        == {2}
        for each in plan.layers
    )
    assert_parity(subject(name), plan)


def test_a_batch_that_divides_is_not_split_in_space() -> None:
    """Halos cost what a split of the batch does not; and what does not divide is no option."""
    wide = trained_alone(UNet().double(), {"image": torch.randn(2, 3, 16, 4, dtype=torch.float64)})
    plan = quick_search(wide.traced.program, 2, SearchRequest())
    assert dims_split(plan) == [set()] * len(plan.layers)
    plan = quick_search(wide.traced.program, 4, SearchRequest())
    assert {2} in dims_split(plan)


def test_images_that_do_not_fit_are_split() -> None:
    """Devices that have an image each run all of them one after the other, in slices, if that is what fits."""
    who = trained_alone(UNet().double(), {"image": torch.randn(2, 3, 64, 32, dtype=torch.float64)})
    program = who.traced.program
    whole = forced_plan(program, 2, "tensor=1")
    assert dims_split(whole) == [set()]
    limit = int(0.8 * whole.peak_memory_bytes)
    plan = quick_search(program, 2, SearchRequest(limit, constraints=("tensor=1",)))
    assert dims_split(plan) == [{2}]
    assert plan.num_microbatches == 2
    assert plan.peak_memory_bytes < limit
    assert_parity(who, plan)
    with pytest.raises(InfeasibleError, match="no plan fits"):
        quick_search(program, 2, SearchRequest(limit // 4, constraints=("tensor=1",)))


def test_what_is_not_split_in_space_is_cheap_to_run_again() -> None:
    """A kernel that communicates is never run again, but the same op without it is."""
    ops = [op for layer in subject("unet").traced.program.layers for op in layer.ops]
    assert [is_cheap(op) for op in ops if op.target == "aten.group_norm.default"] == [True, True]
    plan = plan_of("unet", 2, "context=2", "recompute=selective")
    assert {2} in dims_split(plan)
    assert_parity(subject("unet"), plan)


def test_images_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(
        ConstraintError, match="images of 32 x 16 do not divide over 3 devices in any dim that a convolution splits"
    ):
        plan_of("unet", 3, "context=3")
