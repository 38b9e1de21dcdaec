"""Write values to a state file and read them back, as the next sidecar or a report does."""

from __future__ import annotations

from typing import TypeVar

from torchlens_perf.verdicts.node_state import decode_json, encode_json

_T = TypeVar("_T")


def save_and_load(value: _T) -> _T:
    """Return the value after it was written to a state file and read back. Writing the read value
    again must give the same bytes.
    """
    text = encode_json(value)
    back = decode_json(text, type(value))
    assert encode_json(back) == text
    return back
