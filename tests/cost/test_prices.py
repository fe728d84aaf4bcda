import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Curve, Point, Profile
from autopar.cost.collective_prices import traffic_share
from autopar.errors import MissingPriceError
from autopar.placement import Axis
from autopar.step.prices import Prices
from tests.cost.ops import ATTENTION, CUDNN, FLASH, LINEAR, MUL, op, tensor

KINDS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")
CLUSTERS = [Cluster.of(name, nodes=4) for name in Cluster.names()]
H100 = ClusterPrices(Cluster.of("h100", nodes=4))
AXES = [Axis(2, 1), Axis(8, 1), Axis(4, 2), Axis(4, 8), Axis(32, 1), Axis(8, 4), Axis(2, 4)]


def _profile(**curves: list[tuple[float, float]]) -> Profile:
    found = {key.replace("__", "/"): Curve(tuple(Point(*p) for p in points)) for key, points in curves.items()}
    return Profile("cpu", 4, "2026-01-01", {"torch": "2"}, found)


def test_they_are_what_a_search_asks_for():
    prices: Prices = H100
    assert (prices.device, prices.devices_per_node) == ("H100-80GB", 8)
    assert 70e9 < prices.memory_bytes < 80e9


def test_a_missing_dtype_is_an_error_that_names_those_known():
    prices, x = ClusterPrices(Cluster.of("a100")), tensor(8, 8, dtype="float8_e4m3fn")
    with pytest.raises(MissingPriceError, match=r"A100-80GB.*float8_e4m3fn.*bfloat16.*flops_per_s"):
        prices.op_s(LINEAR, (x, x), (x,), True)


def test_complex_products_run_at_a_quarter_of_the_rate_of_real_ones():
    x, z = tensor(4096, 4096, dtype="float32"), tensor(4096, 4096, dtype="complex64")
    real, complex_ = (H100.op_s(LINEAR, (kind, kind), (kind,), False).forward_s for kind in (x, z))
    assert complex_ == pytest.approx(4 * real, rel=0.05)


@pytest.mark.parametrize("kind", ["", "none", "gather", "barrier"])
def test_an_unknown_collective_is_an_error_never_free(kind):
    with pytest.raises(MissingPriceError, match="all_gather"):
        H100.collective_s(kind, Axis(8, 1), 1e6)
    with pytest.raises(MissingPriceError):
        H100.collective_s(kind, Axis(1, 1), 1e6)


def test_backward_only_if_differentiable():
    operands, results = (tensor(64, 64), tensor(64, 64)), (tensor(64, 64),)
    whole, inference = (H100.op_s(LINEAR, operands, results, needed) for needed in (True, False))
    assert whole.forward_s == inference.forward_s
    assert (whole.backward_s > whole.forward_s, inference.backward_s, whole.source) == (True, 0.0, "estimate")


def test_large_products_take_twice_as_long_backward():
    x, weight = tensor(8192, 8192), tensor(8192, 8192)
    taken = H100.op_s(LINEAR, (x, weight), (x,), True)
    assert taken.backward_s == pytest.approx(2 * taken.forward_s, rel=0.05)


def test_views_are_free():
    taken = H100.op_s(op("aten.transpose.int", 1, is_view=True), (tensor(8, 4),), (tensor(4, 8),), True)
    assert (taken.forward_s, taken.backward_s) == (0.0, 0.0)


def test_small_products_are_less_efficient():
    def rate(size: int) -> float:
        x = tensor(size, size)
        return 2 * size**3 / H100.op_s(LINEAR, (x, x), (x,), False).forward_s

    rates = [rate(size) for size in (64, 256, 1024, 4096, 16384)]
    assert rates == sorted(rates)
    assert rates[0] < 0.01 * rates[-1]


@given(
    st.sampled_from(KINDS),
    st.sampled_from(AXES),
    st.sampled_from(CLUSTERS),
    st.floats(0, 1e11),
    st.floats(0, 1e11),
)
def test_more_bytes_never_travel_faster(kind, axis, cluster, one, other):
    prices = ClusterPrices(cluster)
    few, many = sorted((one, other))
    assert 0 < prices.collective_s(kind, axis, few) <= prices.collective_s(kind, axis, many)


@given(st.sampled_from([LINEAR, MUL]), st.lists(st.integers(1, 64), min_size=4, max_size=4), st.integers(0, 2))
def test_a_larger_op_is_never_faster(an_op, extents, grown):
    rows, columns, inner, more = (64 * extent for extent in extents)  # aligned rows are faster than shorter others

    def price(rows: int, columns: int, inner: int):
        if an_op is MUL:
            x = tensor(rows, columns, inner)
            return H100.op_s(MUL, (x, x), (x,), True)
        operands = (tensor(rows, inner), tensor(columns, inner))
        return H100.op_s(LINEAR, operands, (tensor(rows, columns),), True)

    sizes = [rows, columns, inner]
    small = price(*sizes)
    sizes[grown] += more
    large = price(*sizes)
    assert small.forward_s <= large.forward_s
    assert small.backward_s <= large.backward_s


