"""Makes a user's loader of samples of different lengths load one rank's share of each batch, balanced between ranks."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from autopar.balance import BatchPlanner
from autopar.balance.costs import check_lengths
from autopar.data.buckets import EvenSteps
from autopar.data.encoder_rows import EncoderRows, EncoderSharing
from autopar.data.image_grids import GridSharing
from autopar.data.loaders import WithEpochs, remade, unsharded_parts
from autopar.data.packed_rows import RowPacking
from autopar.data.sampling import AgreedDraws, sampled
from autopar.data.shares import CollateBatch, CollateShare, RowMaker, SamplesOfShare, Sharing, TakeShare
from autopar.errors import LengthError, LoaderError
from autopar.lower import ParallelModule
from autopar.lower.observe.balance import Dealt
from autopar.lower.run.call_inputs import CallInputs
from autopar.planning.sequence_separation import why_not_packed
from autopar.search.microbatches.row_sums import row_pieces
from autopar.trace import ignored_labels

__all__ = ["balanced"]

_LOGGER = logging.getLogger("autopar")
L = TypeVar("L", bound=DataLoader[Any])

_END = -1  # what a rank says in place of a digest when its loader has ended
# What a loss leaves out by default, and an id that every vocabulary has.
_PADDING: Mapping[str, float] = {"input_ids": 0, "labels": -100}


def balanced(  # noqa: PLR0913  (what a user may say)
    loader: L,
    model: ParallelModule,
    *,
    length: Callable[[Any], int] | None = None,
    length_index: Sequence[int] | np.ndarray | None = None,
    packs: bool = True,
    shifts: str | Sequence[str] | None = None,
    padding: Mapping[str, float] | None = None,
    across_steps: int = 1,
    encoder: EncoderRows | str | None = None,
) -> L:
    """The loader that gives this rank its share of the batches of `loader`, in rows of one length; every rank calls it.

    For a model of ``autopar.parallelize(..., inputs="local")`` with example inputs ``[rows, tokens]``.  A batch is the
    samples of a batch of `loader`, as on one device: a step has no others, but for `across_steps`.  `BatchPlanner` says
    which rank gets which, in as few rows as hold them; steps with more samples or longer ones have more rows.

    Packed, a row has several sequences, and ``position_ids`` that begin at 0 in each: the model must take these, and
    let no place attend to another sequence (as causal language models of transformers do).  Padded, a row has one
    sequence, and an ``attention_mask``, and samples may have entries for the whole sequence, such as its class, of
    which the example inputs are ``[rows, ...]``.  Either way loss and gradients are those of one device on each
    sequence alone, if the loss is a mean over labels that counts none with the value of padding.

    Args:
        loader: a ``DataLoader`` or torchdata's ``StatefulDataLoader`` as on one device, whose samples are mappings
            from names to tensors ``[length, ...]``.  Its ``collate_fn`` is not used.  It is left as it is.
        model: says which share is this rank's.
        length: sample -> its number of tokens.  Every rank then reads all samples of a batch.
        length_index: ``[samples]`` tokens of each sample of a map-style dataset.  A rank then reads its own only.
        packs: whether sequences share rows.
        shifts: packed: entries that the model moves by a place to predict the next token: ``"labels"`` for causal
            language models of transformers; ``()`` if there are none.
        padding: name of an entry -> what it has in places without a token; by default 0 for ``input_ids`` and -100
            for ``labels``.
        across_steps: with `length_index`: the samples of so many batches are dealt out anew to as many steps, for like
            work in each.  Training then differs from that on one device by which samples a step has.
        encoder: the entries of a sample that an encoder reads in rows of its own, such as ``"pixel_values"``, which are
            balanced apart from the text: see `EncoderRows`.  `length` and `length_index` are those of the text.

    Returns:
        A loader of the same class, with ``set_epoch``, which passes the epoch on to sampler and dataset.

    Raises:
        LoaderError: the loader is sharded already, `model` takes the whole batch on every rank, arguments are missing,
            or the model does not keep packed sequences apart.  While it runs, on every rank: ranks have other lengths,
            or some loaders end before others.
        LengthError: a sequence is longer than a row, or has no token.

    Example:
        >>> loader = DataLoader(documents, batch_size=64, shuffle=True)
        >>> loader = autopar.balanced(loader, model, length_index=documents.lengths, shifts="labels")
    """
    inputs, sampler = unsharded_parts(loader, model)
    given: Any = loader
    is_stream = isinstance(given.dataset, IterableDataset)
    _check_arguments(given, length, length_index, shifts if packs else (), is_stream=is_stream)
    if across_steps < 1 or (across_steps > 1 and length_index is None):
        raise LoaderError(
            f"across_steps={across_steps} deals out samples before they are read: pass 1 or more, and length_index="
        )
    _check_packing(model, packs=packs)
    kinds = _kinds_of_positions(inputs, packs=packs)
    images = _encoder_sharing(EncoderRows(encoder) if isinstance(encoder, str) else encoder, model, inputs, kinds)
    whole: frozenset[str] = frozenset() if packs else _whole_entries(inputs, images)
    keeps = images is None or (isinstance(images, EncoderSharing) and images.pieces is not None)
    planner = BatchPlanner(model.plan, packs=packs, uses_groups=keeps and not kinds)
    if model.plan.groups and not planner.groups:
        _LOGGER.warning(
            "the plan has groups of devices of unlike size, but all devices run one plan in every step, which takes "
            "longer than the plan says: batches with positions of several kinds, or with encoder= of images that a row "
            "can't be computed with alone (EncoderRows with lookup= or grids=), don't run in such groups"
        )
    maker = _row_maker(padding or {}, shifts, images, packs=packs, kinds=kinds, whole=whole)
    if images is not None:
        maker = replace(maker, is_encoder_optional=_is_optional(images.encoder, model))
    if not packs:
        maker = replace(maker, keeps_empty=_ignores_empty_rows(model, maker.packing.padding))
    sharing = Sharing(planner, model.data_rank, model.data_parallel_size, inputs.rank, images)
    made = remade(loader, f"Balanced{type(loader).__name__}", _Balanced)
    attributes: Any = made.__dict__
    attributes["call_inputs"] = inputs
    attributes["join_rows"] = dict.fromkeys(images.encoder.made, model.join_rows) if images else {}
    take = None
    if length_index is None:
        assert length is not None
        made.collate_fn = CollateBatch(sharing, maker, length)
    else:
        known = check_lengths(length_index, planner.longest, "a row of the plan", "sample {} of length_index")
        attributes["dataset"] = SamplesOfShare(given.dataset)
        made.collate_fn = CollateShare(maker)
        take = TakeShare(sharing, known, images.known_lengths(len(known)) if images else ())
        if across_steps > 1:
            attributes["batch_sampler"] = EvenSteps(attributes["batch_sampler"], known, planner, across_steps)
    if not is_stream:
        attributes["batch_sampler"] = sampled(attributes["batch_sampler"], AgreedDraws(inputs, sampler), take)
    return made


def _check_packing(model: ParallelModule, *, packs: bool) -> None:
    """Raise LoaderError if sequences of packed rows would attend to each other; warn if the plan expects others."""
    reason = why_not_packed(model.program.source) if packs else ""
    if reason:
        raise LoaderError(reason)
    expected = model.plan.prediction.lengths
    if expected.plans and expected.packs != packs:
        _LOGGER.warning(
            "the plan's expected step is that of packed rows, but with packs=False each sequence has a row of its own, "
            "so steps take longer than the plan says. It counts such rows if the example inputs have no position_ids"
        )


def _row_maker(
    padding: Mapping[str, float],
    shifts: str | Sequence[str] | None,
    images: EncoderSharing | GridSharing | None,
    *,
    packs: bool,
    kinds: int,
    whole: frozenset[str],
) -> RowMaker:
    shifted = (shifts,) if isinstance(shifts, str) else tuple(shifts or ())
    looked_up = {images.encoder.lookup: 0} if images and images.encoder.lookup else {}
    packing = RowPacking(
        {**_PADDING, **looked_up, **padding}, "position_ids" if packs else "", "" if packs else "attention_mask",
        shifted if packs else (), kinds, whole,
    )  # fmt: skip
    return RowMaker(packing, images)


def _ignores_empty_rows(model: ParallelModule, padding: Mapping[str, float]) -> bool:
    """Whether a padded row without a sequence counts for nothing, as its labels have what a cross entropy ignores.

    Any other loss, such as a mean over rows, or over places where the mask is 1, would count it.
    """
    ignored = ignored_labels(model.program.source)
    return bool(ignored) and all(padding.get(name) == index for name, index in ignored.items())


def _is_optional(encoder: EncoderRows, model: ParallelModule) -> bool:
    """Whether forward can be called without what `encoder` makes.

    One device then calls it so for a batch without any image: parameters of the encoder have no gradients, and
    optimizers leave them alone, where gradients of zeros would have AdamW go on moving them.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    names = [name for name in (*encoder.made, encoder.grids) if name]
    return all(
        parameters[name].default is not inspect.Parameter.empty if name in parameters else takes_any for name in names
    )


