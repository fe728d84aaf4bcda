"""Train an unmodified transformers model on rows of thousands of tokens, each process with a part of every row.

    torchrun --standalone --nproc-per-node 2 examples/train_long.py
    python examples/train_long.py        # one process, without autopar: the same losses

The text is that of `train_text.py`.  With `context=2` each of two processes has half of the tokens, all of the heads,
and keys and values of the others travel or are gathered in attention; `--constraints` alone leaves it to the search.
"""

import torch
import torch.distributed as dist
from devices import make_mesh
from train_text import read_arguments, read_batches
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1 << 20,
    rope_theta=500_000.0,
    use_cache=False,
)
arguments = read_arguments(__doc__, constraints=("context=2",), batch_size=1, sequence_length=8192)
batches = read_batches(arguments.steps, arguments.batch_size, arguments.sequence_length)
torch.manual_seed(0)
model = LlamaForCausalLM(CONFIG)
is_first = True
if dist.is_torchelastic_launched():
    mesh = make_mesh()
    model = autopar.parallelize(model, mesh, batches[0], constraints=arguments.constraints)  # the only changed line
    is_first = dist.get_rank() == 0
    if is_first:
        print(model.plan)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in enumerate(batches):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_first:
        print(f"step {step:3}  loss {loss.item():.6f}", flush=True)

if dist.is_initialized():
    dist.destroy_process_group()
