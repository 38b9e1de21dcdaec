"""Protobuf's wire format, as far as requests are put together from parts that are encoded already.

A step's spans differ in ids and times, and share all else. Encoding that once a step, and not once a span, is what
makes the difference to the generated classes: docs/performance.md has the figures. Formats:
https://protobuf.dev/programming-guides/encoding/ and the .proto files of opentelemetry-proto 1.x, whose field numbers
are stable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue

# Field numbers, the same in requests of spans, metrics and logs: a request has resources, these have scopes, these
# items.
_RESOURCES = _RESOURCE = _SCOPE = b"\x0a"  # field 1, length-delimited
_SCOPES = _ITEMS = b"\x12"  # field 2, length-delimited


def varint(number: int) -> bytes:
    """A number that is not negative."""
    return _VARINTS[number] if number < len(_VARINTS) else _varint(number)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_VARINTS = [_varint(number) for number in range(1 << 11)]  # most lengths of spans


def field(tag: bytes, content: bytes) -> bytes:
    """A length-delimited field."""
    return tag + varint(len(content)) + content


def fixed64(value: int) -> bytes:
    return struct.pack("<Q", value)


def key_values(attributes: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes as the generated classes have them. Raises TypeError for a value of another type."""
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def any_value(value: Any) -> AnyValue:
    """A string, bool, number, bytes, or a sequence of those."""
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, list | tuple):
        return AnyValue(array_value=ArrayValue(values=[any_value(each) for each in value]))
    raise TypeError(f"an attribute cannot hold a {type(value).__name__}")


def scope(name: str, version: str) -> bytes:
    encoded: bytes = InstrumentationScope(name=name, version=version).SerializeToString()
    return encoded


def request(groups: Iterable[tuple[bytes, Sequence[bytes]]], in_scope: bytes) -> bytes:
    """A whole request. groups: an encoded resource, and its items, each encoded with item()."""
    parts = []
    head = field(_SCOPE, in_scope)
    for resource, items in groups:
        scoped = head + b"".join(items)
        parts.append(field(_RESOURCES, field(_RESOURCE, resource) + field(_SCOPES, scoped)))
    return b"".join(parts)


def item(content: bytes) -> bytes:
    """A span, a metric or a log record, as it lies in a request."""
    return _ITEMS + varint(len(content)) + content
