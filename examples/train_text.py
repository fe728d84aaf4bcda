"""Train an unmodified transformers LlamaForCausalLM on the Python standard library's source, byte by byte.

    torchrun --standalone --nproc-per-node 4 examples/train_text.py        # or: make demo

Ends with what autopar predicted beside what was measured, and the loss beside a single device's.
"""

import argparse
import copy
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from devices import make_mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=256,
    use_cache=False,
)
NUM_WARMUP_STEPS = 3  # not timed


def main(make_model: Callable[[], nn.Module], arguments: argparse.Namespace) -> None:
    """Train on every process, then once more on one, and compare."""
    mesh = make_mesh()
    is_first = dist.get_rank() == 0
    console = Console(quiet=not is_first)

    torch.manual_seed(0)
    single = make_model()
    batches = read_batches(arguments.steps, arguments.batch_size, arguments.sequence_length)

    console.print(f"Planning {sum(p.numel() for p in single.parameters()):,} parameters on {mesh} ...")
    model = autopar.parallelize(copy.deepcopy(single), mesh, batches[0], constraints=arguments.constraints)
    console.print(str(model.plan), markup=False, highlight=False, soft_wrap=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, step_times_s = train(model, optimizer, model.clip_grad_norm_, batches, console, f"{mesh.size()} processes")
    held_bytes = measure_held_bytes(model, optimizer, with_gradients=model.plan.num_microbatches > 1)
    saved_bytes = measure_saved_bytes(model, batches[0])

    if is_first:
        optimizer = torch.optim.AdamW(single.parameters(), lr=1e-3)
        clip = lambda max_norm: nn.utils.clip_grad_norm_(single.parameters(), max_norm)  # noqa: E731
        single_losses, _ = train(single, optimizer, clip, batches, console, "1 process")
        print_losses(console, losses, single_losses)
        print_predictions(console, model.plan, statistics.median(step_times_s), held_bytes, saved_bytes)
    dist.barrier()
    dist.destroy_process_group()


def read_batches(num_batches: int, batch_size: int, length: int) -> list[dict[str, Tensor]]:
    """Random passages of the standard library's source as byte tokens; the same on every rank."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    random = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - length, (num_batches, batch_size, 1), generator=random)
    tokens = text[starts + torch.arange(length)].long()
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_grad_norm_: Callable[[float], Tensor],
    batches: Sequence[dict[str, Tensor]],
    console: Console,
    title: str,
) -> tuple[list[float], list[float]]:
    """An ordinary training loop: every step's loss, and the seconds of every step after the first few."""
    texts = ("{task.description}", "loss {task.fields[loss]:.3f}", "{task.fields[rate]:,.0f} tokens/s")
    description, loss_text, rate_text = map(TextColumn, texts)
    columns = (description, BarColumn(), MofNCompleteColumn(), loss_text, rate_text, TimeElapsedColumn())
    bar = Progress(*columns, console=console)
    losses: list[float] = []
    times_s: list[float] = []
    with bar:
        task = bar.add_task(title, total=len(batches), loss=float("nan"), rate=0.0)
        for batch in batches:
            started_s = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times_s.append(time.perf_counter() - started_s)
            rate = batch["input_ids"].numel() / times_s[-1]
            bar.update(task, advance=1, loss=losses[-1], rate=rate)
    return losses, times_s[NUM_WARMUP_STEPS:] or times_s


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that this rank holds of these tensors."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def measure_held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, *, with_gradients: bool) -> int:
    """Parameters, optimizer state and, if asked for, gradients (one for each trained parameter) on this rank.

    With one microbatch a gradient comes when the activations that autograd kept for it go: they are not held together.
    """
    parameters = list(model.parameters())
    gradients = [parameter for parameter in parameters if parameter.requires_grad and with_gradients]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return count_bytes([*parameters, *gradients, *(value for value in states if isinstance(value, Tensor))])


class SavedTensors:
    """Counts the bytes that autograd keeps, each storage once; `peak_bytes` is the most at one time."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.live = Counter(address_of(parameter) for parameter in parameters)  # parameters never count
        self.live_bytes = self.peak_bytes = 0

    def pack(self, tensor: Tensor) -> "Saved":
        """Called by autograd with each tensor that it keeps; without its history, which would keep itself alive."""
        return Saved(tensor.detach(), self)

    def add(self, tensor: Tensor, sign: int) -> None:
        """Note that autograd keeps `tensor` once more (1) or once less (-1)."""
        address, before = address_of(tensor), self.live[address_of(tensor)]
        self.live[address] += sign
        if 0 in (before, self.live[address]):
            self.live_bytes += sign * tensor.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class Saved:
    """One tensor that autograd keeps, for as long as it keeps it."""

    def __init__(self, tensor: Tensor, counts: SavedTensors) -> None:
        self.tensor, self.counts = tensor, counts
        counts.add(tensor, 1)

    def __del__(self) -> None:
        self.counts.add(self.tensor, -1)


def address_of(tensor: Tensor) -> int:
    """Where this rank's part of a tensor lies in memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def measure_saved_bytes(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """The most that autograd keeps for backward at any time of one more step, parameters apart."""
    saved = SavedTensors(model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed.tensor):
        model(**batch).loss.backward()
    model.zero_grad()
    return saved.peak_bytes


def print_losses(console: Console, parallel: list[float], single: list[float]) -> None:
    """Some steps' losses side by side."""
    table = Table("step", "autopar", "single device", "difference", title="The same steps on a single device")
    shown = sorted({0, 1, len(single) // 4, len(single) // 2, 3 * len(single) // 4, len(single) - 1})
    for step in shown:
        ours, theirs = parallel[step], single[step]
        table.add_row(str(step), f"{ours:.6f}", f"{theirs:.6f}", f"{abs(ours - theirs):.1e}")
    console.print(table)
    largest = max(abs(ours - theirs) for ours, theirs in zip(parallel, single, strict=True))
    console.print(f"Largest difference of all {len(single)} steps: {largest:.1e}")


def print_predictions(console: Console, plan: autopar.Plan, step_s: float, held_bytes: int, saved_bytes: int) -> None:
    """Prediction beside measurement, then the ratio."""
    predicted_bytes = plan.group_peak_bytes(0)
    table = Table("", "predicted", "measured", "measured / predicted", title="Prediction and measurement, rank 0")
    table.add_row(
        "step time",
        f"{plan.step_time_s:.3f} s",
        f"{step_s:.3f} s (median)",
        f"{step_s / plan.step_time_s:.2f}",
    )
    mib = 2**20
    measured = held_bytes + saved_bytes
    table.add_row(
        "peak memory", f"{predicted_bytes / mib:.1f} MiB", f"{measured / mib:.1f} MiB",
        f"{measured / predicted_bytes:.2f}",
    )  # fmt: skip
    console.print(table)
    console.print(
        f"Measured memory: {held_bytes / mib:.1f} MiB of parameters"
        f"{', gradients' if plan.num_microbatches > 1 else ''} and optimizer state, and {saved_bytes / mib:.1f} MiB "
        "that autograd keeps for backward.  Transients, which the prediction includes, are not in it."
    )


def read_arguments(
    description: str | None, constraints: Sequence[str] = (), *, batch_size: int = 8, sequence_length: int = 256
) -> argparse.Namespace:
    """The command line; the other arguments are what holds where it says nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--sequence-length", type=int, default=sequence_length)
    parser.add_argument("--constraints", nargs="*", default=constraints, help="such as tensor=2 or pipeline=2")
    return parser.parse_args()


if __name__ == "__main__":
    main(lambda: LlamaForCausalLM(CONFIG), read_arguments(__doc__))
