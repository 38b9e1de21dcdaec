"""Train a small GPT with DistributedDataParallel on the sources of Python's standard library.

The program contains no code of torchlens_perf. `make demo` starts it with one artificially slow
rank:

    SLOW_RANK=1 torchrun --nproc-per-node 2 --logs-specs torchlens_perf examples/train_gpt.py
"""

import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 128, 4, 4, 8
STEPS = int(os.environ.get("STEPS", "120"))
SLOW_RANK = int(os.environ.get("SLOW_RANK", "-1"))


class StandardLibrary(Dataset):
    """Byte sequences of CONTEXT + 1 bytes from the source files of the standard library."""

    def __init__(self):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(path.read_bytes() for path in files)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self):
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index):
        piece = self.bytes[index * CONTEXT : index * CONTEXT + CONTEXT + 1].long()
        return piece[:-1], piece[1:]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self, slow=False):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.slow = slow

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        # Compute the same again, which looks like a throttled or shared processor.
        if self.slow:
            with torch.no_grad():
                for _ in range(24):
                    self.mlp(self.norm2(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, slow_block=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(slow=index == slow_block) for index in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()
    dist.init_process_group("nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    torch.manual_seed(0)

    model = DistributedDataParallel(GPT(slow_block=2 if rank == SLOW_RANK else None).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = StandardLibrary()
    loader = DataLoader(
        data, batch_size=BATCH, sampler=DistributedSampler(data, seed=0), drop_last=True
    )

    for step, (ids, targets) in enumerate(loader):
        logits = model(ids.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 40 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
        if step + 1 == STEPS:
            break

    model.eval()
    with torch.no_grad():
        ids, targets = next(iter(loader))
        loss = F.cross_entropy(model(ids.to(device)).flatten(0, 1), targets.to(device).flatten())
    dist.all_reduce(loss)
    if rank == 0:
        print(f"trained  loss {loss.item() / dist.get_world_size():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
