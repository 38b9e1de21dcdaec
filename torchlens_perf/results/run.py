"""The Run class, which perf.open_run() returns: results of a recorded run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchlens_perf.errors import RunStoreError
from torchlens_perf.results.ask import RunHandle
from torchlens_perf.results.methods import Backend, ResultMethods
from torchlens_perf.run.directory import RunDirectory, is_recording

if TYPE_CHECKING:
    from torchlens_perf.run.verdicts import Verdict


class Run(ResultMethods):
    """Results of a run directory. Reading changes nothing in the directory."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        """Raise RunStoreError for a folder that is not a run directory."""
        self.run_dir: Path = Path(run_dir).absolute()
        if not (self.run_dir / "nodes").is_dir():
            raise RunStoreError(f"{self.run_dir} is no run directory: it has no folder nodes")

    def __repr__(self) -> str:
        return f"<Run {str(self.run_dir)!r}>"

    def _get_run_handle(self) -> RunHandle:
        run = RunDirectory(self.run_dir)
        return RunHandle(
            run, None, True, "", may_settle=not any(map(is_recording, run.local_rings()))
        )

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Verdicts of summary(), the most important one first."""
        return self.summary().verdicts

    def report(self) -> dict[str, Any]:
        """Return the whole report as `torchlens-perf report RUN_DIR --json` prints it.

        Raise RunStoreError if nothing is saved yet.
        """
        from torchlens_perf.results import child

        return dict(json.loads(child.run_and_capture("report", str(self.run_dir), "--json")))

    def table(
        self,
        name: Literal["steps", "spans", "gpus", "links", "processes", "events"],
        backend: Backend | None = None,
    ) -> Any:
        """Return a table of the run directory as a frame. backend: see step_table().

        docs/reference/run-directory.md describes the columns.

        Raise ConfigError for another name.
        """
        from torchlens_perf.results.tables import read_table

        return read_table(self._get_run_handle(), name, backend)
