"""A live run as lines, one after the other: for terminals that cannot be drawn on, pipes and logs."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from torchlens_perf.top import overview
from torchlens_perf.top.frame import frame
from torchlens_perf.top.verdict_lines import verdict_lines
from torchlens_perf.verdicts.words.order import ranks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.top.lettering import Lettering
    from torchlens_perf.top.reading import View
    from torchlens_perf.verdicts.words.report import VerdictRow

_PACE_EVERY_S = 10.0


class PlainTop:
    """One thread."""

    def __init__(self, file: IO[str], width: int, lettering: Lettering, *, color: bool) -> None:
        self._file, self._width, self._lettering, self._color = file, width, lettering, color

    def once(self, view: View) -> None:
        """One frame."""
        self._print(frame(view, self._width, self._lettering))

    def follow(self, look: Callable[[], View], rest: Callable[[], object] = lambda: time.sleep(1.0)) -> None:
        """A frame at the beginning and at the end, and in between what is new, until the run has ended.

        look: RunReader.look; rest: waits until the next look.
        """
        shown: View | None = None
        pace_due_s = 0.0
        while shown is None or not shown.has_ended:
            view = look()
            if view is shown:
                rest()
                continue
            if shown is None or shown.report is None or view.has_ended:
                self.once(view)
                pace_due_s = time.monotonic() + _PACE_EVERY_S
            else:
                news = self._news(view, shown)
                if time.monotonic() >= pace_due_s:
                    pace_due_s = time.monotonic() + _PACE_EVERY_S
                    news.append(self._pace(view))
                self._print(news)
            shown = view

    def _news(self, view: View, before: View) -> list[Text]:
        """What is in trouble, and verdicts that were not there, or held."""
        lines = []
        if view.trouble != before.trouble:
            lines += overview.trouble_lines(view, self._width, self._lettering)
        shown = set(map(_subject, before.verdicts))
        new = [row for row in view.verdicts if _subject(row) not in shown]
        return lines + verdict_lines(new[::-1], self._width, self._lettering)

    def _pace(self, view: View) -> Text:
        state, _ = overview.run_state(view)
        pace = overview.pace_lines(view, self._width - len(state) - 2, self._lettering)[0]
        return Text(f"{state}  {pace.plain.rstrip()}")

    def _print(self, lines: Sequence[Text]) -> None:
        """Raises BrokenPipeError where nobody reads on; rich's own console would end the process."""
        drawn = io.StringIO()
        console = Console(
            file=drawn, width=self._width, highlight=False, markup=False, emoji=False, soft_wrap=True,
            force_terminal=self._color, color_system="standard" if self._color else None,
        )  # fmt: skip
        for line in lines:
            line.rstrip()
            console.print(line)
        self._file.write(drawn.getvalue())
        self._file.flush()


def _subject(row: VerdictRow) -> tuple[object, ...]:
    """What makes a verdict another one: not its numbers, which change from look to look."""
    return row["kind"], ranks_of(row), row["is_over"], row["since_step"] if row["is_over"] else None
