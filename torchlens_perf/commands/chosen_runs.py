"""Find the run directories that a command line names."""

from __future__ import annotations

import os
from pathlib import Path

from torchlens_perf.config import Config
from torchlens_perf.errors import RunStoreError


def find_newest_run() -> Path:
    """Return the newest run in the default folder. Raise RunStoreError if it has no runs."""
    folder = Path(os.environ.get("TORCHLENS_PERF_DIR", Config.dir))
    compared = [run for each in folder.glob("compare-*") for run in _find_runs_below(each)]
    runs = [run for run in (*_find_runs_below(folder), *compared) if not run.is_symlink()]
    if not runs:
        raise RunStoreError(
            f"no run in {folder}: record one with `torchlens-perf run train.py`, or name one,"
            " torchlens-perf report RUN_DIR"
        )
    return max(runs, key=lambda run: (run / "nodes").stat().st_mtime)


def find_runs(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run directory, otherwise its runs in order of names.

    Raise RunStoreError if the folder is neither a run directory nor has any.
    """
    runs = [folder] if (folder / "nodes").is_dir() else sorted(_find_runs_below(folder))
    if not runs:
        raise RunStoreError(f"{folder} is neither a run directory nor a folder of runs")
    return runs


def _find_runs_below(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob("*/nodes") if path.is_dir()]
