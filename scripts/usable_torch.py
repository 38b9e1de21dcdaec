"""Prints where the torch of this Python lies, if it is one that torchlens_perf supports; else exits with 1."""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(1)

import torch

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
    sys.exit(1)
sys.stdout.write(torch.__path__[0].rpartition("/")[0] + "\n")
