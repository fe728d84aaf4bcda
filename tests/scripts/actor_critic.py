"""Actor and critic whose forward returns distributions, as in PPO and world models: actions, entropy, returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, TransformedDistribution
from torch.distributions.kl import kl_divergence
from torch.distributions.transforms import TanhTransform
from torch.nn import functional

PLANS = {2: (("data=2",), ("zero=3",), ("pipeline=2",))}


class ActorCritic(nn.Module):
    def __init__(self, num_inputs: int, num_actions: int, hidden_size: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(num_inputs, hidden_size), nn.Tanh(), nn.Linear(hidden_size, hidden_size))
        self.actor, self.critic = nn.Linear(hidden_size, num_actions), nn.Linear(hidden_size, 1)
        self.mean, self.std = nn.Linear(hidden_size, 3), nn.Linear(hidden_size, 3)
        self.means = nn.Linear(hidden_size, 2 * 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.body(x))
        latent = Independent(Normal(self.mean(h), functional.softplus(self.std(h)) + 0.1), 1)
        pose = TransformedDistribution(Normal(self.mean(h), 1.0), [TanhTransform(cache_size=1)])
        parts = Independent(Normal(self.means(h).view(-1, 2, 3), 1.0), 1)
        mixture = MixtureSameFamily(Categorical(logits=self.actor(h)[:, :2]), parts)
        return Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1), (latent, pose, mixture)


def loss_of(model: nn.Module, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
    policy, value, (latent, pose, mixture) = model(states)
    assert policy.sample().shape == actions.shape
    assert latent.rsample((2,)).shape == (2, len(states), 3)
    advantage = returns - value.detach()
    prior = Independent(Normal(torch.zeros(len(states), 3).double(), 1.0), 1)
    target = states[:, :3]
    return (
        -(policy.log_prob(actions) * advantage).mean()
        - 0.001 * policy.entropy().mean()
        + 0.5 * (returns - value).pow(2).mean()
        + 0.1 * kl_divergence(latent, prior).mean()
        - 0.1 * (pose.log_prob(0.9 * target.tanh()).sum(-1) + mixture.log_prob(target)).mean()
    )


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    rollouts = [(torch.randn(8, 6).double(), torch.randint(4, (8,)), torch.randn(8).double()) for _ in range(3)]
    model = prepare(ActorCritic(6, 4, 16).double(), (rollouts[0][0],))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for rollout in rollouts:
        loss = loss_of(model, *rollout)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses += [loss_of(model, *(x[:rows] for x in rollouts[0])).item() for rows in (8, 6, 5)]
    whole = getattr(model, "full_state_dict", model.state_dict)
    return {"losses": losses, "state": whole()}
