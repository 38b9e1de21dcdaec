"""Verdicts on jobs with experts: is a rank slow because of its tokens, or because of its machine?

    python -m benchmarks.experts_verdicts --seeds 0-9 --folder /tmp/experts

Each run is a real job of two to four gloo ranks that train a mixture of experts. Tokens travel to
the ranks of their experts by all-to-all, in the way of Megatron-LM or, for odd seeds, in that of
torchtitan. One rank gets more tokens (`tokens`), or as many tokens but computes longer with them
(`machine`), or no rank differs (`clean`). The ranks write down how many tokens they received.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from benchmarks.planted_faults import seeds, started, wait
from benchmarks.planted_training import wait_for_sidecar
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

KINDS = ("tokens", "machine", "clean")
RANKS = (2, 3, 4)
STEPS = 200
TOKENS, HIDDEN, INNER, LAYERS, CHOSEN = 256, 64, 128, 2, 2
PACE_S = 20e-6
"""Time of an expert for a token, as on an accelerator: other programs on the CPUs do not change it."""
EXPERTS_PER_RANK = 2
RUN_TIMEOUT_S = 180


class Fault:
    """The planted difference of one rank, which is the same for all ranks of a run."""

    def __init__(self, kind: str, seed: int) -> None:
        draw = random.Random(f"{kind}/{seed}")
        self.kind = kind
        self.ranks = RANKS[seed % len(RANKS)]
        self.suspect = draw.randrange(self.ranks)
        self.load = draw.uniform(1.4, 1.9) if self.ranks > 2 else draw.uniform(1.3, 1.6)
        """Tokens of the rank with more tokens, as a multiple of the mean."""
        self.slower = draw.uniform(0.4, 0.9)
        """Additional time of the slow machine, as a share of the time of its experts."""

    def logit_bias(self) -> Tensor:
        """Return what is added to the router's logits."""
        bias = torch.zeros(self.ranks, EXPERTS_PER_RANK)
        if self.kind == "tokens":
            share = self.load / self.ranks
            bias[self.suspect] = torch.tensor(share / (1 - share) * (self.ranks - 1)).log()
        return bias.flatten()


class Exchange(torch.autograd.Function):
    """An all-to-all whose gradient is the reverse all-to-all."""

    @staticmethod
    def forward(context: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        context.sizes = received, sent
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent)
        return found

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        received, sent = context.sizes
        return Exchange.apply(gradients[0], sent, received), None, None