@given(st.integers(1, 2**16), st.integers(1, 2**16))
def test_a_longer_sequence_is_never_faster(one, other):
    def price(length: int):
        x = tensor(1, 4, length, 64)
        return H100.op_s(ATTENTION, (x, x, x), (x,), True)

    short, long = map(price, sorted((one, other)))
    assert short.forward_s <= long.forward_s
    assert short.backward_s <= long.backward_s


@pytest.mark.parametrize(
    ("device", "dtype", "rows", "head", "kernel"),
    [
        ("h100", "bfloat16", 4096, 128, CUDNN),
        ("b200", "float16", 4096, 64, CUDNN),
        ("a100", "bfloat16", 4096, 128, FLASH),  # has no kernels of its own
        ("h100", "float32", 4096, 128, FLASH),
        ("h100", "bfloat16", 4096, 256, FLASH),
        ("h100", "bfloat16", 2048, 128, FLASH),  # a slice of the rows
    ],
)
def test_attention_is_priced_as_the_kernel_that_torch_picks(device, dtype, rows, head, kernel):
    query, key = tensor(1, 8, rows, head, dtype=dtype), tensor(1, 8, 4096, head, dtype=dtype)
    prices = ClusterPrices(Cluster.of(device))
    picked, same = (prices.op_s(each, (query, key, key), (query,), True) for each in (ATTENTION, kernel))
    assert (picked.forward_s, picked.backward_s) == (same.forward_s, same.backward_s)


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_the_node_costs_more(kind):
    assert H100.collective_s(kind, Axis(4, 8), 2**26) > 2 * H100.collective_s(kind, Axis(4, 1), 2**26)
    assert H100.collective_s(kind, Axis(4, 4), 2**26) > H100.collective_s(kind, Axis(4, 1), 2**26)


def test_an_axis_inside_a_node_does_not_care_about_its_stride():
    far, near = (H100.collective_s("all_gather", Axis(2, stride), 2**20) for stride in (4, 1))
    assert far == near


def test_an_axis_of_one_is_free():
    assert H100.collective_s("all_reduce", Axis(1, 8), 2**30) == 0.0


def bus_bandwidth(kind):
    """Of a large message, without what an empty one takes."""
    seconds = H100.collective_s(kind, Axis(8, 1), 2.0**26) - H100.collective_s(kind, Axis(8, 1), 0.0)
    return traffic_share(kind, 8) * 2.0**26 / seconds


def test_in_switch_reduction_is_for_all_reduce_only():
    assert bus_bandwidth("all_reduce") > 1.15 * bus_bandwidth("all_gather")


def test_latency_and_bus_bandwidth_of_a_gather_are_those_of_the_link():
    assert 1e-6 < H100.collective_s("all_gather", Axis(8, 1), 0.0) < 1e-4
    assert 200e9 < bus_bandwidth("all_gather") < 362e9


def test_an_optimizer_step_is_limited_by_memory():
    assert H100.optimizer_s(1e9, 28) == pytest.approx(28e9 / 2.5e12, rel=0.05)
    assert H100.optimizer_s(0, 28) > 0


def test_a_profile_comes_first():
    profile = _profile(
        matmul__float32__forward=[(1e3, 1e-5), (1e9, 1e-2)],
        matmul__float32__backward=[(2e3, 2e-5), (2e9, 2e-2)],
        elementwise__forward=[(1e3, 1e-6), (1e7, 1e-3)],
        elementwise__backward=[(1e3, 2e-6), (1e7, 2e-3)],
        optimizer=[(28.0, 1e-4), (28e6, 1e-2)],
        collective__all_reduce__4__1=[(1e3, 1e-4), (1e6, 1e-3)],
    )
    prices = ClusterPrices(Cluster.of("cpu", devices_per_node=4), profile)
    x = tensor(1000, 1000, dtype="float32")
    taken = prices.op_s(LINEAR, (x, x), (x,), True)
    assert (taken.forward_s, taken.source) == (pytest.approx(2e-2), "measured")
    assert taken.backward_s == pytest.approx(4e-2)
    assert prices.op_s(MUL, (x, x), (x,), True).forward_s == pytest.approx(1.2e-3)
    half = tensor(8, 8)
    assert prices.op_s(LINEAR, (half, half), (half,), True).source == "estimate"
    assert prices.optimizer_s(1e6, 28) == pytest.approx(1e-2)
    assert prices.collective_s("all_reduce", Axis(4, 1), 1e6) == pytest.approx(1e-3)
    # Two ranks send 1 byte for each that 4 ranks send 1.5 of.
    assert prices.collective_s("all_reduce", Axis(2, 1), 1.5e6) == pytest.approx(1e-3)
    assert prices.collective_s("all_gather", Axis(4, 1), 1e6) > 0


