from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

import autopar
from autopar.cluster import LINKS, Cluster, Device, Link
from autopar.cost import ClusterPrices
from autopar.errors import MeshError
from autopar.placement import Axis
from tests.models import make_plain_gpt


@pytest.mark.parametrize("thing", [*LINKS.values(), *(Cluster.of(name).device for name in Cluster.names())])
def test_every_preset_says_where_each_number_comes_from(thing):
    for part in fields(thing):
        if part.name in ("name", "sources", "is_mesh") or getattr(thing, part.name) == part.default:
            continue
        source = thing.sources.get(part.name, "")
        assert source.startswith(("published", "estimate", "calibrated")), (thing.name, part.name)


def test_other_links_by_name():
    cluster = Cluster.of("h100", nodes=2, within="pcie5", between="roce-200")
    assert (cluster.within.name, cluster.between.name) == ("PCIe 5 x16", "200 Gb/s per device, RoCE")
    with pytest.raises(MeshError, match=r"'carrier pigeon'.*ethernet-100.*nvlink4"):
        Cluster.of("h100", between="carrier pigeon")


def test_slower_wires_are_priced_slower():
    names = ["infiniband-400", "infiniband-200", "roce-50", "ethernet-10"]
    rates = [LINKS[name].gather_bytes_per_s for name in names]
    assert rates == sorted(rates, reverse=True)


def test_of_counts_devices():
    cluster = Cluster.of("H100", nodes=8, devices_per_node=4)
    assert cluster.world_size == 32
    assert cluster.device.name == "H100-80GB"


def test_an_unknown_name_lists_what_exists():
    with pytest.raises(MeshError, match=r"'tpu'.*a100.*h100.*mi300x"):
        Cluster.of("tpu")


def test_an_empty_cluster_is_refused():
    with pytest.raises(MeshError, match="num_nodes=0"):
        Cluster.of("h100", nodes=0)


def test_usable_memory_is_less_than_the_device_has_and_grows_with_it():
    small, large = Cluster.of("h100").device, Cluster.of("h200").device
    assert 0.85 * small.memory_bytes < small.usable_memory_bytes < small.memory_bytes
    assert small.usable_memory_bytes < large.usable_memory_bytes
    assert replace(small, memory_bytes=1e9).usable_memory_bytes == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": -1.0}, "memory_bytes must be positive"),
        ({"matmul_efficiency": 1.5}, r"matmul_efficiency must be in \(0, 1\]"),
        ({"launch_s": float("nan")}, "launch_s must be at least 0"),
        ({"flops_per_s": {"float32": 0.0}}, "flops_per_s must be positive"),
    ],
)
def test_a_device_with_impossible_numbers_is_refused(change, message):
    with pytest.raises(MeshError, match=message):
        replace(Cluster.of("a100").device, **change)


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(MeshError, match="gather_bytes_per_s must be positive"):
        Link("wire", 1e9, 0.0, 1e9, latency_s=1e-6, step_s=0.0)


def test_save_and_load_give_the_same_cluster(tmp_path):
    cluster = Cluster.of("mi300x", nodes=2)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster
    assert '"matmul_efficiency": 0.48' in (tmp_path / "cluster.json").read_text()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"autopar_cluster": 2}', '{"autopar_cluster": 1, "device": {}}'])
def test_other_text_is_no_cluster(text):
    with pytest.raises(MeshError, match="not the JSON of a cluster"):
        Cluster.from_json(text)


def _mesh(size: int, device_type: str):
    return SimpleNamespace(size=lambda: size, device_type=device_type)


def test_from_mesh_of_processes_shares_the_memory():
    two, four = (Cluster.from_mesh(_mesh(size, "cpu")) for size in (2, 4))
    assert (two.world_size, two.num_nodes) == (2, 1)
    assert two.device.memory_bytes == pytest.approx(2 * four.device.memory_bytes)


