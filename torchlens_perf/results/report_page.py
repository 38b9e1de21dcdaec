"""A run's page on request of the training process, which does nothing for it but start a command of ours and wait."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from torchlens_perf.errors import RunStoreError

TIMEOUT_S = 120.0
_NAME = "report.html"  # in the run directory


class Recorded(Protocol):
    """What there is to show: a watch."""

    run_dir: Path | None


def report_html(watch: Recorded, path: str | os.PathLike[str] | None = None) -> Path:
    """Writes the run as one HTML file, as `torchlens-perf report RUN --html FILE` does, and returns where it is.

    path: the file; without it, report.html in the run directory. A live run has what the sidecar has saved, which
    is some seconds old. Blocks the calling thread until another process has written it: a second or two, up to 120 s.
    Raises RunStoreError, with what to do, where nothing is recorded, nothing is saved yet, or the file cannot be
    written.
    """
    # A watch that nobody asks for a page does not load it.
    from torchlens_perf.results import child

    if watch.run_dir is None:
        raise RunStoreError(
            "there is no run to show: enter the watch first; where it is switched off, the log says why"
        )
    page = Path(path).absolute() if path is not None else watch.run_dir / _NAME
    child.output("report", str(watch.run_dir), "--html", str(page), timeout_s=TIMEOUT_S)
    return page
