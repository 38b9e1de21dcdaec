"""Start launched.py twice like a shell loop, without variables for local ranks.

usage: launched_loop.py FIRST_RANK
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    script, first = str(Path(__file__).with_name("launched.py")), int(sys.argv[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, script], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "4"}
        )
        for rank in range(first, first + 2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
