"""Print the location of this Python's torch if torchlens_perf supports it.

Exit with 1 otherwise.
"""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(1)

import torch

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
    sys.exit(1)
sys.stdout.write(torch.__path__[0].rpartition("/")[0] + "\n")
