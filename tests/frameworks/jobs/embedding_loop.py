"""Train a recommender as in TorchRec on two ranks.

Each rank has half of the tables, and all-to-all exchanges rows.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as exchanged
from job import RANK, STEPS, WORLD_SIZE, Losses, planted_fault
from torch import nn

TABLES, ROWS, WIDTH, BATCH = 4, 100, 8, 6
torch.manual_seed(RANK)
dist.init_process_group("gloo")
mine = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH) for _ in range(TABLES // WORLD_SIZE))


class Recommender(nn.Module):
    """A module that sends sparse features to the rank with their table, and receives vectors."""

    def __init__(self):
        super().__init__()
        self.tables = mine
        self.dense = nn.Linear(TABLES * WIDTH, 1)

    def forward(self, features):
        asked = features.view(BATCH, WORLD_SIZE, -1).transpose(0, 1).contiguous()
        received = torch.empty_like(asked)
        dist.all_to_all_single(received, asked)
        rows = [
            table(received[..., index].reshape(-1, 1)) for index, table in enumerate(self.tables)
        ]
        found = torch.stack(rows, 1).view(WORLD_SIZE, BATCH, -1)
        vectors = exchanged.all_to_all_single(torch.empty_like(found), found)
        return self.dense(vectors.transpose(0, 1).reshape(BATCH, -1))


model = Recommender()
for parameter in model.dense.parameters():
    dist.broadcast(parameter.data, 0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(RANK)
losses = Losses()


def batches():
    for _ in range(STEPS):
        for _ in range(3):
            planted_fault()
        yield (
            torch.randint(ROWS, (BATCH, TABLES), generator=generator),
            torch.rand(BATCH, 1, generator=generator),
        )


# -- paste
import torchlens_perf as perf

with perf.watch(model, optimizer) as w:
    for features, labels in batches():
        loss = nn.functional.mse_loss(model(features), labels)
        loss.backward()
        for parameter in model.dense.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        # -- end
        losses.add(loss)
losses.print(steps=STEPS)
dist.destroy_process_group()
