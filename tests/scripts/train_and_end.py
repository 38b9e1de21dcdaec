"""Train eight steps and end in the requested way, without using torchlens_perf.

usage: train_and_end.py normally | crash | exit | SIGTERM | everything [no-autoload]
"""

import importlib.util
import io
import os
import signal
import sys

# The library transformers checks for torch in this way.
importlib.util.find_spec("torch")
if "no-autoload" in sys.argv:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch import nn  # noqa: E402


class Checkpoint:
    def __init__(self, model, step):
        self.model, self.step = model, step


def loss_of(model, rows):
    return model(rows).square().mean()


def train_step(model, optimizer, step):
    if step == 5 and sys.argv[1] == "crash":
        raise RuntimeError("loss is not finite")
    if step == 5 and sys.argv[1] == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    loss = loss_of(model, torch.full((2, 4), float(step)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def other_rank(rank, queue):
    queue.put((rank, __name__, sys.argv, Checkpoint.__module__))


def everything(model):
    """Use features that look up __main__ again: checkpoints, spawned ranks, and the compiler."""
    file = io.BytesIO()
    torch.save(Checkpoint(model, 3), file)
    file.seek(0)
    print(type(torch.load(file, weights_only=False)) is Checkpoint)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(other_rank, (queue,), nprocs=1)
    print(queue.get())
    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    print(compiled(model, torch.ones(2, 4)).item() == loss_of(model, torch.ones(2, 4)).item())


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        print(step, train_step(model, optimizer, step), flush=True)
    if sys.argv[1] == "everything":
        everything(model)
    loader = torch.__loader__
    print(vars(loader), torch.__spec__.loader is loader)
    if sys.argv[1] == "exit":
        sys.exit(3)


if __name__ == "__main__":
    main()
