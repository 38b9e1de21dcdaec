"""Run the named parts, or all of them, the most important first.

Print a line with PASS, FAIL or "not run" for each check.

    python -m benchmarks.gpu_check [PART...] [--out FOLDER] [--seconds 230] [--device asyncdev]
    python -m benchmarks.gpu_check --docs FOLDER/gpu-check.json

The command updates FOLDER/gpu-check.md and FOLDER/gpu-check.json after each line. The exit code is
1 after a FAIL, 2 if no part can run (for example without a GPU), and 3 if the time ended before all
parts had run. --docs makes results those of the documentation: benchmarks/gpu_check.json and
docs/internals/gpu-check.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_check.parts import ASYNC, CUDA, MODULES, PARTS
from benchmarks.gpu_check.results import Results, write_docs
from benchmarks.gpu_check.runner import ROOT, Runner

# With the build before it, the check ends within four minutes.
SECONDS = 230


def main() -> int:
    """Run the parts. Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS)
    )
    parser.add_argument("--out", type=Path, default=Path(), help="folder of gpu-check.md")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="then no further part begins"
    )
    parser.add_argument("--device", choices=(CUDA, ASYNC, MODULES), default=CUDA)
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the docs from results")
    asked = parser.parse_args()
    if asked.docs is not None:
        write_docs(Results.load(asked.docs))
        return 0
    there = {part.name: part for part in PARTS if asked.device in part.devices}
    # "planted" selects all parts whose names begin so.
    chosen = {
        name: [part for part in there.values() if f"{part.name}-".startswith(f"{name}-")]
        for name in asked.parts
    }
    unknown = [name for name, parts in chosen.items() if not parts]
    if unknown:
        where = "" if asked.device == CUDA else f" on {asked.device}"
        print(f"unknown part {unknown[0]}{where}; there are {', '.join(there)}", file=sys.stderr)
        return 2
    if not asked.out.is_dir():
        print(f"no folder {asked.out}", file=sys.stderr)
        return 2
    begin_s = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check.facts", asked.device],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if told.returncode:
        return 2
    facts = json.loads(told.stdout)
    print(", ".join(f"{name} {value}" for name, value in facts.items()) + "\n")
    # End the running part together with the check.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    runner = Runner(
        asked.out.absolute(), asked.device, facts, asked.seconds - (time.monotonic() - begin_s)
    )
    return runner.run(
        [part for parts in chosen.values() for part in parts] if chosen else list(there.values())
    )


if __name__ == "__main__":
    sys.exit(main())
