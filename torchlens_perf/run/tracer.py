"""Allow another process to read this process's memory, and thus its Python stack, under Yama.

With kernel.yama.ptrace_scope=1, the default of Ubuntu, only a process's ancestors may read its
memory. With prctl(2) and PR_SET_PTRACER, a process can allow one more process of the same user.
Other values of ptrace_scope need no action.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from torchlens_perf.run.processes import read_kernel_text

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_ANCESTORS_ONLY = "1"


def must_name_tracer() -> bool:
    """Return True if a process that is not an ancestor needs a call of allow_tracer()."""
    return read_kernel_text(YAMA) == _ANCESTORS_ONLY


def allow_tracer(pid: int) -> bool:
    """Allow a process and its children to read this process's memory. Return True on success.

    pid: id of the allowed process; 0 to allow none. Each call replaces the previously allowed
    process. Forked children do not inherit the setting.
    """
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)
