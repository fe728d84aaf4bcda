"""Programs for the tests of the search inside a layer: written op by op, with options from the factor
rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.cluster import HostLink
from autopar.ops import options_for
from autopar.placement import Axis
from autopar.program import Arg, Layer, Op, Program, Ref, TensorType, Value
from autopar.search.layer.layer_problem import LayerProblem, StepSettings
from autopar.step.layer.local_layer import SharedStorage
from autopar.step.layer.op_states import Allowed
from autopar.step.prices import OpTime, Prices
from autopar.step.training import TrainingSpec


def build_problem(
    program: Program,
    mesh: tuple[int, ...],
    *,
    layer: Layer | None = None,
    prices: Prices | None = None,
    training: TrainingSpec | None = None,
    num_microbatches: int = 1,
    time: tuple[str, ...] = (),
    allowed: Allowed | None = None,
    shared: SharedStorage | None = None,
) -> LayerProblem:
    """The problem of a program's only layer, or of `layer`."""
    settings = StepSettings(
        program, prices or TablePrices(), training or TrainingSpec(), num_microbatches,
        {each.kind: time for each in program.layers}, shared or {},
    )  # fmt: skip
    return LayerProblem(settings, layer or program.layers[0], mesh, allowed)


@dataclass
class Builder:
    """Collects values and ops of a one-layer program."""

    dtype: str = "bfloat16"
    values: dict[str, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    saves_operands: frozenset[str] = frozenset({"linear", "mul", "pow", "silu", "rsqrt"})

    def add(self, name: str, shape: Sequence[int], role: str, *, grad: bool = True, dtype: str = "") -> str:
        self.values[name] = Value(name, TensorType(tuple(shape), dtype or self.dtype), role, grad)
        return name

    def op(self, target: str, args: tuple[Arg, ...], shape: Sequence[int], dtype: str = "") -> str:
        """Append one op with one result, which takes a gradient if an operand does; the result's name."""
        kind = target.split(".")[1]
        name = f"{kind}_{len(self.ops)}"
        bare = Op(name, target, args, (), (name,))
        types = tuple(self.values[operand].type for operand in bare.operands)
        grad = any(self.values[operand].requires_grad for operand in bare.operands)
        self.add(name, shape, "op", grad=grad, dtype=dtype)
        match = options_for(bare, types, (self.values[name].type,))
        assert match is not None, target
        saves: tuple[int, ...] = ()
        if grad and kind in self.saves_operands:
            saves = tuple(range(len(types)))
        if grad and kind == "scaled_dot_product_attention":
            saves = (0, 1, 2, 3)
        self.ops.append(
            replace(bare, options=match.options, is_view=match.is_view, size_args=match.size_args, saves=saves)
        )
        return name

    def program(self, outputs: tuple[str, ...], **more: object) -> Program:
        """The program of the one layer; its inputs are the values of role "input"."""
        by_role = {role: tuple(n for n, v in self.values.items() if v.role == role)
                   for role in ("input", "parameter", "constant")}  # fmt: skip
        held = by_role["parameter"] + by_role["constant"]
        layer = Layer("layer", 0, tuple(self.ops), by_role["input"], held, outputs)
        fields: dict[str, object] = {"inputs": (), "outputs": (), "loss": ""} | more
        return Program(
            dict(self.values),
            (layer,),
            parameters={n: n for n in by_role["parameter"]},
            aliases={},
            **fields,  # type: ignore[arg-type]
        )


def decoder_layer(
    batch: int, seq: int, hidden: int = 4096, ffn: int = 14336, heads: int = 32, kv_heads: int = 8
) -> Program:
    """A decoder layer with root-mean-square norms, rotary positions, grouped queries and a gated
    feed-forward.
    """
    b = Builder()
    size = hidden // heads
    x = b.add("x", (batch, seq, hidden), "input")
    cos, sin = (b.add(n, (1, 1, seq, size), "constant", grad=False) for n in ("cos", "sin"))
    h = _norm(b, x, (batch, seq, hidden), "norm1")
    q, k, v = (
        _heads(b, h, n, (batch, seq, hidden), count, size)
        for n, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
    )
    q = _rotate(b, q, cos, sin)
    k = _rotate(b, k, cos, sin)
    k, v = (_repeat(b, t, heads) for t in (k, v))
    a = b.op(
        "aten.scaled_dot_product_attention.default",
        (Ref(q), Ref(k), Ref(v), None, 0.0, True),
        (batch, heads, seq, size),
    )
    a = b.op("aten.transpose.int", (Ref(a), 1, 2), (batch, seq, heads, size))
    a = b.op("aten.reshape.default", (Ref(a), (batch, seq, hidden)), (batch, seq, hidden))
    a = _linear(b, a, "o", (batch, seq, hidden), hidden, hidden)
    r = b.op("aten.add.Tensor", (Ref(x), Ref(a)), (batch, seq, hidden))
    h = _norm(b, r, (batch, seq, hidden), "norm2")
    gate = _linear(b, h, "gate", (batch, seq, ffn), ffn, hidden)
    gate = b.op("aten.silu.default", (Ref(gate),), (batch, seq, ffn))
    up = _linear(b, h, "up", (batch, seq, ffn), ffn, hidden)
    g = b.op("aten.mul.Tensor", (Ref(gate), Ref(up)), (batch, seq, ffn))
    g = _linear(b, g, "down", (batch, seq, hidden), hidden, ffn)
    out = b.op("aten.add.Tensor", (Ref(r), Ref(g)), (batch, seq, hidden))
    return b.program((out,))


def _linear(b: Builder, x: str, name: str, shape: tuple[int, ...], rows: int, columns: int) -> str:
    w = b.add(f"w_{name}", (rows, columns), "parameter")
    return b.op("aten.linear.default", (Ref(x), Ref(w)), shape)


def _norm(b: Builder, x: str, shape: tuple[int, ...], name: str) -> str:
    w = b.add(f"w_{name}", shape[-1:], "parameter")
    f = b.op("aten.to.dtype", (Ref(x), "torch.float32"), shape, "float32")
    s = b.op("aten.pow.Tensor_Scalar", (Ref(f), 2), shape, "float32")
    s = b.op("aten.sum.dim_IntList", (Ref(s), (-1,), True), (*shape[:-1], 1), "float32")
    s = b.op("aten.div.Tensor", (Ref(s), float(shape[-1])), (*shape[:-1], 1), "float32")
    s = b.op("aten.add.Tensor", (Ref(s), 1e-5), (*shape[:-1], 1), "float32")
    s = b.op("aten.rsqrt.default", (Ref(s),), (*shape[:-1], 1), "float32")
    f = b.op("aten.mul.Tensor", (Ref(f), Ref(s)), shape, "float32")
    f = b.op("aten.to.dtype", (Ref(f), "torch.bfloat16"), shape)
    return b.op("aten.mul.Tensor", (Ref(w), Ref(f)), shape)


def _heads(b: Builder, x: str, name: str, shape: tuple[int, ...], heads: int, size: int) -> str:
    batch, seq, hidden = shape
    y = _linear(b, x, name, (batch, seq, heads * size), heads * size, hidden)
    y = b.op("aten.view.default", (Ref(y), (batch, seq, heads, size)), (batch, seq, heads, size))
    return b.op("aten.transpose.int", (Ref(y), 1, 2), (batch, heads, seq, size))


def _rotate(b: Builder, x: str, cos: str, sin: str) -> str:
    shape = b.values[x].type.shape
    half = (*shape[:-1], shape[-1] // 2)
    direct = b.op("aten.mul.Tensor", (Ref(x), Ref(cos)), shape)
    first = b.op("aten.slice.Tensor", (Ref(x), 3, 0, half[-1]), half)
    second = b.op("aten.slice.Tensor", (Ref(x), 3, half[-1], 2**63 - 1), half)
    second = b.op("aten.neg.default", (Ref(second),), half)
    turned = b.op("aten.cat.default", ((Ref(second), Ref(first)), -1), shape)
    turned = b.op("aten.mul.Tensor", (Ref(turned), Ref(sin)), shape)
    return b.op("aten.add.Tensor", (Ref(direct), Ref(turned)), shape)


def _repeat(b: Builder, x: str, heads: int) -> str:
    batch, kv_heads, seq, size = b.values[x].type.shape
    y = b.op("aten.unsqueeze.default", (Ref(x), 2), (batch, kv_heads, 1, seq, size))
    full = (batch, kv_heads, heads // kv_heads, seq, size)
    y = b.op("aten.expand.default", (Ref(y), full), full)
    return b.op("aten.reshape.default", (Ref(y), (batch, heads, seq, size)), (batch, heads, seq, size))


@dataclass(frozen=True)
class TablePrices:
    """Prices without a cluster: an op takes time in proportion to its elements, a collective to its bytes."""

    device: str = "table"
    memory_bytes: float = 80e9
    devices_per_node: int = 8
    latency_s: float = 7e-6
    bytes_per_s: float = 3e11
    taken: float = 0.2
    host_link: HostLink = field(default_factory=HostLink)
    notes: tuple[str, ...] = ()

    def op_s(
        self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], differentiable: bool
    ) -> OpTime:
        elements = sum(t.num_elements for t in operands) + 3 * sum(t.num_elements for t in results)
        forward = 1e-6 + 1e-11 * elements * (1 + len(op.target) % 3)
        return OpTime(forward, 1.7 * forward if differentiable else 0.0, "table")

    def collective_s(self, kind: str, axis: Axis, num_bytes: float) -> float:
        shares = {"all_reduce": 2.0, "all_gather": 1.1, "reduce_scatter": 1.0, "all_to_all": 0.3}
        share = (shares | {"send": 1.0, "broadcast": 1.0})[kind]
        return (
            self.latency_s * (1 + axis.stride) ** 0.5
            + share * num_bytes * (axis.size - 1) / axis.size / self.bytes_per_s
        )

    def optimizer_s(self, num_parameters: float, bytes_per_parameter: float) -> float:
        return 1e-6 + num_parameters * bytes_per_parameter / 2e12

    @property
    def optimizer_tensor_s(self) -> float:
        return 2e-6

    def peak_flops_per_s(self, dtype: str) -> float:
        return 1e15

    def interference(self, kind: str, axis: Axis) -> float:
        return self.taken

    @property
    def host(self) -> HostLink:
        return self.host_link

    def collective_source(self, kind: str, axis: Axis) -> str:
        return "table"

    @property
    def optimizer_source(self) -> str:
        return "table"
