"""Train in a loop as in torchtitan on two ranks: several optimizers in one, FSDP2, microbatches,
manual garbage collection.
"""

import gc

import torch
import torch.distributed as dist
from job import RANK, STEPS, WIDTH, Losses, classifier, planted_fault
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
dist.init_process_group("gloo")
gc.disable()
model = classifier()
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
generator = torch.Generator().manual_seed(RANK)
losses = Losses()


class OptimizersContainer:
    """Optimizers of the model's parts, all of which step together."""

    def __init__(self, parts):
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def batches():
    while True:
        for _ in range(2):
            planted_fault()
        yield (
            torch.randn(4, WIDTH, generator=generator),
            torch.randint(4, (4,), generator=generator),
        )


optimizers = OptimizersContainer([model[0], model[2], model[4]])
data_iterator = batches()
# -- paste
import torchlens_perf as perf

with perf.watch(model, optimizers.optimizers) as w:
    for step in range(STEPS):
        optimizers.zero_grad()
        for _ in range(2):
            with perf.section("batch"):
                inputs, labels = next(data_iterator)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        if step % 20 == 0:
            gc.collect(1)
        # -- end
        losses.add(loss)
losses.print(steps=STEPS)
dist.destroy_process_group()
