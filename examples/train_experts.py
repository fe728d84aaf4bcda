"""Train an unmodified transformers mixture of experts on the text of `train_text.py`, each process with some experts.

    torchrun --standalone --nproc-per-node 4 examples/train_experts.py
    python examples/train_experts.py        # one process, without autopar: the same losses

Each of two processes has half of the experts; with `--constraints expert=4` each of four has a quarter, with `expert=1`
every one has all, and `--constraints` alone leaves it to the search.
"""

import torch
import torch.distributed as dist
from devices import make_mesh
from train_text import read_arguments, read_batches
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import autopar

CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=256,
    moe_intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    output_router_logits=True,  # adds the loss that balances experts, here of the whole batch as on one device
    max_position_embeddings=256,
    use_cache=False,
)
arguments = read_arguments(__doc__, constraints=("expert=2",))
batches = read_batches(arguments.steps, arguments.batch_size, arguments.sequence_length)
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(CONFIG)
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
