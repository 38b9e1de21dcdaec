"""A script that asks for annotations as text gets them, and barry_as_FLUFL does not leak from anywhere."""
from __future__ import annotations


def train(rate: float) -> Unknown: ...


print(train.__annotations__, train.__code__.co_flags, compile("x: int", "s", "exec").co_flags)
