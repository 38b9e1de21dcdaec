"""Accuracy of straggler verdicts in simulated runs, ours and those of other tools' rules.

The tables show how soon and how often the faulty rank is named, and the rate of false alarms.

    python -m benchmarks.accuracy_simulated size --ranks 256 --deviation 0.01 --runs 200 --clean 200
    python -m benchmarks.accuracy_simulated curve --ranks 256
    python -m benchmarks.accuracy_simulated spread --ranks 64
    python -m benchmarks.accuracy_simulated kinds --ranks 256
    python -m benchmarks.accuracy_simulated window --ranks 16384

--deviation is the standard deviation of a rank's work between steps, without the part common to all
ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import other_judges
from benchmarks.measure import Table, share_interval
from tests.support.simulations import slow_ranks
from torchlens_perf.simulate.faults import ConstantFault, parse_fault
from torchlens_perf.simulate.simulation import (
    BLOCK,
    Fault,
    SimulatedSteps,
    Simulation,
    Topology,
    load_recorded_noise,
)
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import Findings

# Steps after the fault's first step in which the rank must be named.
WITHIN = 20
CLEAN_STEPS = 512
FIRST_FAULTY = 2 * BLOCK
US = "torchlens_perf"
OTHERS = (
    "NVRx relative < 0.75",
    "NVRx relative < 0.95",
    "NVRx individual < 0.75",
    "Megatron forward",
    "slowest step",
)


@dataclasses.dataclass
class MetricSnapshot:
    """Counts of one judge over runs with a fault, or over runs without one."""

    runs: int = 0
    named: int = 0
    """Runs in which the right rank was named within WITHIN steps."""
    first: int = 0
    """Runs in which the judge's slowest rank was the right one, named or not.

    For our judge: the rank named first.
    """
    alarms: int = 0
    """Runs in which a rank without a fault was named."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Size, noise and fault of a simulated job."""

    ranks: int
    deviation: float
    share: float = 0.05
    phase: str = "compute"
    stages: int = 1
    """Pipeline stages.

    With one stage all ranks form one population, which is the hardest case for a judge.
    """
    spread: float = 0.003
    """Standard deviation of the ranks' lasting differences, as a share of their work."""
    since: int = FIRST_FAULTY
    """First step of the fault. A run may delay it by up to one block."""

    def simulation(self, seed: int, faults: Sequence[Fault] = ()) -> Simulation:
        """Return a job with tensor parallelism in a node, then data parallelism, then stages."""
        tp = min(8, self.ranks // self.stages)
        topology = Topology(
            self.ranks // (tp * self.stages),
            tp,
            self.stages,
            node_size=max(1, min(8, self.ranks // 4)),
        )
        recorded = load_recorded_noise().individual.sum(axis=2, dtype=np.float64)
        noise = self.deviation / float(recorded.std())
        return Simulation(topology, faults=faults, seed=seed, noise=noise, spread=self.spread)


def judged(
    run: Simulation, steps: int, seen: Callable[[SimulatedSteps], None] | None = None
) -> Findings:
    """Run all steps through the sidecar's judge and return its findings."""
    judge = StragglerDetector()
    for rank in range(run.topology.rank_count):
        judge.set_placement(rank, run.topology.placement(rank))
    findings = judge.judge()
    for part in run.steps(steps):
        for population, block in part.detector_rows(1):
            judge.add_bin_batch(population, block)
        findings = judge.judge()
        if seen is not None:
            seen(part)
    return findings


class Others:
    """The other tools' rules, applied to every interval of WITHIN steps."""

    def __init__(self, first: int, seed: int) -> None:
        """Start the first interval at step `first`."""
        self.answers: list[dict[str, other_judges.Answer]] = []
        self._first = first
        self._parts: list[np.ndarray] = []
        self._durations: list[np.ndarray] = []
        self._best: np.ndarray | None = None
        self._random = np.random.default_rng([seed, 9])

    def see(self, part: SimulatedSteps) -> None:
        skipped = max(0, self._first - part.first_step)
        self._parts.append(part.parts_ns[:, skipped:])
        self._durations.append(part.duration_ns[skipped:])
        while sum(map(len, self._durations)) >= WITHIN:
            parts, durations = np.concatenate(self._parts, axis=1), np.concatenate(self._durations)
            self.answers.append(self._asked(parts[:, :WITHIN], durations[:WITHIN]))
            self._parts, self._durations = [parts[:, WITHIN:]], [durations[WITHIN:]]

    def _asked(
        self, parts_ns: np.ndarray, duration_ns: np.ndarray
    ) -> dict[str, other_judges.Answer]:
        relative = other_judges.relative_score(parts_ns)
        individual, self._best = other_judges.individual_score(parts_ns, self._best)
        answers = (
            other_judges.below(relative, 0.75),
            other_judges.below(relative, 0.95),
            other_judges.below(individual, 0.75),
            other_judges.slowest_forward(parts_ns),
            other_judges.slowest_step(duration_ns, len(parts_ns), self._random),
        )
        return dict(zip(OTHERS, answers, strict=True))


def faulty_run(job: Job, seed: int, others: bool = True) -> dict[str, list[bool]]:
    """Simulate one run with a rank that becomes slower.

    Return three booleans per judge: the slow rank was named in time, the judge's slowest rank is
    the slow one, a healthy rank was named.
    """
    random = np.random.default_rng([seed, 7])
    rank, since = int(random.integers(job.ranks)), job.since + int(random.integers(BLOCK))
    run = job.simulation(
        seed, [ConstantFault(rank=rank, share=job.share, phase=job.phase, since=since)]
    )
    # Start one interval before the fault, for the rules that compare with the past.
    asked = Others(since - WITHIN, seed)
    findings = judged(run, since + 2 * WITHIN, asked.see if others else None)
    order = sorted(findings.episodes, key=lambda episode: (episode.named_step, -episode.excess_ns))
    right = [episode for episode in order if episode.rank == rank and episode.named_step >= since]
    in_time = bool(right) and right[0].named_step - since < WITHIN
    said = {US: [in_time, bool(right) and order[0] is right[0], len(right) < len(order)]}
    for name, answer in asked.answers[1].items() if others else ():
        said[name] = [rank in answer.named, answer.first == rank, bool(answer.named - {rank})]
    return said


def clean_run(job: Job, seed: int, others: bool = True) -> dict[str, bool]:
    """Simulate one run without a fault. Return for each judge whether it named a rank."""
    asked = Others(0, seed)
    findings = judged(job.simulation(seed), CLEAN_STEPS, asked.see if others else None)
    alarmed = {
        name: any(answers[name].named for answers in asked.answers) for name in OTHERS if others
    }
    return {US: bool(findings.episodes), **alarmed}


def share_with_interval(hits: int, runs: int) -> str:
    """Format a share with its 95 % interval by Wilson's score."""
    if not runs:
        return ""
    _, low, high = share_interval(hits, runs)
    return f"{hits}/{runs} ({low:.0%} to {high:.0%})"


def size(options: argparse.Namespace) -> int:
    """Run a job of one size and noise through all judges, with +5 % on one rank and without a
    fault.
    """
    faulty: dict[str, MetricSnapshot] = {name: MetricSnapshot() for name in (US, *OTHERS)}
    clean: dict[str, MetricSnapshot] = {name: MetricSnapshot() for name in (US, *OTHERS)}
    for what, run in results(options):
        for name, value in run.items():
            tally = (faulty if what == "faulty" else clean)[name]
            tally.runs += 1
            if what == "faulty":
                tally.named += value[0]
                tally.first += value[1]
                tally.alarms += value[2]
            else:
                tally.alarms += value
    stages = f" in {options.stages} stages" if options.stages > 1 else ""
    fault = f"+{options.share:.0%} in {options.phase} on one rank"
    print(f"{options.ranks} ranks{stages}, deviation {options.deviation:.1%}, {fault}\n")
    table = Table(
        "judge",
        f"right rank within {WITHIN} steps",
        "its slowest is the right one",
        "another named too",
        "named in a clean run",
    )
    for name in (US, *OTHERS):
        mine, quiet = faulty[name], clean[name]
        table.row(
            name,
            *(
                share_with_interval(hits, mine.runs)
                for hits in (mine.named, mine.first, mine.alarms)
            ),
            share_with_interval(quiet.alarms, quiet.runs),
        )
    return 0


def results(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the results of runs of one size. Add new runs to those stored in `options.keep`."""
    job = Job(
        options.ranks,
        options.deviation,
        options.share,
        options.phase,
        options.stages,
        since=options.since,
    )
    key = dataclasses.asdict(job)
    known: set[tuple[str, int]] = set()
    if options.keep is not None and options.keep.exists():
        for line in options.keep.read_text().splitlines():
            row = json.loads(line)
            if row["key"] == key:
                known.add((row["what"], row["seed"]))
                yield row["what"], row["run"]
    wanted = [("faulty", seed) for seed in range(options.runs)] + [
        ("clean", seed) for seed in range(options.clean)
    ]
    until = time.monotonic() + options.seconds
    for what, seed in sorted(wanted, key=lambda each: each[1]):
        if (what, seed) in known or time.monotonic() > until:
            continue
        run: dict[str, Any] = (
            faulty_run(job, seed) if what == "faulty" else clean_run(job, 1_000_000 + seed)
        )
        if options.keep is not None:
            with options.keep.open("a") as file:
                file.write(json.dumps({"key": key, "what": what, "seed": seed, "run": run}) + "\n")
        yield what, run


def curve(options: argparse.Namespace) -> int:
    """Print the smallest slowdown that is detected within WITHIN steps, for each noise level."""
    shares, deviations = (0.03, 0.05, 0.1, 0.25), (0.005, 0.01, 0.02, 0.05, 0.1)
    table = Table("deviation", *(f"+{share:.0%}" for share in shares), "named in a clean run")
    for deviation in deviations:
        cells = []
        for share in shares:
            job = Job(options.ranks, deviation, share, options.phase, options.stages)
            runs = [faulty_run(job, seed, others=False)[US] for seed in range(options.runs)]
            in_time, others = sum(run[0] for run in runs), sum(run[2] for run in runs)
            cells.append(
                f"{in_time / len(runs):.0%}"
                + (f", others named in {others / len(runs):.0%}" * (others > 0))
            )
        job = Job(options.ranks, deviation, stages=options.stages)
        quiet = [
            clean_run(job, 1_000_000 + seed, others=False)[US] for seed in range(options.clean)
        ]
        table.row(f"{deviation:.1%}", *cells, share_with_interval(sum(quiet), len(quiet)))
    return 0


def spread(options: argparse.Namespace) -> int:
    """Print the smallest detected slowdown if ranks always differ, as GPUs of one type do."""
    deviations, shares = (0.005, 0.01), (0.05, 0.1)
    columns = [(deviation, share) for deviation in deviations for share in shares]
    table = Table(
        "lasting spread",
        *(f"deviation {deviation:.1%}, +{share:.0%}" for deviation, share in columns),
    )
    for lasting in (0.0, 0.003, 0.01, 0.02):
        cells = []
        for deviation, share in columns:
            job = Job(options.ranks, deviation, share, spread=lasting)
            in_time = sum(
                faulty_run(job, seed, others=False)[US][0] for seed in range(options.runs)
            )
            cells.append(f"{in_time}/{options.runs}")
        table.row(f"{lasting:.1%}", *cells)
    return 0


KINDS = {
    "constant +5 %": "constant:rank=3,share=0.05,since=64",
    "constant +5 %, data": "constant:rank=3,share=0.05,since=64,phase=data",
    "drifting to +10 % in 200 steps": "drifting:rank=3,share=0.1,over=200,since=64",
    "one step in four +20 %": "intermittent:rank=3,share=0.2,slow=1,of=4,since=64",
    "one step in ten +50 %": "intermittent:rank=3,share=0.5,slow=1,of=10,since=64",
    "moving +10 %, 100 steps each": "moving:ranks=3+5,share=0.1,every=100,since=64",
    "one node +5 %": "node:node=1,share=0.05,since=64",
    "data stall in one step of 50, +200 %": "stalls:rank=3,share=2,every=50,since=64",
    "GC in one step of 100, each at its time, +30 %": "pauses:share=0.3,every=100",
    "GC all together, one step of 100, +30 %": "pauses:share=0.3,every=100,together=yes",
    "slow link, +10 %": "link:rank=3,share=0.1,since=64",
    "variable length, sd 20 %, not reported": "variable_length:spread=0.2",
    "variable length, sd 20 %, reported": "variable_length:spread=0.2,reported=yes",
    "variable length reported, and +5 %": (
        "variable_length:spread=0.2,reported=yes constant:rank=3,share=0.05,since=64"
    ),
}


def kinds(options: argparse.Namespace) -> int:
    """Print for each kind of fault how often and how soon its rank is named, and the false
    alarms."""
    table = Table(
        "fault", "faulty rank named by the end", "median steps until then", "another rank named"
    )
    for label, text in KINDS.items():
        faults = [parse_fault(one) for one in text.split(" ") if one]
        named, wrong, delays = 0, 0, []
        for seed in range(options.runs):
            run = Job(options.ranks, options.deviation, stages=options.stages).simulation(
                seed, faults
            )
            findings = judged(run, FIRST_FAULTY + 256)
            right = [
                each for each in findings.episodes if each.rank in slow_ranks(run, each.named_step)
            ]
            named += bool(right)
            wrong += len(right) < len(findings.episodes)
            delays += [min(each.named_step for each in right) + 1 - FIRST_FAULTY] if right else []
        planted = any(slow_ranks(run, step) for step in range(FIRST_FAULTY + 256))
        table.row(
            label,
            f"{named}/{options.runs}" if planted else "no rank is faulty",
            f"{np.median(delays):.0f}" if delays else "",
            share_with_interval(wrong, options.runs),
        )
    return 0


def window(options: argparse.Namespace) -> int:
    """Measure the judge's time on one core for a window of four rows of all ranks, with a full
    history.
    """
    run = Job(options.ranks, 0.01).simulation(1)
    judge = StragglerDetector()
    for rank in range(options.ranks):
        judge.set_placement(rank, run.topology.placement(rank))
    times: list[tuple[float, float]] = []
    history = 12
    for number in range(history + 1):
        part = run.block(number)
        for first in range(0, BLOCK, 4):
            blocks = [
                (population, dataclasses.replace(block, **_columns(block, first)))
                for population, block in part.detector_rows(1)
            ]
            begun = time.process_time()
            for population, block in blocks:
                judge.add_bin_batch(population, block)
            added = time.process_time()
            judge.judge()
            if number == history:
                times.append((added - begun, time.process_time() - added))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    table = Table(
        "ranks", "add", "judge", "both, worst of 8", "peak resident memory, simulation included"
    )
    add_s, judge_s = (float(np.median(column)) for column in zip(*times, strict=True))
    worst_s = max(sum(each) for each in times)
    table.row(
        options.ranks, f"{add_s:.3f} s", f"{judge_s:.3f} s", f"{worst_s:.3f} s", f"{peak_mb:.0f} MB"
    )
    return 0


def _columns(block: Any, first: int) -> dict[str, Any]:
    names = ("key", "flags", "duration_ns", "wait_ns", "ready_ns", "workload", "parts_ns")
    return {name: getattr(block, name)[:, first : first + 4] for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("size", "curve", "spread", "kinds", "window"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--deviation", type=float, default=0.01)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--phase", default="compute", help="in which the fault is")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages")
    parser.add_argument(
        "--since", type=int, default=FIRST_FAULTY, help="step that the fault begins with, in `size`"
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--clean", type=int, default=50)
    parser.add_argument(
        "--keep", type=Path, help="a file of runs: these are taken over, new ones are added"
    )
    parser.add_argument(
        "--seconds", type=float, default=280.0, help="begins no new run of `size` after so long"
    )
    options = parser.parse_args(arguments)
    commands = {"size": size, "curve": curve, "spread": spread, "kinds": kinds, "window": window}
    return commands[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
