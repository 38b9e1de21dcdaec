"""What the application knows and its screens show: one value, changed by the application alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top.lettering import Lettering
from torchlens_perf.top.live_runs import RunRow
from torchlens_perf.top.reading import View

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import VerdictRow


@dataclasses.dataclass
class Known:
    """One thread: the application's."""

    folder: Path
    """Whose runs are listed."""
    lettering: Lettering
    view: View
    opens_next: bool
    """Whether no run is shown yet, and the next live one will be."""
    runs: list[RunRow] = dataclasses.field(default_factory=list)

    @property
    def verdicts(self) -> list[VerdictRow]:
        """The verdicts of the run that is shown."""
        return self.view.verdicts

    def start_with(self, run: RunDirectory) -> None:
        """Another run, of which nothing is known yet."""
        self.view, self.opens_next = View(run.run_id, str(run.path), None, None, ""), False
