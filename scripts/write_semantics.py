"""Writes docs/reference/telemetry.md from torchlens_perf/exporters/semantics.py: python scripts/write_semantics.py

tests/exporters/test_semantics.py holds the page against what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchlens_perf.exporters import JobPart, semantics
from torchlens_perf.exporters.series_room import most_ranks

PAGE = Path(__file__).parents[1] / "docs/reference/telemetry.md"

HEAD = """# Every name that is sent

Written by `scripts/write_semantics.py` from `torchlens_perf/exporters/semantics.py`. What the names are for, and how to
use them: [opentelemetry.md](opentelemetry.md). Names that only a scrape of `/metrics` sees are in
[prometheus.md](prometheus.md#metrics).

- **From**: OpenTelemetry, its semantic conventions; NeMo Lens, NVIDIA's names for distributed training; ours, where
  neither has one. A test compares the first with the package `opentelemetry-semantic-conventions`: names, units and
  instruments.
- **When**: what must be there. What has none is sent by every run; of events and their attributes, by every run that
  has such an event.

Not used, though they look near: `gen_ai.*`, which is about requests to models; `dl.iteration` of NeMo Lens, because a
step here is counted from the start of recording, and a trainer's iteration from the start of training.
"""


def page() -> str:
    """The page's text."""
    events = (
        (f"`{semantics.event_name(kind, change)}`", "INFO" if change == "ended" else "WARN")
        for kind, changes in semantics.EVENTS.items()
        for change in changes
    )
    parts = [
        HEAD,
        "## Spans\n",
        _table(
            ("span", "below", "", "when"),
            ((f"`{each.name}`", each.parent, each.meaning, each.when) for each in semantics.SPANS),
        ),
        "Below the root each rank has a span `rank N`: its step. Those below it have the names of what they are: of a"
        " phase, module, section or collective.\n",
        "## Metrics\n",
        _table(
            ("metric", "instrument", "unit", "attributes", "", "from", "when"),
            (
                (f"`{m.name}`", m.instrument, f"`{m.unit}`", _names(m.attributes), m.meaning, m.source, m.when)
                for m in semantics.METRICS
            ),
        ),
        f"Beyond {most_ranks(JobPart().max_series)} ranks, points have a rank only where it stands out.\n",
        "## Attributes\n",
        _table(
            ("attribute", "type", "on", "", "from", "when"),
            ((f"`{a.name}`", a.kind, a.on, a.meaning, a.source, a.when) for a in semantics.ATTRIBUTES),
        ),
        "## Events\n",
        _table(("event", "severity"), events),
    ]
    return "\n".join(parts)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
