"""Train with Accelerate on two DDP ranks.

Accelerate's prepare() wraps all objects, and gradients of two batches are accumulated.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from job import STEPS, WORLD_SIZE, Examples, Losses, classifier
from torch.utils.data import DataLoader

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Examples(4 * STEPS * WORLD_SIZE), batch_size=2)
losses, steps = Losses(), 0
# -- paste
import torchlens_perf as perf

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with perf.watch(model, optimizer) as w:
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        # -- end
        losses.add(loss)
        steps += accelerator.sync_gradients
losses.print(steps=steps)
accelerator.end_training()
