"""Optimizers that don't work element by element (Adafactor, Muon, SOAP, Shampoo, LAMB) get whole parameters to work on.

Their steps on a slice of a parameter would be others than on all of it.  Which do is found by running an optimizer's
step on a small parameter and on slices of it.  Before a step of such an optimizer, parameters that are cut take part
as whole plain tensors, with whole gradients and states, equal on all ranks; after it each rank keeps its part.  An
optimizer whose kernels don't take DTensors (bitsandbytes) gets all parameters so.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autopar.errors import OptimizerError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.reshard_ops import whole_copy
from autopar.lower.compat import local_part_of, make_dtensor, native_functions
from autopar.lower.kernels.random import generators_kept
from autopar.lower.once import once
from autopar.lower.parameters.dtensor_functions import begin_step, end_step
from autopar.lower.parameters.function_calls import is_known_dtensor
from autopar.lower.parameters.host_storage import HostCopies
from autopar.lower.parameters.known_meshes import note_step, read_whole, stages_of
from autopar.lower.parameters.optimizer_state import fit_loaded_state, wraps_another
from autopar.lower.parameters.other_stages import empty_part, is_elsewhere
from autopar.lower.parameters.saved_files import watch_state_dict
from autopar.lower.parameters.store import ParameterStore, local_part
from autopar.lower.parameters.view_writes import note_write
from autopar.objects.attribute_contents import has_only_values
from autopar.placement import REPLICATE, Layout

__all__ = ["OptimizerService", "watch_steps", "works_on_slices"]

_BY_ELEMENT = frozenset({
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
})  # fmt: skip
"""Those of torch that need no trial."""
_BY_MASKS = frozenset({"Rprop"})  # ``sign[sign.gt(0)] = ...``, which torch's DTensor has no rule for
_FUSED_WITHOUT_RULE = frozenset({"SGD", "Adagrad"})  # torch's DTensor knows the fused kernels of Adam and AdamW
_TRIAL_SIZE = 256  # of a dim at most: optimizers treat dims below 128 in other ways than large ones
_TRIAL_STEPS = 3  # the first step often divides a gradient by its own size
_TRIAL_RATE = 1e-3  # at least: a schedule often begins at zero, where steps show nothing of how they are made


@dataclass(frozen=True)
class _Slices:
    """How ranks share a parameter; `is_joint`: those of all pipeline stages read it."""

    layout: Layout
    mesh: tuple[int, ...]
    communicator: Communicator
    host: HostCopies | None = None
    is_joint: bool = False

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that are cut."""
        return tuple(sorted({placement.dim for placement in self.layout if placement.is_shard}))

    def whole(self, x: Tensor) -> Tensor:
        """A whole copy of a tensor that is laid out as the parameter; every rank calls it."""
        if not isinstance(x, DTensor):
            return x.detach().clone()
        if self.is_joint:
            return read_whole(cast("DTensor", x.detach())).clone()
        return whole_copy(local_part_of(x), self.layout, self.mesh, self.communicator)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, where parameters are stored."""
        part = local_part(whole.detach(), self.layout, self.mesh, self.communicator)
        return part if self.host is None else self.host.home(part)


@dataclass(frozen=True)
class _Swap:
    """A parameter that takes part in a step as `whole`: its place in a list of the optimizer's."""

    params: list[Any]
    place: int
    parameter: nn.Parameter
    whole: nn.Parameter
    slices: _Slices


@dataclass(frozen=True, eq=False)
class OptimizerService:
    """The parameters of a module, for the steps of optimizers, as long as this object lives.

    By their places in the module: ``module.to(...)`` puts other tensors there, and refuses those with weak references.
    """

    store: ParameterStore
    communicator: Communicator

    def __post_init__(self) -> None:
        """Take part in the steps of all optimizers from now on."""
        _SERVICES.append(ref(self, _SERVICES.remove))
        watch_steps()

    def parameters(self) -> Iterator[tuple[int, _Slices]]:
        """The ids of the parameters, and how ranks share them."""
        for table, key, slices in self._slots:
            parameter = table.get(key)
            if parameter is not None:
                yield id(parameter), slices

    def count_trained(self) -> int:
        """How many parameters require a gradient now."""
        with native_functions():  # asked of a DTensor, it goes through Python else
            return sum(p.requires_grad for table, key, _ in self._slots if (p := table.get(key)) is not None)

    def count_gradients(self) -> int:
        """Of how many parameters there are gradients now."""
        with native_functions():
            return sum(p.grad is not None for table, key, _ in self._slots if (p := table.get(key)) is not None)

    @cached_property
    def _slots(self) -> list[tuple[dict[str, nn.Parameter | None], str, _Slices]]:
        store = self.store
        return [
            (*store.slot(name), _Slices(stored.layout, store.mesh, self.communicator, store.host))
            for name, stored in store.stored.items()
        ]


