"""Whether a thread is one of autograd's, on which the backward passes of devices run."""

from __future__ import annotations

import threading

_NAMES_BEGIN_WITH = "pt_autograd_"  # torch/csrc/autograd/engine.cpp names them, pt_autograd_0 is the first device's
_known = threading.local()


def is_autograds() -> bool:
    """Whether the calling thread is one of them; False where Linux's /proc does not tell. A thread keeps its name."""
    known: bool | None = getattr(_known, "is_autograds", None)
    if known is None:
        try:
            with open("/proc/thread-self/comm") as file:
                known = file.read().startswith(_NAMES_BEGIN_WITH)
        except OSError:
            known = False
        _known.is_autograds = known
    return known
