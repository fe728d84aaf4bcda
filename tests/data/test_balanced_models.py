"""Balanced batches of BERT, T5, a vision and a video diffusion transformer: loss and gradients of each sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

import autopar
from autopar.balance import Clip
from autopar.data.packed_rows import RowPacking
from autopar.errors import LoaderError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.planning.sequence_separation import why_not_packed
from autopar.program import Program
from autopar.search import SearchRequest
from autopar.verify.rehearsal import keep_double_program, planner_for, run_single
from tests.data.test_balanced import small_llama
from tests.lower.runs import build, loss_of
from tests.zoo import quick_search

TOKENS, PIXELS, WIDTH = 16, 6, 8
Sample = dict[str, Tensor]


class Patches(nn.Module):
    """A transformer over patches of several images or clips in a row, with or without a noise level for each patch."""

    def __init__(self, *, is_diffusion: bool) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(PIXELS, WIDTH), nn.Linear(3, WIDTH)
        self.modulation = nn.Linear(1, 3 * WIDTH) if is_diffusion else None
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, PIXELS)

    def forward(self, patches: Tensor, place: Tensor, target: Tensor, counts: Tensor, position_ids: Tensor,
                level: Tensor | None = None) -> Tensor:  # fmt: skip
        number = (position_ids == 0).cumsum(1)
        mask = (number[:, :, None] == number[:, None, :])[:, None]
        x = self.embed(patches) + self.places(place)
        y = self.norm(x)
        gate: Tensor | float = 1.0
        if self.modulation is not None:
            shift, scale, gate = self.modulation(level).chunk(3, -1)
            y = y * (1 + scale) + shift
        q, k, v = (z.unflatten(-1, (2, -1)).transpose(1, 2) for z in self.qkv(y).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + gate * self.out(attended.transpose(1, 2).flatten(2))
        error = (self.head(functional.gelu(self.up(x))) - target).square().mean(-1)
        return (error * counts).sum() / counts.sum()


class Classes(nn.Module):
    """Tells what is in images of several resolutions, each in a row of its own; or how much of it, a mean over rows."""

    def __init__(self, *, is_amount: bool = False) -> None:
        super().__init__()
        self.is_amount = is_amount
        self.embed, self.qkv, self.head = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, patches: Tensor, kind: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        seen = torch.ones_like(patches[..., 0]) if attention_mask is None else attention_mask.to(patches.dtype)
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in self.qkv(self.embed(patches)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None].bool())
        pooled = (attended.transpose(1, 2).flatten(2) * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)
        scores = self.head(pooled)
        return (scores[:, 0] - kind).square().mean() if self.is_amount else functional.cross_entropy(scores, kind)


class Samples(Dataset[Sample]):
    """Of these lengths: patches, or tokens of which some are to be predicted."""

    def __init__(self, lengths: Sequence[int], names: Sequence[str]) -> None:
        random = torch.Generator().manual_seed(0)
        sizes = {"patches": (PIXELS,), "place": (3,), "target": (PIXELS,), "level": (1,)}
        self.samples: list[Sample] = []
        for n in lengths:
            ids = torch.randint(1, 32, (n,), generator=random)
            made = {name: torch.randn(n, *size, generator=random).double() for name, size in sizes.items()}
            labels = torch.where(torch.arange(n) % 3 == 0, ids, -100)
            made |= {"counts": torch.ones(n).double(), "input_ids": ids, "labels": labels, "kind": ids[0]}
            self.samples.append({name: made[name] for name in names})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def size(sample: Sample) -> int:
    return len(next(iter(sample.values())))


def counted(sample: Sample) -> int:
    if "kind" in sample:
        return 1
    return int((sample["labels"] != -100).sum()) if "labels" in sample else size(sample)


class Alone(nn.Module):
    """The mean over what counts in all samples, each of which runs alone."""

    def __init__(self, model: nn.Module, samples: Samples, *, packs: bool) -> None:
        super().__init__()
        self.model, self.samples, self.packs = model, samples.samples, packs

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        for sample in self.samples:
            extra = {"position_ids": torch.arange(size(sample))[None]} if self.packs else {}
            total = total + counted(sample) * loss_of(self.model(**{k: v[None] for k, v in sample.items()}, **extra))
        return total / sum(map(counted, self.samples))


def bert() -> nn.Module:
    config = BertConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        max_position_embeddings=TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def t5() -> nn.Module:
    config = T5Config(
        d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, relative_attention_num_buckets=4, relative_attention_max_distance=8,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


VISION = ("patches", "place", "target", "counts")
CASES: dict[str, tuple[Any, tuple[str, ...], bool]] = {
    "bert": (bert, ("input_ids", "labels"), False),
    "t5": (t5, ("input_ids", "labels"), False),  # targets of the same length as their text
    "classes": (Classes, ("patches", "kind"), False),  # a class for each row
    "amounts": (lambda: Classes(is_amount=True), ("patches", "kind"), False),
    "vit": (lambda: Patches(is_diffusion=False), VISION, True),
    "dit": (lambda: Patches(is_diffusion=True), (*VISION, "level"), True),
}
# Of images and clips of several resolutions; one alone, so that a rank has none; all alike.
MIXES = ([4, 6, 16, 1, 9, 2], [16], [8, 8, 8, 8])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("dit", 2),
        ("classes", 2),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in (("bert", 2), ("t5", 4))),
    ],
)
def test_loss_and_gradients_are_those_of_each_sample_alone(case: str, world: int) -> None:
    make, names, packs = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    form = Samples([TOKENS], names)[0]
    example = {name: x.expand(world, *x.shape).clone() for name, x in form.items()}
    ones = torch.ones(world, TOKENS, dtype=torch.int64)
    example |= {"position_ids": torch.arange(TOKENS).expand(world, -1).clone()} if packs else {"attention_mask": ones}
    traced = keep_double_program(trace_model(model, example))
    plan = quick_search(traced.program, world, SearchRequest(constraints=(f"data={world}",)))
    assert plan.prediction.row.tokens == TOKENS
    more = [{name: torch.cat([x] * k) for name, x in example.items()} for k in (2, 3)]
    more += [{name: x[:1] for name, x in example.items()}] * (case == "amounts")  # which would count empty rows
    planner = planner_for(model, traced, plan, more, keep_double_program, training=True)
    for mix in MIXES:
        samples = Samples(mix, names)
        alone = run_single(Alone(model, samples, packs=packs), {"x": torch.zeros(1).double()}, 1, in_double=True)

        def rank(talk: Communicator, samples: Samples = samples) -> tuple[float, dict[str, Tensor]]:
            made: Any = build(model, traced, plan, talk, planner=planner)
            made.call_inputs = call_inputs(model, example, traced.program, made.data_split, talk, is_local=True)
            loader = DataLoader(samples, batch_size=len(samples))
            padding = dict.fromkeys(set(names) - {"labels"}, 0) | ({"kind": -100} if "kind" in names else {})
            arguments: dict[str, Any] = {"length": size, "packs": packs, "shifts": (), "padding": padding}
            (batch,) = autopar.balanced(loader, made, **arguments)
            loss = loss_of(made(**batch))
            loss.backward()
            return loss.item(), {name: made._whole(name, p.grad) for name, p in made.named_parameters()}

        largest = max(float(x.abs().max()) for x in alone.gradients.values())
        for loss, gradients in simulate(world, rank):
            assert loss == pytest.approx(alone.losses[0], rel=1e-12)
            for name, expected in alone.gradients.items():
                torch.testing.assert_close(
                    gradients[name.removeprefix("model.")], expected, rtol=0, atol=1e-9 * largest
                )


def test_text_beside_vision_is_one_sequence_or_refused() -> None:
    packing = RowPacking({"input_ids": 0, "patches": 0})
    sample = {"input_ids": torch.ones(3), "patches": torch.ones(5, PIXELS)}
    with pytest.raises(LoaderError, match=r"the entries of a sample have one length.*'input_ids': 3, 'patches': 5"):
        packing.rows([[sample]], TOKENS, sample)


def test_clips_say_how_many_tokens_they_have() -> None:
    clips = {Clip(1, 16, 16, (1, 8, 8)): 3, Clip(4, 16, 16, (1, 8, 8)): 1}
    lengths = autopar.balance.Lengths.clips(clips)
    assert (lengths.mean, lengths.longest) == (7.0, 16)
    drawn = autopar.planning.length_plans.read_distribution(clips)
    assert drawn is not None
    np.testing.assert_array_equal(drawn.tokens, lengths.tokens)


def test_models_that_mix_packed_sequences_are_refused() -> None:
    position_ids = torch.arange(TOKENS).expand(2, -1)
    ids = torch.zeros_like(position_ids)
    packed, masked = {"input_ids": ids, "labels": ids, "position_ids": position_ids}, {"input_ids": ids, "labels": ids}

    def program(model: nn.Module, example: dict[str, Tensor]) -> Program:
        return trace_model(model, example).program

    caching = small_llama()
    caching.config.use_cache = True
    assert not why_not_packed(program(small_llama(), packed))
    assert "use_cache = False" in why_not_packed(program(caching, packed))
    assert "in a packed row sequences would attend to each other" in why_not_packed(program(bert(), packed))
    reason = "have none (only input_ids, labels), so nothing keeps the sequences of a row apart"
    assert reason in why_not_packed(program(bert(), masked))


def test_entries_of_whole_sequences_have_one_shape() -> None:
    packing = RowPacking({"x": 0, "kind": -100}, mask="attention_mask", whole=frozenset({"kind"}))
    samples = [{"kind": torch.tensor([n, n]), "x": torch.ones(n)} for n in (3, 1)]
    batch = packing.rows([samples[:1], [], samples[1:]], 4, samples[0])
    assert batch["kind"].tolist() == [[3, 3], [-100, -100], [1, 1]]
    assert batch["x"].tolist() == [[1, 1, 1, 0], [0] * 4, [1, 0, 0, 0]]
    assert packing.length_of(samples[0]) == 3
    with pytest.raises(LoaderError, match=r"entry 'kind' of a sample is \[\], but that of another one \[2\]"):
        packing.rows([[samples[1] | {"kind": torch.tensor(1)}]], 4, samples[0])


def test_masks_of_tokenizers_are_left_out() -> None:
    packing = RowPacking({"input_ids": 0}, "", "attention_mask")
    sample = {"input_ids": [5, 6], "attention_mask": [1, 1]}
    made = packing.rows([[sample]], 4, sample)
    assert (made["input_ids"].tolist(), made["attention_mask"].tolist()) == ([[5, 6, 0, 0]], [[1, 1, 0, 0]])
    with pytest.raises(LoaderError, match="a sample is padded already"):
        packing.rows([[sample | {"attention_mask": [1, 0]}]], 4, sample)
