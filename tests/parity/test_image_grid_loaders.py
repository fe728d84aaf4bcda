"""Balanced loaders for vision models that read the sizes of images in Python: images of one size in each batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autopar
from autopar.data import EncoderRows
from autopar.errors import LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.caller_inputs import call_inputs
from autopar.verify.rehearsal import keep_double_program, planner_for, run_single
from tests.balance.assignments import plan_of
from tests.data.sharded import FakeModel
from tests.data.test_balanced import ROW
from tests.lower.runs import build, loss_of, losses_and_gradients
from tests.models import skip_before_transformers_5
from tests.parity.test_image_grids import IMAGE, SMALL, START, TOKENS, WIDE, small
from tests.zoo import forced_plan

Grid = tuple[int, int, int]
ENCODER = EncoderRows("pixel_values", grids="image_grid_thw")
# Of each sample the number of its words, and its images: batches of four samples have images of one size, or none.
SAMPLES: list[tuple[int, list[Grid]]] = [
    (3, [SMALL, SMALL]), (9, []), (2, [SMALL]), (6, [SMALL]),
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
@pytest.mark.parametrize(("kind", "asked"), [("qwen2", "data=2"), ("qwen2.5", "data=2"), ("qwen3", "tensor=2")])
def test_images_of_one_size_in_each_batch_train_as_on_one_device(kind: str, asked: str) -> None:
    skip_before_transformers_5("the configuration is another one")
    model: Any = small(kind)
    dataset: Any = [sample_of(model, number) for number in range(len(SAMPLES))]
    example = example_of(2, [SMALL] * 4)
    traced = keep_double_program(autopar.api.trace_model(model, example))
    plan = forced_plan(traced.program, 2, asked)
    others = [example_of(2, grids) for grids in ([WIDE] * 4, [SMALL] * 2)]
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
            assert loss == pytest.approx(expected.losses[0], rel=1e-12)
            largest = max(float(x.abs().max()) for x in expected.gradients.values())
            for name, x in gradients.items():
                wanted = expected.gradients.get(f"model.{name}", torch.zeros_like(x))
                torch.testing.assert_close(x, wanted, rtol=0, atol=1e-9 * largest)


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
            r"the sizes \[\(1, 4, 4\), \(1, 4, 8\)\].*which forward reads in Python.*BucketSampler",
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