def test_a_plan_says_where_processes_share_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    model, inputs = make_plain_gpt()
    for world, is_said in ((2, False), (4, True)):
        cluster = Cluster.from_mesh(_mesh(world, "cpu"))
        assert Cluster.from_json(cluster.to_json()) == cluster
        plan = autopar.plan(model, cluster, inputs, constraints=("pipeline=1",))
        assert ("processes share cores: times are rough" in plan.notes) is is_said
    assert not ClusterPrices(Cluster.of("cpu")).notes


@pytest.mark.parametrize(
    ("driver", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA B200", "B200-180GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("AMD Instinct MI325X", "MI325X-256GB"),
        ("Ascend910B3", "Ascend-910B-64GB"),
        ("GAUDI3", "Gaudi3-128GB"),
    ],
)
def test_from_mesh_knows_devices_by_the_drivers_name(driver, device):
    cluster = Cluster.from_mesh(_mesh(16, "cuda"), devices_per_node=8, device_name=driver)
    assert (cluster.device.name, cluster.num_nodes) == (device, 2)


def test_from_mesh_asks_the_module_of_the_devices_type(monkeypatch):
    driver = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "Ascend910B2", device_count=lambda: 8)
    monkeypatch.setattr(torch, "npu", driver, raising=False)  # as a package with a backend of its own does
    cluster = Cluster.from_mesh(_mesh(16, "npu"))
    assert (cluster.device.name, cluster.devices_per_node, cluster.num_nodes) == ("Ascend-910B-64GB", 8, 2)


def test_a_device_without_a_preset_has_its_own_memory_and_says_that_its_speed_is_not_known(monkeypatch):
    driver = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 0, get_device_name=lambda: "RTX 9090", device_count=lambda: 2,
        get_device_properties=lambda _: SimpleNamespace(total_memory=24 * 2**30),
    )  # fmt: skip
    monkeypatch.setattr(torch, "npu", driver, raising=False)
    cluster = Cluster.from_mesh(_mesh(2, "npu"))
    assert (cluster.device.name, cluster.device.memory_bytes) == ("RTX 9090", 24 * 2**30)
    prices = ClusterPrices(cluster)
    assert prices.peak_flops_per_s("bfloat16") == 0.0  # so that no MFU is printed
    model, inputs = make_plain_gpt()
    plan = autopar.plan(model, cluster, inputs)
    assert any("nothing is known of the device 'RTX 9090'" in note for note in plan.notes)
    assert "MFU" not in str(plan)


@pytest.mark.parametrize("name", ["ascend-910b", "mi300x", "gaudi3", "h100"])
def test_nodes_of_one_device_have_no_link_inside(name):
    prices = ClusterPrices(Cluster.of(name, nodes=4, devices_per_node=1))
    assert 0 < prices.collective_s("all_reduce", Axis(4, 1), 2**20) < 1


def test_from_mesh_refuses_what_it_can_not_price():
    with pytest.raises(MeshError, match="'RTX 9090'"):
        Cluster.from_mesh(_mesh(8, "cuda"), devices_per_node=8, device_name="RTX 9090")
    with pytest.raises(MeshError, match="'NVIDIA GH200'"):
        Cluster.from_mesh(_mesh(8, "cuda"), devices_per_node=8, device_name="NVIDIA GH200")
    with pytest.raises(MeshError, match="'xpu'"):
        Cluster.from_mesh(_mesh(8, "xpu"))
    with pytest.raises(MeshError, match="no device"):
        Cluster.from_mesh(_mesh(0, "cpu"))
    with pytest.raises(MeshError, match="12 devices is not a multiple of the 8"):
        Cluster.from_mesh(_mesh(12, "cuda"), devices_per_node=8, device_name="NVIDIA H100")


def test_own_numbers():
    device = Device("mine", 1e9, 1e9, {"float32": 1e9}, 0.5, 0.5, 0.5, launch_s=0.0)
    wire = Link("wire", 1e9, 1e9, 1e9, latency_s=1e-6, step_s=0.0)
    assert Cluster(device, 2, 3, wire, wire).world_size == 6
