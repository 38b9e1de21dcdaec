"""Let another process read this one's memory, and so its Python stack, under Yama.

With kernel.yama.ptrace_scope=1, Ubuntu's default, only ancestors may read a process, and one
process that it names (prctl(2), PR_SET_PTRACER). The named process must have the same user. Other
settings need no action.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from torchlens_perf.run.processes import read_kernel_text

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_ANCESTORS_ONLY = "1"


def must_name_tracer() -> bool:
    """Return True if a process that is not an ancestor must be named."""
    return read_kernel_text(YAMA) == _ANCESTORS_ONLY


def allow_tracer(pid: int) -> bool:
    """Let a process and its children read the calling process; 0 revokes that.

    Return True if it took effect.

    The kernel keeps one name, so earlier ones are dropped. A forked child does not inherit it.
    """
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)
