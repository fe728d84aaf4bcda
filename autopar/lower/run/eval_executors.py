"""The executor of a module's current mode: in eval mode often another program than in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import AutoparError, PlanMismatchError
from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Executable
from autopar.lower.run.stage_map import StageMap

__all__ = ["EvalExecutors", "EvalFactory"]

EvalFactory = Callable[[], Sequence[Any]]


class EvalExecutors:
    """The executors of eval mode, each made when it is first needed."""

    def __init__(
        self, trained: Executor, factories: tuple[EvalFactory | None, EvalFactory | None], compile_layers: bool
    ) -> None:
        """`factories` are those of calls with and without a target (`lower`); `trained` is the executor of training."""
        self._trained = trained
        self._factories = factories
        self._compile_layers = compile_layers
        self._made: dict[EvalFactory | None, Executor] = {}

    def of_mode(self, *, is_training: bool, has_target: bool) -> Executor:
        """The executor of a call.

        Raises:
            PlanMismatchError: a stage lacks parameters that it reads in eval mode.
            AutoparError: the module was lowered for training only, and eval mode would be another program.
        """
        program = self._trained.executable.program
        if is_training == program.training or not program.training:
            return self._trained
        with_target, without_target = self._factories
        factory = with_target if has_target else without_target or with_target
        if factory not in self._made:
            self._made[factory] = self._make(factory)
        return self._made[factory]

    def _make(self, factory: EvalFactory | None) -> Executor:
        trained = self._trained
        if factory is None:
            if trained.is_random or trained.executable.program.updates:
                raise AutoparError(
                    "this module was lowered for training only: it draws random numbers or updates "
                    "buffers, so eval() needs an eval_factory"
                )
            return trained
        made = tuple(factory())
        executable = Executable(*made, *trained.executable[len(made) :])
        self._check_places(executable)
        return Executor(executable, trained.store, trained.communicator, self._compile_layers)

    def _check_places(self, evaluated: Executable) -> None:
        """Raise PlanMismatchError, on every rank, unless each stage finds the parameters that it reads in eval mode."""
        own, store = self._trained.stages, self._trained.store
        stages = StageMap(evaluated.program, evaluated.plan, own.rank)
        for name, groups in stages.holders.items():
            stored = store.stored.get(store.first_name.get(name, name))
            held = groups if stored is None else stored.groups
            if stages.axis != own.axis or not set(groups) <= set(held):
                raise PlanMismatchError(
                    f"in eval mode {name!r} is read on device groups {list(groups)} of {stages.plan.num_groups}, but "
                    f"the pipeline stages of training keep it on {list(held)} of {own.plan.num_groups}.  For the loss "
                    "of a batch stay in training mode under torch.no_grad(); for outputs load full_state_dict() into "
                    "the original model"
                )
