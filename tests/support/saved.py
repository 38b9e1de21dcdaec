"""Values after a round trip through a state file, as the next sidecar or a report reads them."""

from __future__ import annotations

from typing import TypeVar

from torchlens_perf.verdicts.node_state import decode_json, encode_json

_T = TypeVar("_T")


def save_and_load(value: _T) -> _T:
    """Return the value after a round trip. Writing the result again must give the same bytes."""
    text = encode_json(value)
    back = decode_json(text, type(value))
    assert encode_json(back) == text
    return back
