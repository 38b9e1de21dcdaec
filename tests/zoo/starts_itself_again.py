"""A script that replaces itself by itself, as launchers that change LD_LIBRARY_PATH do."""
import os
import sys

print(sys.argv, sys.path[0], sys.flags.optimize, os.environ.get("AGAIN"), flush=True)
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, sys.orig_argv)
