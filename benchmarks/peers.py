"""Compare the costs of this package with those of other tools: `make bench-peers`.

    python -m benchmarks.peers ENVIRONMENTS --data FILE --write

ENVIRONMENTS is the folder with an environment for each tool. All tools do the same work in processes
of their own, which take turns in blocks: in each round every process makes one block, in shuffled
order. A generation starts all processes anew. At least two are made, and as many as fit into
--minutes. The values go to FILE as JSON. --write renews the tables of benchmarks/peers.md
and the chart of the README. `python -m benchmarks.peers_tables` does that without measuring.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import peers_growth, peers_tables
from benchmarks.peers_jobs import REPO, Failures, Job, contained, started
from benchmarks.peers_tools import TOOLS

WARM_ROUNDS = 1


@dataclasses.dataclass(frozen=True)
class Jobs:
    """Jobs that make the same kinds of work under all tools."""

    model: str
    works: dict[str, tuple[str, int]]
    """What is measured: name in the results -> unit of work, units in a block."""
    ranks: int = 1
    options: tuple[str, ...] = ()


JOBS = (
    Jobs("gpt", {"gpt": ("step", 8)}),
    Jobs("gpt", {"modules": ("step", 8), "section": ("section", 400)}, options=("all",)),
    Jobs("ddp", {"ddp": ("step", 8), "all_reduce": ("all_reduce", 50)}, ranks=2),
)
WORKS = tuple(work for jobs in JOBS for work in jobs.works)


def takes_part(tool: str, work: str) -> bool:
    """Return False if the tool records nothing of this kind."""
    kind = TOOLS[tool][0]
    if work == "modules":
        return kind.marks_modules
    return kind.has_sections or work not in ("section", "all_reduce")


@dataclasses.dataclass
class Results:
    """The values of all works."""

    times: dict[str, dict[str, list[list[int]]]]
    """ns of a unit by work, tool, generation and round."""
    resources: dict[str, dict[str, list[float]]]
    """From jobs of the GPT step, by tool, name and generation."""
    steps_found: dict[str, dict[str, int | None]]
    """Steps that were made and that the results of a tool have, from the first generation."""
    versions: dict[str, str]
    failed: Failures


def run_jobs(
    jobs: Jobs, environments: Path, tools: Sequence[str], rounds: int, results: Results, clock: str,
    draw: random.Random,
) -> None:  # fmt: skip
    """Start the jobs of all tools, make all rounds, and end the jobs."""
    asked = [
        tool
        for tool in tools
        if tool not in results.failed and any(takes_part(tool, work) for work in jobs.works)
    ]
    draw.shuffle(asked)
    settings = {"ranks": jobs.ranks, "options": jobs.options, "clock": clock}
    with started(asked, jobs.model, environments, results.failed, **settings) as (running, begun):
        found: dict[str, dict[str, list[int]]] = {work: {} for work in jobs.works}
        for number in range(WARM_ROUNDS + rounds):
            order = list(running)
            draw.shuffle(order)
            for tool in order:
                with contained(tool, running, results.failed):
                    for work, (unit, units) in jobs.works.items():
                        if takes_part(tool, work):
                            value = round(running[tool].block(unit, units))
                            if number >= WARM_ROUNDS:
                                found[work].setdefault(tool, []).append(value)
        for work, times in found.items():
            for tool in running:
                if tool in times:
                    results.times[work].setdefault(tool, []).append(times[tool])
        for tool, job in list(running.items()):
            results.versions |= job.versions
            if "gpt" in jobs.works:
                with contained(tool, running, results.failed):
                    note_resources(tool, job, begun[tool], results)


def note_resources(tool: str, job: Job, begun: dict[str, float], results: Results) -> None:
    values = begun | job.measure_memory() | job.end()
    values["bytes_per_step"] = values.pop("written_bytes") / job.steps
    kept = results.resources.setdefault(tool, {})
    for key, value in values.items():
        kept.setdefault(key, []).append(round(value, 6))
    if tool not in results.steps_found:
        results.steps_found[tool] = {"made": job.steps, "found": job.count_steps()}


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Return all values, which can be written as JSON."""
    begin_s, load = time.monotonic(), os.getloadavg()[0]
    environments = asked.environments.absolute()
    results = Results({work: {} for work in WORKS}, {}, {}, {}, Failures())
    draw = random.Random(1)
    deadline_s, longest_s = begin_s + 60 * asked.minutes, 0.0
    growth = {}
    for number in range(asked.generations):
        generation_s = time.monotonic()
        # One start would not show how much starts differ.
        if number > 1 and generation_s + longest_s > deadline_s:
            break
        for jobs in JOBS:
            if set(jobs.works) & set(asked.works):
                run_jobs(jobs, environments, asked.tools, asked.rounds, results, asked.clock, draw)
        now_s = time.monotonic()
        longest_s = max(longest_s, now_s - generation_s)
        print(f"generation {number + 1}: {now_s - generation_s:.0f} s", file=sys.stderr, flush=True)
        if number == 0 and asked.growth != "none":
            growth = peers_growth.measure(
                environments, asked.tools, results.failed, deadline_s - longest_s,
                small=asked.growth == "small",
            )  # fmt: skip
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}",
        "load_before": round(load, 2),
        "minutes": round((time.monotonic() - begin_s) / 60, 1),
        "clock": asked.clock,
        "versions": results.versions,
        "failed": results.failed,
        "rounds": asked.rounds,
        "steps_found": results.steps_found,
        "resources": results.resources,
        "growth": growth,
        "times_ns": {work: times for work, times in results.times.items() if times},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environments", type=Path, metavar="ENVIRONMENTS")
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=11.5)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--growth", choices=("all", "small", "none"), default="all")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if "none" not in asked.tools:
        parser.error("--tools must contain none, which the other tools are compared with")
    data = measure(asked)
    asked.data.write_text(peers_tables.to_json(data))
    print("\n".join(peers_tables.draw_tables(data)))
    if asked.write:
        peers_tables.write(data, REPO)
    return 1 if data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
