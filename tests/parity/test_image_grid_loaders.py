"""Balanced loaders for vision models that read the sizes of images in Python: of one size, or several, in a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import autopar
from autopar.data import EncoderRows
from autopar.data.image_grids import GridSharing
from autopar.errors import LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.verify.rehearsal import keep_double_program, planner_for, run_single
from tests.balance.assignments import plan_of
from tests.data.sharded import FakeModel
from tests.data.test_balanced import ROW
from tests.lower.runs import build, loss_of, losses_and_gradients
from tests.models import skip_before_transformers_5
from tests.parity.test_image_grids import HIGH, IMAGE, SMALL, START, TOKENS, WIDE, small
from tests.ranks import run_ranks
from tests.zoo import forced_plan

Grid = tuple[int, int, int]
ENCODER = EncoderRows("pixel_values", grids="image_grid_thw")
# Of each sample the number of its words, and its images: of several sizes, of one size, or none in a batch of four.
SAMPLES: list[tuple[int, list[Grid]]] = [
    (3, [WIDE, SMALL]), (9, []), (2, [HIGH]), (6, [SMALL]),
    (2, [WIDE]), (1, [WIDE, WIDE]), (5, []), (4, []),
    (8, []), (5, []), (9, []), (3, []),
]  # fmt: skip


def sample_of(model: Any, number: int) -> dict[str, Tensor]:
    """As a processor and `get_rope_index` make it."""
    random = torch.Generator().manual_seed(number)
    words, grids = SAMPLES[number]
    places = [frames * height * width // 4 for frames, height, width in grids]
    images = [torch.tensor([START] + [IMAGE] * count) for count in places]
    ids = torch.cat([*images, torch.randint(1, 50, (words,), generator=random)])
    sample = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}
    if not grids:
        return sample
    sizes = torch.tensor(grids)
    positions, _ = model.model.get_rope_index(ids[None], (ids == IMAGE).int()[None], sizes)
    pixels = torch.randn(4 * sum(places), 96, generator=random, dtype=torch.float64)
    return {**sample, "position_ids": positions[:, 0], "pixel_values": pixels, "image_grid_thw": sizes}


class Alone(nn.Module):
    """The mean loss over all predicted words of some samples, each of which runs alone."""

    def __init__(self, model: nn.Module, numbers: range) -> None:
        super().__init__()
        self.model, self.numbers = model, numbers

    def forward(self, x: Tensor) -> Tensor:
        total, counted = x.sum(), 0
        for sample in (sample_of(self.model, number) for number in self.numbers):
            count = int((sample["labels"][1:] != -100).sum())
            batch = {name: x if name in ("pixel_values", "image_grid_thw") else x[None] for name, x in sample.items()}
            if "position_ids" in batch:
                batch["position_ids"] = batch["position_ids"].transpose(0, 1)
            total, counted = total + count * loss_of(self.model(**batch)), counted + count
        return total / counted


def size(sample: dict[str, Tensor]) -> int:
    return len(sample["input_ids"])


def example_of(rows: int, grids: list[Grid]) -> dict[str, Tensor]:
    """A whole batch of packed rows."""
    ids = torch.ones(rows, TOKENS, dtype=torch.int64)
    patches = sum(frames * height * width for frames, height, width in grids)
    ids.view(-1)[: patches // 4] = IMAGE
    return {
        "input_ids": ids, "labels": ids, "position_ids": torch.arange(TOKENS).expand(4, rows, TOKENS),
        "pixel_values": torch.randn(patches, 96, dtype=torch.float64), "image_grid_thw": torch.tensor(grids),
    }  # fmt: skip


@pytest.mark.slow
def test_images_train_as_on_one_device() -> None:
    """Qwen2.5; Qwen2 trains on gloo below, and Qwen3 without a loader (`test_image_grids`)."""
    skip_before_transformers_5("the configuration is another one")
    model: Any = small("qwen2.5")
    dataset: Any = [sample_of(model, number) for number in range(len(SAMPLES))]
    example = example_of(2, [SMALL] * 4)
    traced = keep_double_program(trace_model(model, example))
    plan = forced_plan(traced.program, 2, "data=2")
    text = {name: x for name, x in example.items() if name not in ("pixel_values", "image_grid_thw")}
    others = [example_of(2, [WIDE] * 4), text]
    planner = planner_for(model, traced, plan, others, keep_double_program, training=True)
    alone = [
        run_single(Alone(model, range(n, n + 4)), {"x": torch.zeros(1).double()}, 1, in_double=True) for n in (0, 4, 8)
    ]

    def rank(talk: Communicator) -> Any:
        made: Any = build(model, traced, plan, talk, planner=planner)
        made.call_inputs = call_inputs(
            model, example, traced.program, made.data_split, talk, is_local=True, read_values=traced.read_values
        )
        loader: Any = autopar.balanced(
            DataLoader(dataset, batch_size=4), made, length=size, shifts="labels",
            encoder=ENCODER,
        )  # fmt: skip
        return losses_and_gradients(made, loader)

    for steps in simulate(2, rank):
        for (loss, gradients), expected in zip(steps, alone, strict=True):
            assert {f"model.{name}" for name in gradients} == expected.gradients.keys()  # the last have no image
            assert_step(loss, gradients, expected, loss_error=1e-12, gradient_error=1e-9)


def assert_step(
    loss: float, gradients: dict[str, Tensor], expected: Any, *, loss_error: float, gradient_error: float
) -> None:
    """Within relative errors; gradients relative to the largest entry of all."""
    assert loss == pytest.approx(expected.losses[0], rel=loss_error)
    largest = max(float(x.abs().max()) for x in expected.gradients.values())
    for name, x in gradients.items():
        wanted = expected.gradients.get(f"model.{name}", torch.zeros_like(x))
        torch.testing.assert_close(x, wanted, rtol=0, atol=gradient_error * largest)


def on_gloo() -> tuple[float, dict[str, Tensor]]:
    """A step with images of several sizes."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model: Any = small("qwen2")
    dataset: Any = [sample_of(model, number) for number in range(4)]
    made: Any = autopar.parallelize(
        model, mesh, example_of(2, [SMALL] * 4), profile=False, inputs="local", constraints=["data=2"]
    )
    loader: Any = autopar.balanced(
        DataLoader(dataset, batch_size=4), made, length_index=[size(sample) for sample in dataset], shifts="labels",
        encoder=replace(ENCODER, lengths=[grids for _, grids in SAMPLES[:4]]),
    )  # fmt: skip
    (batch,) = loader
    loss = loss_of(made(**batch))
    loss.backward()
    named = [(name, p.grad) for name, p in made.named_parameters() if p.grad is not None]
    return loss.item(), {name: made._whole(name, x) for name, x in named}


