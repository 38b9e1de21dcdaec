"""Train a vision model as in timm's train.py on two ranks: an averaged copy of the weights, mixed
labels, validation.
"""

import torch
import torch.distributed as dist
from job import RANK, STEPS, WORLD_SIZE, Losses, planted_fault
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
dist.init_process_group("gloo")


class Images(Dataset):
    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, index):
        for _ in range(2):
            planted_fault()
        generator = torch.Generator().manual_seed(index * WORLD_SIZE + RANK)
        return torch.randn(3, 16, 16, generator=generator), index % 4


def validate(averaged):
    averaged.eval()
    with torch.no_grad():
        averaged(torch.ones(2, 3, 16, 16))


stem = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GELU())
raw_model = nn.Sequential(
    stem, nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(128, 4)
)
model, averaged = (
    DistributedDataParallel(raw_model),
    AveragedModel(raw_model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
loader = DataLoader(Images(), batch_size=2)
losses = Losses()
# -- paste
import torchlens_perf as perf

with perf.watch(model, optimizer) as w:
    for step, (images, labels) in enumerate(loader):
        mixed = 0.8 * images + 0.2 * images.flip(0)
        loss = torch.nn.functional.cross_entropy(model(mixed), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        averaged.update_parameters(raw_model)
        if step % 20 == 19:
            validate(averaged)
        # -- end
        losses.add(loss)
losses.print(steps=STEPS)
dist.destroy_process_group()
