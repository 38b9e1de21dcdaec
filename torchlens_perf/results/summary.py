"""Build the Summary that w.summary() returns: verdicts and key figures of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.results.ask import request_results
from torchlens_perf.run.verdicts import Summary as Summary
from torchlens_perf.run.verdicts import Verdict as Verdict

if TYPE_CHECKING:
    from torchlens_perf.results.ask import RunHandle


def build_summary(recorded: RunHandle) -> Summary:
    """Request the results of a run and convert them to a Summary, see Watch.summary()."""
    found = request_results(recorded)
    if not found.summary:
        return Summary(missing=found.missing, html=found.html)
    verdicts = tuple(Verdict(**row) for row in found.summary["verdicts"])
    return Summary(**{**found.summary, "verdicts": verdicts, "html": found.html})