def _whole_entries(inputs: CallInputs, images: EncoderSharing | GridSharing | None) -> frozenset[str]:
    """The inputs of which a row has no entry for each of its tokens: ``[rows, ...]`` next to ``[rows, tokens]``."""
    forms = {name: shape for name, (shape, _) in inputs.example_forms.items()}
    first = next(iter(forms.values()), ())
    left_out = images.encoder.made if images else ()
    return frozenset(
        name
        for name, shape in forms.items()
        if name not in left_out and shape[:1] == first[:1] and shape[1:2] != first[1:2]
    )


def _kinds_of_positions(inputs: CallInputs, *, packs: bool) -> int:
    """How many kinds of positions the model takes behind those of the text, as ``[1 + kinds, rows, tokens]``.

    Raises:
        LoaderError: rows aren't packed, or there are as many of them as kinds.
    """
    forms = inputs.example_forms
    if "position_ids" not in forms:
        return 0
    first, shape = next(iter(forms.values()))[0], forms["position_ids"][0]
    kinds = shape[0] - 1 if len(shape) == 3 and shape[1:] == first[:2] else 0
    if kinds and not packs:
        raise LoaderError(
            f"the example has position_ids {list(shape)}, which autopar.balanced makes for packed rows only: leave "
            "packs=False out"
        )
    if kinds and shape[0] == shape[1]:
        raise LoaderError(
            f"the example has position_ids {list(shape)}, as many rows as kinds of positions, so it is not known which "
            f"dim has the rows: give the example another number of rows than {shape[0]}"
        )
    return kinds


