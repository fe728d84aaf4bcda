"""Ops as a trace writes them, without a trace."""

from autopar.program import Op, Ref, TensorType


def tensor(*shape: int, dtype: str = "bfloat16") -> TensorType:
    return TensorType(shape, dtype)


def op(target: str, num_operands: int, saves: tuple[int, ...] = (), is_view: bool = False, **kwargs) -> Op:
    refs = tuple(Ref(f"x{index}") for index in range(num_operands))
    return Op("op", target, refs, tuple(kwargs.items()), ("y",), saves=saves, is_view=is_view)


LINEAR = op("aten.linear.default", 2, saves=(0, 1))
ATTENTION = op("aten.scaled_dot_product_attention.default", 3, saves=(0, 1, 2, 3), is_causal=True)
FLASH = op("aten._scaled_dot_product_flash_attention.default", 3, saves=(0, 1, 2, 3), is_causal=True)
CUDNN = op("aten._scaled_dot_product_cudnn_attention.default", 3, saves=(0, 1, 2, 3), is_causal=True)
MUL = op("aten.mul.Tensor", 2, saves=(0, 1))
