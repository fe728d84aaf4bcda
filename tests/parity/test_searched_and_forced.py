"""Plans that a search finds, freely or under constraints, train every model of the zoo as one device does.

What runs while they do is what was priced (`tests.zoo.assert_parity` asks for both).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from autopar.errors import ConstraintError
from autopar.plan import Plan
from autopar.program import Program
from autopar.search.settings.labels import degrees
from tests.models import ZOO
from tests.zoo import assert_parity, plan_for, subject

Constraints = tuple[str, ...]

# A part of a model that lies in layers of its own, and a parameter, for constraints that name them.
PARTS = {
    "gpt2": ("transformer.h.*", "transformer.wte"),
    "t5": ("decoder.block.*", "shared"),
    "vit": ("vit.layers.*", "classifier"),
    "flat": ("weights.2", "weights.0"),
}
# These are searched for without constraints on 4 devices.  The others' ops are theirs; `test_random_plans` trains them
# by plans of any kind.
SEARCHED = ("llama", "t5", "vit", "unet", "skip_unet", "contrastive", "crossing")
# Two models are on 2 devices, too, and the first on 8; the others show on 4 what their own ops do.
MORE_WORLDS = {"llama": (2, 4, 8), "unet": (2, 4)}
# Constraints that a model can't meet at all, and why.
REFUSED = {
    ("unet", "microbatches"): "batch_norm.* needs the whole batch",
    ("contrastive", "microbatches"): "matmul.* needs the whole batch",
}
# Layers that have no way to cut the sequence (a head over flattened tokens, 17 tokens, images, no sequence at all), or
# cut another one besides (a decoder's): they are left alone, and the plan says so.
NO_SEQUENCE = {
    "bert": {"cls.predictions"},
    "gpt2": {"transformer+lm_head"},
    "vit": {"vit.embeddings", "vit.layers.0", "vit.layers.1", "vit+classifier"},
    "plain_gpt": {"embed", "norm+head"},
    "frozen": {"embed", "norm+head"},
    "flat": {"layer3"},
    "unet": {"stem+norm1+..."},
    "contrastive": {"image+text"},
    "t5": {"decoder.block.0", "decoder+lm_head"},
    "bart": {"lm_head"},
    "skip_unet": {"stem", "downs.0", "downs.1", "middle", "ups.0", "ups.1", "head"},
}


# How parameters are stored, what is recomputed and how many microbatches there are does not depend on a model's ops:
# each of the first nine models takes one of these, and random plans (`test_random_plans`) combine them with all else.
BY_TURNS: tuple[Constraints, ...] = (
    ("data=4",), ("data=4", "zero=1"), ("data=4", "zero=2"), ("recompute=selective",), ("microbatches=2", "zero=1"),
    ("microbatches=2", "zero=2"), ("microbatches=4", "zero=0"), ("microbatches=2", "zero=3", "recompute=full"),
    ("zero=3", "recompute=selective", "microbatches=2"),
)  # fmt: skip


def asked(model: str, world: int) -> Iterator[Constraints]:
    """What a user may ask of a model on so many devices."""
    turn = [*ZOO].index(model)
    if world == 2 or model in SEARCHED:
        yield ()
    if world == 2:  # 4 devices show the same
        return
    yield (f"tensor={world}", "recompute=full")
    if world == 8:
        yield BY_TURNS[-1]
        return
    yield from BY_TURNS[turn : turn + 1]
    yield ("sequence=4",)
    if turn < 8:  # each of these for two models
        part, parameter = PARTS.get(model, ("", ""))
        more = (
            ("data=2", "tensor=2"), (f"{part}: zero=3", f"{part}: recompute=full"),
            ("data=4", "zero=3"), (f"{parameter}: replicate", "tensor=4"),
        )  # fmt: skip
        yield more[turn % 4]


def cases() -> Iterator[pytest.param]:
    for model in ZOO:
        for world in MORE_WORLDS.get(model, (4,)):
            for constraints in asked(model, world):
                fast = world == 2 and not constraints
                name = f"{model}-{world}-{'+'.join(constraints) or 'searched'}"
                yield pytest.param(model, world, constraints, id=name, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("model", "world", "constraints"), list(cases()))
def test_a_plan_trains_as_one_device_does(model: str, world: int, constraints: Constraints) -> None:
    refusal = [REFUSED[model, c.partition("=")[0]] for c in constraints if (model, c.partition("=")[0]) in REFUSED]
    if refusal:
        with pytest.raises(ConstraintError, match=refusal[0]):
            plan_for(model, world, constraints)
        return
    plan = plan_for(model, world, constraints)
    assert_met(model, plan, constraints)
    assert_parity(subject(model), plan)


def assert_met(model: str, plan: Plan, constraints: Constraints) -> None:
    """Every layer does what is asked, but for those known to be unable to, which the plan names."""
    for text in constraints:
        pattern, _, setting = text.rpartition(":")
        key, _, value = setting.strip().partition("=")
        if pattern:
            assert_met_by_part(model, plan, pattern, key, value)
        elif key == "microbatches":
            assert plan.num_microbatches == int(value)
        else:
            missed = {layer.name for layer in plan.layers if not is_met(plan, layer.strategy, key, value)}
            assert missed <= unable(model, key, constraints), text
            kinds = {layer.kind for layer in plan.layers if layer.name in missed}
            named = {name for note in plan.notes for name in re.findall(rf"layers like (\S+) can't use .*{key}=", note)}
            assert kinds <= {layer.kind for layer in plan.layers if layer.name in named}, plan.notes


def unable(model: str, key: str, constraints: Constraints) -> set[str]:
    """Names of the layers that may leave a degree alone: without a sequence, or with a parameter to keep whole."""
    whole = [text.partition(":")[0] for text in constraints if text.endswith("replicate")]
    program = subject(model).traced.program
    holders = {
        layer.name
        for layer in program.layers
        for name in layer.state
        if any(known.startswith(prefix) for prefix in whole for known in names_of(program, name))
    }
    return holders | (NO_SEQUENCE.get(model, set()) if key == "sequence" else set())


def assert_met_by_part(model: str, plan: Plan, pattern: str, key: str, value: str) -> None:
    program = subject(model).traced.program
    prefix = pattern.removesuffix("*")
    hit = False
    for layer, planned in zip(program.layers, plan.layers, strict=True):
        held = [
            position
            for position, name in enumerate(layer.state)
            if any(known.startswith(prefix) for known in names_of(program, name))
        ]
        hit |= bool(held)
        if key != "replicate":
            assert not held or is_met(plan, planned.strategy, key, value)
            continue
        strategy = plan.strategies[planned.strategy]
        assert all(not p.is_shard for position in held for p in strategy.storage[position])
    assert hit, f"{pattern} matches nothing"


def names_of(program: Program, value: str) -> list[str]:
    """The names of a held value in the module, those of tied weights included."""
    name = program.parameters.get(value)
    return [name, *(alias for alias, first in program.aliases.items() if first == name)] if name else []


def is_met(plan: Plan, index: int, key: str, value: str) -> bool:
    strategy = plan.strategies[index]
    if key in ("zero", "recompute"):
        return str(getattr(strategy, key)) == value
    return degrees(strategy.labels, strategy.mesh)[key] == int(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "constraints"),
    [
        ("llama", ("tensor=4",)),
        ("plain_gpt", ("microbatches=2", "zero=3", "recompute=full")),
    ],
)  # fmt: skip
def test_a_plan_trains_as_one_device_does_in_float32(model: str, constraints: Constraints) -> None:
    assert_parity(subject(model, torch.float32), plan_for(model, 4, constraints, torch.float32), torch.float32)
