"""Constraints: what a user demands of a plan, as short texts.

=================================  ===========================================================================
text                               meaning
=================================  ===========================================================================
``data=4``                         mesh axes that split the batch, which must divide by it, multiply to 4; so
                                   ``tensor=``, ``sequence=``, ``context=`` and ``expert=``, which leave layers alone
                                   that can't (the plan says which)
``zero=3``                         every layer has this ZeRO level
``recompute=full``                 every layer recomputes so: ``none``, ``selective`` or ``full``; ``ops``: the search
                                   names the ops of each layer that run again
``offload=activations``            what every layer keeps for backward is in the host's memory until then; ``none``: on
                                   the device
``offload=optimizer``              parameters as they are stored, and the optimizer's state, are in the host's memory
``gradients=bf16``                 gradients are added up over microbatches and reduced over devices in this dtype:
                                   ``fp32`` or ``bf16``
``pieces=4``                       collectives overlap with products of their rows in 4 pieces; 1: whole
``logits=pieces``                  the product before the loss and the loss run for 2048 tokens of a device at a time
                                   (``logits=512``: for 512), forward and backward; ``whole``: for all
``microbatches=8``                 the batch runs in 8 microbatches
``mesh=2x4``                       every layer has this mesh, outermost axis first
``pipeline=2``                     the devices form 2 groups, each with its own stages; 1: no stages.  Degrees and
                                   ``mesh`` then speak about one group
``stages=4``                       there are 4 pipeline stages
``cuts=3,6``                       the stages but the first begin at layers 3 and 6: numbers, or names of layers
``schedule=1f1b``                  the pipeline runs so: one of `autopar.schedules.schedule_names()`
``model.layers.*: zero=3``         so for the layers that hold a parameter, or an op of a module, of
                                   this name; a degree, ``zero``, ``recompute``, ``offload``, ``pieces``
``lm_head: replicate``             no parameter that matches is cut, neither in compute nor in storage
``batch_norm: per_microbatch``     what matches (ops, or all in a module) may use the statistics of each microbatch: not
                                   exact, but microbatches are possible; for batch norm in training
=================================  ===========================================================================

Patterns are those of `fnmatch`; one that names a module means all that is inside it.  `WORDS` are read as well.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopar.errors import ConstraintError
from autopar.plan.decisions import GRADIENT_DTYPES
from autopar.program import Layer, Program
from autopar.schedules import schedule_names
from autopar.search.microbatches.time_assignment import PER_MICROBATCH
from autopar.search.microbatches.time_problem import is_named, option_per_microbatch
from autopar.step.activation_policies import policy_names
from autopar.user_text.suggestions import suggest

__all__ = [
    "CONSTRAINT_WORDS", "DEGREES", "HOST_STORAGE", "OPS", "WORDS", "Constraints", "LayerDemands", "check_degrees",
    "check_patterns", "demands_on", "parse_constraints", "spell_out",
]  # fmt: skip

DEGREES = ("data", "tensor", "sequence", "context", "expert")
OPS = "ops"
"""The value of ``recompute=`` that lets the search name ops."""
HOST_STORAGE = "host_storage"
"""What ``offload=optimizer`` is read as: it goes with any choice for activations."""
_OFFLOADED = ("none", "activations", "optimizer")
_LOGITS = ("whole", "pieces")
_SCOPED = (*DEGREES, "zero", "recompute", "offload", "pieces", "replicate", PER_MICROBATCH)
_COUNTS = ("microbatches", "pipeline", "stages")
_GLOBAL = (
    *DEGREES, "zero", "recompute", "offload", "pieces", "mesh", *_COUNTS, "cuts", "schedule", "gradients", "logits",
)  # fmt: skip
_GRADIENTS = {"fp32": "float32", "bf16": "bfloat16", **{dtype: dtype for dtype in GRADIENT_DTYPES}}

WORDS = {
    "dp": "data", "ddp": "data", "tp": "tensor", "sp": "sequence", "cp": "context", "ep": "expert", "pp": "pipeline",
    "fsdp": "data",
}  # fmt: skip
"""What people type -> the key; ``fsdp`` is ``zero=3`` as well, and needs no degree."""
CONSTRAINT_WORDS = tuple(dict.fromkeys((*_GLOBAL, *_SCOPED, *WORDS)))
"""All that may stand before ``=``."""
ConstraintValue = int | str | tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True)
class ScopedConstraint:
    """One scoped constraint: what `pattern` matches must have `key` = `value`."""

    text: str
    pattern: str
    key: str
    value: ConstraintValue


@dataclass(frozen=True)
class Constraints:
    """All constraints, read: the global ones by key, the scoped ones in order, and how many devices a group has by
    them (1: unknown).
    """

    settings: tuple[tuple[str, ConstraintValue], ...] = ()
    scoped: tuple[ScopedConstraint, ...] = ()
    group_size: int = 1

    def get(self, key: str) -> ConstraintValue | None:
        """The global value of `key`, or None."""
        return dict(self.settings).get(key)

    @property
    def per_microbatch(self) -> tuple[str, ...]:
        """The patterns of what may take each microbatch for the whole batch."""
        return tuple(scoped.pattern for scoped in self.scoped if scoped.key == PER_MICROBATCH)


@dataclass(frozen=True)
class LayerDemands:
    """What constraints demand of one layer.

    Args:
        degrees: (usual name, product of the sizes of the axes that do it), those that count most first.
        zero: ZeRO level, or -1 for any.
        recompute: how to recompute, or ``""`` for any.
        offload: what is offloaded: one of ``"activations"`` and ``"none"``, or ``""`` for any.
        whole: positions in `Layer.state` of parameters that must not be cut.
        pieces: in how many pieces collectives overlap with products, where possible; 0 for any.
        space: the dim of images or videos that may be split in space; 0 for none.
    """

    degrees: tuple[tuple[str, int], ...] = ()
    zero: int = -1
    recompute: str = ""
    offload: str = ""
    whole: tuple[int, ...] = ()
    pieces: int = 0
    space: int = 0


def parse_constraints(texts: Iterable[str], world_size: int) -> Constraints:
    """Read the user's constraints.

    Raises:
        ConstraintError: a key is unknown, a value is out of its range, or two constraints contradict each
            other.
    """
    settings: dict[str, tuple[ConstraintValue, str]] = {}
    scoped: list[ScopedConstraint] = []
    devices = world_size
    parts = [(text, part) for text in texts for part in spell_out(text)]
    # How many devices a group has must be known before what speaks about a group.
    for text, part in sorted(parts, key=lambda pair: not pair[1].startswith("pipeline")):
        pattern, separator, rest = part.rpartition(":")
        key, value = _parse_setting(rest, text, _SCOPED if separator else _GLOBAL, devices)
        if (key, value) == ("offload", "optimizer"):
            if separator:
                raise ConstraintError(
                    f"constraint {text!r}: 'offload=optimizer' holds for the whole plan, without a pattern"
                )
            key = HOST_STORAGE
        if key == "pipeline" and isinstance(value, int):
            devices = world_size // value
        if separator:
            scoped.append(ScopedConstraint(text, pattern, key, value))
        elif key in settings and settings[key][0] != value:
            raise ConstraintError(f"{settings[key][1]!r} and {text!r} contradict each other: keep one of them")
        else:
            settings[key] = (value, text)
    constraints = Constraints(tuple((key, value) for key, (value, _) in settings.items()), tuple(scoped), devices)
    check_degrees(constraints, devices)
    return constraints


def spell_out(text: str) -> tuple[str, ...]:
    """A constraint without `WORDS`: ``fsdp=8`` is ``data=8`` and ``zero=3``.

    Raises:
        ConstraintError: there is no constraint for what it asks.
    """
    pattern, colon, setting = text.rpartition(":")
    key, equals, value = (part.strip() for part in setting.partition("="))
    word, scope = key.lower(), f"{pattern.strip()}:" if colon else ""
    zero = (f"{scope}zero=3",) if word == "fsdp" else ()
    return zero if zero and not equals else (f"{scope}{WORDS.get(word, key)}{equals}{value}", *zero)


def _parse_setting(text: str, whole_text: str, keys: tuple[str, ...], world_size: int) -> tuple[str, ConstraintValue]:
    key, separator, value = text.partition("=")
    if "=" in value:
        if re.search(r"[=<>!]=|=>|=<", whole_text):
            once = re.sub(r"[=<>!]=|=[<>]", "=", whole_text)
            raise ConstraintError(f"constraint {whole_text!r:.80}: values are set by one '=': write {once!r:.80}")
        each = whole_text.replace(",", " ").split()
        raise ConstraintError(f"constraint {whole_text!r:.80} is more than one: write a text for each, as in {each}")
    if key not in keys:
        if key in (*_GLOBAL, *_SCOPED):
            where = "holds for the whole plan, without a pattern" if key in _GLOBAL else "needs a pattern before it"
            raise ConstraintError(f"constraint {whole_text!r}: {key!r} {where}")
        raise ConstraintError(f"constraint {whole_text!r}: {key!r} is none of {', '.join(keys)}{suggest(key, keys)}")
    if key in ("replicate", PER_MICROBATCH):
        if separator:
            raise ConstraintError(f"constraint {whole_text!r}: {key!r} takes no value")
        return key, True
    if key == "logits" and value in _LOGITS:
        return key, value
    return key, _parse_value(key, value, whole_text, world_size)


def _parse_value(key: str, value: str, text: str, world_size: int) -> ConstraintValue:
    choices = {
        "recompute": (*policy_names(), OPS), "schedule": schedule_names(), "offload": _OFFLOADED,
        "gradients": tuple(_GRADIENTS),
    }.get(key)  # fmt: skip
    if choices:
        if value not in choices:
            known = f"{', '.join(choices)}{suggest(value, choices)}"
            raise ConstraintError(f"constraint {text!r}: {value!r} is none of {known}")
        return _GRADIENTS[value] if key == "gradients" else value
    if key == "cuts":
        return tuple(part.strip() for part in value.split(","))
    parts = value.split("x") if key == "mesh" else [value]
    if not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", part) for part in parts):
        form = {"mesh": "sizes such as 2x4", "logits": "whole, pieces or a whole number"}.get(key, "a whole number")
        raise ConstraintError(f"constraint {text!r:.80}: {value!r:.80} is not {form} below a billion")
    numbers = tuple(int(part) for part in parts)
    if key == "mesh":
        if math.prod(numbers) != world_size:
            raise ConstraintError(
                f"constraint {text!r}: {math.prod(numbers)} devices, but there are {world_size}; with pipeline stages "
                "the mesh is that of one device group: say how many groups there are, such as 'pipeline=2'"
            )
        return numbers
    if key == "zero" and numbers[0] > 3:
        raise ConstraintError(f"constraint {text!r}: the ZeRO level is 0, 1, 2 or 3")
    if key in (*DEGREES, *_COUNTS, "pieces", "logits") and numbers[0] < 1:
        raise ConstraintError(f"constraint {text!r}: must be at least 1")
    if key in (*DEGREES, "pipeline") and world_size % numbers[0]:
        raise ConstraintError(f"constraint {text!r}: {numbers[0]} does not divide the {world_size} devices")
    return numbers[0]


def check_degrees(constraints: Constraints, num_devices: int) -> None:
    """Raise `ConstraintError` if the degrees together don't divide `num_devices`."""
    degrees = {key: int(str(value)) for key, value in constraints.settings if key in DEGREES}
    product = math.prod(degrees.values())
    if product and num_devices % product:
        texts = ", ".join(f"{key}={value}" for key, value in degrees.items())
        raise ConstraintError(f"{texts} need a multiple of {product} devices, but there are {num_devices}")