_SERVICES: list[ref[OptimizerService]] = []  # of modules that are alive
_HOOKS: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, RemovableHandle]] = WeakKeyDictionary()
_SWAPS: WeakKeyDictionary[Optimizer, list[_Swap]] = WeakKeyDictionary()  # of steps under way
_TRIALS: WeakKeyDictionary[Optimizer, dict[object, bool]] = WeakKeyDictionary()


@once
def watch_steps() -> None:
    """From now on steps of optimizers on parameters of parallel modules are those of one device."""
    register_optimizer_step_pre_hook(_come_next_to_step)
    register_optimizer_step_post_hook(_keep_parts)


def _come_next_to_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Have all other hooks run before the step begins here, and after it has ended: they see whole parameters."""
    if optimizer not in _HOOKS:
        before = optimizer.register_step_pre_hook(_make_whole)
        _HOOKS[optimizer] = before, optimizer.register_step_post_hook(_keep_parts)
    for handle, is_last in zip(_HOOKS[optimizer], (True, False), strict=True):
        untyped: Any = handle
        untyped.hooks_dict_ref().move_to_end(handle.id, last=is_last)


def _make_whole(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    fit_loaded_state(optimizer)
    watch_state_dict(optimizer)
    _note(optimizer)
    has_closure = any(callable(x) for x in (*args[1:], *kwargs.values()))
    if type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in _BY_ELEMENT:
        if not has_closure:
            begin_step(_parameters_of(optimizer), is_native=_has_rules(optimizer))
        return
    _keep_parts(optimizer, args, kwargs)  # of a step that failed
    if wraps_another(optimizer):
        return  # a trial of it would make steps of the inner one, on the user's own parameters
    every = _parameters_of(optimizer)
    if not any(isinstance(p, DTensor) for p in every):
        return  # without a look at each module's parameters: trials make dozens of such steps
    is_joint = _is_joint(optimizer, has_closure=has_closure)
    swaps = _find_swaps(optimizer, has_closure=has_closure, is_joint=is_joint)
    for swap in swaps:
        swap.params[swap.place] = swap.whole
        _move_state(optimizer, swap.parameter, swap.whole, swap.slices.whole)
    _SWAPS[optimizer] = swaps
    if not is_joint:
        begin_step(every, is_native=False)


def _note(optimizer: Optimizer) -> None:
    """Tell what is compared across ranks: the numbers among hyperparameters, not those that a device has."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    first = [p for group in groups for p in group["params"][:1]]
    if any(isinstance(p, DTensor) for p in first):
        numbers = [x for group in groups for value in group.values() for x in _numbers_in(value)]
        rate = ", ".join(f"lr={x:g}" for x in _numbers_in(groups[0].get("lr")))
        note_step(first, numbers, f", the last one by {type(optimizer).__name__}{rate and ' with '}{rate}")


def _numbers_in(value: Any) -> list[float]:
    values = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
    return [x for x in values if isinstance(x, int | float)]


def _has_rules(optimizer: Optimizer) -> bool:
    """Whether torch's DTensor does all functions of a step of this optimizer of torch."""
    name = type(optimizer).__name__
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    return name not in _BY_MASKS and not (is_fused and name in _FUSED_WITHOUT_RULE)


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _find_swaps(optimizer: Optimizer, *, has_closure: bool, is_joint: bool) -> list[_Swap]:
    """The parameters that take part whole.

    Raises:
        OptimizerError: a closure would run the model on parts that take no part in the step.
    """
    swaps: list[_Swap] = []
    services = [service for each in tuple(_SERVICES) if (service := each()) is not None]
    shared = dict(pair for service in services for pair in service.parameters())
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            slices = shared.get(id(parameter))
            if slices is None or parameter.grad is None or (is_elsewhere(parameter) and not is_joint):
                continue
            if has_closure and is_known_dtensor(parameter):
                continue  # it runs the model on its own parameters: functions of these are right, only slower
            # In a step of all stages each parameter is whole: optimizers look into DTensors, some of which are empty.
            if not is_joint and _works_on(optimizer, group, parameter, slices.dims):
                continue
            if has_closure:
                raise OptimizerError(
                    f"{type(optimizer).__name__} needs whole parameters, which are gathered before a step, so that a "
                    "closure can't run in it: call loss.backward() first, then optimizer.step() without a closure"
                )
            slices = replace(slices, is_joint=is_joint)
            whole = nn.Parameter(slices.whole(parameter))
            whole.grad = slices.whole(parameter.grad)
            swaps.append(_Swap(group["params"], place, parameter, whole, slices))
    return swaps


