"""`ClusterPrices`: seconds of ops, collectives and optimizer steps on a cluster, from a profile or a roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.cluster import Cluster, HostLink, OpTime
from autopar.cost.collective_prices import CollectiveTerms, check_kind, collective_terms, traffic_share
from autopar.cost.layer_corrections import LayerCorrections, TimedLayer
from autopar.cost.op_curves import OpCurves, ProductCurves
from autopar.cost.profile import Curve, Profile
from autopar.cost.roofline import Roofline
from autopar.ops import OpCall, Work, count_work, family_of, packet_name
from autopar.placement import Axis
from autopar.program import Op, Program, TensorType

__all__ = ["DEFAULT_INTERFERENCE", "ClusterPrices", "link_source", "memory_source", "op_source"]


_SOURCES = ("published", "calibrated", "estimate")
"""The kinds of sources, from the most to the least reliable."""
_RATE_OF = {"matmul": "matmul_efficiency", "attention": "attention_efficiency"}
_LINK_RATES = {"all_reduce": "all_reduce_bytes_per_s", "all_to_all": "exchange_bytes_per_s"}


def op_source(sources: Mapping[str, str], work: Work) -> str:
    """The least reliable source of the roofline of an op on a device with these `sources`."""
    return _least_reliable(sources.get(_RATE_OF.get(work.kind, "memory_efficiency"), ""))


def memory_source(sources: Mapping[str, str]) -> str:
    """The least reliable source of the price of moving bytes on a device with these `sources`."""
    return _least_reliable(sources.get("memory_efficiency", ""))


def link_source(sources: Mapping[str, str], kind: str) -> str:
    """The least reliable source of the price of a collective on a link with these `sources`."""
    return _least_reliable(sources.get(_LINK_RATES.get(kind, "gather_bytes_per_s"), ""))


def _least_reliable(text: str) -> str:
    """The least reliable kind of source that `text` mentions; ``"estimate"`` if it mentions none."""
    return next((source for source in reversed(_SOURCES) if source in text), "estimate")


DEFAULT_INTERFERENCE = 0.2
"""The fraction by which a collective slows down kernels that run at the same time.  Calibrated on published training
runs (one value for all); NCCL's default of up to 24 blocks on the 108 to 132 cores of these devices is 0.18 to 0.22."""

_COPY_INTERFERENCE = 0.02
"""Estimate: a copy over PCIe uses 50 GB/s of a device's 2500 GB/s, and none of its cores."""
_USABLE_HOST = 0.6
"""Estimate: torch rounds pinned buffers up to powers of two, by a third on average; loaders need the rest."""

_HOST_UPDATE_BYTES_PER_S = 40e9
"""Estimate: three quarters of the memory bandwidth of a node's two processors (in a DGX A100 8 channels of DDR4-3200
each, 410 GB/s; in a DGX H100 8 of DDR5-4800, 614 GB/s: vendors' data sheets), shared by eight devices; the smaller of
both."""

_OPTIMIZER_KERNELS = 12
"""Estimate: kernels of a ``foreach`` AdamW step over a list of tensors, one for each of its operations."""


