"""A comparison as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torchlens_perf.compare.comparison import ComparedRun, Comparison
from torchlens_perf.compare.measures import Kind, Measure
from torchlens_perf.compare.screens import build_headline, build_notes

SCHEMA = 1
"""The number changes when a field changes its meaning or is removed."""


def to_dictionary(compared: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON types. Differences and intervals have the unit of their row."""
    head = build_headline(compared)
    return {
        "schema": SCHEMA,
        "status": head.status,
        "sentence": head.sentence,
        "verdicts": [dataclasses.asdict(each) for each in compared.verdicts],
        "before": _describe_runs(compared.before),
        "after": _describe_runs(compared.after),
        "changes": [
            {
                "kind": measure.kind.name.lower(),
                "name": measure.name,
                "unit": "By" if measure.kind is Kind.MEMORY else "s",
                **dataclasses.asdict(change),
                "difference": change.difference,
                "share": change.share,
                "outcome": change.outcome.value,
            }
            for measure, change in compared.changes.items()
        ],
        "only_before": _describe_measures(compared.only_before),
        "only_after": _describe_measures(compared.only_after),
        "notes": build_notes(compared),
    }


def _describe_runs(side: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    return [
        {
            "run_dir": str(run.run.path),
            "id": run.run.run_id,
            "started": run.report["run"]["started"],
        }
        for run in side
    ]


def _describe_measures(measures: Sequence[Measure]) -> list[dict[str, str]]:
    return [{"kind": each.kind.name.lower(), "name": each.name} for each in measures]
