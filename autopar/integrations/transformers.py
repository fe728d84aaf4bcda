"""`AutoparTrainer`: the Trainer of transformers on all devices, with the numbers of one device.

To the Trainer there is one device: every rank goes through the same whole batches, so its own way of counting tokens,
accumulating, logging, evaluating and skipping batches when it resumes is right as it is.  Left to do are the model, the
files that rank 0 writes, and the optimizer's state, which is sharded over all ranks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import TrainerError
from autopar.integrations.accelerate import AutoparAccelerator
from autopar.integrations.packages import optional
from autopar.integrations.parallel_model import (
    count_ranks,
    draws_kept,
    exchange_parameters,
    first_batch,
    give_back,
    inputs_of_call,
    load_optimizer,
    own_rank,
    parallelize_over_ranks,
    save_optimizer,
    share_draws,
    wait_for_ranks,
)
from autopar.lower import ParallelModule

__all__ = ["AutoparSeq2SeqTrainer", "AutoparTrainer", "AutoparTrainerMixin"]

_transformers = optional("transformers", "transformers[torch]")
_Trainer: type[Any] = _transformers.Trainer
_Seq2SeqTrainer: type[Any] = _transformers.Seq2SeqTrainer
_NO: Any = optional("accelerate", "transformers[torch]").DistributedType.NO

_OPTIMIZER_FOLDER = "autopar_optimizer"
_PARAMETER_GROUPS = ("params", "model", "optimizer_dict")  # in which trainers pass parameters with other arguments

_MODEL_CHANGES = {
    "activation_checkpointing": "the plan decides what is computed again: parallelize_kwargs={'memory': ...} or "
    "{'constraints': ['recompute=full']}",
    "gradient_checkpointing": "the plan decides what is computed again: parallelize_kwargs={'memory': ...} or "
    "{'constraints': ['recompute=full']}",
    "torch_compile": "parallelize_kwargs={'compile': True}",
    "neftune_noise_alpha": "add the noise in the model, before it is passed",
    "use_liger_kernel": "leave it out",
    "auto_find_batch_size": "a plan fits, or says the smallest memory that would do: choose the batch size",
    "fp16": "bf16=True",
    "fp16_full_eval": "bf16=True, which evaluates in the same precision",
    "bf16_full_eval": "bf16=True, which evaluates in the same precision",
    "deepspeed": "leave it out",
    "fsdp": "leave it out",
    "parallelism_config": "parallelize_kwargs={'constraints': ['tensor=2']}, say",
}
"""Training arguments that change, wrap or split the model, and what does so with a plan."""


class _OneProcess:
    """accelerate's state of the processes, as that of one: its batches are whole.  Only rank 0 writes and logs."""

    num_processes = 1
    distributed_type = _NO

    def __init__(self, state: Any, rank: int, local_rank: int) -> None:
        self.state = state
        self.process_index = rank
        self.local_process_index = local_rank
        self.is_main_process = rank == 0
        self.is_local_main_process = local_rank == 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.state, name)


