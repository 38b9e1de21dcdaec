"""What a live page has besides a file: a script that follows the run, and a form that asks for captures."""

from __future__ import annotations

import functools
from importlib import resources

from torchlens_perf.page.document.html import LivePart
from torchlens_perf.page.pictures.markup import tag
from torchlens_perf.run.captures import MAX_RANKS, MAX_STEPS


def live_part(*, is_live: bool) -> LivePart:
    """Of a run that goes on, or has ended."""
    said = "follows the run" if is_live else "this run has ended"
    status = tag(
        "p",
        tag("span", said, id="live-status", role="status"),
        " ",
        tag("a", "load anew", href="."),
        " ",
        tag("a", "all runs", href="../../"),
        class_="live",
    )
    form = tag(
        "form",
        tag("label", "Ranks ", tag("input", name="ranks", required="", pattern="[0-9,\\- ]+", placeholder="5 or 0-3")),
        " ",
        tag("label", "Steps ", tag("input", name="steps", type="number", min="1", max=str(MAX_STEPS), value="3")),
        " ",
        tag("button", "Capture", type="submit"),
        tag("p", "", id="capture-status", role="status"),
        id="capture",
        method="post",
        action="api/captures",
    )
    what = (
        f"A trace by torch.profiler, stacks and the flight recorder of up to {MAX_RANKS} ranks for a few steps. The "
        "ranks pause while they write."
    )
    captures = tag("details", tag("summary", "Look at a few steps in full detail"), tag("p", what), form)
    return LivePart(_script(), [status, captures if is_live else None])


@functools.cache
def _script() -> str:
    return (resources.files("torchlens_perf.serve") / "static" / "live.js").read_text("utf-8")
