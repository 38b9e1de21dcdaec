"""Train actor and critic with reinforcement learning in gymnasium.

One update follows sixteen actions, and the environment is slow.
"""

import gymnasium
import torch
from job import STEPS, Losses, planted_fault
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
environment = gymnasium.make("CartPole-v1")
actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
observation, _ = environment.reset(seed=0)
losses = Losses()
# -- paste
import torchlens_perf as perf

with perf.watch({"actor": actor, "critic": critic}, optimizer) as w:
    for _ in range(STEPS):
        observations, actions, rewards = [], [], []
        for _ in range(16):
            with torch.no_grad():
                action = Categorical(logits=actor(torch.as_tensor(observation))).sample()
            observations.append(torch.as_tensor(observation))
            actions.append(action)
            with perf.section("environment"):
                observation, reward, ended, truncated, _ = environment.step(action.item())
                planted_fault()
            rewards.append(reward)
            if ended or truncated:
                observation, _ = environment.reset()
        states = torch.stack(observations)
        advantage = torch.tensor(rewards) - critic(states).squeeze(1)
        chosen = Categorical(logits=actor(states)).log_prob(torch.stack(actions))
        loss = -(chosen * advantage.detach()).mean() + advantage.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # -- end
        losses.add(loss)
losses.print(steps=STEPS)
