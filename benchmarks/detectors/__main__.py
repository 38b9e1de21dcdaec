"""Measure detectors of slow ranks on the same planted faults.

    python -m benchmarks.detectors --minutes 25 --out FOLDER [--tools TOOL ...] [--seed SEED]

Without --seed, it is drawn and printed. --compare FOLDER lists figures whose intervals do not
overlap with those of another campaign. README.md in this folder describes all of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.detectors.campaign import (
    ENVIRONMENTS,
    draw_truths,
    obstacle,
    read_runs,
    run_campaign,
)
from benchmarks.detectors.protocol import write_json
from benchmarks.detectors.scoring import TITLES, Figure, Scores, cell, differences, score
from benchmarks.detectors.tools import CONTROL, TOOLS
from benchmarks.measure import Table
from benchmarks.planted_truth import FAULTY, RANKS


def read_scores(out: Path) -> dict[str, Scores]:
    """Return the scores of a campaign, by tool."""
    return {
        tool: {name: figure and msgspec.convert(figure, Figure) for name, figure in figures.items()}
        for tool, figures in json.loads((out / "scores.json").read_text())["tools"].items()
    }


def main() -> int:
    """Run the campaign and print its table. Return 1 if a run failed or figures differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--seed", type=int, help="repeat a campaign")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--kinds", nargs="+", choices=FAULTY, default=FAULTY, metavar="KIND")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="other programs that run")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="an earlier campaign")
    asked = parser.parse_args()
    out: Path = asked.out.absolute()
    out.mkdir(parents=True)
    seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    absent = {name: obstacle(name, asked.environments.absolute()) for name in asked.tools}
    names = [name for name in dict.fromkeys([CONTROL, *asked.tools]) if not absent.get(name)]
    load, begin_s = os.getloadavg()[0], time.monotonic()
    print(
        f"seed {seed}, {asked.ranks} ranks, {os.cpu_count()} CPUs, {asked.busy} busy programs, load {load:.1f}",
        flush=True,
    )
    truths = draw_truths(seed, asked.ranks, asked.kinds)
    failed = run_campaign(
        names, truths, asked.minutes, out, asked.environments.absolute(), asked.busy
    )
    runs = {name: read_runs(out, name) for name in names}
    control = {run.truth.name: run for run in runs[CONTROL]}
    scores = {name: score(runs[name], {} if name == CONTROL else control) for name in names}
    took_min = (time.monotonic() - begin_s) / 60
    facts = {
        "seed": seed, "minutes": round(took_min, 1), "load": [load, os.getloadavg()[0]],
        "ranks": asked.ranks, "busy": asked.busy,
    }  # fmt: skip
    values = {
        name: {what: figure and dataclasses.asdict(figure) for what, figure in each.items()}
        for name, each in scores.items()
    }
    write_json(out / "scores.json", {**facts, "tools": values})
    print(f"\n{facts}\n")
    table = Table("tool", "runs", "failed", *TITLES.values())
    for name in dict.fromkeys([*asked.tools, CONTROL]):
        if name in scores:
            cells = [cell(what, figure) for what, figure in scores[name].items()]
            table.row(name, len(runs[name]), failed[name], *cells)
        else:
            table.row(name, absent[name], *["-"] * (len(TITLES) + 1))
    differing = list(differences(read_scores(asked.compare), scores)) if asked.compare else []
    if asked.compare:
        print("\nIntervals that do not overlap:", *(differing or ["none"]), sep="\n")
    return 1 if any(failed.values()) or differing else 0


sys.exit(main())