@pytest.mark.slow
def test_gloo_processes_group_images_by_size() -> None:
    skip_before_transformers_5("the configuration is another one")
    alone = run_single(Alone(small("qwen2"), range(4)), {"x": torch.zeros(1).double()}, 1)
    for loss, gradients in run_ranks(on_gloo, 2):
        # The model casts rotary embeddings and logits to float32.
        assert_step(loss, gradients, alone, loss_error=1e-6, gradient_error=1e-6)


def loaded(samples: Any, rows: int = 2, **arguments: Any) -> Any:
    """A batch of these samples, on two ranks."""
    example = example_of(rows, [SMALL] * 4)

    def act(talk: Communicator) -> Any:
        model: Any = FakeModel(talk)
        model.plan = plan_of(ROW)
        model.call_inputs.example_forms = {name: (tuple(x.shape), x.dtype) for name, x in example.items()}
        model.call_inputs.read_values = {"image_grid_thw": SMALL * 4}
        given: dict[str, Any] = {"shifts": "labels", "encoder": ENCODER, "length": size}
        given |= arguments
        return next(iter(autopar.balanced(DataLoader(samples, batch_size=4), model, **given)))

    return simulate(2, act)


def plain_sample(grids: list[Grid], tokens: int = 8) -> dict[str, Tensor]:
    ids = torch.ones(tokens, dtype=torch.int64)
    pixels = torch.zeros(sum(frames * height * width for frames, height, width in grids), 96)
    return {
        "input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens).expand(3, tokens),
        "pixel_values": pixels, "image_grid_thw": torch.tensor(grids),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "arguments", "message"),
    [
        (
            [plain_sample([SMALL]), plain_sample([WIDE])], {},
            r"the sizes \[\(1, 4, 4\), \(1, 4, 8\)\].*doesn't say how many patches become one feature.*BucketSampler",
        ),
        (
            [{n: x for n, x in plain_sample([SMALL]).items() if n != "position_ids"}], {},
            "has images but no 'position_ids'.*get_rope_index",
        ),
        (
            [plain_sample([SMALL]) | {"position_ids": torch.arange(8)}], {},
            r"has position_ids \[8\], but the model takes \[4, rows, tokens\]",
        ),
        (
            [plain_sample([SMALL]) | {"image_grid_thw": torch.tensor([WIDE])}], {},
            r"which are 32 patches, but 'pixel_values' is \[16, 96\]",
        ),
        ([plain_sample([SMALL])], {"packs": False}, r"has position_ids \[4, 2, 20\].*leave packs=False out"),
        ([plain_sample([SMALL])], {"rows": 4}, "give the example another number of rows than 4"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_sizes_is_named(
    samples: list[dict[str, Tensor]], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoaderError, match=message):
        loaded(samples, **arguments)


def test_a_rank_reads_its_own_images_by_index() -> None:
    samples = [plain_sample([SMALL] * n) for n in (2, 1, 1)] + [plain_sample([SMALL])]
    encoder = EncoderRows("pixel_values", grids="image_grid_thw", lengths=[[SMALL] * n for n in (2, 1, 1, 1)])
    for batch in loaded(samples, length=None, length_index=[8] * 4, encoder=encoder):
        assert batch["image_grid_thw"].tolist() == [[*SMALL]] * 6
        assert batch["pixel_values"].shape == (3 * 16, 96)
        assert batch["position_ids"].shape == (4, *batch["input_ids"].shape)


def sharing(rank: int = 0, merged: int = 4) -> GridSharing:
    forms = {"pixel_values": ((64, 3), torch.float32)}
    return GridSharing(ENCODER, forms, rank, 2, 2, SMALL, merged=merged)


def test_each_rank_has_as_many_images_of_each_size_and_text_finds_its_own() -> None:
    lengths = [[WIDE, SMALL], [], [SMALL], [SMALL], [WIDE]]
    samples = {
        number: {"pixel_values": torch.full((sum(map(math.prod, own)), 3), number), "image_grid_thw": torch.tensor(own)}
        for number, own in enumerate(lengths)
        if own
    }
    order = [4, 0, 1, 2, 3]  # of the text
    shares = [sharing(rank).assign(lengths, order) for rank in range(2)]
    batches = [sharing(rank).collate(share, samples) for rank, share in enumerate(shares)]
    assert shares[0].digest == shares[1].digest
    for batch in batches:
        sizes: Any = batch["image_grid_thw"]
        assert sizes.tolist() == [[*grid] for grid in [SMALL, SMALL, WIDE] * 2]
    features = torch.cat([batch["pixel_values"] for batch in batches])[::4, 0]  # of which sample each is
    orders: Any = sharing().order_of(shares[0], [[4, 0], [], [1, 3, 2]], 20)["feature_order"]
    found = [[int(features[place]) for place in row if place < len(features)] for row in orders.tolist()]
    assert found == [[4] * 8 + [0] * 12, [], [3] * 4 + [2] * 4]
    with pytest.raises(LoaderError, match="have 20 features, more than the 19 places of their row"):
        sharing().order_of(shares[0], [[4, 0]], 19)


def test_numbers_of_images_are_rounded_so_that_plans_are_few() -> None:
    five = [(1, 4, 4 * n) for n in range(1, 6)]
    for sizes, each in (([SMALL], 13), ([SMALL, WIDE], 16), (five, 16)):
        share = sharing().assign([[size] * 25 for size in sizes], range(len(sizes)))
        assert len(share.rows) == each * len(sizes)
    # A rank has 12.5 images, 2.5 of a size: of one 9 (rounded up to 16), and of four 1, of which it gets 2.
    share = sharing().assign([[size] * (17 if size == five[0] else 2) for size in five], range(5))
    assert [share.grids.count(size) for size in five] == [16, 2, 2, 2, 2]
    with pytest.raises(LoaderError, match=r"an image of \(1, 4, 4\).*has 16 patches.*of 3 each"):
        sharing(merged=3).assign([[SMALL, WIDE]], [0])
