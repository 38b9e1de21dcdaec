"""A callback that does nothing."""

from typing import Any

from transformers import TrainerCallback


class TorchlensCallback(TrainerCallback):
    def __init__(self, **settings: Any) -> None:
        """Accept the real callback's arguments."""
