"""Train LlamaForCausalLM on documents of many lengths, the Python standard library's definitions byte by byte.

    torchrun --standalone --nproc-per-node 4 examples/train_documents.py
    python examples/train_documents.py      # one process, without autopar, each document alone: the same losses

Documents are packed into rows, where each attends to itself only.  The plan is a family: one for rows that hold the
longest document, and one for rows of half of it, for batches that fit.
"""

import argparse
import math
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from devices import make_mesh
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.balance import Lengths

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
)


def read_documents(most: int) -> list[dict[str, Tensor]]:
    """What blank lines separate in the library's files, in a random order; what is longer than `most` bytes is cut."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text[:most] for path in sources for text in path.read_bytes().split(b"\n\n\n") if len(text) > 1]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    tokens = [torch.tensor(list(texts[index])) for index in order.tolist()]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def loss_of_each_alone(model: nn.Module, documents: Iterable[dict[str, Tensor]]) -> Tensor:
    """The mean over all tokens that documents predict."""
    predicted = [(len(each["labels"]) - 1, {name: x[None] for name, x in each.items()}) for each in documents]
    return sum(count * model(**each).loss for count, each in predicted) / sum(count for count, _ in predicted)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=16, help="documents of a step")
parser.add_argument("--tokens", type=int, default=1024, help="of a row, and the longest document")
arguments = parser.parse_args()

documents = read_documents(arguments.tokens)
lengths = [len(each["input_ids"]) for each in documents]
torch.manual_seed(0)
model = LlamaForCausalLM(CONFIG)
loader = DataLoader(documents, batch_size=arguments.batch_size, collate_fn=list)
is_first, is_parallel = True, dist.is_torchelastic_launched()
if is_parallel:
    mesh = make_mesh()
    rows = math.ceil(arguments.batch_size * sum(lengths) / len(lengths) / arguments.tokens)
    ids = torch.zeros(max(rows, mesh.size()), arguments.tokens, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(arguments.tokens).expand_as(ids)}
    model = autopar.parallelize(model, mesh, example, inputs="local", lengths=Lengths.of(lengths))
    loader = autopar.balanced(loader, model, length_index=lengths, shifts="labels")
    is_first = dist.get_rank() == 0
    if is_first:
        print(model.plan)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in zip(range(arguments.steps), loader, strict=False):
    loss = model(**batch).loss if is_parallel else loss_of_each_alone(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_first:
        shape = f"  {list(batch['input_ids'].shape)} on this rank" if is_parallel else ""
        print(f"step {step:3}  loss {loss.item():.6f}{shape}", flush=True)

if is_parallel:
    dist.destroy_process_group()