class ClusterPrices:
    """Prices on `cluster`: measurements of `profile` where it has any, otherwise a roofline.

    Satisfies the protocol `autopar.step.prices.Prices`.  The roofline of a matrix product is
    ``launch + max(flops / rate, reads / bandwidth) + writes / bandwidth``: the result is written after the last
    product of each tile, which is why products with a short inner dimension stay below the peak.

    Equal arguments give equal prices; they are cached.

    >>> from autopar.cluster import Cluster, OpTime
    >>> ClusterPrices(Cluster.of("h100")).collective_s("all_reduce", Axis(8, 1), 2.0**30) < 4.2e-3
    True
    """

    def __init__(self, cluster: Cluster, profile: Profile | None = None) -> None:
        """Set up prices on `cluster`, with `profile`'s measurements where it has any."""
        self.cluster = cluster
        self.timed: Mapping[str, TimedLayer] = {}
        self._corrections: LayerCorrections | None = None
        self.profile = profile
        self._curves: Mapping[str, Curve] = profile.curves if profile else {}
        self._products, self._ops = ProductCurves(self._curves), OpCurves(self._curves)
        self._op_times: dict[tuple[int, tuple[TensorType, ...], tuple[TensorType, ...], bool], OpTime] = {}
        self._alive: dict[int, Op] = {}
        self._terms: dict[tuple[str, Axis], tuple[Curve | CollectiveTerms, float]] = {}
        self._roofline = Roofline.of(cluster.device)

    def corrected(self, program: Program, timed: Mapping[str, TimedLayer]) -> ClusterPrices:
        """Return these prices, with ops of `program` scaled so that its `timed` layers cost what was measured."""
        prices = ClusterPrices(self.cluster, self.profile)
        prices.timed = dict(timed)
        prices._corrections = LayerCorrections(program, tuple(timed.values()), self.op_s)
        return prices

    @property
    def device(self) -> str:
        """The name of the device."""
        return self.profile.device if self.profile else self.cluster.device.name

    @property
    def memory_bytes(self) -> float:
        """The bytes of one device that a program may use."""
        return self.cluster.device.usable_memory_bytes

    @property
    def devices_per_node(self) -> int:
        """The number of consecutive ranks that share the fast links of a node."""
        return self.cluster.devices_per_node

    def op_s(
        self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], differentiable: bool
    ) -> OpTime:
        """Seconds of `op` on tensors of these local types; backward is 0.0 if not `differentiable`.

        Raises:
            MissingPriceError: the op computes with a dtype for which the device has no rate.
        """
        # Hashing an op costs more than pricing it; its id will do, as long as the op is kept alive here.
        key = (id(op), operands, results, differentiable)
        time = self._op_times.get(key)
        if time is None:
            self._alive[id(op)] = op
            time = self._price_op(op, operands, results, differentiable)
            if self._corrections is not None:
                time = self._corrections.correct(op, operands, results, time)
            self._op_times[key] = time
        return time

    def collective_s(self, kind: str, axis: Axis, num_bytes: float) -> float:
        """Seconds of one collective on `axis` with a buffer of `num_bytes` (the NCCL tests' "size").

        Raises:
            MissingPriceError: this kind has no price.
        """
        curve_and_scale = self._terms.get((kind, axis))
        if curve_and_scale is None:
            measured = self._collective_curve(kind, axis)
            curve_and_scale = measured or (collective_terms(self.cluster, kind, axis), 1.0)
            self._terms[kind, axis] = curve_and_scale
        curve, scale = curve_and_scale
        return curve.seconds(num_bytes * scale)

    def optimizer_s(self, num_parameters: float, bytes_per_parameter: float) -> float:
        """Seconds of an optimizer step over `num_parameters` local elements that moves `bytes_per_parameter` each."""
        num_bytes = num_parameters * bytes_per_parameter
        curve = self._curves.get("optimizer")
        if curve is not None:
            return curve.seconds(num_bytes)
        return num_bytes / self._roofline.bytes_per_s + _OPTIMIZER_KERNELS * self.cluster.device.launch_s

    @property
    def optimizer_tensor_s(self) -> float:
        """Seconds of an optimizer step per parameter, in addition to those of its elements; 0.0 if not measured."""
        curve = self._curves.get("optimizer/tensor")
        return curve.overhead_s if curve is not None else 0.0

    def peak_flops_per_s(self, dtype: str) -> float:
        """The peak rate of a device in this dtype, by its data sheet; 0 if unknown, as for CPUs."""
        device = self.cluster.device
        is_known = not device.sources.get("flops_per_s", "").startswith("estimate")
        return device.flops_per_s.get(dtype, 0.0) if is_known else 0.0

    def interference(self, kind: str, axis: Axis) -> float:
        """The fraction of its speed, 0 to 1, that compute loses while such a collective runs.

        If it wasn't measured: 1 on a CPU, whose cores also do the sending (so that nothing counts as overlapped), and
        `DEFAULT_INTERFERENCE` elsewhere.
        """
        measured = self.profile.interference(kind, axis) if self.profile else None
        if measured is not None:
            return min(1.0, max(0.0, measured))
        return 1.0 if self.cluster.device.name == "cpu" else DEFAULT_INTERFERENCE

    @property
    def host(self) -> HostLink:
        """The link between a device and its host's memory.

        Copies overlap with compute on devices with copy engines, but not on a CPU, whose cores do both.
        """
        device = self.cluster.device
        room_bytes = _USABLE_HOST * device.host_memory_bytes
        if device.name == "cpu":
            return HostLink(device.host_bytes_per_s, device.launch_s, room_bytes, taken=1.0)
        return HostLink(
            device.host_bytes_per_s, device.launch_s, room_bytes, _COPY_INTERFERENCE, _HOST_UPDATE_BYTES_PER_S
        )  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about these prices for the user of a plan."""
        notes = ["processes share cores: times are rough"] if self.cluster.shares_cores else []
        if self.cluster.is_unknown:
            notes.append(
                f"nothing is known of the device {self.cluster.device.name!r}: what is not measured is estimated as "
                "on an A100"
            )
        return tuple(notes)

    def collective_source(self, kind: str, axis: Axis) -> str:
        """The source of `collective_s`: ``"measured"``, ``"published"``, ``"calibrated"`` or ``"estimate"``."""
        if self._collective_curve(kind, axis) is not None:
            return "measured"
        is_within = axis.size * axis.stride <= self.cluster.devices_per_node
        return link_source((self.cluster.within if is_within else self.cluster.between).sources, kind)

    @property
    def optimizer_source(self) -> str:
        """The source of `optimizer_s`, one of those of `collective_source`."""
        return "measured" if "optimizer" in self._curves else memory_source(self.cluster.device.sources)

    def _collective_curve(self, kind: str, axis: Axis) -> tuple[Curve, float] | None:
        """The measured curve of the most similar axis, and a factor for buffers that gives them equal traffic on it.

        Axes are similar if both stay inside a node, or if both join the same number of ranks of each of several nodes.
        """
        check_kind(kind)
        if self.profile is None or axis.size <= 1:
            return None
        if kind == "send" and not self.profile.measured_axes(kind):
            # A broadcast to a single other rank is a send.
            pairs = [a for a in self.profile.measured_axes("broadcast") if a.size == 2]
            similar = [a for a in pairs if self._reach(a) == self._reach(axis)]
            return (self.profile.collective("broadcast", min(similar)), 1.0) if similar else None
        similar = [a for a in self.profile.measured_axes(kind) if self._reach(a) == self._reach(axis)]
        if not similar:
            return None
        nearest = min(similar, key=lambda a: (abs(math.log(a.size / axis.size)), a != axis, a))
        share = traffic_share(kind, axis.size) / traffic_share(kind, nearest.size)
        return self.profile.collective(kind, nearest), share

    def _reach(self, axis: Axis) -> int:
        """0 for an axis inside a node, otherwise the number of ranks of one node that it joins."""
        per_node = max(1, self.cluster.devices_per_node // axis.stride)
        return 0 if axis.size <= per_node else per_node

    def _price_op(
        self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], differentiable: bool
    ) -> OpTime:
        family, work = family_of(op.target), count_work(op, operands, results)
        if family.calls is not None:
            calls = tuple(family.calls(op, operands, results))
            return self._price_calls(calls, work, differentiable, again=family.calls_again)
        measured = self._measured(op, work)
        forward_s, backward_s = measured or self._roofline.seconds(work)
        source = "measured" if measured else op_source(self.cluster.device.sources, work)
        return OpTime(forward_s, backward_s if differentiable else 0.0, source)

    def _price_calls(self, calls: tuple[OpCall, ...], work: Work, differentiable: bool, *, again: bool) -> OpTime:
        """The price of an op that runs `calls`.

        Its forward runs their forward and backward, and its own backward only scales their gradients.  With `again`,
        its forward runs their forward alone, and its backward runs both.
        """
        times = [self._price_op(call.op, call.operands, call.results, differentiable) for call in calls]
        forward_s = sum(call.times * time.forward_s for call, time in zip(calls, times, strict=True))
        both_s = forward_s + sum(call.times * time.backward_s for call, time in zip(calls, times, strict=True))
        longest = max(times, key=lambda time: time.forward_s + time.backward_s)
        own_s = self._roofline.seconds(work)[1] if differentiable else 0.0
        if again:
            return OpTime(forward_s, both_s + own_s if differentiable else 0.0, longest.source)
        return OpTime(both_s, own_s, longest.source)

    def _measured(self, op: Op, work: Work) -> tuple[float, float] | None:
        name = packet_name(op.target)
        if work.is_counted_in_flops:
            seconds = self._products.seconds(work, "forward"), self._products.seconds(work, "backward")
        elif work.kind == "view":
            seconds = self._ops.view_s(name, work, "forward"), self._ops.view_s(name, work, "backward")
        else:
            seconds = self._ops.seconds(name, work, "forward"), self._ops.seconds(name, work, "backward")
        forward_s, backward_s = seconds
        if forward_s is None or backward_s is None:
            return None
        return forward_s, backward_s + self._ops.summing_s(work.summed_bytes, work.width)
