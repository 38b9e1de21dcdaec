"""Replace the process by the same command, like launchers that change LD_LIBRARY_PATH."""
import os
import sys

print(sys.argv, sys.path[0], sys.flags.optimize, os.environ.get("AGAIN"), flush=True)
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, sys.orig_argv)