class AutoparTrainerMixin:
    """Makes a Trainer, or a subclass of it, train on all ranks: ``class Mine(AutoparTrainerMixin, MyTrainer)``.

    The model is parallelized when the trainer is made, for a batch of the training dataset; ``trainer.model.plan`` is
    the plan.  A batch has ``per_device_train_batch_size`` times the number of ranks rows, as with any other Trainer
    (with ``accelerator_config={"split_batches": True}``, ``per_device_train_batch_size`` rows).  On one process it is
    the Trainer that it extends, whose checkpoints go on on any number of ranks.

    Args:
        parallelize_kwargs: arguments of `autopar.parallelize`, such as ``{"constraints": ["tensor=2"]}``;
            ``"example_inputs"`` among them take the place of the training dataset's first batch.
        all others: as of the Trainer.

    Raises:
        TrainerError: a training argument changes, wraps or splits the model, which the plan does.
    """

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, parallelize_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._parallelize_kwargs = dict(parallelize_kwargs or {})
        self._num_parameters = 0
        self._original: weakref.ref[nn.Module] | None = None
        untyped: Any = super()
        untyped.__init__(*args, **kwargs)
        if count_ranks() > 1:
            own: Any = self
            own._train_batch_size = self.args.train_batch_size
            original = self.model
            self._original = weakref.ref(original)
            self.model = self.model_wrapped = self._parallelize(original)
            own.callback_handler.model = self.model
            if self.optimizer is not None:  # the caller's, of the original's parameters
                exchange_parameters(self.optimizer, (original, self.model))

    # --- the model

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's, of which the view of one process is made here, before the Trainer looks at it."""
        untyped: Any = super()
        given = self.args
        given.device  # noqa: B018  (reading it joins the processes)
        if count_ranks() > 1:
            _check(given)
            self._given_args = given
            self.args = _of_one_device(given)
        untyped.create_accelerator_and_postprocess()
        if count_ranks() > 1:
            self.accelerator = AutoparAccelerator.of(self.accelerator, self._parallelize_kwargs)
            own: Any = self
            own.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Each rank holds parts only, which parallelize puts on its device."""
        untyped: Any = super()
        if count_ranks() == 1:
            untyped._move_model_to_device(model, device)

    def call_model_init(self, trial: Any = None) -> Any:
        """The Trainer's; train() makes the model anew with it, to be parallelized anew."""
        untyped: Any = super()
        made = untyped.call_model_init(trial)
        return self._parallelize(made) if isinstance(getattr(self, "model", None), ParallelModule) else made

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, on ranks that draw the same numbers: some trainers seed each process by its number.

        The model that the trainer was made with then has the values that training gave, as on one process.
        """
        share_draws(self.args.device)
        untyped: Any = super()
        result = untyped.train(*args, **kwargs)
        if isinstance(self.model, ParallelModule) and self._original is not None:
            give_back(self.model, self._original())
        return result

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, on one process."""
        if count_ranks() > 1:
            raise TrainerError(
                "hyperparameter_search() on several ranks would search on each of them: run every trial as a training "
                "of its own, or search on one process"
            )
        untyped: Any = super()
        return untyped.hyperparameter_search(*args, **kwargs)

    def _parallelize(self, model: nn.Module) -> Any:
        if isinstance(model, ParallelModule):
            return model
        options = dict(self._parallelize_kwargs)
        if self.args.bf16:
            options.setdefault("precision", "bf16")
        own: Any = self
        known: Any = own.optimizer_cls_and_kwargs if own.optimizer is None else (type(own.optimizer), {})
        kind, found = known or own.get_optimizer_cls_and_kwargs(self.args, model)
        kwargs = {name: value for name, value in found.items() if name not in _PARAMETER_GROUPS}
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            options.setdefault("optimizer", functools.partial(kind, **kwargs))
        if hasattr(model, "num_parameters"):
            untyped: Any = model
            self._num_parameters = untyped.num_parameters(exclude_embeddings=True)
        model.train()  # as train() will
        return parallelize_over_ranks(model, self.args.device, self._example_inputs, options)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; where it was made of a loss that has the model that was passed, of the parallel one's."""
        untyped: Any = super()
        made = untyped.create_optimizer(*args, **kwargs)
        original = None if self._original is None else self._original()
        if isinstance(self.model, ParallelModule) and original is not None and not _inner(made).state:
            exchange_parameters(_inner(made), (original, self.model), others=True)
        return made

    def _example_inputs(self) -> dict[str, Any] | tuple[Any, ...]:
        """What `compute_loss` calls the model with on the whole first batch: that of train(), in its order."""
        own: Any = self
        dataset: Any = own.eval_dataset if own.train_dataset is None else own.train_dataset
        if hasattr(dataset, "values"):  # several to evaluate on
            dataset = next(iter(dataset.values()), None)
        if dataset is None:
            raise TrainerError(
                "the trainer has neither train_dataset nor eval_dataset, so there are no example inputs to plan with: "
                "pass one, or parallelize_kwargs={'example_inputs': ...}"
            )
        if dataset is own.train_dataset:
            loader = own.get_train_dataloader()
        else:
            loader = own._get_dataloader(dataset, "Example", self.args.train_batch_size)
        first = first_batch(loader, self.args.device)
        if not isinstance(first, Mapping):
            raise TrainerError(
                f"batches of this trainer are a {type(first).__name__}, so that what its model is called with is not "
                "known before it trains: pass parallelize_kwargs={'example_inputs': {'input_ids': ids, ...}}, with all "
                "that compute_loss passes to the model"
            )
        with draws_kept(self.args.device):
            batch = dict(own._prepare_inputs(first))
        count = own._get_num_items_in_batch([batch], self.args.device)
        called: dict[str, Any] | tuple[Any, ...] | None = inputs_of_call(
            self.model,
            lambda: own.compute_loss(self.model, dict(batch), num_items_in_batch=count),
            self.args.device,
        )
        if isinstance(called, dict) and batch.keys() & set(own.label_names) <= called.keys():
            return called
        if called and not _takes(self.model, batch):
            return called
        # compute_loss keeps the labels, and the loss, to itself: the plan is for the model's own loss where it has one.
        if own.model_accepts_loss_kwargs and count is not None:
            batch["num_items_in_batch"] = count
        return batch

    def floating_point_ops(self, inputs: dict[str, Any] | list[Any]) -> float:
        """The Trainer's, of all parameters, not only those of this rank's stages."""
        untyped: Any = super()
        if not isinstance(self.model, ParallelModule):
            return untyped.floating_point_ops(inputs)
        name = getattr(self.model, "main_input_name", "input_ids")
        # A list holds prompts, from which inputs are yet to be made.
        x: Any = inputs.get(name) if isinstance(inputs, Mapping) else None
        return 0 if x is None else 6 * x.numel() * self._num_parameters

    # --- data

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, with workers that draw the same numbers on all ranks, so that batches are equal."""
        untyped: Any = super()
        with self._args_of_first_rank():
            return untyped._get_dataloader(*args, **kwargs)

    @contextmanager
    def _args_of_first_rank(self) -> Generator[None]:
        before = self.args
        if count_ranks() > 1:
            self.args = copy.copy(before)
            self.args.distributed_state = _OneProcess(before.distributed_state.state, 0, 0)
        try:
            yield
        finally:
            self.args = before

    # --- files

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The Trainer's, with whole weights: rank 0 writes, and every rank returns when it has."""
        untyped: Any = super()
        if not isinstance(self.model, ParallelModule):
            untyped._save(output_dir, state_dict)
            return
        mine, self.args = self.args, self._given_args  # which are what is to be saved
        saving: Any = self.model
        try:
            with saving._saving_whole() as is_writer:
                if is_writer:
                    with _writing_by_itself(saving):
                        untyped._save(output_dir, state_dict)
        finally:
            self.args = mine

    def _save_rng_state(self, output_dir: str) -> None:
        """The Trainer's: generators have the same state on all ranks."""
        untyped: Any = super()
        if own_rank() == 0:
            untyped._save_rng_state(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """State by names of parameters, of all ranks, for any number of them."""
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_optimizer(self.model, _inner(self.optimizer), str(Path(output_dir, _OPTIMIZER_FOLDER)))
        if own_rank() == 0:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))
        wait_for_ranks()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """What `_save_optimizer_and_scheduler` saved."""
        if checkpoint is None:
            return
        folder = Path(checkpoint, _OPTIMIZER_FOLDER)
        if not folder.exists():
            raise TrainerError(
                f"{checkpoint} has no {_OPTIMIZER_FOLDER!r}: another Trainer saved it, whose optimizer's state can't "
                "be loaded. Load its weights with from_pretrained() and begin anew, or resume from a checkpoint of an "
                "AutoparTrainer, which may have run on one process"
            )
        load_optimizer(self.model, _inner(self.optimizer), str(folder))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))