def _encoder_sharing(
    encoder: EncoderRows | None, model: ParallelModule, inputs: CallInputs, kinds: int
) -> EncoderSharing | GridSharing | None:
    """What distributes the rows of `encoder`, by the example inputs of `model`.

    Raises:
        LoaderError: it has no such inputs, or they come first.
    """
    if encoder is None:
        return None
    known = inputs.example_forms
    missing = [name for name in (*encoder.made, encoder.lookup, encoder.grids) if name and name not in known]
    if missing:
        raise LoaderError(
            f"the encoder reads {missing}, but the example inputs of the model are {list(known)}: parallelize it with "
            "rows of the encoder next to rows of text"
        )
    if next(iter(known)) in encoder.made:
        raise LoaderError(
            f"the rows of a batch are those of the first input of forward, here {next(iter(known))!r}, which is the "
            "encoder's: let forward take an input of the text first"
        )
    forms = {name: known[name] for name in encoder.names}
    if any(len(shape) < 2 for shape, _ in forms.values()):
        raise LoaderError(f"inputs of an encoder are [rows, ...] with another dim, but the example has {forms}")
    ranks, grids = model.data_parallel_size, inputs.read_values.get(encoder.grids, ())
    if encoder.grids and not grids:
        raise LoaderError(
            f"EncoderRows(grids={encoder.grids!r}) is for models whose forward reads it in Python, but this one reads "
            f"{list(inputs.read_values)}: leave grids= out"
        )
    # The plan of the example may split the encoder over as many devices as divide the example's rows, or images.
    rows = len(grids) // 3 if grids else next(iter(forms.values()))[0][0]
    parts = math.lcm(ranks, math.gcd(rows, model.plan.group_size))
    if not grids:
        pieces = row_pieces(model.program.source)
        has_pieces = pieces is not None and set(pieces.inputs) == set(encoder.made)
        return EncoderSharing(encoder, forms, model.data_rank, ranks, parts, pieces if has_pieces else None)
    positions = "position_ids" if kinds else ""
    merged = _merged_patches(model, next(iter(forms.values()))[0][0])
    return GridSharing(encoder, forms, model.data_rank, ranks, parts, tuple(grids[:3]), positions, merged)


