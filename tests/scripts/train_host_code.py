"""Train on a CPU with a slow step. Arguments: the slow place (loss, section or data), and seconds."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchlens_perf as perf

PLACE, SECONDS = sys.argv[1], float(sys.argv[2])


class Samples(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        if PLACE == "data":
            time.sleep(0.2)  # data
        return torch.ones(4)


def loss_fn(output):
    if PLACE == "loss":
        time.sleep(0.2)  # loss
    return output.square().mean()


def main():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    until_s = time.monotonic() + SECONDS
    with perf.watch(model):
        for batch in DataLoader(Samples()):
            loss_fn(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if PLACE == "section":
                with perf.section("log"):
                    time.sleep(0.2)  # section
            else:
                time.sleep(0.02)
            if time.monotonic() > until_s:
                break


main()
