"""What the screens may know of the application that shows them, and ask of it: so that they need not import it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torchlens_perf.top.lettering import Lettering
    from torchlens_perf.top.live_runs import RunRow
    from torchlens_perf.top.reading import View
    from torchlens_perf.top.verdict_list import VerdictList


class Top(Protocol):
    """app.Top."""

    folder: Path
    lettering: Lettering
    runs: list[RunRow]
    verdicts: VerdictList
    view: View

    @property
    def waits_for_run(self) -> bool: ...

    def open(self, path: Path) -> None: ...

    def lists_runs(self, on: bool) -> None: ...

    def push_screen(self, screen: Any) -> Any: ...