def test_a_profile_of_one_node_says_nothing_about_links_between_nodes():
    profile = _profile(collective__all_reduce__2__1=[(1e3, 1.0)])
    cluster = Cluster.of("h100", nodes=2)
    described, profiled = ClusterPrices(cluster), ClusterPrices(cluster, profile)
    assert profiled.collective_s("all_reduce", Axis(4, 1), 10) == 1.0
    across = ("all_reduce", Axis(2, 8), 1e6)
    assert profiled.collective_s(*across) == described.collective_s(*across)


POINTS = st.tuples(st.floats(1, 1e9), st.floats(1e-7, 10))


@given(st.lists(POINTS, min_size=1, max_size=6, unique_by=lambda p: p[0]), st.floats(0, 1e10), st.floats(0, 1e10))
def test_a_curve_never_falls(points, one, other):
    curve = Curve(tuple(Point(*p) for p in points))
    few, many = sorted((one, other))
    assert curve.seconds(few) <= curve.seconds(many) * (1 + 1e-12)


def test_a_curve_passes_through_its_points():
    curve = Curve((Point(1e6, 2e-3), Point(1e3, 1e-4)))
    assert [curve.seconds(a) for a in (1, 1e3, 1e6, 1e7)] == pytest.approx([1e-4, 1e-4, 2e-3, 2e-2])


def test_a_curve_needs_positive_points():
    for points in ((), (Point(1, 0),), (Point(0, 1),), (Point(1, float("nan")),)):
        with pytest.raises(MissingPriceError, match="positive"):
            Curve(points)


def test_a_profile_survives_being_saved(tmp_path):
    profile = _profile(optimizer=[(1.0, 0.25), (2.0, 0.5)], collective__all_gather__2__1=[(8.0, 1.0)])
    profile.save(tmp_path / "deep" / "profile.json")
    assert Profile.load(tmp_path / "deep" / "profile.json") == profile
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["profile.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"autopar_profile": 99}', '{"autopar_profile": 1}'])
def test_other_text_is_no_profile(text):
    with pytest.raises(MissingPriceError, match="not the JSON of a profile"):
        Profile.from_json(text)


def test_equal_questions_get_equal_answers_and_little_time():
    x, weight = tensor(512, 512), tensor(512, 512)
    fresh = ClusterPrices(Cluster.of("h100", nodes=4))
    assert fresh.op_s(LINEAR, (x, weight), (x,), True) == H100.op_s(LINEAR, (x, weight), (x,), True)
    start = time.process_time()
    for _ in range(20_000):
        H100.op_s(LINEAR, (x, weight), (x,), True)
        H100.collective_s("all_gather", Axis(8, 1), 1e6)
    assert (time.process_time() - start) / 20_000 < 50e-6


def test_more_memory_is_more_usable_memory():
    cluster = Cluster.of("h100")
    more = replace(cluster, device=replace(cluster.device, memory_bytes=cluster.device.memory_bytes + 1))
    assert ClusterPrices(more).memory_bytes > ClusterPrices(cluster).memory_bytes


def test_a_send_is_one_hop_however_long_the_pipeline():
    prices = ClusterPrices(Cluster.of("h100", nodes=4, devices_per_node=8))
    inside, across = prices.collective_s("send", Axis(2, 4), 1e6), prices.collective_s("send", Axis(2, 8), 1e6)
    assert 0 < inside < across
    assert prices.collective_s("send", Axis(4, 8), 1e6) == across
    # Some hops leave the node: the slowest is what a pipeline waits for.
    assert prices.collective_s("send", Axis(8, 4), 1e6) == across


def test_a_profile_prices_a_send_as_a_broadcast_to_one_other_rank():
    points = {
        "collective/broadcast/2/1": [(1e3, 1e-4), (1e6, 1e-3)],
        "collective/broadcast/4/1": [(1e3, 1.0), (1e6, 2.0)],
    }
    prices = ClusterPrices(Cluster.of("cpu", devices_per_node=4), _profile(**points))
    assert prices.collective_s("send", Axis(4, 1), 1e6) == pytest.approx(1e-3)
