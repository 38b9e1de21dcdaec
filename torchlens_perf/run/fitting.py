"""Shorten a rank's metadata to fit into the ring file. Pure functions.

Fields such as TRACEPARENT, resource attributes, notes and process groups may be long. The largest
parts are removed first, and a note lists the removed parts. The rank's identity is not shortened,
except for long texts in it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Only long texts in these fields are removed. A ring file cannot be read without most of them.
_KEPT = ("identity", "anchor", "settings", "run_settings", "run_dir", "report")
_BY_MEMBER = ("notes", "groups", "gpus")
_LONG_TEXT = 256
# Space for the note that lists the removed parts.
_NOTE_BYTES = 400


class _RemovablePart(NamedTuple):
    # Name of the part in the note.
    name: str
    container: Any
    place: Any
    # True if readers need the text, so it is replaced by an empty one.
    is_required: bool = False


def fit_metadata(metadata: Mapping[str, Any], limit_bytes: int) -> bytes:
    """Encode metadata as JSON of at most `limit_bytes`, which must be at least 1024.

    If parts have to be removed, a note in the result lists them.
    """
    text = _encode_json(metadata)
    if len(text) <= limit_bytes:
        return text
    value = json.loads(text)
    left_out: Counter[str] = Counter()
    while (surplus := len(_encode_json(value)) - (limit_bytes - _NOTE_BYTES)) > 0:
        chosen: list[_RemovablePart] = []
        for part in sorted(_removable_parts(value), key=_encoded_size, reverse=True):
            if surplus > 0:
                chosen.append(part)
                surplus -= _encoded_size(part)
        if not chosen:
            # The identity of the rank alone exceeds the limit.
            return _encode_json({})
        # Lists are shortened from the end to keep the indexes of the remaining parts valid.
        for part in sorted(
            chosen, key=lambda part: part.place if isinstance(part.place, int) else 0, reverse=True
        ):
            left_out[part.name] += 1
            if part.is_required:
                part.container[part.place] = ""
            else:
                del part.container[part.place]
    summary = ", ".join(
        f"{name} ({count})" if count > 1 else name for name, count in sorted(left_out.items())
    )
    note = f"too long for the ring file, and left out: {summary}"[: _NOTE_BYTES - 20]
    value["notes"] = [*value.get("notes", ()), note]
    return _encode_json(value)


def _removable_parts(value: dict[str, Any]) -> Iterator[_RemovablePart]:
    """Yield the parts of the metadata that may be removed.

    A part is one note, group, device or attribute, a long text, or a whole field.
    """
    for name, field in value.items():
        if name in _BY_MEMBER and isinstance(field, (dict, list)):
            for place in field if isinstance(field, dict) else range(len(field)):
                yield _RemovablePart(name, field, place)
        elif name not in _KEPT:
            if field and isinstance(field, (dict, list, str)):
                yield _RemovablePart(name, value, name)
        elif isinstance(field, dict):
            for key, inner in field.items():
                if isinstance(inner, str) and len(inner) > _LONG_TEXT:
                    yield _RemovablePart(f"{name}.{key}", field, key, is_required=True)
                elif key == "attributes" and isinstance(inner, dict):
                    yield from (
                        _RemovablePart(f"{name}.{key}", inner, attribute) for attribute in inner
                    )


def _encoded_size(part: _RemovablePart) -> int:
    is_named = isinstance(part.place, str) and not part.is_required
    name_bytes = len(_encode_json(part.place)) if is_named else 0
    return len(_encode_json(part.container[part.place])) + name_bytes


def _encode_json(value: Any) -> bytes:
    """Return a value as JSON. Fields of dataclasses that are None are left out."""
    return json.dumps(
        value,
        separators=(",", ":"),
        default=lambda part: {k: v for k, v in vars(part).items() if v is not None},
    ).encode()
