"""`ParallelModule`: a module with the original's signature and parameter names that runs a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import ModelError
from autopar.lower.communication.call_consensus import PLANNING
from autopar.lower.communication.call_differences import FOLLOWS
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.consensus import attempt
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.communication.sharded_rows import ShardedRows
from autopar.lower.compat import (
    in_transform,
    is_exported,
    keeping_saved_tensors,
    leaves_of,
    map_leaves,
    named_plain,
    named_tensors,
)
from autopar.lower.groups.group_steps import GroupSteps
from autopar.lower.observe.first_steps import FirstSteps
from autopar.lower.observe.predictions import Predictions
from autopar.lower.parameters.dtensor_functions import end_step, watch_functions
from autopar.lower.parameters.gradient_norm import GradientNorm
from autopar.lower.parameters.known_meshes import know_mesh
from autopar.lower.parameters.materialize import Draws
from autopar.lower.parameters.other_stages import StageTensors
from autopar.lower.parameters.skeleton import carry_attributes, carry_gradient_hooks, copy_skeleton
from autopar.lower.parameters.store import ParameterStore, make_store
from autopar.lower.parameters.whole_matrices import OptimizerService
from autopar.lower.program.program_text import LoweredProgram
from autopar.lower.run.attributes import Attributes, settings_text
from autopar.lower.run.call_executors import CallExecutors, ExecutablePlanner, PlannedCall
from autopar.lower.run.call_inputs import Call, CallInputs, check_values
from autopar.lower.run.carried_tensor import CarriedTensor
from autopar.lower.run.checkpoint_calls import watch_state_calls
from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Executable
from autopar.lower.run.module_state import NamedInputs, share_buffers
from autopar.lower.run.original_class import make_instance, refuse_tracer
from autopar.lower.run.original_copy import changed_part
from autopar.lower.run.second_run import StepCall
from autopar.lower.run.stage_map import StageMap
from autopar.lower.run.step_calls import StepCalls
from autopar.lower.run.submodule_calls import SAME_INPUTS, plain_input, read_input
from autopar.lower.run.submodules import bind_submodules, save_own_parts
from autopar.objects.gradient_requests import GRADIENTS
from autopar.step.layer.data_split import data_split
from autopar.step.plan_check import check_same_program

__all__ = ["LoweredProgram", "ParallelModule", "lower"]


def lower(
    executable: Executable,
    *,
    module: nn.Module,
    communicator: Communicator,
    mesh: DeviceMesh,
    draws: Draws | None = None,
    planner: ExecutablePlanner | None = None,
    compile_layers: bool = False,
    predictions: Predictions | None = None,
) -> ParallelModule:
    """Bind a plan to a module and to this rank's communicator.

    Args:
        executable: the traced module and the plan that was made for it.
        module: whose parameters are sliced and copied; it is left as it is.
        communicator: of this rank.
        mesh: over all ranks, of any shape.
        draws: the values of those of `module`'s tensors that are on the meta device.
        planner: makes what runs in eval mode, and for inputs of another form than the program's; None: the latter are
            refused, and eval mode runs the program.
        compile_layers: compile each distinct layer program, forward and backward.
        predictions: what `program` shows, and what `report` compares measurements with.

    Raises:
        PlanMismatchError: plan, program, module and number of devices don't belong together.
    """
    check_same_program(executable.plan, executable.program, communicator.world_size)
    made: ParallelModule = make_instance(ParallelModule, module)
    ParallelModule.__init__(made, executable, module, draws, communicator, mesh, planner, compile_layers, predictions)
    return made


class ParallelModule(StepCalls):
    """Runs a model on all devices: call it, train it and save it as the original.

    What `lower` returns is an instance of the original's class, too, with its attributes and methods.  Every rank
    passes the whole batch.  Parameters are DTensors under the original names; with pipeline stages a rank has those of
    its own stages only.

    Attributes:
        whole_outputs: True: all outputs are whole plain tensors on every rank.  False: those but the loss are DTensors
            that stay cut where the devices hold them cut, and with pipeline stages None on the ranks of other stages.
            None, the default: whole in eval mode, if they fit next to what the plan needs; else, and in training, they
            are gathered when they are first read, which every rank must do.
        call_inputs: makes the inputs of calls whole, where ranks pass their own rows or DTensors.
    """

    call_inputs: CallInputs | None = None

    def __init__(
        self,
        executable: Executable,
        module: nn.Module,
        draws: Draws | None,
        communicator: Communicator,
        mesh: DeviceMesh,
        planner: ExecutablePlanner | None,
        compile_layers: bool,
        predictions: Predictions | None = None,
    ) -> None:
        """See `lower`."""
        super().__init__()
        stages = StageMap(executable.program, executable.plan, communicator.rank)
        store = make_store(self, module, draws, stages, communicator, mesh)
        bind_submodules(self)
        if stages.is_pipeline:
            save_own_parts(self)
        known = set(vars(self))
        carry_attributes(module, self)
        carried = vars(self).keys() - known
        # With stages a program sends gradients to what was trained when it was made; without, to what is trained now.
        frozen = executable.program.frozen if stages.is_pipeline and planner is not None else ()
        self._attributes = Attributes.of(self, frozen=frozen)
        self._bind(executable, store, communicator, planner, compile_layers, predictions)
        carry_gradient_hooks(module, self)
        self._changed_part = changed_part(module)
        self._own_names = frozenset(vars(self)) - carried | {"_own_names"}
        communicator.after_renewal.append(share_buffers(self, executable, communicator))

    def _bind(
        self,
        executable: Executable,
        store: ParameterStore,
        communicator: Communicator,
        planner: ExecutablePlanner | None,
        compile_layers: bool,
        predictions: Predictions | None,
    ) -> None:
        """Make what runs the plan on the parameters of `store`, which are this module's."""
        watch_state_calls()
        self._communicator = communicator
        self._predictions = predictions
        self._data_split = data_split(executable.program, executable.plan.decisions)
        self._store = store
        self._optimizer_service = OptimizerService(store, communicator)
        self._num_trained = self._optimizer_service.count_trained()
        self._bound = (communicator, planner, compile_layers, predictions)
        self._executor = Executor(executable, store, communicator, compile_layers)
        self._executors = CallExecutors(self._executor, planner, compile_layers, self._attributes)
        if communicator.calls is not None or communicator.world_size == 1:
            is_whole = not self._executor.stages.is_pipeline
            know_mesh(store.device_mesh, self, communicator.calls, is_whole_world=is_whole)
            watch_functions()
        if self._executor.stages.is_pipeline:
            stages = StageTensors(store.mesh, self._executor.stages.axis, communicator)
            know_mesh(store.parameter_mesh, self, communicator.calls, stages=stages)
            watch_functions()
        self._gradient_norm = GradientNorm(self._store, self._executor.stages, communicator)
        self.whole_outputs = None
        self.call_inputs = None
        self._group_steps = None
        if executable.plan.groups and planner is not None:
            degrees = {group.tokens: group.decisions.group_size for group in executable.plan.groups}
            self._group_steps = GroupSteps(self._executor, degrees, planner.groups, compile_layers=compile_layers)
        self._first_steps = FirstSteps(executable.plan, communicator.rank, communicator.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A copy with parameters and buffers of its own, for averages of weights and the like; no communication."""
        made: ParallelModule = object.__new__(type(self))
        nn.Module.__init__(made)
        memo[id(self)] = made
        copy_skeleton(
            self, made, lambda _, p: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad), Tensor.clone
        )
        bind_submodules(made)
        made._attributes = Attributes.of(made, self._attributes)
        made._bind(self._executor.executable, replace(self._store, module=made), *self._bound)
        made.whole_outputs, made.call_inputs = self.whole_outputs, self.call_inputs
        made._own_names, made._changed_part = self._own_names, self._changed_part
        carry_attributes(self, made, memo)
        made._attributes.follow(self._attributes)
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward on the whole batch.

        Raises:
            InputShapeError: the model takes no such arguments, or ranks passed inputs of different shapes.
            MeshError: ranks got different batches; on an accelerator of the step before.
            RankError: another rank does something else, failed or ended.
            ModelError: it is called in a transform of ``torch.func``, or traced.
        """
        end_step()  # of an optimizer that raised in it
        if in_transform():
            raise ModelError(
                "a parallelized model was called in torch.func's grad, vmap or another transform, which can't see "
                "into a program on several devices: transform the original model with the values of full_state_dict()"
            )
        if is_exported():
            refuse_tracer()
        if not self.training or not torch.is_grad_enabled():
            self._first_steps.interrupt()
            return self._run(args, kwargs)
        self._first_steps.begin_step()
        try:
            return self._run(args, kwargs)
        except BaseException:
            self._first_steps.interrupt()
            raise

    def __prepare_scriptable__(self) -> NoReturn:
        """What ``torch.jit.script`` calls first: raise ModelError."""
        refuse_tracer()

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], part: str = "") -> Any:
        with keeping_saved_tensors():
            return self._call(args, kwargs, part)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], part: str) -> Any:
        kind = "training step {}" if self.training else "evaluation {}"
        kind += f" of {part!r}{SAME_INPUTS}" if part else ""
        kind += " for gradients of inputs" if GRADIENTS in kwargs else ""
        autocast = self._executors.autocast
        kind += f" with autocast to {autocast}" if autocast else ""
        changed = self._attributes.changed()
        kind += f" with {settings_text(changed)}" if changed else ""
        answers = self._executors.answers.changed()
        kind += f" with {answers}" if answers else ""
        kind += "" if kwargs.get("target") is None else " with a target"
        trained = self._optimizer_service.count_trained() if self.training else self._num_trained
        kind += "" if trained == self._num_trained else f" of {trained} parameters"
        kind += "" if torch.is_grad_enabled() else " without gradients"
        if (calls := self._communicator.calls) is not None:
            adds = self.training and torch.is_grad_enabled() and not self._executor.stages.is_pipeline
            calls.num_gradients = self._optimizer_service.count_gradients() if adds else 0
        is_usual = not part and GRADIENTS not in kwargs and autocast is None and not changed and not answers
        if is_usual and self._group_steps is not None and self._takes_groups():
            assert self.call_inputs is not None
            outputs = self._group_steps.run(kind, self.call_inputs, (args, kwargs))
            if outputs is not None:
                self._first_steps.interrupt()
                usual = self._executor.executable
                usual.unflatten_outputs.assign(self, [None] * len(usual.program.outputs))
                return outputs
        if self.call_inputs is not None and not part:
            args, kwargs = self.call_inputs.whole(kind, args, kwargs, holds_rows=not self._executors.compile_layers)
        executor, tensors = self._enter(kind, self._find(kind, args, kwargs, part))
        if executor is not self._executor:
            self._first_steps.interrupt()
        made = self._compute(executor, tensors, StepCall(kind, args, kwargs, part, autocast))
        form = executor.executable.unflatten_outputs
        outputs = form(made)
        if GRADIENTS not in kwargs:  # else the call whose inputs these are has set them
            form.assign(self, made)  # a part is traced with the names of the whole model
        if calls is not None:
            calls.watch_backward([x for x in leaves_of(outputs) if not isinstance(x, LateTensor)])
        return outputs

    def _takes_groups(self) -> bool:
        """Whether a call now may be one whose ranks pass rows of unlike lengths."""
        is_local = self.call_inputs is not None and self.call_inputs.is_local
        return is_local and self.training and torch.is_grad_enabled()

    def plan_for(self, *args: Any, **kwargs: Any) -> PlannedCall:
        """Plan calls with such inputs in the module's present mode, if that is not done yet, without running anything.

        Every rank calls it with the same inputs.  Calls that were not planned are planned when they come.

        Raises:
            InputShapeError: the model takes no such arguments, or ranks passed inputs of different shapes.
            AutoparError: the model can't be traced or planned on such inputs.
        """
        changes = (settings_text(self._attributes.changed()), self._executors.answers.changed())
        changed = ", ".join(filter(None, changes))
        return self._plan_call(f"plan_for {{}} ({changed})" if changed else "plan_for {}", args, kwargs)

    def _plan_call(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any], part: str = "") -> PlannedCall:
        """Begin `kind` on all ranks, compare the inputs' shapes, and only then plan."""
        tensors = named_tensors(args, kwargs)
        compared = [(name, x) for name, x in tensors if not (x.is_meta or isinstance(x, CarriedTensor))]
        compared = [*compared, *named_plain(args, kwargs)]
        return self._enter(
            kind, lambda: (self._executors.plan(args, kwargs, is_training=self.training, part=part), ()), compared
        )

    def _find(
        self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any], part: str
    ) -> Callable[[], tuple[tuple[Executor, Sequence[Tensor]], NamedInputs]]:
        """What gives, or fails to give, the executor of a call with its tensors; the call is planned if need be."""

        def look_up() -> tuple[Executor, Sequence[Tensor]] | None:
            known = self._executors.find(args, kwargs, is_training=self.training, part=part)
            # Reading is something that all ranks do, of a number of its own: it can't be done inside of another.
            if known is None:
                return None
            executor, tensors = known
            return executor, executor.place_inputs([read_input(x, but=(ShardedRows,)) for x in tensors])

        def give() -> tuple[tuple[Executor, Sequence[Tensor]], NamedInputs]:
            if problem is not None:
                raise problem
            assert ready is not None
            executor, tensors = ready
            named = zip(executor.executable.program.inputs, tensors, strict=True)
            compared = [(n, x) for n, x in named if not isinstance(x, ShardedRows | CarriedTensor)]  # compared before
            check_values(compared)
            # What decides which program runs is compared before it runs; its values were waited for already.
            inputs = [(n, x.cpu() if n in executor.executable.read_values else x) for n, x in compared]
            computed = [(FOLLOWS + name, text) for name, text in executor.executable.computed_values]
            return ready, [*inputs, *computed, *named_plain(args, kwargs)]

        ready, problem = attempt(look_up)
        if ready is None and problem is None:
            self._first_steps.interrupt()
            plain: Call = map_leaves(plain_input, (tuple(args), dict(kwargs)))
            self._plan_call(PLANNING + kind, *plain, part)
            ready, problem = attempt(look_up)
        return give

    def extra_repr(self) -> str:
        """One line about the plan."""
        plan = self.plan
        return f"world_size={plan.world_size}, num_microbatches={plan.num_microbatches}, mesh={self._store.mesh}"
