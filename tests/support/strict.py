"""Internal errors of this package that tests must not hide: where they are looked for, and which
tests plant them.
"""

from __future__ import annotations

import re
from pathlib import Path

PLANTED = {
    "cuda/test_aggregate.py": "the end of a step fails",
    "exporters/test_exporters.py": "an exporter fails",
    "exporters/test_otlp_caller.py": "a caller's function fails",
    "frameworks/test_loggers.py": "a logger fails",
    "cuda/test_out_of_memory.py": "a reading of memory fails",
    "roles/test_libraries.py": "a hook on a library fails",
    "roles/test_recording.py": "a variable is invalid",
    "hooks/test_backward.py": "a backward hook fails",
    "hooks/test_capture.py": "a capture fails",
    "hooks/test_memory.py": "a reading of memory fails",
    "jobs/test_each_call_fails.py": "each system call fails",
    "jobs/test_interpreter_limits.py": "the interpreter's limits are reached",
    "jobs/test_start_faults.py": "each call at the start fails",
    "jobs/test_user_exceptions.py": "a signal handler raises at each line",
    "jobs/test_stderr.py": "stderr is closed, or errors are to be printed",
    "jobs/test_step_faults.py": "each call in a step fails",
    "recorder/test_watch_ends_in_a_mark.py": "a name has no id",
    "results/test_results.py": "a user's function fails",
    "sidecar/telemetry/test_log.py": "an export fails",
    "sidecar/test_node.py": "parts of a round fail",
    "test_watch.py": "a hook fails",
}
"""Files of tests that log internal errors instead of raising them, with the error."""


# The last line of a traceback.
_ERROR = re.compile(r"^[\w.]+: .*|^[\w.]*Error$", re.MULTILINE)
_OF_THE_DISK = ("OSError", "FileNotFoundError", "torchlens_perf.errors.RunStoreError")


def find_failed_sidecars(folder: Path) -> list[str]:
    """Return the internal errors with which sidecars have ended, from their logs.

    Errors of the disk are left out.
    """
    return [
        error
        for log in folder.rglob("nodes/*.log")
        if log.is_file()
        for failure in log.read_text(errors="replace").split("the sidecar has failed")[1:]
        for error in _ERROR.findall(failure)[:1]
        if not error.startswith(_OF_THE_DISK)
    ]
