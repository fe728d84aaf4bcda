"""Small models as users write them, and the loop that trains them; each rank of a test runs these."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

NUM_STEPS = 3


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def compile_for(model: Any, mesh: DeviceMesh, *constraints: str, **options: Any) -> Any:
    given = {"mesh": mesh, "profile": False, "constraints": list(constraints), **options}
    return torch.compile(model, backend="autopar", options=given)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


class Breaking(nn.Module):
    """Dynamo can't see through `forward` in one piece; it has running statistics and a frozen parameter too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        torch._dynamo.graph_break()
        return self.last(torch.relu(x))


class Mlp(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.drop = nn.Dropout(p)
        self.down = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


def token_batches(sizes: Sequence[int] = (4,) * NUM_STEPS) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for size in sizes:
        ids = torch.randint(64, (size, 16), generator=random)
        yield {"input_ids": ids, "labels": ids}


def image_batches() -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        images = torch.randn(4, 3, 16, 16, generator=random)
        yield {"pixel_values": images, "labels": torch.randint(5, (4,), generator=random)}


def vector_batches(sizes: Sequence[int] = (4,) * NUM_STEPS) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(1)
    return (torch.randn(size, 8, generator=random) for size in sizes)


def loss_inside(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def loss_outside(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def differences(
    make: Callable[[], nn.Module],
    batches: Callable[[], Iterator[Any]],
    loss_of: Callable[[Any, Any], Tensor],
    mesh: DeviceMesh,
    *constraints: str,
) -> dict[str, float]:
    """Train compiled and on one device; the largest difference of losses, first gradients, parameters and buffers."""
    torch.manual_seed(0)
    single = make()
    model = copy.deepcopy(single)
    compiled = compile_for(model, mesh, *constraints)
    first = []
    losses = []
    for runs, owner in ((compiled, model), (single, single)):
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for number, batch in enumerate(batches()):
            loss = loss_of(runs, batch)
            loss.backward()
            if number == 0:
                first.append([None if p.grad is None else p.grad.clone() for p in owner.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    assert all((a is None) == (b is None) for a, b in zip(*first, strict=True))
    return {
        "loss": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "gradients": _furthest((a, b) for a, b in zip(*first, strict=True) if a is not None),
        "parameters": _furthest(zip(model.parameters(), single.parameters(), strict=True)),
        "buffers": _furthest(zip(model.buffers(), single.buffers(), strict=True)),
        "moved": _furthest(zip(model.parameters(), _fresh(make), strict=True)),
    }


def _fresh(make: Callable[[], nn.Module]) -> list[Tensor]:
    torch.manual_seed(0)
    return list(make().parameters())


def _furthest(pairs: Any) -> float:
    return max(((a.detach().double() - b.detach().double()).abs().max().item() for a, b in pairs), default=0.0)