def _is_joint(optimizer: Optimizer, *, has_closure: bool) -> bool:
    """Whether a step on parameters of pipeline stages is one that all ranks make together, as it depends on all
    parameters, or runs the model.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    first = [(group, next((p for p in group["params"] if stages_of(p) is not None), None)) for group in groups]
    of_stages = [(group, p) for group, p in first if p is not None]
    return bool(of_stages) and (has_closure or any(_couples(optimizer, *each) for each in of_stages))


def _couples(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> bool:
    """Whether steps on two parameters differ from those on each alone, or fail without all gradients, as where
    parameters of a group have one shape, and their gradients are stacked.
    """
    known = _TRIALS.setdefault(optimizer, {})
    key = ("couples", repr(_flags_of(group)))
    if key not in known:
        make, generator = _twin(optimizer, group, _flags(optimizer, parameter)), torch.Generator().manual_seed(0)
        draws = torch.randn(2, _TRIAL_STEPS + 1, 4, 4, generator=generator, device="cpu").to(parameter.device)
        draws[1] *= 100.0  # what is computed of both is far from what is computed of the first
        with generators_kept(draws.device):
            known[key] = not _treats_each_alone(make, draws)
    return known[key]


def _treats_each_alone(make: Callable[..., Optimizer], draws: Tensor) -> bool:
    """Whether each of two parameters is trained as if it were the only one that has a gradient, or the only one."""
    first, second = draws
    try:
        together, alone = _train(make, first, second), [*_train(make, first), *_train(make, second)]
    except Exception:  # noqa: BLE001  (a foreign optimizer, which may also require a closure)
        return True
    try:
        with_one = [_train(make, first, second, without=(1,))[0], _train(make, first, second, without=(0,))[1]]
        _train(make, first, second, without=(0, 1))
    except Exception:  # noqa: BLE001  (of the same optimizer: it needs the gradients that are missing)
        return False
    return all(map(torch.allclose, [*together, *with_one], [*alone, *alone]))


def _flags(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """What an optimizer's state says about how a parameter is treated."""
    return _flags_of(optimizer.state.get(parameter, {}))


def _flags_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in settings.items() if isinstance(x, bool | str)}


def _twin(optimizer: Optimizer, group: dict[str, Any], flags: dict[str, Any]) -> Callable[..., Optimizer]:
    """A function that makes an optimizer like `optimizer` that has other parameters, with the settings of `group`.

    It has neither hooks nor methods that were put on the optimizer itself, as schedulers of learning rates do with
    ``step``: these would run on the original.
    """
    kind, settings = type(optimizer), copy.deepcopy({name: x for name, x in group.items() if name != "params"})
    rate = settings.get("lr")
    if isinstance(rate, int | float | Tensor):
        settings["lr"] = rate.clamp(min=_TRIAL_RATE) if isinstance(rate, Tensor) else max(rate, _TRIAL_RATE)
    own = {name: x for name, x in vars(optimizer).items() if not (callable(x) and callable(getattr(kind, name, None)))}
    own = {name: x for name, x in own.items() if name not in ("state", "param_groups")}
    own |= {name: OrderedDict[Any, Any]() for name in own if name.endswith("_hooks")}
    own |= {name: copy.deepcopy(x) for name, x in own.items() if type(x) is Tensor or has_only_values(x)}  # counters

    def make(*parameters: nn.Parameter) -> Optimizer:
        made: Any = object.__new__(kind)
        made.__dict__.update(own)
        made.param_groups = [{**copy.deepcopy(settings), "params": [*parameters]}]
        made.state = defaultdict(dict, {x: dict(flags) for x in parameters} if flags else {})
        return made

    return make


