"""`AutoparAccelerator`: an accelerate `Accelerator` whose models are parallelized by autopar.

Every process goes through the same whole batches, as one device does: to the script there is one process, and autopar
distributes the work inside of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from autopar.errors import TrainerError
from autopar.integrations.packages import optional
from autopar.integrations.parallel_model import (
    count_ranks,
    exchange_parameters,
    first_batch,
    load_model,
    load_optimizer,
    own_rank,
    parallelize_over_ranks,
    save_model,
    save_optimizer,
    share_draws,
    wait_for_ranks,
)
from autopar.lower import ParallelModule
from autopar.lower.compat import leaves_of, map_leaves

__all__ = ["AutoparAccelerator"]

_accelerate = optional("accelerate", "accelerate")
_Accelerator: type[Any] = _accelerate.Accelerator
_NO: Any = _accelerate.DistributedType.NO

_SAVES_WITHIN_S = 60.0  # ranks come to a checkpoint within seconds of each other
_BARRIER_S = 1800.0  # torch's time limit for a barrier
_ALL_RANKS = (
    "each has a part of the model, so no rank saves, loads or calls it alone. Take what uses the model out of "
    "`if accelerator.is_main_process:`, or have such blocks run on every rank: "
    "AutoparAccelerator(every_rank_is_main=True)"
)


class AutoparAccelerator(_Accelerator):
    """An `accelerate.Accelerator`, used as that of one process.

    Args:
        args: as of `Accelerator`.
        parallelize_kwargs: arguments of `autopar.parallelize`, such as ``{"constraints": ["tensor=2"]}``.  Without
            ``"example_inputs"`` the first batch of the first loader that is prepared with the model is the example.
            Several models in one `prepare` need a list of them, one for each in order; None: a model stays as it is.
        every_rank_is_main: `is_main_process` is true on every rank.  Scripts save, evaluate and generate with the model
            in blocks for the main process, and each rank has a part of the model only; files that such blocks write are
            then written by every rank, equally.
        kwargs: as of `Accelerator`.  ``mixed_precision="bf16"`` is what the plan computes in.

    Raises:
        TrainerError: another mixed precision.
    """

    parallelize_kwargs: Mapping[str, Any] = {}
    every_rank_is_main: bool = False
    _prepares_loader = False

    def __init__(
        self,
        *args: Any,
        parallelize_kwargs: Mapping[str, Any] | None = None,
        every_rank_is_main: bool = False,
        **kwargs: Any,
    ) -> None:
        untyped: Any = super()
        self.every_rank_is_main = every_rank_is_main
        untyped.__init__(*args, **kwargs)
        # Scripts need no seed: accelerate sends weights, and has each rank draw its own batches.
        share_draws(self.device)
        self._begin(parallelize_kwargs)

    def _begin(self, parallelize_kwargs: Mapping[str, Any] | None) -> None:
        self.parallelize_kwargs = dict(parallelize_kwargs or {})
        if count_ranks() > 1 and self.mixed_precision not in ("no", "bf16"):
            raise TrainerError(
                f"mixed_precision={self.mixed_precision!r} is accelerate's own: a parallelized model computes in "
                "'bf16' or, with 'no', in the dtype of its parameters"
            )

    @classmethod
    def of(cls, accelerator: Any, parallelize_kwargs: Mapping[str, Any]) -> AutoparAccelerator:
        """The same accelerator, nothing prepared yet, as one of this class."""
        made: Any = object.__new__(cls)
        made.__dict__.update(vars(accelerator))
        made._begin(parallelize_kwargs)
        return made

    # --- to the script there is one process

    @property
    def num_processes(self) -> int:
        """One, which is why batches, their sizes, schedulers and what is gathered are those of one device."""
        return 1

    @property
    def distributed_type(self) -> Any:
        """That nothing is distributed by accelerate."""
        return _NO

    @property
    def split_batches(self) -> bool:
        """That the batch size of a loader is that of all processes together."""
        return not self._prepares_loader

    @property
    def process_index(self) -> int:
        """The rank, for whoever writes or logs."""
        return own_rank()

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, or any with `every_rank_is_main`."""
        return self.every_rank_is_main or own_rank() == 0

    def gather(self, tensor: Any) -> Any:
        """The same: every process has the whole."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Likewise, as one process does it: without what a loader repeats to fill its last batch."""
        is_tensors = all(isinstance(x, torch.Tensor) for x in leaves_of(input_data))
        untyped: Any = super()
        return untyped.gather_for_metrics(input_data) if is_tensors and not use_gather_object else input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Likewise, scaled as accelerate scales sums."""
        return map_leaves(lambda x: x * scale if isinstance(x, torch.Tensor) else x, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Likewise."""
        return tensor

    def wait_for_everyone(self) -> None:
        """As `Accelerator.wait_for_everyone`.

        Raises:
            RankError: another rank calls a parallelized model meanwhile, and would wait for this one.
        """
        self._meet("accelerator.wait_for_everyone()", _BARRIER_S)
        untyped: Any = super()
        untyped.wait_for_everyone()

    def _meet(self, what: str, within_s: float) -> None:
        own: Any = self
        parallel: list[Any] = [model for model in own._models if isinstance(model, ParallelModule)]
        for model in parallel[:1]:
            model._meet(what, within_s, _ALL_RANKS)

    # --- preparing

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As `Accelerator.prepare`; optimizers that were made of a model's parameters then train the parallel ones."""
        models = [each for each in args if isinstance(each, nn.Module) and not isinstance(each, ParallelModule)]
        untyped: Any = super()
        if count_ranks() == 1 or not models:
            return untyped.prepare(*args, device_placement=device_placement)
        share_draws(self.device)
        loaders: list[Any] = [each for each in args if isinstance(each, torch.utils.data.DataLoader)]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        made: dict[int, Any] = {}
        for model, options in zip(models, self._options(models), strict=True):
            if options is not None:
                made[id(model)] = self.parallelize(model, loaders, _optimizers_of(model, optimizers), options)
        for optimizer in optimizers:
            exchange_parameters(optimizer, *((model, made[id(model)]) for model in models if id(model) in made))
        return untyped.prepare(*(made.get(id(x), x) for x in args), device_placement=device_placement)

    def _options(self, models: list[nn.Module]) -> list[dict[str, Any] | None]:
        """Arguments of `autopar.parallelize` for each model; None for one that stays as it is."""
        options = dict(self.parallelize_kwargs)
        if len(models) == 1:
            return [options]
        examples: Any = options.pop("example_inputs", ())
        if not isinstance(examples, list | tuple) or len(cast("list[Any]", examples)) != len(models):
            raise TrainerError(
                f"prepare() got {len(models)} models: pass example inputs of each, in their order, "
                "AutoparAccelerator(parallelize_kwargs={'example_inputs': [...]}), with None for a model that stays as "
                "it is, or pass each with its optimizer and a loader to a prepare() of its own"
            )
        return [None if x is None else {**options, "example_inputs": x} for x in cast("list[Any]", examples)]

    def parallelize(self, model: nn.Module, loaders: Any, optimizers: Any, options: dict[str, Any]) -> Any:
        """The parallel model, for these loaders and optimizers."""
        if self.mixed_precision == "bf16":
            options.setdefault("precision", "bf16")
        if optimizers:
            options.setdefault("optimizer", type(optimizers[0]))
        return parallelize_over_ranks(model, self.device, functools.partial(_example, loaders, self.device), options)

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.prepare_data_loader` on one process, where loaders may have no batch size."""
        untyped: Any = super()
        self._prepares_loader = True
        try:
            return untyped.prepare_data_loader(*args, **kwargs)
        finally:
            self._prepares_loader = False

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """As `Accelerator.prepare_model`; a parallel model stays as it is."""
        if not isinstance(model, ParallelModule):
            untyped: Any = super()
            return untyped.prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        if not any(each is model for each in self._models):
            self._models.append(model)
        return model

    # --- training and saving

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As `Accelerator.clip_grad_norm_`, of gradients that lie on all ranks."""
        listed = list(parameters)
        for model in self._models:
            if isinstance(model, ParallelModule):
                own = list(model.parameters())
                if len(own) == len(listed) and all(x is y for x, y in zip(own, listed, strict=True)):
                    return model.clip_grad_norm_(max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(listed, max_norm, norm_type)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Whole tensors on rank 0, nothing on others; every rank calls it."""
        if isinstance(model, ParallelModule):
            return model.full_state_dict(rank=0)
        untyped: Any = super()
        return untyped.get_state_dict(model, unwrap=unwrap)

    @contextmanager
    def _models_aside(self) -> Generator[tuple[list[Any], list[Any]]]:
        """Inside, accelerate knows of no models, optimizers and hooks; gives those that there are."""
        own: Any = self
        names = ("_models", "_optimizers", "_save_model_state_pre_hook", "_load_model_state_pre_hook")
        before = {name: getattr(own, name) for name in names}
        for name, each in before.items():
            setattr(own, name, type(each)())
        try:
            yield before["_models"], [getattr(each, "optimizer", each) for each in before["_optimizers"]]
        finally:
            for name, each in before.items():
                setattr(own, name, each)

    @contextmanager
    def _in_hooks(self, models: list[Any]) -> Generator[None]:
        """Inside, every rank does what hooks have the main process do, and states of models are whole."""
        parallel = [model for model in models if isinstance(model, ParallelModule)]
        before, self.every_rank_is_main = self.every_rank_is_main, True
        for model in parallel:
            vars(model)["state_dict"] = model.full_state_dict
        try:
            yield
        finally:
            self.every_rank_is_main = before
            for model in parallel:
                vars(model).pop("state_dict", None)

    def _run_save_hooks(self, models: list[Any], folder: str) -> list[Any]:
        """Run the hooks before a save, as accelerate does; gives the models whose weights they leave to be saved."""
        own: Any = self
        given = [model.state_dict() for model in models]
        left = list(given)
        with self._in_hooks(models):
            for hook in own._save_model_state_pre_hook.values():
                hook(models, left, folder)
        return [model for model, state in zip(models, given, strict=True) if any(state is x for x in left)]

    def _run_load_hooks(self, models: list[Any], folder: str) -> list[Any]:
        """Run the hooks before a load, as accelerate does; gives the models that they leave to be loaded."""
        own: Any = self
        left = list(models)
        with self._in_hooks(models):
            for hook in own._load_model_state_pre_hook.values():
                hook(left, folder)
        return left

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As `Accelerator.save_state`, of all ranks: models and optimizers lie in folders, by names of parameters.

        Hooks of ``register_save_state_pre_hook`` run on every rank.
        """
        untyped: Any = super()
        self._meet("accelerator.save_state()", _SAVES_WITHIN_S)
        with self._models_aside() as (models, optimizers):
            where = untyped.save_state(output_dir, safe_serialization, **kwargs)
        for number, model in enumerate(self._run_save_hooks(models, where)):
            save_model(model, str(Path(where, f"autopar_model_{number}")))
        for number, (model, optimizer) in enumerate(_pairs(models, optimizers)):
            save_optimizer(model, optimizer, str(Path(where, f"autopar_optimizer_{number}")))
        wait_for_ranks()
        return where

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load what `save_state` of this class saved, by any number of ranks."""
        untyped: Any = super()
        if input_dir is None:
            raise TrainerError("load_state() of a parallelized model needs its folder: load_state('checkpoint')")
        self._meet("accelerator.load_state()", _SAVES_WITHIN_S)
        with self._models_aside() as (models, optimizers):
            untyped.load_state(input_dir, load_kwargs, **kwargs)
        for number, model in enumerate(self._run_load_hooks(models, input_dir)):
            load_model(model, str(Path(input_dir, f"autopar_model_{number}")))
        for number, (model, optimizer) in enumerate(_pairs(models, optimizers)):
            load_optimizer(model, optimizer, str(Path(input_dir, f"autopar_optimizer_{number}")))
        share_draws(self.device)


def _optimizers_of(model: nn.Module, optimizers: Any) -> list[Any]:
    """Those that have parameters of a model."""
    own = {id(p) for p in model.parameters()}
    return [each for each in optimizers if any(id(p) in own for group in each.param_groups for p in group["params"])]


def _pairs(models: Any, optimizers: Any) -> list[tuple[Any, Any]]:
    """Each optimizer with the model whose parameters it has."""
    owners = [{id(p) for p in model.parameters()} for model in models]
    pairs: list[tuple[Any, Any]] = []
    for optimizer in optimizers:
        listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
        model = next((m for m, owned in zip(models, owners, strict=True) if all(x in owned for x in listed)), None)
        if model is None:
            raise TrainerError(f"the {type(optimizer).__name__} has parameters of no prepared model, or of several")
        pairs.append((model, optimizer))
    return pairs


def _example(loaders: Any, device: torch.device) -> Any:
    if not loaders:
        raise TrainerError(
            "prepare() got a model without a DataLoader, so there are no example inputs to plan with: pass the loader "
            "with it, or AutoparAccelerator(parallelize_kwargs={'example_inputs': ...})"
        )
    return first_batch(loaders[0], device)
