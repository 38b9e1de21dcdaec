"""A callback and a profiler that do nothing."""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.profilers import PassThroughProfiler


class TorchlensCallback(Callback):
    def __init__(self, **settings: Any) -> None:
        """Takes what the real one takes."""


class TorchlensProfiler(PassThroughProfiler):
    def __init__(self, **settings: Any) -> None:
        """Takes what the real one takes."""
        super().__init__()
