"""A run as its live page: that of the file, with what follows the run, and what asks for captures. In a reader."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount, duration
from torchlens_perf.page.document.html import LivePart, document
from torchlens_perf.page.gather.run_contents import contents, one_step
from torchlens_perf.page.pictures.markup import Element, tag
from torchlens_perf.page.sections.section import table
from torchlens_perf.run.captures import MAX_KEPT_BYTES, MAX_RANKS, MAX_STEPS
from torchlens_perf.serve.list_page import ROOT
from torchlens_perf.serve.run_names import address, run_directory

if TYPE_CHECKING:
    from torchlens_perf.serve.static_files import Addresses
    from torchlens_perf.verdicts.words.report import Capture

_PACKING = 1  # gzip's fastest: it is done again and again
_MAX_CAPTURES = 32


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A run as it was shown at one time, packed by gzip."""

    version: str
    html: bytes
    contents: bytes
    """As JSON, see page/contents.py."""
    is_live: bool


def rendered(path: str, version: str, addresses: Addresses) -> Rendered:
    """The run's page. version: as the follower has it. Raises TorchlensPerfError where there is nothing to show."""
    held = contents(run_directory(path))
    report = held["report"]
    is_live = report["run"]["live"]
    parts = [_status(is_live=is_live), _captures(report["captures"], is_live=is_live)]
    live = LivePart(version, parts, addresses.styles(ROOT), addresses.scripts(ROOT))
    packed = [
        gzip.compress(text.encode("utf-8", "replace"), _PACKING)
        for text in (document(held, live), json.dumps(held, separators=(",", ":"), allow_nan=False))
    ]
    return Rendered(version, packed[0], packed[1], is_live)


def step_as_json(path: str, number: int) -> bytes:
    """One step, as StepTraces in JSON, packed by gzip; no steps where it was not recorded."""
    found = one_step(run_directory(path), number)
    return gzip.compress(json.dumps(found, separators=(",", ":"), allow_nan=False).encode(), _PACKING)


def _status(*, is_live: bool) -> Element:
    """What the script fills in; without it, what can be done instead."""
    said = "Live. Reload this page to see newer steps." if is_live else "Ended"
    return tag(
        "div",
        tag("p", said, id="live-status", role="status"),
        tag("p", tag("a", "All runs", href=ROOT)),
        id="live",
    )


def _captures(rows: Sequence[Capture], *, is_live: bool) -> Element | None:
    """The form, and what was captured so far with links to the files."""
    if not is_live and not rows:
        return None
    captured = tag("div", _table(rows) if rows else None, id="captured")
    return tag(
        "details",
        tag("summary", f"Profile a few steps ({len(rows)} profiles so far)"),
        _form() if is_live else None,
        captured,
        id="captures",
        class_="live-captures",
    )


def _form() -> Element:
    what = (
        "Records the next steps of some ranks with torch.profiler, with Python stacks, the flight recorder and, on a "
        "GPU, a memory snapshot. Training pauses while the files are written."
    )
    ranks = tag(
        "input", name="ranks", required="", pattern=r"[0-9,\-\/ ]+", placeholder="5, 0-3 or 0,5", size="14",
        autocomplete="off",
    )  # fmt: skip
    steps = tag("input", name="steps", type="number", min="1", max=str(MAX_STEPS), value="3", required="")
    forced = f"allow more than {MAX_RANKS} ranks, or more than {MAX_KEPT_BYTES >> 30} GiB of profiles"
    return tag(
        "form",
        tag("p", what, class_="note"),
        tag(
            "p",
            *_fields(("Ranks ", ranks), ("Steps ", steps)),
            tag("label", tag("input", name="python", type="checkbox", value="1"), " with Python frames and modules"),
            " ",
            tag("label", tag("input", name="force", type="checkbox", value="1"), f" {forced}"),
            " ",
            tag("button", "Profile", type="submit"),
        ),
        tag("div", id="capture-status", role="status"),
        id="capture",
        method="post",
        action="api/captures",
    )


def _fields(*fields: tuple[str, Element]) -> list[Element | str]:
    return [part for label, field in fields for part in (tag("label", label, field), " ")]


def _table(rows: Sequence[Capture]) -> Element:
    shown = rows[-_MAX_CAPTURES:][::-1]
    caption = "Profiles" + (f": the last {len(shown)} of {len(rows)}" if len(shown) < len(rows) else "")
    lines = [[row["id"], str(row["rank"]), captured_words(row), _links(row)] for row in shown]
    return table(caption, ["profile", "rank", "result", "files"], lines, texts=(0, 2, 3))


def captured_words(row: Capture) -> str:
    """What came of it on one rank."""
    if row["first_step"] is None:
        return f"no step was profiled: {row['ended']}"
    first, last = row["first_step"], row["last_step"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    short = f" ({row['ended']})" if row["ended"] else ""
    missing = "".join(f"; no {name}: {why}" for name, why in row["left_out"].items())
    return f"{steps}{short}; training paused for {duration(row['paused_s'])}{missing}"


def _links(row: Capture) -> list[Element | str]:
    links: list[Element | str] = []
    for name, file in row["files"].items():
        links += [
            tag("a", f"{name} ({amount(file['bytes'], 'B')})", href=capture_address(row["id"], row["rank"], name)),
            " ",
        ]
    return links


def capture_address(capture: str, rank: int, file: str) -> str:
    """A captured file's address, seen from the run's page."""
    return f"captures/{address(capture)}/{rank}/{address(file)}"
