"""Recognize autograd's device threads, which run the backward passes on devices."""

from __future__ import annotations

import threading

from torchlens_perf.interruption import ours

# torch/csrc/autograd/engine.cpp names these threads; pt_autograd_0 belongs to the first device.
_NAMES_BEGIN_WITH = "pt_autograd_"
_known = threading.local()


def is_autograd_thread() -> bool:
    """Return True if the calling thread is an autograd thread, or False without /proc."""
    known: bool | None = getattr(_known, "is_autograds", None)
    if known is None:
        try:
            with open("/proc/thread-self/comm") as file:
                known = file.read().startswith(_NAMES_BEGIN_WITH)
        except ours(OSError):
            known = False
        _known.is_autograds = known
    return known
