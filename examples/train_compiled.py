"""Train an unmodified transformers GPT2LMHeadModel with ``torch.compile(backend="autopar")``, byte by byte.

    torchrun --standalone --nproc-per-node 2 examples/train_compiled.py

Nothing of autopar is imported: torch finds the backend by its name.  The text is the Python standard library's source.
Ends with the losses beside those of a single device.
"""

import argparse
import copy
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from devices import make_mesh
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

CONFIG = GPT2Config(
    vocab_size=256,
    n_positions=128,
    n_embd=128,
    n_layer=2,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)


def main(arguments: argparse.Namespace) -> None:
    """Train on every process, then once more on one, and compare."""
    mesh = make_mesh()
    is_first = dist.get_rank() == 0

    torch.manual_seed(0)
    single = GPT2LMHeadModel(CONFIG)
    model = copy.deepcopy(single).to(mesh.device_type)
    batches = read_batches(arguments.steps, arguments.batch_size, arguments.sequence_length)

    options = {"mesh": mesh, "constraints": arguments.constraints, "profile": False, "plans": arguments.plans}
    compiled = torch.compile(model, backend="autopar", options=options)
    losses = train(compiled, model, batches, f"{dist.get_world_size()} processes" if is_first else "")
    if is_first:
        single_losses = train(single, single, batches, "1 process")
        print("step     autopar      single device")
        for step, (ours, theirs) in enumerate(zip(losses, single_losses, strict=True)):
            print(f"{step:4}     {ours:.6f}     {theirs:.6f}")
        largest = max(abs(ours - theirs) for ours, theirs in zip(losses, single_losses, strict=True))
        print(f"Largest difference of all {len(losses)} steps: {largest:.1e}")
    dist.barrier()
    dist.destroy_process_group()


def read_batches(num_batches: int, batch_size: int, length: int) -> list[Tensor]:
    """Random passages of the standard library's source as byte tokens; the same on every rank."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    random = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - length, (num_batches, batch_size, 1), generator=random)
    return list(text[starts + torch.arange(length)].long())


def train(run: nn.Module, owner: nn.Module, batches: Sequence[Tensor], title: str) -> list[float]:
    """An ordinary training loop; `run` is called, `owner` has the parameters.  Prints what it took, with a title."""
    optimizer = torch.optim.AdamW(owner.parameters(), lr=1e-3)
    losses: list[float] = []
    times_s: list[float] = []
    for ids in (batch.to(owner.device) for batch in batches):
        started_s = time.perf_counter()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(owner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times_s.append(time.perf_counter() - started_s)
    if title:
        print(f"{title}: first step {times_s[0]:.1f} s, the fastest {min(times_s):.3f} s, loss {losses[-1]:.3f}")
    return losses


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--constraints", nargs="*", default=["data=2"], help="such as data=2 or tensor=2")
    parser.add_argument("--plans", help="a folder to keep plans in, and to take them from")
    return parser.parse_args()


if __name__ == "__main__":
    main(read_arguments())
