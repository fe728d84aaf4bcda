"""Recurrent ops, on padded sequences and on packed ones.  The batch splits; time and features do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ops.family import Buffers, OpFamily, Rule, Types, argument, aten
from autopar.ops.work import Work, floating, sum_bytes
from autopar.program import Op, itemsize_bytes

__all__ = ["FAMILIES"]


# ---------------------------------------------------------------- how they split


def _drops_between_layers(op: Op) -> bool:
    return argument(op, 6, "train") is True and argument(op, 5, "dropout") != 0.0


def _recurrent(has_cell: bool) -> Rule:
    """lstm, gru, rnn (x, state, parameters, has_biases, num_layers, dropout, train, bidirectional, batch_first).

    States are [layers, batch, hidden].
    """

    def rule(op: Op, operand_types: Types, result_types: Types) -> str | None:
        if len(operand_types[0].shape) != 3:
            return None
        x = "b _ _" if argument(op, 8, "batch_first") else "_ b _"
        states = "[_ b _, _ b _]" if has_cell else "_ b _"
        return f"{x}, {states}, [...] -> {', '.join([x, *['_ b _'] * (2 if has_cell else 1)])}"

    return rule


def _packed(num_states: int) -> Rule:
    """(x, lengths, states, weights, has_biases, num_layers, bidirectional, batch_first, is_sorted): padded `x`, of
    which what is behind each row's length doesn't count.
    """

    def rule(op: Op, operand_types: Types, result_types: Types) -> str | None:
        x = "b _ _" if argument(op, 7, "batch_first") else "_ b _"
        return f"{x}, b, [_ b _], [...] -> {', '.join([x, *['_ b _'] * num_states])}"

    return rule


# ---------------------------------------------------------------- their work and memory


def _is_packed(op: Op) -> bool:
    return op.target.startswith("autopar_traced.")


def _work(op: Op, operands: Types, results: Types) -> Work:
    """Each entry of a row is multiplied with every matrix of its layer and direction.

    Packed rows are counted as if all were as long as the longest; their backward runs the forward again.
    """
    x = operands[0]
    num_entries = x.num_elements // max(1, x.shape[-1])
    flops = 2.0 * num_entries * sum(kind.num_elements for kind in operands[1:] if len(kind.shape) == 2)
    read, written = sum_bytes(operands), sum_bytes(results)
    return Work(
        "matmul",
        x.dtype,
        flops=flops,
        backward_flops=(3.0 if _is_packed(op) else 2.0) * flops,
        read_bytes=read,
        write_bytes=written,
        backward_read_bytes=read + written,
        backward_write_bytes=sum_bytes(floating(operands)),
        num_backward_kernels=2,
    )


def _steps(op: Op, operands: Types) -> Iterator[tuple[int, int]]:
    """Of each layer and direction, how many elements it reads and makes in all steps."""
    is_packed = _is_packed(op)
    x, state = operands[0], operands[2 if is_packed else 1]
    rows, width = x.num_elements // max(1, x.shape[-1]), state.shape[-1]
    directions = 2 if argument(op, 6 if is_packed else 7, "bidirectional") is True else 1
    for number in range(state.shape[0]):
        yield rows * (x.shape[-1] if number < directions else directions * width), rows * width


def _memory_of_steps(op: Op, operands: Types, trains: Sequence[bool]) -> Buffers:
    """What cuDNN keeps of an LSTM's steps: four gates and the cell's state, before and after its tanh.

    An estimate: the size is not published, and was not measured.
    """
    return Buffers(kept=6.0 * itemsize_bytes(operands[0].dtype) * sum(made for _, made in _steps(op, operands)))


def _memory_of_steps_on_cpus(op: Op, operands: Types, trains: Sequence[bool]) -> Buffers:
    """What oneDNN keeps, as measured with torch 2.13: bytes of each element that is made, and of each that is read or
    made, whichever are more.  torch's own kernels, of float64, keep what trace observes.
    """
    sizes = {"float32": (37.1, 24.4), "bfloat16": (23.0, 20.4), "float16": (23.0, 20.4)}
    of_made, of_wider = sizes.get(operands[0].dtype, (0.0, 0.0))
    return Buffers(kept=sum(of_made * made + of_wider * max(read, made) for read, made in _steps(op, operands)))


def _memory_of_packed(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Packed copies of what it reads and gives; backward what the steps keep, as of cuDNN: an estimate."""
    copies = float(operands[0].num_bytes + results[0].num_bytes)
    made = sum(made for _, made in _steps(op, operands))
    return Buffers(forward=copies, backward=copies + 6.0 * itemsize_bytes(operands[0].dtype) * made)


FAMILIES = (
    OpFamily(
        aten({"lstm.input": _recurrent(has_cell=True)}),
        is_random=_drops_between_layers,
        is_cheap=False,
        count_work=_work,
        buffers_on_gpus=_memory_of_steps,
        buffers_on_cpus=_memory_of_steps_on_cpus,
    ),
    OpFamily(
        aten({"gru.input rnn_tanh.input rnn_relu.input": _recurrent(has_cell=False)}),
        is_random=_drops_between_layers,
        is_cheap=False,
        count_work=_work,
    ),
    OpFamily(
        {
            "autopar_traced.packed_lstm.default": _packed(num_states=2),
            "autopar_traced.packed_gru.default": _packed(num_states=1),
            "autopar_traced.packed_rnn_tanh.default": _packed(num_states=1),
            "autopar_traced.packed_rnn_relu.default": _packed(num_states=1),
        },
        is_cheap=False,
        count_work=_work,
        saves=lambda op, operands, results: (tuple(range(len(operands))), 0),
        buffers=_memory_of_packed,
        host_operands=(1,),  # lengths
    ),
)
