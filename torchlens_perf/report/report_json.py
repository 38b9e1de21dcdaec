"""The report as JSON text, and the schema of that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

import msgspec

from torchlens_perf.verdicts.words.evidence import EVIDENCE
from torchlens_perf.verdicts.words.report import Facts, Report, VerdictFacts, VerdictRow


def write(value: Mapping[str, Any], file: IO[str]) -> None:
    """A report, or its schema. Raises ValueError for a number that JSON does not have."""
    json.dump(value, file, indent=1, allow_nan=False, default=plain)
    file.write("\n")


def plain(value: object) -> Any:
    """Convert dataclasses, Structs and what they hold to JSON's types; NumPy's numbers to Python's."""
    return msgspec.to_builtins(value, enc_hook=lambda number: number.item(), str_keys=True)


def schema() -> dict[str, Any]:
    """The JSON schema of a report. A row of `verdicts` has the evidence of its kind.

    msgspec takes no union of several classes without a tag in their JSON: those are put together here.
    """
    classes = list(dict.fromkeys(each for of_kind in EVIDENCE.values() for each in of_kind))
    (_, _, *evidence), definitions = msgspec.json.schema_components(
        [Facts, VerdictFacts, *classes], ref_template="#/$defs/{name}"
    )
    refs = dict(zip(classes, evidence, strict=True))
    kinds = [
        {"properties": {"kind": {"const": kind}, "evidence": {"anyOf": [refs[each] for each in of_kind]}}}
        for kind, of_kind in EVIDENCE.items()
    ]
    definitions["VerdictRow"] = {**_with(definitions.pop("VerdictFacts"), VerdictRow, evidence={}), "anyOf": kinds}
    rows = {"type": "array", "items": {"$ref": "#/$defs/VerdictRow"}}
    report = _with(definitions.pop("Facts"), Report, verdicts=rows)
    return {"$ref": "#/$defs/Report", "$defs": {"Report": report, **definitions}}


def _with(definition: dict[str, Any], kind: type, **more: dict[str, Any]) -> dict[str, Any]:
    """The definition of a class from that of its base, and its own properties."""
    return {
        **definition,
        "title": kind.__name__,
        "description": kind.__doc__,
        "properties": {**definition["properties"], **more},
        "required": [*definition["required"], *more],
    }
