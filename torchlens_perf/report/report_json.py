"""The report as JSON text, and its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

import msgspec

from torchlens_perf.verdicts.words.evidence import EVIDENCE
from torchlens_perf.verdicts.words.report import (
    Facts,
    Report,
    Training,
    TrainingFacts,
    VerdictFacts,
    VerdictRow,
)


def write_json(value: Mapping[str, Any], file: IO[str]) -> None:
    """Write a report or its schema.

    Raise ValueError for NaN and infinity, which JSON cannot represent.
    """
    json.dump(value, file, indent=1, allow_nan=False, default=to_json_types)
    file.write("\n")


def to_json_types(value: object) -> Any:
    """Convert dataclasses, Structs and NumPy numbers, also nested ones, to JSON types."""
    return msgspec.to_builtins(value, enc_hook=lambda number: number.item(), str_keys=True)


def build_schema() -> dict[str, Any]:
    """Return the JSON schema of a report.

    The schema of a verdict's evidence depends on the verdict's kind.

    msgspec rejects unions of classes without a tag field in their JSON, so this function builds
    these unions.
    """
    classes = list(dict.fromkeys(each for of_kind in EVIDENCE.values() for each in of_kind))
    (_, _, _, *evidence), definitions = msgspec.json.schema_components(
        [Facts, VerdictFacts, TrainingFacts, *classes], ref_template="#/$defs/{name}"
    )
    refs = dict(zip(classes, evidence, strict=True))
    kinds = [
        {
            "properties": {
                "kind": {"const": kind},
                "evidence": {"anyOf": [refs[each] for each in of_kind]},
            }
        }
        for kind, of_kind in EVIDENCE.items()
    ]
    definitions["VerdictRow"] = {
        **_extend_definition(definitions.pop("VerdictFacts"), VerdictRow, evidence={}),
        "anyOf": kinds,
    }
    row = {"$ref": "#/$defs/VerdictRow"}
    definitions["Training"] = _extend_definition(
        definitions.pop("TrainingFacts"), Training, verdict={"anyOf": [row, {"type": "null"}]}
    )
    report = _extend_definition(
        definitions.pop("Facts"),
        Report,
        verdicts={"type": "array", "items": row},
        trainings={"type": "array", "items": {"$ref": "#/$defs/Training"}},
    )
    return {"$ref": "#/$defs/Report", "$defs": {"Report": report, **definitions}}


def _extend_definition(
    definition: dict[str, Any], kind: type, **more: dict[str, Any]
) -> dict[str, Any]:
    """Return the definition of a base class, extended by the properties of a derived class."""
    return {
        **definition,
        "title": kind.__name__,
        "description": kind.__doc__,
        "properties": {**definition["properties"], **more},
        "required": [*definition["required"], *more],
    }