def check_patterns(constraints: Constraints, names: Iterable[str]) -> None:
    """Raise `ConstraintError` if a pattern for layers matches none of the `names` of parameters and modules."""
    known = sorted(set(names))
    for scoped in constraints.scoped:
        if scoped.key != PER_MICROBATCH and not any(_matches(name, scoped.pattern) for name in known):
            raise ConstraintError(_describe_no_match(known, scoped))


def demands_on(program: Program, constraints: Constraints) -> tuple[LayerDemands, ...]:
    """What is demanded of each layer of `program`.

    Raises:
        ConstraintError: a pattern matches nothing, patterns demand different things of one layer, or together more
            devices for it than there are.
    """
    collector = _DemandCollector(program)
    for key, value in constraints.settings:
        collector.set_all(key, value)
    for scoped in constraints.scoped:
        if scoped.key == PER_MICROBATCH:
            _check_per_microbatch(program, scoped)
        else:
            collector.set_matching(scoped)
    collector.check_own_degrees(constraints.group_size)
    return collector.freeze()


@dataclass
class _DemandCollector:
    """Demands per layer while they are collected; a scoped one overrides a global one."""

    program: Program
    settings: list[dict[str, tuple[ConstraintValue, str]]] = field(
        default_factory=list[dict[str, tuple[ConstraintValue, str]]]
    )
    whole: list[set[int]] = field(default_factory=list[set[int]])

    def __post_init__(self) -> None:
        self.settings = [{} for _ in self.program.layers]
        self.whole = [set() for _ in self.program.layers]

    def set_all(self, key: str, value: ConstraintValue) -> None:
        for settings in self.settings:
            settings[key] = (value, "")

    def set_matching(self, scoped: ScopedConstraint) -> None:
        hit = False
        for index, layer in enumerate(self.program.layers):
            matching = _matching_parameters(self.program, layer, scoped.pattern)
            if scoped.key == "replicate":
                self.whole[index] |= matching
                hit |= bool(matching)
            elif matching or (not _parameters(self.program, layer) and _has_matching_op(layer, scoped.pattern)):
                self._set(index, scoped)
                hit = True
        if not hit:
            modules = {op.module for layer in self.program.layers for op in layer.ops if op.module}
            names = modules | set(self.program.parameters.values()) | set(self.program.aliases)
            raise ConstraintError(_describe_no_match(sorted(names), scoped))

    def _set(self, index: int, scoped: ScopedConstraint) -> None:
        known = self.settings[index].get(scoped.key)
        if known is not None and known[1] and known[0] != scoped.value:
            raise ConstraintError(
                f"{known[1]!r} and {scoped.text!r} both match layer {self.program.layers[index].name!r} and "
                f"contradict each other: make the patterns disjoint"
            )
        self.settings[index][scoped.key] = (scoped.value, scoped.text)

    def check_own_degrees(self, num_devices: int) -> None:
        """Raise `ConstraintError` if the degrees that patterns demand of a layer need more than `num_devices`."""
        for settings, layer in zip(self.settings, self.program.layers, strict=True):
            own = {settings[key][1]: int(str(settings[key][0])) for key in _degrees_in(settings) if settings[key][1]}
            product = math.prod(own.values())
            if len(own) > 1 and num_devices % product:
                raise ConstraintError(
                    f"{' and '.join(map(repr, own))} both match layer {layer.name!r}, which needs a multiple of "
                    f"{product} devices, but there are {num_devices}: make the patterns disjoint, or use other degrees"
                )

    def freeze(self) -> tuple[LayerDemands, ...]:
        return tuple(
            LayerDemands(
                degrees=tuple((key, int(str(settings[key][0]))) for key in _degrees_in(settings)),
                zero=int(str(settings["zero"][0])) if "zero" in settings else -1,
                recompute=str(settings["recompute"][0]) if "recompute" in settings else "",
                offload=str(settings["offload"][0]) if "offload" in settings else "",
                whole=tuple(sorted(whole)),
                pieces=int(str(settings["pieces"][0])) if "pieces" in settings else 0,
            )
            for settings, whole in zip(self.settings, self.whole, strict=True)
        )


