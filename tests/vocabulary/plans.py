"""Plans for the tests of the vocabulary: one by hand, and any by hypothesis."""

import math

from hypothesis import strategies as st

from autopar.placement import BROADCAST, PARTIAL, REPLICATE, shard
from autopar.plan import Decisions, LayerStrategy, Plan, PlannedLayer
from autopar.plan.prediction import LayerCost, Prediction

__all__ = ["plans", "small_plan"]


def small_plan() -> Plan:
    """Two layers of one kind on a 2x2 mesh."""
    strategy = LayerStrategy(
        mesh=(2, 2),
        assignments=(("b", "f"), ("b", "-")),
        time=("b", "b"),
        inputs=((shard(0), REPLICATE),),
        outputs=((shard(0), PARTIAL),),
        copies=(("x", (shard(0), BROADCAST)),),
        storage=((shard(1), shard(0)),),
        zero=3,
        recompute="selective",
        labels=("data", "tensor"),
    )
    decisions = Decisions(
        fingerprint="abc",
        world_size=4,
        num_microbatches=2,
        layers=(PlannedLayer("block.0", 0, 0), PlannedLayer("block.1", 0, 0)),
        strategies=(strategy,),
        shared_mesh=(4,),
        shared_storage=(("embedding.weight", (shard(0),)),),
    )
    prediction = Prediction(
        device="cpu",
        price_source=(("measured", 1.0),),
        step_time_s=1.5,
        peak_memory_bytes=1e9,
        samples_per_step=8,
        costs=(LayerCost(forward_s=0.5, backward_s=1.0, saved_bytes=1024.0),) * 2,
    )
    return Plan(
        decisions,
        prediction,
        constraints=("tensor=2",),
        memory_limit_bytes=2e9,
        optimality_gap=0.01,
        notes=("one op runs whole: aten.sort",),
        planning_s=(("trace", 0.25), ("search", 0.5)),
    )


_names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
_factors = st.sampled_from(["b", "s", "h", "f", "-", "~", "+", "k0"])
_amounts = st.floats(0, 1e18, allow_nan=False)
_placements = st.sampled_from([REPLICATE, PARTIAL, BROADCAST, shard(0), shard(1), shard(11)])
_pairs_of_numbers = st.dictionaries(_names, _amounts, max_size=3).map(lambda d: tuple(d.items()))


def _many(item, largest=3):
    return st.lists(item, max_size=largest).map(tuple)


@st.composite
def _strategies(draw, mesh):
    layouts = st.tuples(*[_placements] * len(mesh))
    num_ops = draw(st.integers(0, 3))
    return LayerStrategy(
        mesh=mesh,
        assignments=draw(st.tuples(*[st.tuples(*[_factors] * len(mesh))] * num_ops)),
        time=draw(st.sampled_from([(), ("b",) * num_ops])),
        inputs=draw(_many(layouts)),
        outputs=draw(_many(layouts)),
        copies=tuple(draw(st.dictionaries(_names, layouts, max_size=3)).items()),
        storage=draw(_many(layouts)),
        zero=draw(st.integers(0, 3)),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        labels=draw(st.just(()) | st.tuples(*[_names] * len(mesh))),
    )


@st.composite
def plans(draw) -> Plan:
    """Any plan whose parts fit together."""
    mesh = draw(st.sampled_from([(1,), (4,), (2, 2), (2, 2, 3), (1, 8)]))
    world = math.prod(mesh)
    strategies = draw(st.lists(_strategies(mesh) | _strategies((world,)), min_size=1, max_size=3).map(tuple))
    kinds = st.integers(0, len(strategies) - 1)
    decisions = Decisions(
        fingerprint=draw(_names),
        world_size=world,
        num_microbatches=draw(st.integers(1, 64)),
        layers=draw(_many(st.builds(PlannedLayer, name=_names, kind=kinds, strategy=kinds), 5)),
        strategies=strategies,
        shared_mesh=mesh,
        shared_storage=tuple(draw(st.dictionaries(_names, st.tuples(*[_placements] * len(mesh)), max_size=2)).items()),
    )
    prediction = Prediction(
        device=draw(_names),
        price_source=draw(_pairs_of_numbers),
        step_time_s=draw(_amounts),
        peak_memory_bytes=draw(_amounts),
        samples_per_step=draw(st.integers(1, 1 << 40)),
        costs=tuple(draw(st.builds(LayerCost, *[_amounts] * 11)) for _ in decisions.layers),
    )
    return Plan(
        decisions,
        draw(st.sampled_from([prediction, Prediction()])),
        constraints=draw(_many(_names)),
        memory_limit_bytes=draw(_amounts | st.just(math.inf)),
        optimality_gap=draw(_amounts),
        notes=draw(_many(_names)),
        planning_s=draw(_pairs_of_numbers),
    )
