"""What a rank says of itself, made to fit into its place in the ring file. Pure.

A launcher, a user or a job may make any of it long: TRACEPARENT, resource attributes, notes, hundreds of groups. What
is too long is left out, the largest part first, and a note says so. The rest, above all who the rank is, stays whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Without them nobody can read the ring: of these only long texts go.
_KEPT = ("identity", "anchor", "settings", "run_dir")
_BY_MEMBER = ("notes", "groups", "gpus")
_LONG_TEXT = 256
_NOTE_BYTES = 400  # at most, of the note that says what was left out


class _Part(NamedTuple):
    name: str  # as the note calls it
    container: Any
    place: Any
    by_itself: bool  # it goes, with its name; else its container keeps an empty one


def fitted(metadata: Mapping[str, Any], limit_bytes: int) -> bytes:
    """The metadata as JSON of at most `limit_bytes` (1024 or more), with a note on what was left out."""
    text = _encoded(metadata)
    if len(text) <= limit_bytes:
        return text
    value = json.loads(text)
    left_out: Counter[str] = Counter()
    while (surplus := len(_encoded(value)) - (limit_bytes - _NOTE_BYTES)) > 0:
        chosen: list[_Part] = []
        for part in sorted(_parts(value), key=_size, reverse=True):
            if surplus > 0:
                chosen.append(part)
                surplus -= _size(part)
        if not chosen:
            return _encoded({})  # not even who it is fits
        # Lists from their ends, so that the others' places stay right.
        for part in sorted(chosen, key=lambda part: part.place if isinstance(part.place, int) else 0, reverse=True):
            left_out[part.name] += 1
            if part.by_itself:
                del part.container[part.place]
            else:
                part.container[part.place] = type(part.container[part.place])()
    summary = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(left_out.items()))
    note = f"too long for the ring file, and left out: {summary}"[: _NOTE_BYTES - 20]
    value["notes"] = [*value.get("notes", ()), note]
    return _encoded(value)


def _parts(value: dict[str, Any]) -> Iterator[_Part]:
    """What may be left out: single notes, groups, devices and attributes, long texts, and whole fields."""
    for name, field in value.items():
        if name in _BY_MEMBER and isinstance(field, (dict, list)):
            for place in field if isinstance(field, dict) else range(len(field)):
                yield _Part(name, field, place, True)
        elif name not in _KEPT:
            if field and isinstance(field, (dict, list, str)):
                yield _Part(name, value, name, False)
        elif isinstance(field, dict):
            for key, inner in field.items():
                if isinstance(inner, str) and len(inner) > _LONG_TEXT:
                    yield _Part(f"{name}.{key}", field, key, False)
                elif key == "attributes" and isinstance(inner, dict):
                    yield from (_Part(f"{name}.{key}", inner, attribute, True) for attribute in inner)


def _size(part: _Part) -> int:
    named = part.by_itself and isinstance(part.place, str)
    return len(_encoded(part.container[part.place])) + (len(_encoded(part.place)) if named else 0)


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
