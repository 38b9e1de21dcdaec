"""Train a GAN as in the DCGAN example.

The script stores two losses of the critic and then the generator's loss in variables.
"""

import torch
from job import WIDTH, Losses, batches
from torch import nn

import torchlens_perf as perf

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, WIDTH))
critic = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
real, fake = torch.ones(8, 1), torch.zeros(8, 1)
losses = Losses()
with perf.watch([generator, critic], [critic_optimizer, generator_optimizer]):
    for inputs, _ in batches(40):
        critic_optimizer.zero_grad()
        criterion(critic(inputs), real).backward()
        made = generator(torch.randn(8, 16))
        criterion(critic(made.detach()), fake).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        loss = criterion(critic(made), real)
        loss.backward()
        generator_optimizer.step()
        losses.add(loss)
losses.print(steps=40)
