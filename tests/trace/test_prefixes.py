"""Calls that may run longer, with entries that don't count: known from the programs, and true of the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.planning.padded_calls import as_longer
from autopar.trace import LongerProgram, PaddingError, Traced, compare, ignored_labels, trace
from tests.models import make
from tests.shapes import of_length, of_rows

Batch = Mapping[str, Any]


def pair(model: nn.Module, short: Batch, long: Batch, *, training: bool) -> tuple[Traced, Traced]:
    one, two = (trace(model, (), dict(batch), training=training) for batch in (short, long))
    return one, two


def check(
    model: nn.Module, short: Batch, long: Batch, *, training: bool = False, has_copies: bool = False
) -> LongerProgram:
    """What is known of the longer call is true, by the numbers of the model itself."""
    one, two = pair(model, short, long, training=training)
    fills = ignored_labels(two.program)
    known = compare(one, two, fills, has_copies=has_copies)
    runs = as_longer(one, two, None, known, fills)  # pyright: ignore[reportArgumentType]
    names = two.program.inputs
    padded = dict(zip(names, runs.flatten_inputs((), short), strict=True))
    model.train(training)
    if known.last:
        return known
    with torch.no_grad():
        expected, found = (leaves(model(**batch)) for batch in (short, padded))
    for name, wanted, x in zip(two.program.outputs, expected, found, strict=True):
        for dim, size in known.cuts.get(name, {}).items():
            x = x.narrow(dim, 0, size)
        torch.testing.assert_close(x, wanted, rtol=1e-12, atol=1e-12)
    return known


def leaves(outputs: Any) -> list[Tensor]:
    given = [outputs] if isinstance(outputs, Tensor) else outputs.values() if isinstance(outputs, dict) else outputs
    return [x for x in given if isinstance(x, Tensor)]


class Model(nn.Module):
    """Ids, or rows of them, through an embedding and what a test wants."""

    def __init__(self, rest: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.head = nn.Linear(8, 16, dtype=torch.float64)
        self.rest = rest

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        return self.rest(self, self.embedding(ids), ids, labels)


def batch(rows: int = 8, length: int = 12) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"ids": torch.randint(16, (rows, length)), "labels": torch.randint(16, (rows, length))}


def cross_entropy(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    logits = m.head(x)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def own_count(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    terms = functional.cross_entropy(m.head(x).flatten(0, 1), labels.flatten(), reduction="none")
    return terms.sum() / (labels != -100).sum()


def by_rows(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    terms = functional.cross_entropy(m.head(x).transpose(1, 2), labels, reduction="none")
    return terms.sum() / len(labels)


def mean(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x).square().mean()


def labels_as_ids(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return functional.cross_entropy(m.head(x + m.embedding(labels)).flatten(0, 1), labels.flatten())


def shifted_labels(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    """As T5 and BART read their labels: a place later, behind a token that begins, and a token where none counts."""
    shifted = labels.new_zeros(labels.shape)
    shifted[:, 1:] = labels[:, :-1].clone()
    shifted[:, 0] = 3
    shifted.masked_fill_(shifted == -100, 1)
    return functional.cross_entropy(m.head(x + m.embedding(shifted)).flatten(0, 1), labels.flatten())


def shifted_in_part(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    """Some labels stay -100, which an embedding has no row for."""
    shifted = torch.cat([labels[:, :1].clamp(min=0), labels[:, :-1]], 1)
    return functional.cross_entropy(m.head(x + m.embedding(shifted)).flatten(0, 1), labels.flatten())


def labels_where_ids_say_so(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    chosen = torch.where(ids > 3, labels, 0)
    return functional.cross_entropy(m.head(x + m.embedding(chosen)).flatten(0, 1), labels.flatten())


def labels_behind_the_table(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    terms = functional.cross_entropy(m.head(x).flatten(0, 1), labels.flatten(), ignore_index=255, reduction="sum")
    return terms / (labels != 255).sum() + m.embedding(labels)[:, 0, 0]


def batch_norm(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return functional.cross_entropy(m.head(m.norm(x.flatten(0, 1))), labels.flatten())


def normed_rows(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x.softmax(0))


def similarities(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    y = x.sum(1)
    return y @ y.T


def largest(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x).amax(0)


ROWS = [
    (cross_entropy, True, True),
    (own_count, True, True),
    (batch_norm, False, True),
    (similarities, False, True),
    (by_rows, True, False),
    (mean, True, False),
    (labels_as_ids, True, False),
    (batch_norm, True, False),
    (normed_rows, False, False),
    (largest, False, False),
]


@pytest.mark.parametrize(("rest", "training", "is_alike"), ROWS)
def test_rows_that_do_not_count(rest: Callable[..., Any], training: bool, is_alike: bool) -> None:
    arguments = Model(rest), of_rows(batch(), 7), batch()
    if is_alike:
        check(*arguments, training=training)
        return
    with pytest.raises(PaddingError):
        check(*arguments, training=training)


def test_labels_that_are_inputs_too() -> None:
    check(Model(shifted_labels), of_rows(batch(), 7), batch(), training=True, has_copies=True)


@pytest.mark.parametrize(
    ("rest", "number"),
    [(shifted_in_part, -100), (labels_where_ids_say_so, -1), (labels_behind_the_table, 255), (labels_as_ids, -100)],
)
def test_labels_that_count_for_nothing_are_not_looked_up(rest: Callable[..., Any], number: int) -> None:
    with pytest.raises(PaddingError, match=f"embedding.default reads labels, which are padded with {number}"):
        check(Model(rest), of_rows(batch(), 7), batch(), training=True, has_copies=True)


def causal(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    y = x.unsqueeze(1)
    return m.head(functional.scaled_dot_product_attention(y, y, y, is_causal=True).squeeze(1))


def scores(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).masked_fill(mask, -torch.inf).softmax(-1) @ x


def causal_by_hand(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(scores(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)))


def causal_mask(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    y = x.unsqueeze(1)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)


def running(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x.cumsum(1))


def last_logits(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x[:, -1]), m.head(x[:, -1:]), m.head(x[:, [-1]])


def all_see_all(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    y = x.unsqueeze(1)
    return functional.scaled_dot_product_attention(y, y, y)


def looks_ahead(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(scores(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2)))


def sees_the_last(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    mask[:, -1] = False
    return m.head(scores(x, mask))


def positions(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x + m.embedding.weight[torch.arange(x.shape[1])] + m.embedding(torch.arange(x.shape[1])))


def positions_behind_the_table(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x + m.embedding(torch.arange(x.shape[1]) + 8))


def counted_positions(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x + m.embedding((ids > 3).cumsum(1)))


def pooled(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x.mean(1))


def by_length(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x / x.shape[1])


def backwards(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x.flip(1))


def from_the_end(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(x + torch.arange(x.shape[1] - 1, -1, -1)[:, None])


def shifted_back(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(functional.pad(x, (0, 0, 0, 1))[:, 1:])


def shifted_on(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return m.head(functional.pad(x, (0, 0, 1, 0))[:, : x.shape[1]])


def convolution(m: Model, x: Tensor, ids: Tensor, labels: Tensor) -> Any:
    return functional.conv1d(x.transpose(1, 2), m.head.weight[:8, :, None].expand(8, 8, 3), padding=1)


LENGTHS = [
    (causal, True),
    (causal_by_hand, True),
    (causal_mask, True),
    (running, True),
    (last_logits, True),
    (cross_entropy, True),
    (all_see_all, False),
    (looks_ahead, False),
    (sees_the_last, False),
    (positions, True),
    (positions_behind_the_table, False),
    (counted_positions, False),
    (pooled, False),
    (by_length, False),
    (backwards, False),
    (from_the_end, False),
    (shifted_back, False),
    (convolution, False),
    (similarities, False),
]


@pytest.mark.parametrize(("rest", "is_alike"), LENGTHS)
def test_places_that_no_other_place_sees(rest: Callable[..., Any], is_alike: bool) -> None:
    long = batch()
    arguments = Model(rest), of_length(long, 7), long
    if is_alike:
        known = check(*arguments)
        assert len(known.last) == (3 if rest is last_logits else 0)
        return
    with pytest.raises(PaddingError):
        check(*arguments)


def test_a_shift_towards_the_end_is_known_or_not_but_never_wrong() -> None:
    with suppress(PaddingError):
        check(Model(shifted_on), of_length(batch(), 7), batch())


KNOWN = ("gpt2", "bert", "vit")
CAUSAL = ("gpt2",)


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    ("name", "training"),
    [
        *((name, training) for name in ("gpt2", "flat", "contrastive") for training in (True, False)),
        pytest.param("vit", True, marks=pytest.mark.slow),
        pytest.param("bert", False, marks=pytest.mark.slow),
    ],
)
def test_what_is_known_of_rows_of_models_is_true(name: str, training: bool) -> None:
    model, inputs = make(name)
    if name in KNOWN:
        check(model, of_rows(inputs, 7), inputs, training=training, has_copies=True)
        return
    with pytest.raises(PaddingError):
        check(model, of_rows(inputs, 7), inputs, training=training, has_copies=True)


@pytest.mark.parametrize("name", ["gpt2", *slow("bert", "mixtral")])  # the plain GPT takes one length
def test_what_is_known_of_lengths_of_models_is_true(name: str) -> None:
    model, inputs = make(name)
    ids = {key: value for key, value in inputs.items() if key not in ("labels", "attention_mask")}
    if name in CAUSAL:
        check(model, of_length(ids, 9), ids)
        return
    try:
        check(model, of_length(ids, 9), ids)
    except PaddingError:
        return
    assert name != "bert"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "mixtral", "unet"])
def test_what_is_known_is_never_wrong(name: str) -> None:
    model, inputs = make(name)
    for training in (True, False):
        with suppress(PaddingError):
            check(model, of_rows(inputs, 7), inputs, training=training, has_copies=True)
