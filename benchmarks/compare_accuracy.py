"""Count false and missed changes of `torchlens-perf compare` on runs recorded here.

usage: python -m benchmarks.compare_accuracy record FOLDER [--runs N] [--fault-ms MS]
       python -m benchmarks.compare_accuracy judge FOLDER

`record` adds runs of a small transformer to FOLDER. With --fault-ms, runs without a fault alternate
with runs of each fault, which adds MS milliseconds to each step. `judge` draws sides of five runs,
and pairs of single runs, and compares them. Other tools' rules are applied to the same step times.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from torchlens_perf.compare.changes import Outcome
from torchlens_perf.compare.comparison import (
    ComparedRun,
    Comparison,
    build_comparison,
    read_compared_run,
)
from torchlens_perf.compare.measures import DETAILS, STEP, Kind

STEPS, BATCH, SIDE, DRAWS = 100, 8, 5, 100
CLEAN, FAULTS = "clean", ("forward", "backward", "data", "loss")
SIDECAR_TIMEOUT_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["record", "judge"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--fault-ms", type=float, default=0.0, help="0: no faults")
    options = parser.parse_args()
    if options.what == "record":
        kinds = (CLEAN, *FAULTS) if options.fault_ms else (CLEAN,)
        for number, kind in zip(range(options.runs), itertools.cycle(kinds), strict=False):
            name = f"{kind}-{os.getpid()}-{number:03d}"
            record(options.folder, name, kind, options.fault_ms / 1e3)
        return 0
    judge(options.folder)
    return 0


def record(folder: Path, name: str, fault: str, fault_s: float) -> None:
    """Record one run in a forked child, whose process has already loaded torch."""
    import torch

    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        os.environ |= {"TORCHLENS_PERF_DIR": str(folder), "TORCHLENS_PERF_RUN_ID": name}
        os.environ["TORCHLENS_PERF_REPORT"] = "text"
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        train(fault, fault_s)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + SIDECAR_TIMEOUT_S
    while time.monotonic() < deadline and not (folder / name / "report.txt").exists():
        time.sleep(0.05)


def train(fault: str, fault_s: float) -> None:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset

    import torchlens_perf as perf

    def spend(where: str) -> None:
        end_s = time.perf_counter() + fault_s
        while where == fault and time.perf_counter() < end_s:
            pass

    class Tokens(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return STEPS * BATCH

        def __getitem__(self, at: int) -> torch.Tensor:
            if at % BATCH == 0:
                spend("data")
            return torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(at))

    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(context: object, value: torch.Tensor) -> torch.Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
            spend("backward")
            return gradient

    class Block(nn.TransformerEncoderLayer):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            spend("forward")
            return SlowBackward.apply(super().forward(value))

    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True) for _ in range(2)]
    slow = Block(128, 4, 256, 0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, 128), *layers, slow, nn.Linear(128, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    with perf.watch(model, optimizer):
        for tokens in DataLoader(Tokens(), batch_size=BATCH):
            with perf.section("loss"):
                spend("loss")
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def judge(folder: Path) -> None:
    """Print how often equal and unequal sides of the recorded runs are told apart."""
    runs: dict[str, list[ComparedRun]] = {}
    for path in sorted(folder.iterdir()):
        runs.setdefault(path.name.partition("-")[0], []).append(read_compared_run(path))
    clean = runs.pop(CLEAN)
    steps_ms = [1e3 * run.values[STEP] for run in clean]
    spread = statistics.stdev(steps_ms) / statistics.mean(steps_ms)
    print(
        f"{len(clean)} clean runs: step {statistics.median(steps_ms):.2f} ms, spread {spread:.1%}"
    )
    generator = random.Random(0)
    for side in (1, 3, SIDE):
        drawn = [generator.sample(clean, 2 * side) for _ in range(DRAWS)]
        found = [build_comparison(each[:side], each[side:]) for each in drawn]
        print(f"equal sides of {side}: {_false(found)}; {_step_words(found)}")
        for name, rule in RULES.items():
            wrong = sum(rule(_steps_s(each[:side]), _steps_s(each[side:])) for each in drawn)
            print(f"    {name}: {wrong} of {DRAWS} changed")
    for fault, faulty in runs.items():
        drawn = [
            (generator.sample(clean, SIDE), generator.sample(faulty, SIDE)) for _ in range(DRAWS)
        ]
        found = [build_comparison(*each) for each in drawn]
        hits = sum(each.step.outcome is Outcome.CHANGED for each in found)
        parts, details = (
            Counter(
                changed[0][0].name if (changed := each.list_changed(*kinds)) else "none"
                for each in found
            )
            for kinds in ((Kind.PART,), DETAILS)
        )
        share = statistics.median(each.step.share for each in found)
        print(f"{fault}: step {share:+.1%}, step changed in {hits} of {DRAWS}; first changed part")
        print(f"    {dict(parts)}, first changed module or section {dict(details)}")
        for name, rule in RULES.items():
            right = sum(rule(_steps_s(before), _steps_s(after)) for before, after in drawn)
            print(f"    {name}: {right} of {DRAWS} changed")


def _false(found: Sequence[Comparison]) -> str:
    wrong = [each for each in found if each.list_changed(*Kind)]
    names = Counter(f"{measure.name}" for each in wrong for measure, _ in each.list_changed(*Kind))
    return f"{len(wrong)} of {len(found)} with a false change {dict(names.most_common(4))}"


def _step_words(found: Sequence[Comparison]) -> str:
    steps = [each.step for each in found]
    detectable = statistics.median(each.detectable / each.before for each in steps)
    outcomes = Counter(each.outcome.value for each in steps)
    return f"smallest detectable change of the step {detectable:.1%}, outcomes {dict(outcomes)}"


def _steps_s(runs: Sequence[ComparedRun]) -> list[float]:
    return [run.values[STEP] for run in runs]


RULES: dict[str, Callable[[list[float], list[float]], bool]] = {
    "means 5 % apart (pytest-benchmark --benchmark-compare-fail=mean:5%)": lambda before, after: (
        statistics.mean(after) > 1.05 * statistics.mean(before)
    ),
    "medians 10 % apart (asv's default factor)": lambda before, after: (
        statistics.median(after) > 1.1 * statistics.median(before)
    ),
    "one run a side, means 3 % apart (TraceML 0.5 compare: regression or improvement)": (
        lambda before, after: abs(after[0] / before[0] - 1) >= 0.03
    ),
}
"""Rules of other tools on the steps of two sides."""


if __name__ == "__main__":
    sys.exit(main())
