"""A rank under ft_launcher, which fails on one node, and runs to its end in the next attempt.

usage: ft_worker.py FOLDER FAILING_NODE

The rank writes the file FOLDER/NODE-ATTEMPT with the number of ranks and the launcher's socket. In attempt 0
it waits for the file FOLDER/fail, which all later attempts find.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

folder, failing_node, node = Path(sys.argv[1]), sys.argv[2], socket.gethostname()
# The launcher of a node whose ranks did not fail counts no restart.
attempt = int((folder / "fail").exists())
partial = folder / f"partial-{node}"
partial.write_text(f"{os.environ['WORLD_SIZE']} {os.environ['FT_LAUNCHER_IPC_SOCKET']}")
partial.rename(folder / f"{node}-{attempt}")
if attempt == 0:
    while not (folder / "fail").exists():
        time.sleep(0.05)
    if node == failing_node:
        sys.exit(1)
    time.sleep(60)
