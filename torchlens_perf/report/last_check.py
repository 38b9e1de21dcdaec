"""Add to verdicts of a job what the last check of its nodes measured (`torchlens_perf check`)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import structs

from torchlens_perf.errors import DAMAGED_DATA
from torchlens_perf.verdicts.words.report import Report


def add_last_check(folder: Path, report: Report) -> None:
    """Add sentences to verdicts on ranks and links. folder: the folder of runs and checks.

    A check has notes on places: HOST/LOCAL_RANK, or two of them for a link.
    """
    notes: dict[str, str] = {}
    with contextlib.suppress(OSError, *DAMAGED_DATA):
        for path in sorted(folder.glob("check-*.json"), key=os.path.getmtime):
            notes |= msgspec.json.decode(path.read_bytes())["notes"]
    places = {row["rank"]: f"{row['host']}/{row['local_rank']}" for row in report["ranks"]}
    for index, each in enumerate(report["verdicts"]):
        note = notes.get(" ".join(places.get(rank, "") for rank in each.ranks))
        if note and each.kind in ("straggler", "slow_link"):
            report["verdicts"][index] = structs.replace(each, notes=(*each.notes, note))
