"""Find the run directories that a command line names."""

from __future__ import annotations

from pathlib import Path

from torchlens_perf.errors import RunStoreError
from torchlens_perf.store import run_folders


def find_newest_run() -> Path:
    """Return the newest run in the default folder. Raise RunStoreError if it has no runs."""
    folder = run_folders.default_folder()
    folders = [each for each in (folder, *folder.glob("compare-*")) if each.is_dir()]
    runs = [
        (run.changed_ns, each / run.name) for each in folders for run in run_folders.find_runs(each)
    ]
    if not runs:
        raise RunStoreError(
            f"no run in the folder {folder}: record one with `torchlens-perf run train.py`, or name one:"
            " `torchlens-perf report RUN_DIR`"
        )
    return max(runs)[1]


def find_runs(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run directory, otherwise its runs in order of names.

    Raise RunStoreError if the folder is neither a run directory nor has any.
    """
    if (folder / "nodes").is_dir():
        return [folder]
    runs = (
        sorted(folder / run.name for run in run_folders.find_runs(folder))
        if folder.is_dir()
        else []
    )
    if not runs:
        raise RunStoreError(f"{folder} is neither a run directory nor a folder of runs")
    return runs
