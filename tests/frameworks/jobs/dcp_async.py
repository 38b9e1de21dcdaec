"""Save with torch.distributed.checkpoint on two ranks: in the background every ten steps, and once
in the foreground.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import STEPS, WORLD_SIZE, Examples, Losses, classifier
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Examples(4 * STEPS * WORLD_SIZE)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
losses, saved = Losses(), None
names = [tempfile.mkdtemp()]
dist.broadcast_object_list(names, 0)
folder = names[0]
# A save in the background has its own collectives.
saving = dist.new_group()
# -- paste
import torchlens_perf as perf

with perf.watch(model, optimizer) as w:
    for step, (inputs, labels) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 4:
            if saved is not None:
                saved.result()
            state = {"model": model.state_dict()}
            saved = dcp.async_save(state, checkpoint_id=f"{folder}/{step}", process_group=saving)
        # -- end
        if step == 30:
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/now")
        losses.add(loss)
    saved.result()
losses.print(steps=STEPS, saved=len(os.listdir(folder)))
dist.destroy_process_group()
