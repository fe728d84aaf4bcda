"""In the style of CleanRL's PPO: a rollout step by step, then epochs over shuffled minibatches of another size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

PLANS = {2: (("tensor=2",),)}

NUM_ENVS, NUM_STEPS, OBS, ACTIONS = 4, 6, 5, 3


def layer_init(layer: nn.Linear, std: float = 2**0.5) -> nn.Linear:
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(OBS, 16)), nn.Tanh(), layer_init(nn.Linear(16, 16)), nn.Tanh(),
            layer_init(nn.Linear(16, 1), std=1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            layer_init(nn.Linear(OBS, 16)), nn.Tanh(), layer_init(nn.Linear(16, 16)), nn.Tanh(),
            layer_init(nn.Linear(16, ACTIONS), std=0.01),
        )  # fmt: skip

    def get_value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


class Env:
    """Balls that roll where they are pushed."""

    def __init__(self) -> None:
        self.state = torch.randn(NUM_ENVS, OBS, dtype=torch.float64)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.state = 0.9 * self.state + 0.1 * (action.double() - 1)[:, None] * torch.arange(OBS)
        done = self.state.abs().amax(1) > 2
        self.state[done] = 0.5
        return self.state.clone(), -self.state.square().mean(1), done.double()


def main(prepare: Callable[..., Any], folder: Path, master: bool) -> dict[str, Any]:
    """The script; ``prepare(model, example inputs)`` is its changed line."""
    torch.manual_seed(1)
    env = Env()
    agent = prepare(Agent().double(), (torch.zeros(8, OBS, dtype=torch.float64),))
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    shape = (NUM_STEPS, NUM_ENVS)
    obs, next_obs = torch.zeros(*shape, OBS, dtype=torch.float64), env.state.clone()
    actions = torch.zeros(shape, dtype=torch.long)
    logprobs, rewards, dones, values = (torch.zeros(shape, dtype=torch.float64) for _ in range(4))
    next_done = torch.zeros(NUM_ENVS, dtype=torch.float64)
    found: dict[str, Any] = {"losses": []}
    for update in range(2):
        optimizer.param_groups[0]["lr"] = (1.0 - update / 2) * 2.5e-3
        for step in range(NUM_STEPS):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            next_obs, rewards[step], next_done = env.step(action)
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages, last = torch.zeros_like(rewards), torch.zeros(NUM_ENVS, dtype=torch.float64)
            for t in reversed(range(NUM_STEPS)):
                following = next_value if t == NUM_STEPS - 1 else values[t + 1]
                alive = 1.0 - (next_done if t == NUM_STEPS - 1 else dones[t + 1])
                delta = rewards[t] + 0.99 * following * alive - values[t]
                advantages[t] = last = (delta + 0.99 * 0.95 * alive * last).reshape(-1)
            returns = advantages + values
        b_obs, b_logprobs, b_actions = obs.reshape(-1, OBS), logprobs.reshape(-1), actions.reshape(-1)
        b_advantages, b_returns = advantages.reshape(-1), returns.reshape(-1)
        for _ in range(2):
            for mb_inds in torch.randperm(NUM_STEPS * NUM_ENVS).split(10):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
                ratio = (newlogprob - b_logprobs[mb_inds]).exp()
                mb_advantages = b_advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * ratio.clamp(0.8, 1.2)).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
                loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                found["losses"].append(loss.item())
    found["actions"] = actions
    state = agent.full_state_dict() if hasattr(agent, "full_state_dict") else agent.state_dict()
    if master:
        torch.save(state, folder / "agent.pt")
    return found | {"state": {name: value.clone() for name, value in state.items()}}
