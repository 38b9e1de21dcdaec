"""The report as JSON text, and its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

import msgspec

from torchlens_perf.report.build import EVIDENCE
from torchlens_perf.roles.facts import RoleReport
from torchlens_perf.verdicts.verdict import Evidence


def write_json(value: Mapping[str, Any], file: IO[str]) -> None:
    """Write a report or its schema.

    Raise ValueError for NaN and infinity, which JSON cannot represent.
    """
    json.dump(value, file, indent=1, allow_nan=False, default=to_json_types)
    file.write("\n")


def to_json_types(value: object) -> Any:
    """Convert dataclasses, Structs and NumPy numbers, also nested ones, to JSON types."""
    return msgspec.to_builtins(value, enc_hook=lambda number: number.item(), str_keys=True)


def kinds_with(evidence: type[Evidence]) -> list[str]:
    """Return the kinds of verdicts that have evidence of this type."""
    return list(evidence.kinds) or [str(evidence.__struct_config__.tag)]


def build_schema() -> dict[str, Any]:
    """Return the JSON schema of a report.

    A verdict of a kind has evidence of one of the types that list this kind.
    """
    (report, *evidence), definitions = msgspec.json.schema_components(
        [RoleReport, *EVIDENCE], ref_template="#/$defs/{name}"
    )
    del definitions["Evidence"]
    for each in definitions.values():
        # Fields with a default value are always written.
        written = [name for name, of in each["properties"].items() if "default" in of]
        each["required"] += written
        for name in written:
            del each["properties"][name]["default"]
    definitions["Verdict"]["properties"]["evidence"] = {}
    definitions["Verdict"]["anyOf"] = [
        {"properties": {"kind": {"enum": kinds_with(each)}, "evidence": reference}}
        for each, reference in zip(EVIDENCE, evidence, strict=True)
    ]
    return {**report, "$defs": definitions}
