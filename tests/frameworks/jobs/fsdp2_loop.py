"""Train with FSDP2 on two ranks: fully_shard() of each layer and of the model."""

import torch
import torch.distributed as dist
from job import STEPS, WORLD_SIZE, Examples, Losses, classifier
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
dist.init_process_group("gloo")
mesh = torch.distributed.init_device_mesh("cpu", (WORLD_SIZE,))
model = classifier()
data = Examples(4 * STEPS * WORLD_SIZE)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
losses = Losses()
# -- paste
import torchlens_perf as perf

for layer in (model[0], model[2], model[4]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with perf.watch(model, optimizer) as w:
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # -- end
        losses.add(loss)
losses.print(steps=STEPS)
dist.destroy_process_group()
