"""The ops of a transformer's layer with their local shapes, each priced as the search prices it."""

from __future__ import annotations

import re
from typing import NamedTuple

from autopar.cost import ClusterPrices
from autopar.program import Op, Ref, TensorType
from benchmarks.published.calibration import QUANTISING_S, Calibration
from benchmarks.published.runs import Run, UnpricedRowError
from benchmarks.published.stacks import Stack

__all__ = ["Piece", "Pricer"]


def _op(target: str, num_operands: int, saves: tuple[int, ...] = (), **kwargs: bool) -> Op:
    refs = tuple(Ref(f"x{index}") for index in range(num_operands))
    return Op("op", target, refs, tuple(kwargs.items()), ("y",), saves=saves)


_LINEAR = _op("aten.linear.default", 2, (0, 1))
_BMM = _op("aten.bmm.default", 2, (0, 1))
_FLASH = _op("aten._scaled_dot_product_flash_attention.default", 3, (0, 1, 2, 3), is_causal=True)
_CUDNN = _op("aten._scaled_dot_product_cudnn_attention.default", 3, (0, 1, 2, 3), is_causal=True)
_NORM = _op("aten.layer_norm.default", 1, (0,))
_ADD = _op("aten.add.Tensor", 2)
_ACTIVATION = _op("aten.gelu.default", 1, (0,))
_GATE = _op("aten.mul.Tensor", 2, (0, 1))
_SOFTMAX = _op("aten._softmax.default", 1, (1,))
_DROPOUT = _op("aten.native_dropout.default", 1)
_LOSS = _op("aten.cross_entropy_loss.default", 2)
_CAST = _op("aten._to_copy.default", 1)


class Piece(NamedTuple):
    """One op, priced.  `tag` is what recomputation policies call it by: the product's name, "attention" or "bytes"."""

    tag: str
    forward_s: float
    backward_s: float


def _type(dtype: str, *shape: int) -> TensorType:
    return TensorType(tuple(max(1, extent) for extent in shape), dtype)


