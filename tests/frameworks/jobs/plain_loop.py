"""Train in a loop as in nanoGPT on two DDP ranks.

The loop has no DataLoader, but micro-batches, gradient clipping, and evaluation between steps.
"""

import contextlib

import torch
import torch.distributed as dist
from job import RANK, STEPS, WIDTH, WORLD_SIZE, Losses, classifier, planted_fault
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
raw_model = classifier()
ddp = WORLD_SIZE > 1
if ddp:
    dist.init_process_group("gloo")
model = DistributedDataParallel(raw_model) if ddp else raw_model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(RANK)
accumulation = 2
losses = Losses()

import torchlens_perf as perf


def get_batch(split):
    for _ in range(2 if split == "train" else 0):
        planted_fault()
    return torch.randn(4, WIDTH, generator=generator), torch.randint(4, (4,), generator=generator)


@torch.no_grad()
def estimate_loss():
    model.eval()
    raw_model(get_batch("val")[0])
    model.train()


# -- paste
with perf.watch(model, optimizer) as w:
    for step in range(STEPS):
        if step % 20 == 0:
            estimate_loss()
        for micro_step in range(accumulation):
            last = micro_step == accumulation - 1
            with perf.section("get_batch"):
                inputs, labels = get_batch("train")
            with contextlib.nullcontext() if last or not ddp else model.no_sync():
                loss = torch.nn.functional.cross_entropy(model(inputs), labels) / accumulation
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # -- end
        losses.add(loss)
losses.print(steps=STEPS)
if ddp:
    dist.destroy_process_group()
