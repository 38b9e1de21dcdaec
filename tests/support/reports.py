"""Validate reports against the schema of `torchlens-perf report --schema`."""

from __future__ import annotations

import functools
import io
import json
from typing import Any

import numpy as np
from msgspec import Struct, structs

from torchlens_perf.report import report_json

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),), "boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,),
    "array": (list,), "object": (dict,),
}  # fmt: skip
_KEYWORDS = {
    "title", "description", "$ref", "type", "const", "enum", "anyOf", "properties", "required", "additionalProperties",
    "items",
}  # fmt: skip


def as_json(report: Any) -> Any:
    """Return the parsed output of `torchlens-perf report --json`."""
    file = io.StringIO()
    report_json.write_json(report, file)
    return json.loads(file.getvalue())


def checked(report: Any) -> Any:
    """Return the report after validating its JSON against the schema, and the types of its values."""
    found = problem(as_json(report)) or find_numpy(report)
    assert not found, found
    return report


def find_numpy(value: Any, at: str = "report") -> str:
    """Return the first place with a value of NumPy, or "". Readers of a report may print its repr."""
    if isinstance(value, np.generic | np.ndarray):
        return f"{at} is {value!r}"
    if isinstance(value, Struct):
        value = structs.asdict(value)
    if isinstance(value, dict):
        value = {f".{name}": each for name, each in value.items()}
    elif isinstance(value, list | tuple | set | frozenset):
        value = {f"[{index}]": each for index, each in enumerate(value)}
    else:
        return ""
    found = (find_numpy(each, f"{at}{name}") for name, each in value.items())
    return next(filter(None, found), "")


def problem(value: Any) -> str:
    """Return the first place that violates the schema, or "".

    Violations of the schema are missing fields, unknown fields and wrong types.
    """
    return _problem(value, {"$ref": _schema()["$ref"]}, "report")


@functools.cache
def _schema() -> dict[str, Any]:
    return report_json.build_schema()


def _problem(value: Any, schema: dict[str, Any], at: str, *, closed: bool = False) -> str:
    """Return the first violation in `value` at path `at`.

    `closed` rejects unknown properties, which JSON schemas allow.
    """
    assert set(schema) <= _KEYWORDS, f"{at}: not looked at: {set(schema) - _KEYWORDS}"
    if "$ref" in schema:
        return _problem(
            value, _schema()["$defs"][schema["$ref"].removeprefix("#/$defs/")], at, closed=True
        )
    allowed = (
        schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else [value]
    )
    types = _TYPES[schema["type"]] if "type" in schema else (object,)
    if (
        value not in allowed
        or not isinstance(value, types)
        or (isinstance(value, bool) and int in types)
    ):
        return f"{at} is {value!r}"
    found = [_problem(value, each, at) for each in schema.get("anyOf", ())]
    if found and all(found):
        return " or ".join(found)
    if isinstance(value, list):
        inside = [
            _problem(each, schema.get("items", {}), f"{at}[{index}]")
            for index, each in enumerate(value)
        ]
        return next(filter(None, inside), "")
    if not isinstance(value, dict):
        return ""
    fields, more = schema.get("properties", {}), schema.get("additionalProperties", not closed)
    for name in [*schema.get("required", ()), *value]:
        if name not in value or (name not in fields and more is False):
            return f"{at}.{name} is {'not in the schema' if name in value else 'missing'}"
        of = fields.get(name, more)
        inner = "" if of is True else _problem(value[name], of, f"{at}.{name}")
        if inner:
            return inner
    return ""
