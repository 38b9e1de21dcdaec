"""Run a command of this package in a child process and return its output.

The training process thus does not import the analysis code.
"""

from __future__ import annotations

import subprocess

from torchlens_perf.errors import RunStoreError, printable
from torchlens_perf.interruption import ours
from torchlens_perf.output import above_standard_streams
from torchlens_perf.run import children

TIMEOUT_S = 60.0  # Three times the duration of a report on 4096 ranks.


@above_standard_streams()
def run_and_capture(*arguments: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """Run `torchlens-perf ARGUMENTS` and return its stdout. Kill the process after `timeout_s`.

    Paths must be absolute, because the working directory of the child is /. Raise RunStoreError
    with the command's message if the command fails.
    """
    try:
        done = subprocess.run(
            children.build_command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=children.build_environment(),
            cwd="/",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunStoreError(
            f"torchlens-perf {arguments[0]} took longer than {timeout_s:g} s"
        ) from None
    except ours(OSError) as error:
        raise RunStoreError(f"no process can be started: {error.strerror or error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RunStoreError(printable(said) or f"torchlens-perf ended with {done.returncode}")
    return done.stdout
