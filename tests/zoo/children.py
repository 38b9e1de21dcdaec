"""Start processes by command lines and by fork, and print what they inherit."""
import json
import os
import subprocess
import sys

PROGRAM = """
import json, os, sys
finders = [type(each).__name__ for each in sys.meta_path]
print(json.dumps([sys.argv, sys.path, finders, {**os.environ, "and": "no more"}], indent=1))
"""
print(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True).stdout)
sys.stdout.flush()
os.system("env | grep -c ^PYTHONPATH=")
if os.fork() == 0:
    print("forked", sys.argv, flush=True)
    os._exit(0)
os.wait()
print(json.dumps(sorted(name for name in os.environ if name.startswith("PYTHON"))))
