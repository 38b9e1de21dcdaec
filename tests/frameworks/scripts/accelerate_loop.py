"""Train in a plain loop with Accelerate.

prepare() wraps all objects, and gradients are accumulated over two batches.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from script import Losses, classifier, examples, watched
from torch.utils.data import DataLoader

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(examples(480), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = Losses()
with watched(model, optimizer):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.add(loss)
losses.print(steps=30)
