"""Train with parts of torchtune in a loop as in its recipes on two ranks: a tiny Llama 3, its
chunked loss, its scheduler.
"""

import torch
import torch.distributed as dist
from job import STEPS, WORLD_SIZE, Losses, Tokens
from torch.utils.data import DataLoader, DistributedSampler
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.training import get_cosine_schedule_with_warmup, scale_grads
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
dist.init_process_group("gloo")
model = llama3(
    vocab_size=64, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=32, max_seq_len=32
)
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, 5, STEPS)
loss_of = CEWithChunkedOutputLoss(num_output_chunks=2)
model.set_num_output_chunks(2)
data = Tokens(4 * STEPS * WORLD_SIZE)
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
losses, tokens = Losses(), 0
# -- paste
import torchlens_perf as perf

with perf.watch(model, optimizer) as w:
    for index, batch in enumerate(loader):
        logits = model(batch["input_ids"])
        loss = loss_of(logits, batch["labels"])
        loss.backward()
        tokens += batch["labels"].numel()
        if (index + 1) % 2 == 0:
            scale_grads(model, torch.tensor(1 / 2))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        # -- end
        losses.add(loss)
losses.print(steps=STEPS)
dist.destroy_process_group()