def _merged_patches(model: ParallelModule, patches: int) -> int:
    """How many of the example's `patches` become one of the rows that its program puts in the text; 0: not known, or
    the model takes no other order of them.
    """
    program = model.program.source
    ops = (op for layer in program.layers for op in layer.ops if op.target == "aten.masked_scatter.default")
    sizes = {program.type_of(op.operands[2]).shape[0] for op in ops}
    features = sizes.pop() if len(sizes) == 1 else 0
    if not features or patches % features:
        return 0
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    return patches // features if inspect.Parameter.VAR_KEYWORD in kinds else 0


def _check_arguments(loader: Any, length: Any, index: Any, shifts: Any, *, is_stream: bool) -> None:
    if (length is None) == (index is None):
        raise LoaderError(
            "say how long samples are, in one way: balanced(..., length=lambda sample: len(sample['input_ids'])), or "
            "length_index= with the length of every sample of the dataset"
        )
    if shifts is None:
        raise LoaderError(
            "in a packed row the last place of a sequence must not predict the first token of the next: pass "
            "shifts='labels' if the model moves labels by a place itself, as causal language models of transformers "
            "do; shifts=() if labels belong to the places that they are at"
        )
    if is_stream and index is not None:
        raise LoaderError("an iterable dataset has no sample numbers, which length_index= goes by: pass length=")
    if index is not None and len(index) != len(loader.dataset):
        raise LoaderError(
            f"length_index has {len(index)} lengths, but the dataset has {len(loader.dataset)} samples: pass one each"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise LoaderError("the loader gives single samples (batch_size=None): balancing needs the samples of a batch")


class _Balanced(WithEpochs):
    """What the class of a balanced loader has in addition."""

    call_inputs: CallInputs
    join_rows: Mapping[str, Callable[[Tensor], Tensor]]

    def __iter__(self) -> Iterator[Any]:
        base: Any = super()
        return _Compared(base.__iter__(), self.call_inputs, self.join_rows)


class _Compared:
    """Batches of a loader, of which all ranks are to have their shares."""

    def __init__(
        self,
        base: Iterator[tuple[Dealt, Any]],
        inputs: CallInputs,
        join_rows: Mapping[str, Callable[[Tensor], Tensor]],
    ) -> None:
        self._base = base
        self._inputs = inputs
        self._join_rows = join_rows
        self._number = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        failed: Exception | None = None
        dealt = Dealt(_END)
        batch: dict[str, Tensor] = {}
        try:
            dealt, batch = next(self._base)
        except StopIteration:
            pass
        except LengthError as error:
            failed = LengthError(f"batch {self._number + 1} of a balanced loader: {error}")
        except Exception as error:  # noqa: BLE001  (raised below, where other ranks hear of it)
            failed = error

        def find() -> tuple[int]:
            if failed is not None:
                raise failed
            return (dealt.digest,)

        known = [digest for (digest,) in self._inputs.numbers_of_ranks("batch {} of a balanced loader", find)]
        self._number += 1
        _check_same_batch(known, self._number)
        if dealt.digest == _END:
            raise StopIteration
        self._inputs.dealt = dealt
        forms = self._inputs.example_forms  # images that stay with their text have a dim more
        joined = {
            name: join(batch[name])
            for name, join in self._join_rows.items()
            if name in batch and batch[name].dim() == len(forms[name][0])
        }
        return {**batch, **joined}


def _check_same_batch(digests: Sequence[int], number: int) -> None:
    """Raise on every rank unless all ranks share out the same batch."""
    if len(set(digests)) == 1:
        return
    ended = [rank for rank, digest in enumerate(digests) if digest == _END]
    if ended:
        going = [rank for rank in range(len(digests)) if rank not in ended]
        raise LoaderError(
            f"the loader of ranks {ended} ended before batch {number}, which ranks {going} have: give every rank the "
            "same dataset, sampler and batch size, and no share of its own"
        )
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    raise LengthError(
        f"in batch {number} rank {other} has other samples or lengths than rank 0, so they would be shared out in "
        "another way: give every rank the same dataset, lengths and shuffle"
    )
