"""Train with the structure of soft actor-critic.

The actor is called by a method of its own and updated in every second step.

There are two critics of one class, a temperature that is no module, and target networks without
gradients.
"""

import copy

import torch
from job import WIDTH, Losses, batches
from torch import nn
from torch.nn import functional as F

import torchlens_perf as perf


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH + 2, 64), nn.Linear(64, 1)

    def forward(self, state, action):
        return self.fc2(F.relu(self.fc1(torch.cat([state, action], 1))))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.mean, self.log_std = nn.Linear(WIDTH, 64), nn.Linear(64, 2), nn.Linear(64, 2)

    def forward(self, state):
        hidden = F.relu(self.fc1(state))
        return self.mean(hidden), self.log_std(hidden).clamp(-5, 2)

    def get_action(self, state):
        mean, log_std = self(state)
        action = mean + log_std.exp() * torch.randn_like(mean)
        return torch.tanh(action), -log_std.sum(1, keepdim=True)


torch.manual_seed(0)
actor, first_critic, second_critic = Actor(), Critic(), Critic()
first_target, second_target = copy.deepcopy(first_critic), copy.deepcopy(second_critic)
critic_optimizer = torch.optim.Adam(
    [*first_critic.parameters(), *second_critic.parameters()], lr=1e-3
)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
log_alpha = torch.zeros(1, requires_grad=True)
alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)
losses = Losses()
with perf.watch(
    [actor, first_critic, second_critic], [critic_optimizer, actor_optimizer, alpha_optimizer]
):
    for step, (states, _) in enumerate(batches(60)):
        with torch.no_grad():
            next_actions, entropy = actor.get_action(states.flip(0))
            lower = torch.min(
                first_target(states, next_actions), second_target(states, next_actions)
            )
            target = 0.9 * (lower + log_alpha.exp() * entropy)
        actions = torch.tanh(states[:, :2])
        loss = F.mse_loss(first_critic(states, actions), target) + F.mse_loss(
            second_critic(states, actions), target
        )
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        if step % 2 == 0:
            for _ in range(2):
                made, entropy = actor.get_action(states)
                actor_loss = -(
                    torch.min(first_critic(states, made), second_critic(states, made)) + entropy
                ).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                alpha_loss = (log_alpha.exp() * (entropy.detach() - 2)).mean()
                alpha_optimizer.zero_grad()
                alpha_loss.backward()
                alpha_optimizer.step()
        losses.add(loss)
losses.print(steps=60)
