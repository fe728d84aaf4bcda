"""Train an encoder and a decoder (T5) to write a sequence backwards.

torchrun --standalone --nproc-per-node 2 examples/train_translation.py
python examples/train_translation.py        # one process, without autopar: the same losses
"""

import torch
import torch.distributed as dist
from devices import make_mesh
from train_text import read_arguments
from transformers import T5Config, T5ForConditionalGeneration

import autopar

CONFIG = T5Config(
    vocab_size=32,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    use_cache=False,
)


def make_batch(step: int, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Random sequences ``[rows, tokens]``, and the same backwards."""
    ids = torch.randint(2, CONFIG.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.flip(1)}


arguments = read_arguments(__doc__, batch_size=32, sequence_length=8)
torch.manual_seed(0)
model = T5ForConditionalGeneration(CONFIG)
is_first = True
if dist.is_torchelastic_launched():
    mesh = make_mesh()
    example = make_batch(0, arguments.batch_size, arguments.sequence_length)
    model = autopar.parallelize(model, mesh, example, constraints=arguments.constraints)  # the only changed line
    is_first = dist.get_rank() == 0

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(arguments.steps):
    loss = model(**make_batch(step, arguments.batch_size, arguments.sequence_length)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_first:
        print(f"step {step:3}  loss {loss.item():.6f}", flush=True)

if dist.is_initialized():
    dist.destroy_process_group()