class AutoparTrainer(AutoparTrainerMixin, _Trainer):
    """transformers' ``Trainer`` on all ranks that torchrun started.

    Example:
        >>> trainer = AutoparTrainer(model=model, args=args, train_dataset=train, eval_dataset=held_out)
        >>> trainer.train()
    """


class AutoparSeq2SeqTrainer(AutoparTrainerMixin, _Seq2SeqTrainer):
    """transformers' ``Seq2SeqTrainer`` likewise."""


def _takes(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a batch has the arguments of the model's forward."""
    try:
        inspect.signature(model.forward).bind(**batch)
    except TypeError:
        return False
    return True


def _check(args: Any) -> None:
    for name, instead in _MODEL_CHANGES.items():
        if getattr(args, name, None):
            raise TrainerError(f"{name}={getattr(args, name)!r} has no place in a model that runs a plan: {instead}")
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise TrainerError(
            "train_sampling_strategy='batch_rebalance' gives ranks batches of their own, and here all ranks pass the "
            "same whole batch: use 'group_by_length'"
        )


def _of_one_device(given: Any) -> Any:
    """The training arguments of a single device with the same batches."""
    args = copy.copy(given)
    if not _splits(given):
        args.per_device_train_batch_size *= count_ranks()
        args.per_device_eval_batch_size *= count_ranks()
    local = given.local_process_index if given.distributed_state.num_processes > 1 else own_rank()
    args.distributed_state = _OneProcess(given.distributed_state, own_rank(), local)
    return args


def _splits(args: Any) -> bool:
    return bool(getattr(args.accelerator_config, "split_batches", False))


def _inner(optimizer: Any) -> Any:
    """The optimizer itself, without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return vars(module)


@contextmanager
def _writing_by_itself(model: Any) -> Generator[None]:
    """Inside, `save_pretrained` of the original's class writes what `state_dict` gives, without other ranks."""
    own = _attributes(model)
    original = next((c for c in type(model).__mro__[1:] if hasattr(c, "save_pretrained")), None)
    if original is not None:
        untyped: Any = original
        own["save_pretrained"] = functools.partial(untyped.save_pretrained, model)
    try:
        yield
    finally:
        own.pop("save_pretrained", None)
