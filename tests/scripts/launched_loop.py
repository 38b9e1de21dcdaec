"""Starts launched.py twice, as a loop in a shell does: launched_loop.py FIRST_RANK; no variable says what is local."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    script, first = str(Path(__file__).with_name("launched.py")), int(sys.argv[1])
    ranks = [
        subprocess.Popen([sys.executable, script], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "4"})
        for rank in range(first, first + 2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
