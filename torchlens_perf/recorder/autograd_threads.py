"""Whether a thread is one of autograd's, on which the backward passes of devices run."""

from __future__ import annotations

import threading

_NAMES_BEGIN_WITH = "pt_autograd_"  # torch/csrc/autograd/engine.cpp names them, pt_autograd_0 is the first device's


class AutogradThreads:
    """Asks for each thread once: a thread keeps its name."""

    def __init__(self) -> None:
        self._known = threading.local()

    def runs_this(self) -> bool:
        """Whether the calling thread is one of them; False where Linux's /proc does not tell."""
        known: bool | None = getattr(self._known, "is_autograds", None)
        if known is None:
            try:
                with open("/proc/thread-self/comm") as file:
                    known = file.read().startswith(_NAMES_BEGIN_WITH)
            except OSError:
                known = False
            self._known.is_autograds = known
        return known
