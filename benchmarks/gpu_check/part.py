"""Run one part of the check in this process for the runner: `python -m benchmarks.gpu_check.part
NAME`.

Lines are written as JSON to the given file descriptor. Without a file descriptor, lines are printed
as rows of the table.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from benchmarks.gpu_check.lines import Checks, Line
from benchmarks.gpu_check.parts import CUDA, LIMIT_S, PARTS

ROOT = Path(__file__).parent.parent.parent
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the part. Return 0 even after a FAIL line, because the runner counts FAIL lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument(
        "--target", help="module:function[:argument]; of a part that is not in the list"
    )
    parser.add_argument("--device", default=CUDA)
    parser.add_argument("--lines", type=int, help="file descriptor")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds left to the part")
    asked = parser.parse_args()
    target = asked.target or {part.name: part.target for part in PARTS}[asked.name]
    if asked.lines is None:
        checks = Checks(lambda line: print(line.markdown(), flush=True), asked.limit)
    else:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # A part ends when its own process ends, even if child processes are still running.
        os.set_inheritable(asked.lines, False)
        pipe = os.fdopen(asked.lines, "w", buffering=1)

        def write(line: Line) -> None:
            pipe.write(json.dumps(line) + "\n")

        checks = Checks(write, asked.limit)
    module, function, *arguments = target.split(":")
    os.environ["GPU_CHECK_DEVICE"] = asked.device
    # Programs that parts start find this repository, and what the caller's Python finds.
    path = (str(ROOT), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    try:
        getattr(importlib.import_module(module), function)(checks, *arguments)
    # Lines reported so far stay valid.
    except Exception as error:
        traceback.print_exc()
        checks.bar(
            asked.name, "the part itself", f"{type(error).__name__}: {error}"[:200], "runs", False
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
