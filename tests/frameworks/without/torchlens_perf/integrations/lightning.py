"""A callback and a profiler that do nothing."""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.profilers import PassThroughProfiler


class TorchlensCallback(Callback):
    def __init__(self, **settings: Any) -> None:
        """Accept the real callback's arguments."""


class TorchlensProfiler(PassThroughProfiler):
    def __init__(self, **settings: Any) -> None:
        """Accept the real profiler's arguments."""
        super().__init__()