class Pricer:
    """Prices the ops of one row, for one microbatch on one device.

    Raises:
        UnpricedRowError: the row computes in a precision that has no price.
    """

    def __init__(self, run: Run, stack: Stack, prices: ClusterPrices, calibration: Calibration) -> None:
        """Read the local extents from the row."""
        self.run, self.stack, self.prices, self.calibration = run, stack, prices, calibration
        self.precision = run.precision.lower()
        self.dtype, self.is_eight_bit = run.dtype, run.is_in_eight_bits
        if self.is_eight_bit and "float8_e4m3fn" not in prices.cluster.device.flops_per_s:
            raise UnpricedRowError(f"{prices.device} has no products in 8 bits")
        self.tokens = run.micro_batch * run.length // run.context
        self.local_tokens = self.tokens // run.tensor if run.is_sequence_parallel else self.tokens
        self.num_heads = max(1, run.num_heads // run.tensor)
        self.num_kv_heads = max(1, run.num_kv_heads // run.tensor)

    def layer(self) -> list[Piece]:
        """All ops of one layer."""
        run, size = self.run, self.run.head_size
        queries, keys = self.num_heads * size, self.num_kv_heads * size
        rotary = self._in_single(_ACTIVATION, self.tokens, queries + keys, 3) if run.is_gated else []
        return [
            *self._norm(),
            *self._linear("qkv", self.tokens, run.hidden, queries + 2 * keys),
            *rotary,
            *self._attention(),
            *self._linear("out", self.tokens, queries, run.hidden),
            *self._elementwise(_ADD, self.local_tokens, run.hidden, 2),
            *self._norm(),
            *self._feed_forward(),
            *self._elementwise(_ADD, self.local_tokens, run.hidden, 2),
        ]

    def head(self) -> list[Piece]:
        """Final norm, logits and loss."""
        run = self.run
        columns = run.vocabulary // run.tensor
        logits, single = _type(self.dtype, self.tokens, columns), _type("float32", self.tokens, columns)
        cast = self._priced("bytes", _CAST, (logits,), single)
        return [
            *self._norm(),
            self._product("head", self.dtype, self.tokens, run.hidden, columns),
            *([] if self.stack.fuses and not self.stack.splits_loss else [cast]),
            self._loss(single),
        ]

    def _loss(self, logits: TensorType) -> Piece:
        if not self.stack.splits_loss:
            operands = (logits, _type("int64", self.tokens))
            return self._priced("bytes", _LOSS, operands, _type("float32", self.tokens))
        # Three kernels read and write all logits, two more only read them; a backward scales what was kept.
        once_s = self._priced("bytes", _CAST, (logits,), logits).forward_s
        return Piece("bytes", 4 * once_s, once_s)

    def _priced(self, tag: str, op: Op, operands: tuple[TensorType, ...], result: TensorType) -> Piece:
        taken = self.prices.op_s(op, operands, (result,), True)
        return Piece(tag, taken.forward_s, taken.backward_s)

    def _product(self, tag: str, dtype: str, rows: int, inner: int, columns: int) -> Piece:
        operands = (_type(dtype, rows, inner), _type(dtype, columns, inner))
        return self._priced(tag, _LINEAR, operands, _type(self.dtype, rows, columns))

    def _linear(self, tag: str, rows: int, inner: int, columns: int) -> list[Piece]:
        """A product with a weight; in 8 bits also what quantizing takes."""
        if not self.is_eight_bit:
            return [self._product(tag, self.dtype, rows, inner, columns)]
        product = self._product(tag, "float8_e4m3fn", rows, inner, columns)
        if "rowwise" in self.precision:
            product = self._row_scaled(product, rows, inner, columns)
        forward_s, backward_s = self._quantized_s(rows, inner), self._quantized_s(rows, columns)
        if self.stack.casts_weights and "fp8 all-gather" not in self.precision:
            forward_s += self._quantized_s(columns, inner)
        return [product, Piece("bytes", forward_s, backward_s)]

    def _row_scaled(self, product: Piece, rows: int, inner: int, columns: int) -> Piece:
        """Slower; ``gw_hp`` leaves the weight's gradient, half of the backward, in 16 bits."""
        tag, forward_s, backward_s = product
        scale = 1 / self.calibration.row_scaled
        if "gw_hp" in self.precision:
            wide_s = self._product(tag, self.dtype, rows, inner, columns).backward_s
            return Piece(tag, forward_s * scale, (backward_s * scale + wide_s) / 2)
        return Piece(tag, forward_s * scale, backward_s * scale)

    def _quantized_s(self, rows: int, width: int) -> float:
        """Seconds of quantizing a matrix for products along both of its dims.

        With a scale from earlier steps it is read once; with its own maximum as the scale once more before; with
        scales for blocks or rows, which differ along the two dims, a third time.
        """
        in_blocks = re.search("mx|fine|rowwise|fp4", self.precision) is not None
        is_current = in_blocks or re.search("tensor|cs|float8", self.precision) is not None
        x, twice = _type(self.dtype, rows, width), _type(self.dtype, 2, rows, width)
        written = _type("float8_e4m3fn", 2, rows, width)
        seconds = self.prices.op_s(_CAST, (twice if is_current else x,), (written,), False).forward_s + QUANTISING_S
        return seconds + (self.prices.op_s(_CAST, (x,), (x,), False).forward_s if in_blocks else 0.0)

    def _elementwise(self, op: Op, rows: int, width: int, num_operands: int = 1) -> list[Piece]:
        x = _type(self.dtype, rows, width)
        return [self._priced("bytes", op, (x,) * num_operands, x)]

    def _in_single(self, op: Op, rows: int, width: int, num_kernels: int) -> list[Piece]:
        """A chain of kernels that computes in float32; one kernel on the activations' dtype if the stack fuses."""
        if self.stack.fuses:
            return self._elementwise(op, rows, width)
        x = _type("float32", rows, width)
        return [self._priced("bytes", op, (x,), x)] * num_kernels

    def _norm(self) -> list[Piece]:
        """Layer norm is one kernel everywhere; root mean square norm, with gated models, is written out in float32."""
        if self.run.is_gated and not self.stack.fuses_norms:
            return self._in_single(_NORM, self.local_tokens, self.run.hidden, 4)
        return self._elementwise(_NORM, self.local_tokens, self.run.hidden)

    def _attention(self) -> list[Piece]:
        """Attention over this device's heads; context parallelism gives each device an equal part of the work."""
        run = self.run
        if "unfused" in run.attention:
            return self._unfused_attention()
        op = _CUDNN if self.stack.attention == "new" else _FLASH
        query = _type(self.dtype, run.micro_batch, self.num_heads, run.length, run.head_size)
        _, forward_s, backward_s = self._priced("attention", op, (query,) * 3, query)
        share = (2.0 if self.stack.attention == "flash1" else 1.0) / run.context
        return [Piece("attention", forward_s * share, backward_s * share)]

    def _unfused_attention(self) -> list[Piece]:
        run, batch = self.run, self.run.micro_batch * self.num_heads
        query = _type(self.dtype, batch, run.length, run.head_size)
        keys = _type(self.dtype, batch, run.head_size, run.length)
        square = _type(self.dtype, batch, run.length, run.length)
        return [
            self._priced("attention", _BMM, (query, keys), square),
            *self._probabilities(square),
            self._priced("attention", _BMM, (square, query), query),
        ]

    def _probabilities(self, scores: TensorType) -> list[Piece]:
        """Fused, scale and mask belong to the softmax; else they are kernels, and autocast has it in float32."""
        if self.stack.fuses:
            return [self._priced("attention", op, (scores,), scores) for op in (_SOFTMAX, _DROPOUT)]
        single = _type("float32", *scores.shape)
        scaled, masked = [self._priced("attention", _CAST, (scores,), scores)] * 2
        return [
            scaled,
            masked,
            self._priced("attention", _CAST, (scores,), single),
            self._priced("attention", _SOFTMAX, (single,), single),
            self._priced("attention", _DROPOUT, (single,), single),
            self._priced("attention", _CAST, (single,), scores),
        ]

    def _feed_forward(self) -> list[Piece]:
        """With experts, a product for each that is here, on its part of the tokens; those are sorted there and back."""
        run = self.run
        tokens, width = self.tokens * run.routed[0], run.ffn // run.tensor
        sorting = self._elementwise(_ACTIVATION, tokens, run.hidden) if run.routed[1] > 1 else []
        gate = self._elementwise(_GATE, tokens, width, 2) * (1 if self.stack.fuses else 2)
        here = max(1, run.routed[1] // run.experts)
        each = max(1, tokens // here)
        return [
            *sorting,
            *self._linear("up", each, run.hidden, width * (2 if run.is_gated else 1)) * here,
            *(gate if run.is_gated else self._elementwise(_ACTIVATION, tokens, width)),
            *self._linear("down", each, width, run.hidden) * here,
            *sorting,
        ]
