"""`AutoparStrategy`: a Lightning strategy whose model is parallelized by autopar.

Every rank goes through the same whole batches, as one device does; so losses, metrics and what a `LightningModule`
computes around its model are those of one device on every rank.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import TrainerError
from autopar.integrations.packages import optional
from autopar.integrations.parallel_model import (
    count_ranks,
    draws_kept,
    first_batch,
    inputs_of_call,
    load_optimizer,
    own_rank,
    parallelize_over_ranks,
    save_optimizer,
    wait_for_ranks,
)
from autopar.lower import ParallelModule

__all__ = ["AutoparStrategy"]

_pytorch = optional("lightning.pytorch", "lightning")
_launchers = optional("lightning.pytorch.strategies.launchers", "lightning")
_distributed = optional("lightning.fabric.utilities.distributed", "lightning")
_rank_zero = optional("lightning.pytorch.utilities.rank_zero", "lightning")
_ParallelStrategy: type[Any] = optional("lightning.pytorch.strategies", "lightning").ParallelStrategy


class AutoparStrategy(_ParallelStrategy):
    """``lightning.Trainer(strategy=AutoparStrategy(), devices=8)``: one module of the `LightningModule`, on all ranks.

    The module is parallelized when `fit` begins, for the arguments that `training_step` calls it with on the first
    batch.  Loaders, with the batch size of all ranks together, are those of one device.

    Args:
        module: the name of the module in the `LightningModule`; None: the only child that has parameters.
        parallelize_kwargs: arguments of `autopar.parallelize`, such as ``{"constraints": ["tensor=2"]}``.
        kwargs: as of `lightning.pytorch.strategies.ParallelStrategy`.

    Raises:
        TrainerError: the module to parallelize, or what it is called with, can't be found out.
    """

    is_distributed = False  # by which Lightning decides to give each rank samples of its own
    strategy_name = "autopar"

    def __init__(
        self, module: str | None = None, *, parallelize_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        untyped: Any = super()
        untyped.__init__(**kwargs)
        self._name = module
        self._parallelize_kwargs = dict(parallelize_kwargs or {})
        self._loaded = ""
        self.num_nodes = 1

    # --- processes

    @property
    def root_device(self) -> torch.device:
        """This rank's."""
        own: Any = self
        return own.parallel_devices[own.local_rank]

    @property
    def num_processes(self) -> int:
        """On this node."""
        own: Any = self
        return len(own.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank draws all samples."""
        return {"num_replicas": 1, "rank": 0}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """What is loaded goes into the parallel module."""
        return True

    def _configure_launcher(self) -> None:
        own: Any = self
        if not own.cluster_environment.creates_processes_externally:
            kind = _launchers._SubprocessScriptLauncher
            self._launcher = kind(own.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the processes."""
        untyped: Any = super()
        own: Any = self
        untyped.setup_environment()
        environment = own.cluster_environment
        environment.set_global_rank(own.node_rank * self.num_processes + own.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        _rank_zero.rank_zero_only.rank = own.global_rank
        if not dist.is_initialized():
            backend = _distributed._get_default_process_group_backend_for_device(self.root_device)
            _distributed._init_dist_connection(environment, backend)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        wait_for_ranks()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of one rank, on all."""
        if count_ranks() == 1:
            return obj
        objects = [obj]
        untyped: Any = dist
        untyped.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The same: every rank has the number of the whole batch."""
        return tensor

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """The same: every rank has the whole."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """That of rank 0, as clocks and files may differ."""
        return self.broadcast(decision)

    # --- the model

    def setup(self, trainer: Any) -> None:
        """Parallelize the module, then let Lightning make optimizers of its parameters."""
        own: Any = self
        own.accelerator.setup(trainer)
        is_fit = str(trainer.state.fn.value) == "fit"
        # Before there is a plan, which is for parameters of that dtype; where it runs already, there is nothing to do.
        if not self._parallel():
            own.precision_plugin.convert_module(own.lightning_module)
        if count_ranks() > 1 and is_fit:
            self._parallelize(trainer)
        self.model_to_device()
        own.model = own.lightning_module
        if is_fit:
            own.setup_optimizers(trainer)
        own.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move what is not parallelized."""
        own: Any = self
        own.lightning_module.to(self.root_device)

    def _parallelize(self, trainer: Any) -> None:
        around: nn.Module = trainer.lightning_module
        path = self._find(around)
        module = around.get_submodule(path)
        if isinstance(module, ParallelModule):
            return
        around.train()
        made = parallelize_over_ranks(
            module, self.root_device, lambda: self._example(trainer, module), self._parallelize_kwargs
        )
        parent, _, name = path.rpartition(".")
        setattr(around.get_submodule(parent), name, made)

    def _find(self, around: nn.Module) -> str:
        if self._name is not None:
            return self._name
        names = [name for name, child in around.named_children() if any(True for _ in child.parameters())]
        if len(names) != 1:
            raise TrainerError(
                f"{type(around).__name__} has {len(names)} modules with parameters ({', '.join(names)}): say which one "
                "is to be parallelized, as AutoparStrategy(module='model'); one that has them all is best"
            )
        return names[0]

    def _example(self, trainer: Any, module: nn.Module) -> Any:
        """What `training_step` calls `module` with."""
        own: Any = self
        around: Any = trainer.lightning_module
        trainer.fit_loop.setup_data()
        batch = own.precision_plugin.convert_input(first_batch(trainer.train_dataloader, self.root_device))
        batch = own.batch_to_device(batch, self.root_device)
        takes_index = len(inspect.signature(around.training_step).parameters) > 1
        arguments = (batch, 0) if takes_index else (batch,)
        with self._optimizers_of_the_original(trainer):
            example = inputs_of_call(module, lambda: around.training_step(*arguments), self.root_device)
        if example is not None:
            return example
        raise TrainerError(
            f"training_step() did not call the {type(module).__name__}, so there are no example inputs to plan with: "
            "pass AutoparStrategy(parallelize_kwargs={'example_inputs': ...})"
        )

    @contextmanager
    def _optimizers_of_the_original(self, trainer: Any) -> Generator[None]:
        """Inside, ``self.optimizers()`` gives those that a `training_step` with manual optimization asks for.

        They are of the module before it is parallelized, and are made anew after it.  What ``toggle_optimizer()`` froze
        of it when the step was left is not frozen.
        """
        own: Any = self
        around: Any = trainer.lightning_module
        if around.automatic_optimization:
            yield
            return
        frozen = [(p, p.requires_grad) for p in around.parameters()]
        with draws_kept(self.root_device):
            own.setup_optimizers(trainer)
        try:
            yield
        finally:
            own.optimizers, own.lr_scheduler_configs = [], []
            around._param_requires_grad_state = {}
            for parameter, is_trained in frozen:
                parameter.requires_grad_(is_trained)

    # --- checkpoints: Lightning's file with whole weights, and next to it a folder for each optimizer

    def _parallel(self) -> dict[str, ParallelModule]:
        own: Any = self
        return {
            name: child for name, child in own.lightning_module.named_modules() if isinstance(child, ParallelModule)
        }

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors, on rank 0."""
        own: Any = self
        state: dict[str, Any] = dict(own.lightning_module.state_dict())
        for path, module in self._parallel().items():
            state = {name: value for name, value in state.items() if not name.startswith(f"{path}.")}
            state |= {f"{path}.{name}": value for name, value in module.full_state_dict(rank=0).items()}
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole tensors into what each rank has of them."""
        own: Any = self
        state, parallel = checkpoint["state_dict"], self._parallel()
        for path, module in parallel.items():
            prefix = f"{path}."
            part = {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
            module.load_state_dict(part, strict=strict)
        rest = {name: x for name, x in state.items() if not any(name.startswith(f"{path}.") for path in parallel)}
        own.lightning_module.load_state_dict(rest, strict=strict and not parallel)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the state is in folders, by names of parameters, so that any number of ranks can load it."""
        return {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """What `save_checkpoint` saved."""
        own: Any = self
        for number, optimizer in enumerate(own.optimizers):
            folder = _folder(self._loaded, number)
            if not folder.exists():
                raise TrainerError(
                    f"there is no {folder}: another strategy saved {self._loaded}. Load its weights with "
                    "load_from_checkpoint(), and begin anew"
                )
            load_optimizer(own.lightning_module, optimizer, str(folder))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's file by rank 0, and the optimizers by all."""
        untyped: Any = super()
        own: Any = self
        path = self.broadcast(str(filepath))
        untyped.save_checkpoint(checkpoint, path, storage_options=storage_options)
        for number, optimizer in enumerate(own.optimizers):
            save_optimizer(own.lightning_module, optimizer, str(_folder(path, number)))
        wait_for_ranks()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's file."""
        untyped: Any = super()
        self._loaded = str(checkpoint_path)
        return untyped.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Both."""
        untyped: Any = super()
        untyped.remove_checkpoint(filepath)
        if own_rank() == 0:
            for folder in Path(filepath).parent.glob(f"{Path(filepath).name}.optimizer*"):
                shutil.rmtree(folder)


def _folder(path: str, number: int) -> Path:
    return Path(f"{path}.optimizer{number}")
