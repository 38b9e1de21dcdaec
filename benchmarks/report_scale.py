"""Cost of a report on a large job, whose node files are copies of one simulated node's file.

python -m benchmarks.report_scale [RANKS]
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Table

RANKS, ON_A_NODE = 4096, 8
# Modules of each rank.
MODULES = 96
# Seconds and megabytes.
BARS = 20.0, 1000.0


def main() -> int:
    """Print the table. Return the number of missed bars."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = ["simulate", "--ranks", str(ON_A_NODE), "--steps", "1000", "--out", str(run)]
        faults = ["--fault", "constant:rank=3,share=0.25,phase=forward"]
        subprocess.run(
            [sys.executable, "-m", "torchlens_perf", *command, *faults],
            check=True,
            capture_output=True,
        )
        written_bytes = multiply(run / "nodes", RANKS // ON_A_NODE)
        code = (
            "import resource, sys; from torchlens_perf.commands.cli import main; main(['report',"
            " sys.argv[1]]); used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime +"
            " used.ru_stime, used.ru_maxrss, file=sys.stderr)"
        )
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code, str(run)], check=True, capture_output=True, text=True
        )
        took_s = time.monotonic() - began_s
        processor_s, resident_kb = map(float, done.stderr.split()[-2:])
        resident_mb = resident_kb / 1e3
    table = Table(f"report, {RANKS} ranks, {MODULES} modules each", "value", "bar", "")
    table.row("nodes' files", f"{written_bytes / 1e6:.0f} MB", "", "")
    table.row("time", f"{took_s:.1f} s", f"<= {BARS[0]:.0f} s", table.bar(took_s <= BARS[0]))
    table.row("of it, processor time", f"{processor_s:.1f} s", "", "")
    table.row(
        "resident memory",
        f"{resident_mb:.0f} MB",
        f"<= {BARS[1]:.0f} MB",
        table.bar(resident_mb <= BARS[1]),
    )
    table.row("lines of the report", len(done.stdout.splitlines()), "", "")
    return table.missed


def multiply(nodes: Path, count: int) -> int:
    """Copy the only node until there are `count` nodes. Return the total size of the nodes' files."""
    (first,) = nodes.glob("*.json")
    state = json.loads(first.read_bytes())
    for process in state["processes"].values():
        modules = process["statistics"]["modules"]
        some = list(modules.values())
        modules.update(
            {f"blocks.{index}.mlp": some[index % len(some)] for index in range(MODULES - len(some))}
        )
    written = 0
    for node in range(count):
        text = json.dumps(of_node(state, node, count * ON_A_NODE))
        (nodes / f"node-{node:04d}.json").write_text(text)
        written += len(text)
    return written


def of_node(state: dict[str, Any], node: int, world_size: int) -> dict[str, Any]:
    """Return a copy of the state for a further node. Only the first node has the findings."""
    host = f"node-{node:04d}"
    made = {**state, "host": host, "processes": {}}
    if node:
        made["findings"] = {**state["findings"], "compared": 0, "episodes": [], "groups": []}
    for process in state["processes"].values():
        identity = {**process["identity"], "host": host, "world_size": world_size}
        identity["rank"] += node * ON_A_NODE
        key = f"rank{identity['rank']:05d}-attempt0-{identity['pid']}-{identity['process_started']}"
        made["processes"][key] = {**copy.copy(process), "identity": identity}
    return made