def _degrees_in(settings: Mapping[str, tuple[ConstraintValue, str]]) -> list[str]:
    """The degrees that are demanded, those of patterns first: where not all can be met, the first ones are."""
    return sorted((key for key in DEGREES if key in settings), key=lambda key: not settings[key][1])


def _check_per_microbatch(program: Program, scoped: ScopedConstraint) -> None:
    able = [op for layer in program.layers for op in layer.ops if option_per_microbatch(op) is not None]
    if not any(is_named(op, (scoped.pattern,)) for op in able):
        places = ", ".join(dict.fromkeys(op.module or op.name for op in able)) or "nowhere in this model"
        raise ConstraintError(
            f"constraint {scoped.text!r}: {scoped.pattern!r} matches nothing that can take a microbatch for the whole "
            f"batch; only batch norm in training and statistics that balance losses multiply can: {places}"
        )


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _parameters(program: Program, layer: Layer) -> set[int]:
    return {p for p, name in enumerate(layer.state) if program.values[name].role == "parameter"}


def _names_of(program: Program, value: str) -> list[str]:
    name = program.parameters.get(value, "")
    return [name, *(alias for alias, target in program.aliases.items() if target == name)]


def _matching_parameters(program: Program, layer: Layer, pattern: str) -> set[int]:
    read = {name for op in layer.ops if op.module and _matches(op.module, pattern) for name in op.operands}
    return {
        position
        for position in _parameters(program, layer)
        if layer.state[position] in read
        or any(_matches(name, pattern) for name in _names_of(program, layer.state[position]))
    }


def _has_matching_op(layer: Layer, pattern: str) -> bool:
    return any(op.module and _matches(op.module, pattern) for op in layer.ops)


def _describe_no_match(names: Sequence[str], scoped: ScopedConstraint) -> str:
    near = difflib.get_close_matches(scoped.pattern, names, 5, cutoff=0.4) or names[:5]
    return (
        f"constraint {scoped.text!r}: {scoped.pattern!r} matches no parameter and no module that has any; "
        f"names that are near: {', '.join(near) or 'none'}"
    )
