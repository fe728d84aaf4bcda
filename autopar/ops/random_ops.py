"""Ops that draw random numbers."""

from __future__ import annotations

from autopar.ops.family import OpFamily, Saves, Types, argument, aten
from autopar.ops.work import Work
from autopar.program import Op, itemsize_bytes

__all__ = ["FAMILIES"]


def _is_training(op: Op) -> bool:
    """Whether dropout(x, p, train) drops elements, which it does only in training."""
    return bool(argument(op, 2, "train", True))


def _work_of_dropout(op: Op, operands: Types, results: Types) -> Work:
    """Forward also writes a mask of one byte per element, which backward reads."""
    mask, whole = 1.0 * operands[0].num_elements, operands[0].num_bytes
    return Work(
        "bytes",
        operands[0].dtype,
        read_bytes=whole,
        write_bytes=whole + mask,
        backward_read_bytes=whole + mask,
        backward_write_bytes=whole,
    )


def _mask(op: Op, operands: Types, results: Types) -> Saves:
    """A mask of one byte per element is saved."""
    return (), results[0].num_elements * itemsize_bytes("bool")


FAMILIES = (
    OpFamily(
        {"autopar.dropout": "* -> *"},
        function="dropout",
        takes_generator=True,
        is_random=True,
        count_work=_work_of_dropout,
        saves=_mask,
    ),
    OpFamily(aten({"dropout": "* -> *"}), is_random=_is_training, count_work=_work_of_dropout),
    OpFamily(aten({"native_dropout": "* -> *, *"}), is_random=True, count_work=_work_of_dropout, num_differentiable=1),
    OpFamily(
        aten({"bernoulli bernoulli.p rand_like randn_like normal_functional uniform": "* -> *"}),
        is_random=True,
        num_differentiable=0,
    ),
    OpFamily(aten({"randint_like exponential": None}), is_random=True, num_differentiable=0),
    OpFamily(aten({"rand randn": "# -> ..."}), is_random=True),
    OpFamily(
        aten({"randint randperm multinomial normal cauchy geometric log_normal poisson binomial rrelu": None}),
        is_random=True,
    ),
    OpFamily(aten({"feature_dropout alpha_dropout feature_alpha_dropout": None}), is_random=True),
)
