"""Values as the next sidecar, or a report, finds them."""

from __future__ import annotations

from typing import TypeVar

from torchlens_perf.verdicts.node_state import decode, encode

_T = TypeVar("_T")


def saved(value: _T) -> _T:
    """The value as it comes back from a state file. Written once more, it must give the same bytes."""
    text = encode(value)
    back = decode(text, type(value))
    assert encode(back) == text
    return back
