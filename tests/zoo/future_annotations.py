"""Annotations are text by the script's own __future__ import, and no other flag is set."""
from __future__ import annotations


def train(rate: float) -> Unknown: ...


print(train.__annotations__, train.__code__.co_flags, compile("x: int", "s", "exec").co_flags)
