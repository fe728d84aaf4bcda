"""Real calls, at least one for every op that has a rule."""

from __future__ import annotations

from typing import Any

import torch

import autopar.trace  # noqa: F401  (registers ops)
from autopar.ops import pointwise, random_ops
from autopar.ops.experts import ENDS, EXPERTS, IDS, PRODUCT, TRANSPOSE, Body, InnerWidth
from autopar.program import Op, Ref, TensorType
from tests.ops.harness import Sample, sample

F64 = torch.float64


def x(*shape: int) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, dtype=F64)


def u(*shape: int) -> torch.Tensor:
    """Numbers between 0.1 and 0.9, inside the domain of every elementary function."""
    return torch.rand(shape, dtype=F64) * 0.8 + 0.1


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def bits(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


def all_samples() -> list[Sample]:
    """Every sample, freshly drawn under a fixed seed."""
    torch.manual_seed(1)
    return [
        *_pointwise(),
        *_products(),
        *_recurrent(),
        *_complex(),
        *_square_matrices(),
        *_reductions(),
        *_views(),
        *_joins(),
        *_indexing(),
        *_normalization(),
        *_spatial(),
        *_in_space(),
        *_creation(),
        *_special(),
    ]


def _experts() -> Sample:
    """A product for each expert, with a bias for each, a norm's weight for all and a weight for each row."""
    row, scalar = TensorType((6,), "float64"), TensorType((), "float64")
    ops = (
        Op("v0", PRODUCT, (Ref("reads0"), Ref("experts0"), Ref(ENDS)), (), ("v0",)),
        Op("v1", "aten.index.Tensor", (Ref("experts1"), (Ref(IDS),)), (), ("v1",)),
        Op("v2", "aten.add.Tensor", (Ref("v0"), Ref("v1")), (), ("v2",)),
        Op("v3", "aten.mul.Tensor", (Ref("v2"), Ref("others0")), (), ("v3",)),
        Op("v4", "aten.unsqueeze.default", (Ref("reads1"), -1), (), ("v4",)),
        Op("v5", "aten.mul.Tensor", (Ref("v3"), Ref("v4")), (), ("v5",)),
    )
    kinds = {"reads0": TensorType((4,), "float64"), "reads1": scalar, **dict.fromkeys(["v0", "v1", "v2", "v3"], row)}
    body = Body(ops, "v5", {**kinds, "v4": TensorType((1,), "float64"), "v5": row}, 100.0)
    lists = ([x(12, 4), x(24)], [x(5, 4, 6), x(5, 6)], [x(6)])
    return sample(EXPERTS, ids(4, 24), *lists, torch.arange(4), 4, body.text())


def _shared_experts() -> Sample:
    """A gate and an up projection that are halves of one matrix, stored transposed, and biases inside and behind."""
    wide, inner, row = (TensorType((size,), "float64") for size in (24, 12, 4))
    ops = (
        Op("t", TRANSPOSE, (Ref("experts0"), 1, 2), (), ("turned0",)),
        Op("v0", PRODUCT, (Ref("reads0"), Ref("turned0"), Ref(ENDS)), (), ("v0",)),
        Op("v1", "aten.index.Tensor", (Ref("experts1"), (Ref(IDS),)), (), ("v1",)),
        Op("v2", "aten.add.Tensor", (Ref("v0"), Ref("v1")), (), ("v2",)),
        Op("v3", "aten.chunk.default", (Ref("v2"), 2, -1), (), ("v3", "v4")),
        Op("v5", "aten.mul.Tensor", (Ref("v3"), Ref("v4")), (), ("v5",)),
        Op("v6", PRODUCT, (Ref("v5"), Ref("experts2"), Ref(ENDS)), (), ("v6",)),
        Op("v7", "aten.index.Tensor", (Ref("experts3"), (Ref(IDS),)), (), ("v7",)),
        Op("v8", "aten.add.Tensor", (Ref("v6"), Ref("v7")), (), ("v8",)),
    )
    narrow = dict.fromkeys(["v0", "v1", "v2"], wide) | dict.fromkeys(["v3", "v4", "v5"], inner)
    types = {"reads0": row, **narrow, **dict.fromkeys(["v6", "v7", "v8"], row)}
    width = InnerWidth(12, ((2, 1, 1), (0, 1, 2), (1, 1, 2)), (3,), tuple(narrow), 50.0)
    body = Body(ops, "v8", types, 100.0, width=width)
    lists = ([x(12, 4)], [x(4, 24, 4), x(4, 24), x(4, 12, 4), x(4, 4)], [])
    return sample(EXPERTS, ids(4, 24), *lists, torch.arange(4), 4, body.text())


# ---------------------------------------------------------------- pointwise: written by the op's schema

_RANDOM = {"native_dropout", "bernoulli", "rand_like", "randn_like", "normal_functional", "uniform"}
_OWN_SAMPLES = {
    "conj",
    "_conj",
    "resolve_conj",
    "resolve_neg",
    "real",
    "imag",
    "complex",
    "polar",
    "bucketize",
    "where",
    "masked_fill",
    "_to_copy",
    "to",
    "dropout",
    "prelu",
    "heaviside",
    "lerp",
    "threshold",
    "clamp",
    "clip",
    "contiguous",
    "type_as",
    "fill",
    "native_dropout",
}
_NO_GRADIENT = {
    "aten.copy.default",
    "aten.normal_functional.default",
    "aten.bernoulli.default",
    "aten.bernoulli.p",
    "aten.remainder.Scalar_Tensor",
}
_INTEGER = ("bitwise_", "__and__", "__or__", "__xor__", "floor_divide")


def _pointwise() -> list[Sample]:
    found: list[Sample] = []
    families = [family for family in (*pointwise.FAMILIES, *random_ops.FAMILIES) if family.is_pointwise]
    for target in (target for family in families for target in family.rules if target.startswith("aten.")):
        name = target.split(".")[1]
        if name not in _OWN_SAMPLES:
            found += [_from_schema(target, False), _from_schema(target, True)]
    return found + _more_pointwise()


def _from_schema(target: str, is_signed: bool) -> Sample:
    """A call with broadcasting operands: [4, 6], then [6] or [4, 1]."""
    name = target.split(".")[1]
    schema = getattr(getattr(torch.ops.aten, name), target.split(".")[2])._schema
    shapes = [(4, 6), (4, 1) if is_signed else (6,), (4, 6)]
    args: list[Any] = []
    for argument in schema.arguments:
        kind = str(argument.type)
        if kind in {"Tensor", "Optional[Tensor]"}:
            shape = shapes.pop(0)
            if name.startswith(_INTEGER):
                args.append(torch.randint(1, 4, shape))
            else:
                args.append(
                    x(*shape) if is_signed and name not in {"pow", "logit", "erfinv", "bernoulli"} else u(*shape)
                )
        elif not argument.has_default_value():
            args.append(0.5 if kind == "float" else 2)
    if name == "acosh":
        args[0] = args[0].abs() + 1.1
    keywords = {"rounding_mode": "floor"} if "rounding_mode" in str(schema) else {}
    args = [arg for arg, argument in zip(args, schema.arguments, strict=False) if not argument.kwarg_only]
    if target == "aten.round.decimals":
        keywords = {"decimals": 1}
    return Sample(
        target,
        tuple(args),
        keywords,
        shapes_only=name in _RANDOM,
        fixed=(0, 1) if target in _NO_GRADIENT else (),
    )


def _more_pointwise() -> list[Sample]:
    y = x(4, 6)
    return [
        sample("add.Tensor", y, y),
        sample("add.Tensor", x(2, 1, 6), x(4, 6)),
        sample("add.Tensor", x(4, 6), 2.0, alpha=3),
        sample("mul.Tensor", x(4, 6), x()),
        sample("mul.Tensor", y, y),
        sample("sub.Tensor", x(1), x(4, 1), alpha=2),
        sample("contiguous", y.t()),
        sample("bucketize.Tensor", x(4, 6), torch.tensor([-1.0, 0.0, 1.0], dtype=F64)),
        sample("fill.Tensor", x(4, 6), x()),
        sample("fill.Scalar", x(4, 6), 2.0),
        sample("type_as", x(4, 6), x(3)),
        sample("where.self", bits(4, 1), x(4, 6), x(6)),
        sample("where.self", bits(6), x(), x(4, 6)),
        sample("where.Scalar", bits(4, 6), 1.0, 2.0),
        sample("where.ScalarOther", bits(4, 6), x(4, 6), 2.0),
        sample("where.ScalarSelf", bits(4, 6), 1.0, x(4, 6)),
        sample("masked_fill.Scalar", x(4, 6), bits(4, 1), -1.0),
        sample("masked_fill.Tensor", x(4, 6), bits(6), x()),
        sample("clamp", x(4, 6), -0.5, 0.5),
        sample("clamp", x(4, 6), None, 0.5),
        sample("clip", x(4, 6), -0.5, 0.5),
        sample("clamp.Tensor", x(4, 6), None, x(6)),
        sample("clip.Tensor", x(4, 6), x(6)),
        sample("heaviside", x(4, 6).round(), torch.ones(6, dtype=F64), fixed=(0, 1)),
        sample("lerp.Scalar", x(4, 6), x(6), 0.3),
        sample("lerp.Tensor", x(4, 6), x(6), u(4, 1)),
        sample("threshold", x(4, 6), 0.1, 2.0),
        sample("prelu", x(4, 6, 2), u(6)),
        sample("prelu", x(4, 6), u(1)),
        sample("prelu", x(6), u(1)),
        sample("_to_copy", x(4, 6), dtype=torch.float32, tolerance=1e-6),
        sample("_to_copy", ids(9, 4, 6), dtype=F64),
        sample("to.dtype", bits(4, 6), F64),
        sample("to.dtype_layout", x(4, 6), dtype=F64),
        sample("to.device", x(4, 6), torch.device("cpu"), F64),
        sample("dropout", x(4, 6), 0.0, True),
        sample("dropout", x(4, 6), 0.5, False),
        sample("dropout", x(4, 6), 0.5, True, shapes_only=True),
        sample("native_dropout", x(4, 6), 0.5, True, shapes_only=True),
        sample("native_dropout", x(4, 6), 0.0, True),
    ]


# ---------------------------------------------------------------- the other tables


def _products() -> list[Sample]:
    masks = (
        x(6, 6),
        x(2, 1, 6, 6),
        x(1, 1, 1, 6),
        bits(2, 1, 6, 6).logical_or(torch.eye(6, dtype=torch.bool)),
    )
    q, k, v = x(2, 4, 6, 3), x(2, 4, 6, 3), x(2, 4, 6, 3)
    few_k, few_v = x(2, 2, 6, 3), x(2, 2, 6, 3)
    conv = ((4, 2), (6, 4), (6,))
    found = [
        sample("linear", x(2, 4, 6), x(8, 6), x(8)),
        sample("linear", x(2, 4, 6), x(8, 6)),
        sample("linear", x(6), x(8, 6)),
        sample("linear", x(4, 6), x(8, 6), None),
        sample("mm", x(4, 6), x(6, 8)),
        sample("bmm", x(2, 4, 6), x(2, 6, 8)),
        sample("addmm", x(8), x(4, 6), x(6, 8)),
        sample("addmm", x(4, 8), x(4, 6), x(6, 8), beta=2, alpha=3),
        sample("addmm", x(4, 1), x(4, 6), x(6, 8)),
        sample("baddbmm", x(2, 4, 8), x(2, 4, 6), x(2, 6, 8)),
        sample("baddbmm", x(1, 8), x(2, 4, 6), x(2, 6, 8)),
        sample("mv", x(4, 6), x(6)),
        sample("addmv", x(4), x(4, 6), x(6)),
        sample("dot", x(6), x(6)),
        sample("vdot", x(6), x(6)),
        sample("outer", x(4), x(6)),
        sample("ger", x(4), x(6)),
        sample("linalg_vecdot", x(4, 6), x(4, 6)),
        sample("linalg_vecdot", x(4, 6), x(4, 6), dim=0),
        sample("bilinear", x(4, 3), x(4, 2), x(6, 3, 2), x(6)),
        sample("transformers.grouped_mm_fallback.default", x(6, 4), x(2, 4, 8), torch.tensor([2, 6])),
        sample(
            "_grouped_mm",
            torch.randn(32, 32, dtype=torch.bfloat16),
            torch.randn(2, 32, 32, dtype=torch.bfloat16),
            torch.tensor([16, 32], dtype=torch.int32),
            tolerance=0.15,
        ),
        sample("cdist", x(2, 4, 3), x(2, 6, 3)),
        sample("cosine_similarity", x(4, 6, 2), x(4, 6, 2), 1),
        sample("matmul", x(4, 6), x(6, 8)),
        sample("matmul", x(2, 3, 4, 6), x(3, 6, 8)),
        sample("matmul", x(6), x(6)),
        sample("matmul", x(2, 4, 6), x(6)),
        sample("matmul", x(6), x(2, 6, 4)),
        sample("matmul", x(2, 4, 6), x(6, 8)),
        sample("embedding", x(12, 6), ids(12, 4, 2)),
        sample("embedding", x(12, 6), ids(12, 4), 3),
        sample("embedding", x(12, 6), ids(12, 4, 2), -1, True),
        sample("scaled_dot_product_attention", q, k, v),
        sample("scaled_dot_product_attention", q, k, v, None, 0.0, True),
        sample("scaled_dot_product_attention", q, k, v, attn_mask=masks[0], scale=0.3),
        sample("scaled_dot_product_attention", q, few_k, few_v, enable_gqa=True),
        sample("scaled_dot_product_attention", q[0], k[0], v[0], masks[0]),
        sample("scaled_dot_product_attention", q, k, v, None, 0.5, False, shapes_only=True),
        sample("einsum", "bij,bjk->bik", [x(2, 4, 6), x(2, 6, 3)]),
        sample("einsum", "ij,j->", [x(4, 6), x(6)]),
        sample("einsum", "...qd,...kd->...qk", [x(2, 3, 4, 6), x(2, 3, 2, 6)]),
        sample("einsum", "ii,ij->ij", [x(4, 4), x(4, 6)]),
        sample("einsum", "ij,jk", [x(4, 6), x(6, 2)]),
        sample("einsum", "bij->b", [x(2, 4, 6)]),
        sample("convolution", x(4, 2, 5, 5), x(6, 2, 3, 3), x(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        sample("convolution", x(4, 2, 5, 5), x(2, 6, 3, 3), x(6), [1, 1], [1, 1], [1, 1], True, [0, 0], 1),
        sample("convolution", x(4, 6, 5, 5), x(6, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 6),
        sample("conv1d", x(4, 6), x(2, 4, 3), x(2)),
        sample("conv1d", x(4, 6, 5), x(6, 1, 3), x(6), [1], [1], [1], 6),
    ]
    found += [sample("scaled_dot_product_attention", q, k, v, mask) for mask in masks]
    for n in (1, 2, 3):
        space, kernel = (4,) * n, (3,) * n
        found += [
            sample(f"conv{n}d", x(*conv[0], *space), x(6, 2, *kernel), x(6)),
            sample(f"conv{n}d.padding", x(*conv[0], *space), x(6, 2, *kernel), None, [1] * n, "same"),
            sample(
                f"conv_transpose{n}d.{'default' if n == 1 else 'input'}",
                x(*conv[0], *space),
                x(2, 6, *kernel),
                x(6),
            ),
        ]
    return found


def _padded_convolutions(image: torch.Tensor) -> list[Sample]:
    """Rows before only, after only, more before than after, none that are needed; every mode, and a dim with both."""
    calls = (
        ((3, 3), 1, 1, [1, 1, 2, 0], "constant"), ((3, 3), 1, 1, [0, 0, 2, 0], "constant", 0.5),
        ((3, 3), 2, 1, [0, 1, 0, 1], "constant"), ((3, 1), 1, 2, [0, 0, 4, 0], "replicate"),
        ((5, 3), 1, 1, [1, 1, 2, 2], "reflect"), ((3, 3), 1, 1, [1, 1, 1, 1], "circular"),
        ((5, 3), 1, 1, [1, 1, 3, 1], "replicate"), ((5, 3), 1, 1, [1, 1, 1, 3], "reflect"),
        ((2, 2), 2, 1, [0, 1, 0, 1], "circular"), ((2, 3), 1, 1, [1, 1, 0, 1], "constant", 2.0),
    )  # fmt: skip
    op = "autopar.padded_convolution"

    def call(kernel: tuple[int, int], stride: int, dilation: int, *pad: Any) -> Sample:
        value = pad[2] if len(pad) > 2 else None
        rest = [[stride] * 2, [0, 0], [dilation, 1], 1, *pad[:2], value]
        return sample(op, image, x(3, 2, *kernel), x(3), *rest)

    ones, none, video = [1, 1], [0, 0], [1, 1, 1, 0, 2, 0]
    return [
        *(call(*each) for each in calls),
        sample(op, image, x(3, 2, 3, 3), x(3), ones, none, ones, 1, [0, 0, 1, 1], "constant", 1.0),
        sample(op, image, x(3, 2, 3, 3), x(3), ones, [0, 1], ones, 1, [0, 0, 2, 0], "replicate", None),
        sample(op, image, x(3, 2, 3, 3), x(3), ones, [0, 1], ones, 1, [0, 0, 2, 0], "constant", 1.0),
        sample(op, image, x(3, 2, 3, 3), x(3), ones, ones, ones, 1, [0, 0, 1, 0], "reflect", None),
        sample(op, image, x(4, 1, 3, 3), None, ones, none, ones, 2, [1, 1, 2, 0], "replicate", None),
        sample(op, x(1, 2, 12), x(4, 2, 3), None, [1], [0], [1], 1, [2, 0], "constant", None),
        sample(op, x(1, 2, 4, 6, 4), x(3, 2, 3, 3, 3), x(3), [1, 2, 1], [0] * 3, [1] * 3, 1, video, "replicate", None),
    ]


def _transposed_convolutions(image: torch.Tensor) -> list[Sample]:
    """Slices that need rows before, after, on both sides, of none, and results that don't match."""
    calls = (
        ((4, 4), [2], [1]), ((2, 2), [2]), ((3, 3), [1], [1]), ((3, 3), [2], [1], [1]), ((6, 4), [2], [2, 1]),
        ((3, 3), [1], [2, 1], [0], 1, [2, 1]), ((7, 3), [3], [2, 0]), ((5, 3), [3], [1, 0]), ((1, 2), [2], [0], [1, 0]),
        ((3, 3), [2]),
    )  # fmt: skip
    return [
        *(sample("conv_transpose2d.input", image, x(2, 3, *kernel), x(3), *rest) for kernel, *rest in calls),
        sample("conv_transpose2d.input", image, x(2, 2, 4, 4), x(4), [2], [1], [0], 2),
        sample("conv_transpose1d", x(1, 2, 12), x(2, 3, 4), None, [2], [1]),
        sample("conv_transpose3d.input", x(1, 2, 4, 6, 4), x(2, 3, 4, 2, 4), x(3), [2], [1, 0, 1]),
    ]


def _in_space() -> list[Sample]:
    """Calls whose slices in space need halos before, after, on both sides or on none; an even kernel never splits."""
    image = x(1, 2, 12, 6)
    calls = (
        ((3, 3), [1], [1]), ((5, 3), [1], [2, 1]), ((3, 3), [1], [2, 1], [2, 1]), ((3, 3), [2], [1]), ((2, 2), [2]),
        ((1, 1),), ((1, 1), [2]), ((3, 3), [3], [1]), ((7, 3), [3], [3, 1]), ((4, 2), [2], [1, 0]),
    )  # fmt: skip
    pools = ([3, 3], [2], [1]), ([2, 2],), ([2], [2]), ([3], [3], [1]), ([3], [1], [1]), ([3], [2], [1], [1], True)
    return [
        *(sample("conv2d", image, x(3, 2, *kernel), x(3), *rest) for kernel, *rest in calls),
        *(sample("max_pool2d", image, *rest) for rest in pools),
        sample("conv2d", image, x(2, 1, 3, 3), x(2), [1], [1], [1], 2),
        sample("conv2d.padding", image, x(3, 2, 3, 3), None, [1], "same", [2, 1]),
        sample("conv2d.padding", image, x(3, 2, 2, 3), None, [1], "same"),
        sample("conv1d", x(1, 2, 12), x(3, 2, 9), x(3), [1], [4]),
        sample("conv3d", x(1, 2, 4, 6, 4), x(3, 2, 3, 3, 3), x(3), [1, 2, 1], [1]),
        sample("max_pool3d", x(1, 2, 4, 6, 4), [3], [1, 2, 1], [1]),
        *_padded_convolutions(image),
        *_transposed_convolutions(image),
        sample("avg_pool2d", image, [3, 2]),
        sample("avg_pool2d", image, [3], [1], [1]),
        sample("avg_pool2d", x(2, 12, 6), [3], [3]),
        sample("upsample_nearest2d.vec", image, None, [2.0, 3.0]),
        sample("upsample_nearest2d.vec", image, None, [1.5, 2.0]),
        sample("upsample_nearest2d.vec", image, [36, 9], None),
        sample("_upsample_nearest_exact1d.vec", image[0], None, [3.0]),
        sample("_upsample_nearest_exact2d.vec", image, None, [3.0, 2.0]),
        sample("_upsample_nearest_exact3d.vec", x(1, 2, 4, 4, 2), None, [2.0, 1.0, 2.0]),
        sample("upsample_linear1d.vec", image[0], None, False, [3.0]),
        sample("upsample_bilinear2d.vec", image, None, False, [2.0, 3.0]),
        sample("upsample_bilinear2d.vec", image, None, True, [2.0, 2.0]),
        sample("upsample_bilinear2d.vec", image, [60, 9], False, None),
        sample("upsample_bicubic2d.vec", image, None, False, [3.0, 2.0]),
        sample("upsample_trilinear3d.vec", x(1, 2, 4, 6, 4), None, False, [2.0, 1.0, 2.0]),
        sample("group_norm", image, 2),
        sample("roll", x(1, 12, 6, 4), [-2, 1], [1, 2]),
        sample("roll", x(2, 4, 6, 3, 2), [3, 7, 1], [1, -3, 4]),
        sample("slice.Tensor", x(1, 12, 6, 4), 1, 1, 2**63 - 1, 2),
        sample("slice.Tensor", x(1, 12, 6, 4), 1, 2, 2**63 - 1, 2),
        sample("group_norm", x(2, 4, 4, 6) + 1e4, 2, x(4), None, 1e-3, tolerance=1e-7),
        sample("group_norm", x(4, 6), 3, x(6), x(6)),
    ]


def _recurrent() -> list[Sample]:
    def weights(gates: int) -> list[torch.Tensor]:
        return [x(gates * 3, 5), x(gates * 3, 3), x(gates * 3), x(gates * 3)]

    flags = (True, 1, 0.0, True, False)
    found = [
        sample("lstm.input", x(2, 4, 5), [x(1, 4, 3), x(1, 4, 3)], weights(4), *flags, False),
        sample("lstm.input", x(4, 2, 5), [x(1, 4, 3), x(1, 4, 3)], weights(4), *flags, True),
        sample("gru.input", x(4, 2, 5), x(1, 4, 3), weights(3), *flags, True),
    ]
    lengths = torch.tensor([5, 2, 1, 4])
    for kind, gates, num_states in (("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1), ("rnn_relu", 1, 1)):
        for rows_first in (True, False):
            args = (x(*(4, 5) if rows_first else (5, 4), 5), lengths, [x(1, 4, 3) for _ in range(num_states)])
            packed = (*args, weights(gates), True, 1, False, rows_first, False)
            found.append(sample(f"autopar_traced.packed_{kind}.default", *packed))
    return found + [
        sample(f"{name}.input", x(2, 4, 5), x(1, 4, 3), weights(1), *flags, False) for name in ("rnn_tanh", "rnn_relu")
    ]


def _complex() -> list[Sample]:
    z = torch.complex(x(4, 6), x(4, 6))
    found = [
        sample("view_as_complex", x(4, 6, 2)),
        sample("view_as_real", z),
        sample("polar", u(4, 6), x(4, 6)),
        sample("complex", x(4, 6), x(4, 6)),
        sample("mul.Tensor", z, z[0]),
        sample("diff", x(4, 6)),
        sample("diff", x(4, 6), 1, 0, x(1, 6)),
        sample("histc", x(4, 6)),
    ]
    found += [sample(name, z) for name in ("conj", "_conj", "resolve_conj", "resolve_neg", "real", "imag")]
    found += [sample(name, z) for name in ("fft_fft", "fft_ifft", "fft_irfft", "fft_hfft")]
    found += [sample(name, x(4, 6)) for name in ("fft_rfft", "fft_ihfft")]
    return [*found, sample("fft_fft", z, None, 0)]


def _square_matrices() -> list[Sample]:
    a = u(4, 3, 3) + 3 * torch.eye(3, dtype=F64)
    symmetric = a @ a.mT
    names = "linalg_inv inverse linalg_matrix_exp matrix_exp linalg_det det logdet linalg_cholesky"
    triangles = [sample("linalg_solve_triangular", a, x(4, 3, 5), upper=True)]
    triangles += [sample("linalg_solve_triangular", a, x(1, 5, 3), upper=False, left=False, unitriangular=True)]
    return [*(sample(name, symmetric) for name in names.split()), *triangles]


def _reductions() -> list[Sample]:
    found = [
        sample("sum", x(4, 6)),
        sample("sum", bits(4, 6)),
        sample("sum.dim_IntList", x(4, 6, 2), [0, -1], True),
        sample("sum.dim_IntList", x(4, 6, 2), [1]),
        sample("sum.dim_IntList", x(4, 6), None),
        sample("nansum", x(4, 6), [1]),
        sample("mean", x(4, 6)),
        sample("mean.dim", x(4, 6, 2), [-1], True),
        sample("mean.dim", x(4, 6, 2), [1]),
        sample("any.dims", bits(4, 6), [1]),
        sample("all.dims", bits(4, 6), [0], True),
        sample("any.dim", bits(4, 6), 1),
        sample("all.dim", bits(4, 6), 0, True),
        sample("any", bits(4, 6)),
        sample("all", bits(4, 6)),
        sample("count_nonzero", bits(4, 6)),
        sample("argmax", x(4, 6)),
        sample("argmin", x(4, 6), 1),
        sample("argmax", x(4, 6), 0, True),
        sample("amax", x(4, 6), [1]),
        sample("amin", x(4, 6), [0], True),
        sample("amax", x(4, 6)),
        sample("logsumexp", x(4, 6), [-1]),
        sample("prod.dim_int", x(4, 6), 1),
        sample("prod", x(4)),
        sample("norm.Scalar", x(4, 6)),
        sample("norm.ScalarOpt_dim", x(4, 6), 2, [1]),
        sample("linalg_vector_norm", x(4, 6), 2, [1], True),
        sample("linalg_norm", x(4, 6), None, [1]),
        sample("linalg_norm", x(4, 6)),
        sample("kthvalue", x(4, 6), 2),
        sample("mode", ids(3, 4, 6)),
        sample("topk", x(4, 6), 2),
        sample("topk", x(4, 6), 2, 0),
        sample("sort", x(4, 6)),
        sample("sort", x(4, 6), 0, True),
        sample("sort.stable", x(4, 6), stable=True, dim=0),
        sample("argsort", x(4, 6), 0),
        sample("argsort.stable", x(4, 6), stable=True, dim=-1),
        sample("glu", x(4, 6), 1),
        sample("glu", x(4, 6), 0),
        sample("pairwise_distance", x(4, 6), x(4, 6)),
        sample("pairwise_distance", x(4, 6), x(4, 6), 2.0, 1e-6, True),
        sample("cumsum", x(4, 6), 1),
        sample("cumsum", x(2, 12, 3), -2),
        sample("cumsum", ids(3, 4, 6), 1),
        sample("cumsum", x(4, 6), 1, dtype=torch.float32, tolerance=1e-5),
        sample("cumprod", u(4, 6), 0),
        sample("cumprod", x(2, 12, 3) * (x(2, 12, 3) > -1), -2),  # with zeros
        sample("logcumsumexp", x(4, 6), 1),
        sample("logcumsumexp", 50 * x(2, 12, 3), -2),
        sample("max", x(4, 6)),
        sample("min", x(4, 6)),
        sample("var", x(4, 6)),
        sample("std", x(4, 6)),
        sample("softmax.int", x(4, 6), -1),
        sample("log_softmax.int", x(4, 6), 0),
        sample("_safe_softmax", x(4, 6), 1),
        sample("_softmax", x(4, 6), 1, False),
        sample("_log_softmax", x(4, 6), 1, False),
        sample("special_softmax", x(4, 6), 1),
    ]
    found += [sample(f"{name}.dim", x(4, 6), 1, True) for name in ("max", "min", "median", "nanmedian")]
    found += [sample(f"{name}.dim", x(4, 6), [1]) for name in ("var", "std")]
    found += [
        sample(f"{name}.correction", x(4, 6), [1], correction=1, keepdim=True)
        for name in ("var", "std", "var_mean", "std_mean")
    ]
    return found + [sample(name, x(4, 6), 1) for name in ("cummax", "cummin")]


def _views() -> list[Sample]:
    y = x(4, 6, 2)
    return [
        sample("view", y, [4, 12]),
        sample("view", x(4, 12), [4, 3, -1]),
        sample("view", x(12, 2), [2, 12]),
        sample("reshape", y, [24, 2]),
        sample("reshape", x(1, 4, 1), [2, 1, 2]),
        sample("_unsafe_view", y, [2, 2, 12]),
        sample("unsqueeze", y, -1),
        sample("squeeze", x(4, 1, 6)),
        sample("squeeze.dim", x(4, 1, 6), 1),
        sample("squeeze.dim", x(4, 6), 0),
        sample("squeeze.dims", x(4, 1, 6, 1), [1, 3]),
        sample("flatten.using_ints", y, 1),
        sample("flatten.using_ints", y),
        sample("ravel", y),
        sample("atleast_1d", x()),
        sample("atleast_2d", x(4)),
        sample("atleast_3d", x(4, 6)),
        sample("view_as", y, x(4, 12)),
        sample("reshape_as", y, x(24, 2)),
        sample("unflatten.int", x(4, 12), 1, [-1, 3]),
        sample("unflatten.int", x(4, 12), 1, [4, 3]),
        sample("unflatten.int", x(4, 12), -1, [1, -1, 3]),
        sample("unflatten.int", x(4, 12), 0, [2, -1]),
        sample("expand", x(4, 1, 6), [4, 2, 6]),
        sample("expand", x(6), [4, -1]),
        sample("broadcast_to", x(4, 1), [4, 6]),
        sample("expand_as", x(6), x(4, 6)),
        sample("permute", y, [2, 0, -2]),
        sample("transpose.int", y, 0, -1),
        sample("swapaxes", y, 0, 1),
        sample("swapdims", y, 1, 2),
        sample("mT", y),
        sample("adjoint", y),
        sample("t", x(4, 6)),
        sample("t", x(4)),
        sample("numpy_T", x(4, 6)),
        sample("movedim.int", y, 0, 2),
        sample("movedim.intlist", y, [0, 1], [2, 0]),
        sample("moveaxis.int", y, -1, 0),
        sample("moveaxis.intlist", y, [2], [0]),
        sample("select.int", y, 1, 2),
        sample("unbind.int", y, 1),
        sample("split.Tensor", y, 4, 1),
        sample("split.sizes", y, [4, 2], 1),
        sample("split_with_sizes", y, [1, 3]),
        sample("unsafe_split.Tensor", y, 2),
        sample("chunk", y, 2, -1),
        sample("unsafe_chunk", y, 2),
        sample("tensor_split.sections", y, 2, 1),
        sample("tensor_split.indices", y, [1, 2], 1),
        sample("narrow", y, 1, 2, 3),
        sample("slice.Tensor", y, 1, 2, 5),
        sample("slice.Tensor", y, 1, 0, 9223372036854775807),
        sample("slice.Tensor", y),
        sample("slice.Tensor", y, 1, 0, None, 2),
        sample("slice.Tensor", y, -2, -2),
        sample("slice.Tensor", y, 0, 0, 4),
        sample("unfold", y, 1, 3, 1),
        sample("diagonal", x(4, 6, 6), 0, 1, 2),
        sample("alias", y),
        sample("detach", y),
    ]


def _joins() -> list[Sample]:
    y = x(4, 6, 2)
    return [
        sample("cat", [x(4, 6), x(4, 2)], 1),
        sample("cat", [x(4, 6), x(2, 6)]),
        sample("concat", [x(4, 6), x(4, 6)], -1),
        sample("concatenate", [x(4, 6), x(4, 6)]),
        sample("stack", [x(4, 6), x(4, 6)]),
        sample("stack", [x(4, 6), x(4, 6)], -1),
        sample("repeat", x(4, 6), [2, 1, 3]),
        sample("repeat", x(4, 1), [1, 2]),
        sample("tile", x(4, 6), [2]),
        sample("tile", x(4, 6), [2, 1, 1]),
        sample("repeat_interleave.self_int", y, 3, 1),
        sample("repeat_interleave.self_int", y, 3),
        sample("repeat_interleave.self_int", x(6), 2),
        sample("repeat_interleave.self_int", y, 2, 1, output_size=12),
        sample("select_scatter", y, x(4, 2), 1, 3),
        sample("slice_scatter", y, x(4, 3, 2), 1, 2, 5),
    ]


def _indexing() -> list[Sample]:
    y, index = x(4, 6, 2), ids(4, 4, 6, 2)
    where = torch.tensor([0, 2, 2, 5])
    return [
        sample("one_hot", ids(5, 4, 6), 5),
        sample("masked_scatter", x(4, 6), bits(4, 6), x(24)),
        sample("gather", y, 1, ids(6, 4, 8, 2)),
        sample("gather", y, -1, ids(2, 2, 6, 4)),
        sample("index_select", y, 1, where),
        sample("index.Tensor", y, [ids(4, 6)]),
        sample("index.Tensor", y, [None, ids(6, 4, 2)]),
        sample("index.Tensor", x(4, 6, 8), [ids(4, 3, 1), ids(6, 2)]),
        sample("index.Tensor", x(4, 6, 8), [ids(4, 6), None, ids(8, 6)]),
        sample("index.Tensor", x(4, 6, 8, 2), [None, ids(6, 4), ids(8, 4)]),
        sample("index.Tensor", y, [None, None, ids(2, 4)]),
        sample("index_put", x(12, 6), [ids(12, 4)], x(4, 6), True),
        sample("index_put", x(12, 6), [ids(12, 4)], x(), True),
        sample("index_put", x(4, 3, 6), [torch.arange(4), ids(3, 4)], x(4, 6)),
        sample("index_put", x(12, 6), [torch.arange(4)], x(6)),
        sample("index_put", x(4, 6, 8), [None, torch.arange(3)], x(4, 3, 8)),
        sample("index_put", x(4, 6, 8), [None, None, torch.arange(4)], x(1, 6, 4)),
        sample("index_put", x(4, 6, 8), [torch.arange(4), None, ids(8, 4)], x(4, 6)),
        sample("index_put", x(4, 6, 8), [None, torch.tensor([True, False] * 3)], x(4, 3, 8)),
        sample("index_put", x(6, 4, 8), [torch.tensor([[True, False] * 2] * 6)], x(8)),
        sample("index_put", x(6, 4, 8), [torch.tensor([[True, False] * 2] * 6)], x(12, 8), True),
        sample("scatter.src", y, 1, index, x(4, 6, 2)),
        sample("scatter.src", y, 1, index[:, :2], x(4, 2, 2)),
        sample("scatter.value", y, 0, index, 2.0),
        sample("scatter.reduce", y, 1, index, x(4, 6, 2), reduce="add", fixed=(0, 2)),
        sample("scatter_add", y, 1, index, x(4, 6, 2)),
        sample("scatter_add", x(4), 0, ids(4, 12), x(12)),
        sample("scatter_reduce.two", y, 1, index, x(4, 6, 2), "sum"),
        sample("index_add", y, 1, where, x(4, 4, 2)),
        sample("index_add", x(6), 0, where, x(4)),
        sample("index_copy", y, 1, torch.tensor([0, 3]), x(4, 2, 2)),
        sample("index_fill.int_Scalar", y, 1, where, 3.0),
        sample("index_fill.int_Tensor", y, 1, where, x()),
    ]


def _normalization() -> list[Sample]:
    return [
        sample("layer_norm", x(2, 4, 6), [6], x(6), x(6)),
        sample("layer_norm", x(2, 4, 6), [4, 6]),
        sample("layer_norm", x(2, 4, 6), [6], bias=x(6)),
        sample("rms_norm", x(2, 4, 6), [6], x(6)),
        sample("rms_norm", x(2, 4, 6), [6], weight=x(6)),
        sample("native_layer_norm", x(2, 4, 6), [6], x(6), x(6), 1e-5),
        sample("_fused_rms_norm", x(2, 4, 6), [6], x(6), 1e-5),
        sample("group_norm", x(4, 6, 2), 3, x(6), x(6)),
        sample("instance_norm", x(4, 6, 5), x(6), x(6), None, None, True, 0.1, 1e-5, False),
        sample("batch_norm", x(4, 6, 5), x(6), x(6), x(6), u(6), False, 0.1, 1e-5, False, fixed=(3, 4)),
        sample("batch_norm", x(4, 6, 5), x(6), x(6), None, None, True, 0.1, 1e-5, False),
        sample("batch_norm", x(4, 6), None, None, x(6), u(6), False, 0.1, 1e-5, False, fixed=(1, 2)),
    ]


def _spatial() -> list[Sample]:
    found: list[Sample] = []
    for n in (1, 2, 3):
        image, twice = x(2, 6, *(4,) * n), [8] * n
        found += [
            sample(f"max_pool{n}d", image, [2] * n),
            sample(f"avg_pool{n}d", image, [2] * n),
            sample(f"adaptive_avg_pool{n}d", image, [3] * n),
            sample(f"adaptive_max_pool{n}d", image, [3] * n),
            sample(f"max_pool{n}d_with_indices", image, [2] * n),
            sample(f"upsample_nearest{n}d.vec", image, twice, None),
            sample(f"upsample_{('linear', 'bilinear', 'trilinear')[n - 1]}{n}d.vec", image, twice, False, None),
        ]
    image = x(2, 6, 4, 4)
    return [
        *found,
        sample("_adaptive_avg_pool2d", image, [3, 3]),
        sample("_adaptive_avg_pool3d", x(2, 6, 4, 4, 4), [2, 2, 2]),
        sample("upsample_bicubic2d.vec", image, [8, 8], False, None),
        sample("_upsample_nearest_exact2d.vec", image, [8, 8], None),
        sample("upsample_nearest2d", image, [8, 8]),
        sample("upsample_bilinear2d", image, [8, 8], False),
        sample("upsample_bicubic2d", image, [8, 8], False),
        sample("_upsample_bilinear2d_aa.vec", image, [8, 8], False, None),
        sample("_upsample_bicubic2d_aa.vec", image, [8, 8], False, None),
        sample("grid_sampler", image, u(2, 3, 3, 2), 0, 0, False),
        sample("grid_sampler_2d", image, u(2, 3, 3, 2), 0, 0, False),
        sample("pixel_shuffle", x(2, 12, 4, 4), 2),
        sample("pixel_unshuffle", image, 2),
        sample("channel_shuffle", image, 2),
        sample("native_channel_shuffle", image, 2, fixed=(0,)),
        sample("im2col", image, [2, 2], [1, 1], [0, 0], [1, 1]),
        sample("col2im", x(2, 24, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
        sample("flip", x(4, 6), [1]),
        sample("roll", x(4, 6), [1], [0]),
        sample("roll", x(4, 6), [1]),
        sample("tril", x(2, 4, 6)),
        sample("triu", x(2, 4, 6), 1),
        sample("pad", x(4, 6), [1, 2]),
        sample("pad", x(4, 6), [0, 0, 1, 1]),
        sample("pad", x(2, 4, 6), [1, 1], "reflect"),
        sample("constant_pad_nd", x(4, 6), [-1, 2], 3.0),
    ]


def _creation() -> list[Sample]:
    found = [
        sample("full", [4, 6], 2.0),
        sample("zeros", [4, 6], dtype=F64),
        sample("ones", [4]),
        sample("ones", []),
        sample("empty.memory_format", [4, 6], shapes_only=True),
        sample("full_like", x(4, 6), 2.0),
        sample("empty_like", x(4, 6), shapes_only=True),
        sample("zeros_like", x(4, 6)),
        sample("ones_like", x(4, 6)),
        sample("rand", [4, 6], shapes_only=True),
        sample("randn", [4, 6], shapes_only=True),
        sample("arange", 6),
        sample("arange.start", 2, 6),
        sample("arange.start_step", 0, 6, 2),
        sample("linspace", 0, 1, 6),
        sample("eye", 4),
        sample("eye.m", 4, 6),
        sample("scalar_tensor", 2.0),
        sample("new_full", x(4, 6), [4, 6], 2.0),
        sample("new_full", x(3), [4, 6], 2.0),
        sample("new_empty", x(3), [4, 6], shapes_only=True),
        sample("new_empty", x(4, 3), [4, 6], shapes_only=True),
    ]
    return found + [sample(f"new_{name}", x(4, 6), size) for name in ("zeros", "ones") for size in ([4, 6], [4], [])]


def _special() -> list[Sample]:
    logits, target = x(4, 12, 6), ids(12, 4, 6)
    target[0, :3] = -100
    flat, labels, weight = x(4, 12), torch.tensor([3, -100, 0, 11]), u(12)
    found = [
        sample("autopar.dropout", x(4, 6), 0.0),
        sample("autopar.as_strided", x(4, 6, 2), [4, 5, 2, 2], [12, 2, 2, 1], 0),
        sample("autopar.as_strided", x(4, 6, 2), [2, 4, 5], [1, 12, 2], 2),
        sample(
            "autopar.document_attention", x(2, 4, 8, 6), x(2, 2, 8, 6), x(2, 2, 8, 6), ids(3, 2, 8), None, True, False
        ),
        sample("autopar.document_attention", x(2, 4, 8, 6), x(2, 4, 8, 6), x(2, 4, 8, 4), ids(3, 8), 0.3, False, False),
        sample("autopar.window_attention", x(2, 4, 8, 6), x(2, 2, 8, 6), x(2, 2, 8, 6), None, 3, True),
        sample("autopar.window_attention", x(2, 4, 8, 6), x(2, 4, 8, 6), x(2, 4, 8, 4), 0.3, 5, False),
        sample("autopar.dropout", x(4, 6), 0.5, shapes_only=True),
        sample("autopar.cross_entropy_denominator", target, None, -100, 12),
        sample("autopar.cross_entropy_denominator", target, weight, -100, 12),
        sample("autopar.batch_statistic", u(4, 6).round(), 1, fixed=(0,)),
        sample("autopar.batch_norm", x(4, 6, 2, 4), x(6), x(6), x(6), u(6), 0.1, 1e-5, fixed=(3, 4)),
        sample("autopar.batch_norm", x(4, 6), None, None, None, None, 0.1, 1e-5),
        sample("autopar.batch_norm", x(4, 6, 2), x(6), None, x(6), u(6), 0.1, 1e-5, fixed=(2, 3)),
        sample("autopar.cross_entropy", x(12), torch.tensor(5), None, 0, -100, 0.0, "sum"),
        sample("binary_cross_entropy_with_logits", x(4, 6), u(4, 6), None, u(4, 6), 2, fixed=(2,)),
        sample(
            "flash_attn._flash_attn_forward.default",
            *(x(2, 6, 4, 3) for _ in range(3)),
            0.0,
            0.5,
            True,
            -1,
            -1,
            0.0,
            None,
            False,
        ),
        sample(
            "flash_attn._flash_attn_forward.default",
            *(x(2, 6, 4, 3) for _ in range(3)),
            0.0,
            0.5,
            True,
            -1,
            -1,
            0.0,
            u(4),
            False,
        ),
        sample(
            "torch_attn._varlen_attn.default",
            *(x(6, 4, 3) for _ in range(3)),
            torch.tensor([0, 2, 6]),
            torch.tensor([0, 2, 6]),
            4,
            4,
            True,
            0.5,
        ),
        sample(
            "flash_attn._flash_attn_varlen_forward.default",
            *(x(6, 4, 3) for _ in range(3)),
            torch.tensor([0, 2, 6]),
            torch.tensor([0, 2, 6]),
            4,
            4,
            0.0,
            0.5,
            True,
        ),
    ]
    # Softcapped logits of three tokens at a time, of eight or of one batch's row.
    hidden, head, cap = x(4, 2, 6), x(12, 6), 2.0
    chain = (
        ("aten.div.Tensor", ("x", cap), (), ()),
        ("aten.tanh.default", ("x",), (), (1,)),
        ("aten.mul.Tensor", ("x", cap), (), ()),
    )
    some = ids(12, 4, 2)
    some[0] = -100
    for smoothing in (0.0, 0.1):
        found += [
            sample("autopar.linear_cross_entropy", hidden, head, None, some, None, chain, -100, smoothing, 3),
            sample(
                "autopar.linear_cross_entropy", hidden, head, x(12), some, weight, (), -100, smoothing, 3, fixed=(4,)
            ),
            sample("autopar.linear_token_losses", hidden, head, x(12), some, None, chain, -100, smoothing, 3, True),
            sample(
                "autopar.linear_token_losses",
                hidden,
                head,
                None,
                some,
                weight,
                (),
                -100,
                smoothing,
                3,
                False,
                fixed=(3,),
            ),
        ]
    for reduction in ("sum", "none"):
        for smoothing in (0.0, 0.1):
            found += [
                sample("autopar.cross_entropy", logits, target, None, 1, -100, smoothing, reduction),
                sample("autopar.cross_entropy", flat, labels, weight, -1, -100, smoothing, reduction, fixed=(2,)),
            ]
    found += [_experts(), _shared_experts()]
    lengths = (torch.tensor([12, 9, 7, 12]), torch.tensor([4, 3, 2, 1]))
    log_probs = x(12, 4, 6).log_softmax(-1)
    for targets in (ids(5, 4, 4) + 1, ids(5, 10) + 1):
        found.append(sample("autopar_traced.ctc_loss.default", log_probs, targets, *lengths, 0, True))
    for reduction in (0, 1, 2):
        found += [
            sample(name, x(4, 6), x(4, 6), reduction)
            for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")
        ]
        found += [
            sample("soft_margin_loss", x(4, 6), x(4, 6).sign(), reduction, fixed=(1,)),
            sample("hinge_embedding_loss", x(4, 6), x(4, 6).sign(), 1.0, reduction),
            sample("poisson_nll_loss", x(4, 6), u(4, 6), True, False, 1e-8, reduction),
            sample("binary_cross_entropy", u(4, 6), u(4, 6), None, reduction),
            sample("binary_cross_entropy_with_logits", x(4, 6), u(4, 6), None, None, reduction),
        ]
    return found
