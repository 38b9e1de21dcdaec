"""Train with DeepSpeed on CPUs with two ranks: ZeRO stage 1.

DeepSpeed's engine accumulates gradients over two batches.
"""

import logging

import deepspeed
import torch
from job import STEPS, WORLD_SIZE, Examples, Losses, classifier
from torch.utils.data import DataLoader, DistributedSampler

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
torch.manual_seed(0)
deepspeed.init_distributed("gloo")
model = classifier()
settings = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
}  # fmt: skip
data = Examples(4 * STEPS * WORLD_SIZE)
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
losses = Losses()
# -- paste
import torchlens_perf as perf

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
with perf.watch(engine) as w:
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        # -- end
        losses.add(loss)
losses.print(steps=engine.global_steps)
torch.distributed.destroy_process_group()
