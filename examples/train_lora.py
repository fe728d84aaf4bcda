"""Train adapters of low rank (LoRA) on a frozen LLaMA, and gather them to be saved alone.

torchrun --standalone --nproc-per-node 2 examples/train_lora.py
python examples/train_lora.py       # one process, without autopar: the same losses
"""

import torch
import torch.distributed as dist
from devices import make_mesh
from torch import Tensor, nn
from train_text import CONFIG, read_arguments, read_batches
from transformers import LlamaForCausalLM

import autopar


class Adapted(nn.Module):
    """A frozen linear layer, plus a product of rank 8 that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 8, bias=False), nn.Linear(8, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``."""
        return self.base(x) + self.up(self.down(x))


arguments = read_arguments(__doc__, sequence_length=64)
batches = read_batches(arguments.steps, arguments.batch_size, arguments.sequence_length)
torch.manual_seed(0)
model = LlamaForCausalLM(CONFIG).requires_grad_(False)
for layer in model.model.layers:
    layer.self_attn.q_proj, layer.self_attn.v_proj = map(Adapted, (layer.self_attn.q_proj, layer.self_attn.v_proj))
is_first = True
if dist.is_torchelastic_launched():
    mesh = make_mesh()
    model = autopar.parallelize(model, mesh, batches[0], constraints=arguments.constraints)  # a changed line
    is_first = dist.get_rank() == 0

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step, batch in enumerate(batches):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_first:
        print(f"step {step:3}  loss {loss.item():.6f}", flush=True)

state = model.full_state_dict(rank=0) if dist.is_initialized() else model.state_dict()  # the other changed line
adapters = {name: value for name, value in state.items() if "_proj.up." in name or "_proj.down." in name}
if is_first:
    print(f"{len(adapters)} tensors of adapters, {sum(x.numel() for x in adapters.values()):,} elements")
if dist.is_initialized():
    dist.destroy_process_group()