def _keep_parts(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    end_step()
    for swap in _SWAPS.pop(optimizer, ()):
        swap.params[swap.place] = swap.parameter
        local_part_of(swap.parameter).copy_(_part(swap, swap.whole))
        note_write()
        _move_state(optimizer, swap.whole, swap.parameter, partial(_cut, swap))


def _part(swap: _Swap, whole: Tensor) -> Tensor:
    return empty_part(whole.detach()) if is_elsewhere(swap.parameter) else swap.slices.part(whole)


def _cut(swap: _Swap, whole: Tensor) -> Tensor:
    like: Any = swap.parameter
    part = _part(swap, whole).contiguous()
    return make_dtensor(part, like.device_mesh, swap.slices.layout, like.shape, like.stride())


def _move_state(
    optimizer: Optimizer, source: nn.Parameter, target: nn.Parameter, change: Callable[[Tensor], Tensor]
) -> None:
    """Give the state of one parameter to another, with what has the parameter's shape changed."""
    if source in optimizer.state:
        optimizer.state[target] = {
            name: change(x) if _is_like(x, source) else x for name, x in optimizer.state.pop(source).items()
        }


def _is_like(x: Any, parameter: nn.Parameter) -> bool:
    """Whether it has an entry for each of the parameter's, and can be cut: not so what is quantized in blocks."""
    return type(x) in (Tensor, nn.Parameter, DTensor) and x.dim() > 0 and x.shape == parameter.shape


def _works_on(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter, dims: tuple[int, ...]) -> bool:
    shape = tuple(min(size, _TRIAL_SIZE) // 2 * 2 if size > 1 else 1 for size in parameter.shape)
    flags = _flags(optimizer, parameter)
    place = next(index for index, each in enumerate(optimizer.param_groups) if each is group)
    key = (place, shape, dims, repr(flags))
    known = _TRIALS.setdefault(optimizer, {})
    if key not in known:
        make, like = _twin(optimizer, group, flags), torch.empty(shape, device=parameter.device)
        known[key] = _takes_dtensors(make, like, parameter) and works_on_slices(make, like, dims)
    return known[key]


def _takes_dtensors(make: Callable[[nn.Parameter], Optimizer], like: Tensor, parameter: Any) -> bool:
    """Whether an optimizer that can make a step on a tensor like `like` alone can on a DTensor of the same shape."""
    if not isinstance(parameter, DTensor):
        return True
    mesh, generator = parameter.device_mesh, torch.Generator().manual_seed(0)
    draws = [
        torch.randn(like.shape, generator=generator, device="cpu").to(like.device, parameter.dtype)
        for _ in range(_TRIAL_STEPS)
    ]
    start = draws[0] * 0.01  # small, so that steps change more than its last bits

    def trained(wrap: Callable[[Tensor], Tensor]) -> Tensor | None:
        try:
            with generators_kept(like.device):
                return local_part_of(_train(make, map(wrap, [start, *draws]))[0])
        except Exception:  # noqa: BLE001  (a foreign optimizer, which may also require a closure)
            return None

    alone = trained(lambda x: x)
    made = trained(lambda x: make_dtensor(x.clone(), mesh, (REPLICATE,) * mesh.ndim, like.shape))
    return alone is None or (made is not None and _are_close(made, alone, start, 1e-3))


def works_on_slices(make: Callable[[nn.Parameter], Optimizer], like: Tensor, dims: Iterable[int]) -> bool:
    """Whether an optimizer's steps on a parameter are its steps on slices of it along each of these `dims`.

    Args:
        make: parameter -> a new optimizer that has it alone.
        like: of the parameter's shape and device.
        dims: those that are cut.
    """
    # Not every optimizer takes float64; in float32 what counts is more than what the last bit of a parameter adds.
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-3)):
        try:
            with generators_kept(like.device):
                return all(_agrees(make, like.to(dtype), dim, tolerance) for dim in dims)
        except Exception:  # noqa: BLE001  (a foreign optimizer; whole parameters are always right)
            continue
    return False


def _agrees(make: Callable[[nn.Parameter], Optimizer], like: Tensor, dim: int, tolerance: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(like.shape, generator=generator, device="cpu").to(like) for _ in range(_TRIAL_STEPS + 1)]
    ramp = (
        torch.linspace(0.1, 3.0, like.shape[dim], device="cpu")
        .to(like)
        .view([-1 if d == dim else 1 for d in range(like.dim())])
    )
    draws = [draw * ramp * 2.0**number for number, draw in enumerate(draws)]  # slices and steps of other sizes
    (whole,) = _train(make, draws)
    parts = [_train(make, halves)[0] for halves in zip(*(draw.chunk(2, dim) for draw in draws), strict=True)]
    return bool((whole != draws[0]).any()) and _are_close(torch.cat(parts, dim), whole, draws[0], tolerance)


def _are_close(x: Tensor, expected: Tensor, start: Tensor, tolerance: float) -> bool:
    """Whether `x` differs from what was expected by less than this part of the way from where both began."""
    return bool((x - expected).abs().max() <= tolerance * (expected - start).abs().max())


def _train(make: Callable[..., Optimizer], *draws: Iterable[Tensor], without: tuple[int, ...] = ()) -> list[Tensor]:
    """Train one parameter for each of `draws`, which is where it starts and then a gradient for each step.

    The parameters at the places `without` get no gradients.
    """
    starts, *gradients = zip(*draws, strict=True)
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = make(*parameters)
    for each in gradients:
        for place, (parameter, gradient) in enumerate(zip(parameters, each, strict=True)):
            parameter.grad = None if place in without else gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
