"""Add to verdicts of a job what the last check of its nodes measured (`torchlens_perf check`)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
from msgspec import structs

from torchlens_perf.errors import DAMAGED_DATA
from torchlens_perf.run import ownership
from torchlens_perf.verdicts.words.report import Report


def add_last_check(folder: Path, report: Report) -> None:
    """Add sentences to verdicts on ranks and links. folder: the folder of runs and checks.

    A check has notes on places: HOST/LOCAL_RANK, or two of them for a link.
    """
    notes: dict[str, str] = {}
    # Other users may write to the folder, also what would block or spoil the report.
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("check-*.json"), key=lambda each: each.lstat().st_mtime):
            with contextlib.suppress(OSError, *DAMAGED_DATA):
                notes |= msgspec.convert(
                    msgspec.json.decode(ownership.read_regular_file(path, 1 << 24))["notes"],
                    dict[str, str],
                )
    places = {row["rank"]: f"{row['host']}/{row['local_rank']}" for row in report["ranks"]}
    for index, each in enumerate(report["verdicts"]):
        if each.kind in ("straggler", "slow_link") and (
            note := notes.get(" ".join(places.get(rank, "") for rank in each.ranks))
        ):
            report["verdicts"][index] = structs.replace(each, notes=(*each.notes, note))