def exchange(rows: Tensor, received: list[int], sent: list[int], *, functional: bool) -> Tensor:
    if functional:
        return all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)
    return Exchange.apply(rows, received, sent)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A layer whose tokens each go to CHOSEN experts, of which this rank has EXPERTS_PER_RANK."""

    def __init__(self, fault: Fault, rank: int, *, functional: bool) -> None:
        super().__init__()
        self.fault, self.rank, self.functional = fault, rank, functional
        self.router = nn.Linear(HIDDEN, fault.ranks * EXPERTS_PER_RANK)
        nn.init.normal_(self.router.weight, std=0.02)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))
            for _ in range(EXPERTS_PER_RANK)
        )
        self.received: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        ranks = self.fault.ranks
        logits = self.router(tokens) + self.fault.logit_bias()
        noise = -torch.empty_like(logits).exponential_().log()
        chosen = (logits + noise).topk(CHOSEN, dim=1).indices.flatten()
        weights = logits.softmax(1).repeat_interleave(CHOSEN, 0).gather(1, chosen[:, None])
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=ranks * EXPERTS_PER_RANK)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(ranks, -1).sum(1).tolist()
        by_expert = theirs.view(ranks, -1).tolist()
        received = [sum(each) for each in by_expert]
        self.received.append(sum(received))
        rows = tokens.repeat_interleave(CHOSEN, 0)[order]
        rows = exchange(rows, received, sent, functional=self.functional)
        parts = rows.split([count for each in by_expert for count in each])
        slower = self.fault.kind == "machine" and self.rank == self.fault.suspect
        pace_s = PACE_S * (1 + self.fault.slower if slower else 1)
        end_s = time.perf_counter() + len(rows) * pace_s
        done = [self.experts[i % EXPERTS_PER_RANK](part) for i, part in enumerate(parts)]
        time.sleep(max(0.0, end_s - time.perf_counter()))
        back = exchange(torch.cat(done), sent, received, functional=self.functional)
        result = rows.new_zeros(len(order), HIDDEN).index_copy(0, order, back) * weights
        return tokens + result.view(-1, CHOSEN, HIDDEN).sum(1)


class Model(nn.Module):
    def __init__(self, fault: Fault, rank: int, *, functional: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(
            Experts(fault, rank, functional=functional) for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.dense(tokens)
        for layer in self.layers:
            found = layer(found)
        return self.head(found)  # type: ignore[no-any-return]


def run_rank(cases: list[tuple[str, int]], folder: Path, steps: int, *, serve: bool) -> None:
    """Run these jobs on one rank, one after the other."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{ranks}-{cases[0][1]}"), ranks)
    timeout = datetime.timedelta(seconds=RUN_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    for kind, seed in cases:
        out = folder / f"{kind}-{seed}"
        out.mkdir(exist_ok=True)
        run_dir, received = run_job(kind, seed, rank, out, steps, serve=serve)
        if rank == 0:
            wait_for_sidecar(run_dir)
        (out / f"rank-{rank}.json").write_text(json.dumps([str(run_dir), received]))
        dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


def run_job(
    kind: str, seed: int, rank: int, out: Path, steps: int, *, serve: bool
) -> tuple[Path, list[int]]:
    """Train or serve under perf.watch. Return the run directory and the numbers of tokens."""
    import torchlens_perf as perf

    torch.manual_seed(1000 * seed + rank)
    model = Model(Fault(kind, seed), rank, functional=seed % 2 == 1)
    shared = [each for name, each in model.named_parameters() if "experts" not in name.split(".")]
    for each in shared:
        dist.broadcast(each.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watched = (model,) if serve else (model, optimizer)
    with perf.watch(*watched, dir=str(out / "run"), report="off") as watch:
        for _ in range(steps):
            tokens = torch.randn(TOKENS, HIDDEN)
            if serve:
                with torch.inference_mode():
                    model(tokens)
                continue
            optimizer.zero_grad()
            F.mse_loss(model(tokens), tokens).backward()
            dist.all_reduce(
                torch.cat([each.grad.flatten() for each in shared if each.grad is not None])
            )
            optimizer.step()
    assert watch.run_dir is not None
    return watch.run_dir, [each for layer in model.layers for each in layer.received]


def judge(kind: str, seed: int, out: Path) -> dict[str, Any]:
    """Return what the report says on a run, and whether it is right."""
    fault = Fault(kind, seed)
    logs = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(fault.ranks)]
    sums = [sum(received) for _, received in logs]
    report: Any = load_report(RunDirectory(Path(logs[0][0])), lost_time=False)
    slow = [each for each in report["verdicts"] if each.kind == "straggler"]
    causes = [each.kind for each in slow[0].diagnosis.causes] if slow and slow[0].diagnosis else []
    first = causes[0] if causes else ""
    is_right = not slow
    if kind != "clean":
        named = len(slow) == 1 and slow[0].rank == fault.suspect
        is_right = named and first == kind
    return {
        "kind": kind, "seed": seed, "ranks": fault.ranks, "right": is_right,
        "named": [each.rank for each in slow], "suspect": fault.suspect, "causes": causes,
        "truth": round(sums[fault.suspect] * fault.ranks / sum(sums), 3),
        "measured": [
            dict(cause.evidence)
            for each in slow if each.diagnosis
            for cause in each.diagnosis.causes if cause.kind in ("tokens", "machine")
        ],
        "text": slow[0].sentence if slow else "",
    }  # fmt: skip


def run_cases(
    cases: list[tuple[str, int]], folder: Path, steps: int = STEPS, *, serve: bool = False
) -> Iterator[dict[str, Any]]:
    """Run jobs and yield their judgements. Raises RuntimeError if a rank fails.

    Jobs with as many ranks share their processes, whose start takes longer than a job.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for ranks in RANKS:
        of_size = [(kind, seed) for kind, seed in cases if Fault(kind, seed).ranks == ranks]
        if not of_size:
            continue
        command = [sys.executable, "-m", "benchmarks.experts_verdicts", "--steps", str(steps)]
        command += ["--folder", str(folder), *(["--serve"] if serve else [])]
        command += ["--rank", *(f"{kind}:{seed}" for kind, seed in of_size)]
        with started(command, ranks, folder) as processes:
            if failed := wait(processes, time.monotonic() + RUN_TIMEOUT_S * len(of_size)):
                raise RuntimeError(f"{failed}, see {folder}/rank*.log")
        for kind, seed in of_size:
            yield judge(kind, seed, folder / f"{kind}-{seed}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Verdicts on jobs with experts.")
    parser.add_argument("--seeds", type=seeds, default=seeds("0-3"), help="like 0-9 or 3,5")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--serve", action="store_true", help="forward passes only")
    parser.add_argument("--folder", type=Path, help="by default, a temporary one")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        parts = [each.partition(":") for each in given.rank]
        of_rank = [(kind, int(seed)) for kind, _, seed in parts]
        run_rank(of_rank, given.folder, given.steps, serve=given.serve)
        return
    cases = [(kind, seed) for seed in given.seeds for kind in given.kinds]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        found = []
        for each in run_cases(cases, folder, given.steps, serve=given.serve):
            found.append(each)
            print(json.dumps(each), flush=True)
    for kind in given.kinds:
        of_kind = [each for each in found if each["kind"] == kind]
        errors = [
            abs(cause["of_mean_times"] / each["truth"] - 1)
            for each in of_kind for cause in each["measured"]
        ]  # fmt: skip
        print(
            f"{kind}: {sum(each['right'] for each in of_kind)} of {len(of_kind)} right; tokens off"
            f" by at most {max(errors, default=0.0):.1%}"
        )


if __name__ == "__main__":
    main()
