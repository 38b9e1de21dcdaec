"""Train with Accelerate and DeepSpeed on two ranks, ZeRO 1 on CPUs.

backward() makes DeepSpeed's engine step, and optimizer.step() does nothing.

Without a GPU Accelerate treats each process as the only one. Therefore DeepSpeed sets up the ranks,
and the job selects the examples of each rank.
"""

import logging
import os

os.environ.update(ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from job import STEPS, WORLD_SIZE, Examples, Losses, classifier
from torch.utils.data import DataLoader, DistributedSampler

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
set_seed(0)
settings = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
}  # fmt: skip
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Examples(4 * STEPS * WORLD_SIZE)
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
losses = Losses()
# -- paste
import torchlens_perf as perf

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with perf.watch(model) as w:
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        # -- end
        losses.add(loss)
losses.print(steps=model.global_steps)
accelerator.end_training()
