"""Letting another process read this one's memory, and so its Python stack, where the kernel's Yama would refuse it.

With kernel.yama.ptrace_scope=1, as Ubuntu has it, a process may be read by its ancestors alone, unless it names another
one (prctl(2), PR_SET_PTRACER). That one must still be of the same user. Nothing is done under other settings.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from torchlens_perf.run.processes import text_of

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_ANCESTORS_ONLY = "1"


def is_needed() -> bool:
    """Whether a process that is no ancestor must be named."""
    return text_of(YAMA) == _ANCESTORS_ONLY


def name_tracer(pid: int) -> bool:
    """Let this process, and its children, read the calling process; 0: nobody any more. Return whether it is so now.

    What was named before is forgotten: the kernel keeps one. A forked child does not inherit it.
    """
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)
