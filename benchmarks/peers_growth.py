"""Growth of the costs of peers.py with modules, steps and local ranks."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers_jobs import Failures, contained, started
from benchmarks.peers_tools import CONTROL, TOOLS

MODULES = (10, 10_000)
# A million steps would take an hour under all tools. The memory and files of two lengths show what
# grows, and `python -m benchmarks long_run` makes a million steps under this package.
STEPS = (1000, 10_000)
RANKS = (1, 64)
# Processes of a tool may need some seconds until they use all their memory.
RANK_STEPS, RANK_PERIOD_MS = 240, 50
Growth = dict[str, dict[str, dict[str, float]]]


def measure_modules(
    environments: Path, tools: Sequence[str], failed: Failures, counts: Sequence[int], rounds: int
) -> Growth:
    """Return ns of a step with all modules marked, and the start, by tool and number of modules."""
    asked = [tool for tool in tools if TOOLS[tool][0].marks_modules and tool != CONTROL]
    found: Growth = {tool: {} for tool in asked}
    draw = random.Random(1)
    for count in counts:
        left = [tool for tool in asked if tool not in failed]
        units = max(1, 1000 // count)
        with started(
            left, f"chain:{count}", environments, failed, options=("all",)
        ) as (jobs, begun):  # fmt: skip
            order = list(jobs)
            times: dict[str, list[float]] = {tool: [] for tool in order}
            for _ in range(rounds):
                draw.shuffle(order)
                for tool in order:
                    times[tool].append(jobs[tool].block("step", units))
            memory = {tool: jobs[tool].measure_memory()["rank_bytes"] for tool in order}
            for tool in order:
                pairs = zip(times[tool], times["none"], strict=True)
                added_ns = statistics.median(value - base for value, base in pairs)
                found[tool][str(count)] = {
                    "ns": statistics.median(times[tool]),
                    "added_by_module_ns": added_ns / count,
                    **begun[tool],
                    "added_bytes": memory[tool] - memory["none"],
                }
    return found


def measure_steps(
    environments: Path, tools: Sequence[str], failed: Failures, counts: Sequence[int]
) -> Growth:
    """Return memory, files and exit by tool and number of steps, each in a run of its own."""
    asked = [tool for tool in tools if tool != CONTROL and not TOOLS[tool][0].is_idle()]
    found: Growth = {tool: {} for tool in asked}
    for count in counts:
        left = [tool for tool in asked if tool not in failed]
        with started(left, "short", environments, failed) as (jobs, _):
            for tool, job in list(jobs.items()):
                with contained(tool, jobs, failed):
                    values = {"ns": job.block("step", count)}
                    found[tool][str(count)] = values | job.measure_memory() | job.end()
    return found


def measure_ranks(
    environments: Path, tools: Sequence[str], failed: Failures, counts: Sequence[int]
) -> Growth:
    """Return memory and processor time of the tools' own processes by number of local ranks.

    The ranks do not communicate. They sleep between their steps, so that two CPUs are enough.
    """
    asked = [tool for tool in tools if TOOLS[tool][0].has_own_processes]
    found: Growth = {tool: {} for tool in asked}
    for count in counts:
        for tool in asked:
            if tool in failed:
                continue
            options = (f"forks={count}",)
            with started([tool], "short", environments, failed, options=options) as (jobs, begun):
                with contained(tool, jobs, failed):
                    job = jobs[tool]
                    job.block("step", RANK_STEPS, RANK_PERIOD_MS)
                    values = job.measure_memory() | begun[tool] | job.end()
                    found[tool][str(count)] = {**values, "steps": job.steps}
    return found


def measure(
    environments: Path, tools: Sequence[str], failed: Failures, deadline_s: float, *, small: bool
) -> dict[str, Growth]:
    """Return the tables. After the deadline, a time of time.monotonic(), no other table begins.

    small: only few modules, steps and ranks, for tests.
    """
    parts: dict[str, Callable[[], Growth]] = {
        "modules": lambda: measure_modules(
            environments, tools, failed, (10, 100) if small else MODULES, 3 if small else 7
        ),
        "steps": lambda: measure_steps(environments, tools, failed, (20, 100) if small else STEPS),
        "ranks": lambda: measure_ranks(environments, tools, failed, (1, 3) if small else RANKS),
    }
    found = {}
    for name, part in parts.items():
        begin_s = time.monotonic()
        if begin_s < deadline_s:
            found[name] = part()
        print(f"growth of {name}: {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
    return found
