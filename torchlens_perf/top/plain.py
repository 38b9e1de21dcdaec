"""A live run as consecutive lines, for pipes, logs and terminals without cursor control."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import IO, TYPE_CHECKING

from torchlens_perf.roles.evidence import describe_iterations
from torchlens_perf.top import overview
from torchlens_perf.top.pace import describe_pace
from torchlens_perf.top.text import Terminal, unwrapped_line
from torchlens_perf.view.terminal import lines_to_text, verdict_lines

if TYPE_CHECKING:
    from rich.text import Text

    from torchlens_perf.top.reading import View

_PACE_EVERY_S = 10.0


class PlainTop:
    """Printer of the frames and new findings of a run.

    Not thread-safe. Raise BrokenPipeError if the output pipe is closed.
    """

    def __init__(self, file: IO[str], width: int, terminal: Terminal) -> None:
        self._file, self._width, self._terminal = file, width, terminal

    def print_once(self, view: View) -> None:
        """Print one frame."""
        self._print(overview.build_frame(view, self._width, self._terminal))

    def print_until_end(
        self, look: Callable[[], View], rest: Callable[[], object] = lambda: time.sleep(1.0)
    ) -> None:
        """Print a frame, then each new finding, and a last frame when the run has ended.

        look: returns the current view, see RunReader.poll(). rest: waits until the next poll.
        """
        shown: View | None = None
        pace_due_s = time.monotonic()
        while shown is None or not shown.has_ended:
            view = look()
            if view is shown:
                rest()
                continue
            if shown is None or shown.report is None or view.has_ended:
                self.print_once(view)
                pace_due_s = time.monotonic() + _PACE_EVERY_S
            else:
                self._print(self._news_lines(view, shown))
                if view.report is not None and time.monotonic() >= pace_due_s:
                    words = [
                        overview.run_state_and_style(view)[0],
                        *describe_pace(view.report, view.seen_s),
                        *describe_iterations(view.report),
                    ]
                    self._print([unwrapped_line("   ".join(words))])
                    pace_due_s = time.monotonic() + _PACE_EVERY_S
            shown = view

    def _news_lines(self, view: View, before: View) -> Iterable[Text]:
        """Yield problems and new findings.

        A finding is not new if only its figures have changed.
        """
        if view.trouble != before.trouble:
            yield from overview.trouble_lines(view)
        shown = {overview.finding_key(each) for each in before.headlines}
        for each in reversed(view.headlines):
            if overview.finding_key(each) not in shown:
                yield from verdict_lines(each, self._width)

    def _print(self, texts: Iterable[Text]) -> None:
        self._file.write(
            lines_to_text(self._terminal.lines(texts, self._width), color=self._terminal.color)
        )
        self._file.flush()
