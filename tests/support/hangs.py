"""The sentences on a hang, for tests of code that finds hangs."""

from __future__ import annotations

from collections.abc import Mapping

from torchlens_perf.analysis.collectives.hang import Hang
from torchlens_perf.verdicts.words.hang import build_hang_verdict, describe_hang


def hang_text(hang: Hang, user_lines: Mapping[int, str] | None = None) -> str:
    """Return the finding and the action as one line, and a line for each place of the ranks.

    user_lines: as in describe_hang().
    """
    verdict = build_hang_verdict(describe_hang(hang, {}, user_lines or {}))
    places = "\n".join(verdict.evidence.places)
    return f"{verdict.explanation} Next: {verdict.action}\n{places}"
