"""Reports that are held against their schema."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from torchlens_perf.analysis.words.report import Report


def checked(report: Any) -> Any:
    """The same report, once its JSON is known to be as the schema says: each field, no other, and of the right type.

    What is converted lacks the fields that the schema lacks, so it would not be equal.
    """
    value = json.loads(json.dumps(report, allow_nan=False))
    assert msgspec.convert(value, Report, strict=True) == value
    return report
