"""A run's page on the server: the static page, the run's state, and a form to request captures; and
the page that compares runs.

This module runs in reader processes.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Sequence
from urllib.parse import urlencode

from torchlens_perf.analysis.statistics.quantities import format_bytes
from torchlens_perf.compare.comparison import compare_runs
from torchlens_perf.compare.page import build_body
from torchlens_perf.page.document.html import (
    LIVE_POLICY,
    PageParts,
    build_document,
    build_style_links,
    contents_as_json,
)
from torchlens_perf.page.gather.run_contents import gather_contents, gather_step
from torchlens_perf.run.captures import MAX_KEPT_BYTES, MAX_RANKS, MAX_STEPS
from torchlens_perf.serve.captures import describe_capture, list_captured_files
from torchlens_perf.serve.list_page import ROOT, build_page
from torchlens_perf.serve.run_names import quote_name
from torchlens_perf.serve.static_files import LIVE_SCRIPT, PAGE_SCRIPT, STYLE, static_address
from torchlens_perf.store.run_folders import open_run
from torchlens_perf.verdicts.words.report import Capture
from torchlens_perf.view.html import build_table, cut_middle
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.specs import Column, Quantity, Table

# Use the fastest level, since a live page is compressed every few seconds.
_GZIP_LEVEL = 1
_MAX_CAPTURES = 32
_ABOUT = (
    "Records the next steps of the given ranks with torch.profiler. Python stacks, the flight"
    " recorder and, on a GPU, a memory snapshot are written too. Training pauses while the files"
    " are written."
)


@dataclasses.dataclass(frozen=True)
class RenderedPage:
    """A run's page at one point in time, compressed with gzip."""

    version: str
    html: bytes
    contents: bytes
    """JSON, see page/contents.py."""
    is_live: bool


def render_page(path: str, version: str) -> RenderedPage:
    """Return the run's page.

    version: the version of the run's data. Raise TorchlensPerfError if the run cannot be read.
    """
    held = gather_contents(open_run(path))
    is_live = held["report"]["run"]["live"]
    # The page's script replaces this text.
    state = "Live. Reload this page to see newer steps." if is_live else "Ended"
    status = tag(
        "div",
        tag("p", state, id="live-status", role="status"),
        tag("p", tag("a", "All runs", href=ROOT)),
        id="live",
    )
    parts = PageParts(
        LIVE_POLICY,
        build_style_links([static_address(STYLE, ROOT)]),
        [tag("script", src=static_address(name, ROOT)) for name in (PAGE_SCRIPT, LIVE_SCRIPT)],
        [status, _build_captures(held["report"]["captures"], is_live=is_live)],
        version,
    )
    page = build_document(held, parts)
    return RenderedPage(
        version, compress_text(page), compress_text(contents_as_json(held)), is_live
    )


def step_as_json(path: str, number: int) -> bytes:
    """Return StepTraces with one step, or none if it was not recorded, as compressed JSON."""
    step = gather_step(open_run(path), number)
    return compress_text(json.dumps(step, separators=(",", ":"), allow_nan=False))


def render_comparison(folder: str, before: Sequence[str], after: Sequence[str]) -> bytes:
    """Return the compressed page that compares runs of a folder. before, after: their names."""
    paths = [open_run(os.path.join(folder, name)).path for name in (*before, *after)]
    swapped = {
        key: list(map(quote_name, side)) for key, side in (("before", after), ("after", before))
    }
    links = tag(
        "ul",
        tag("li", tag("a", "All runs", href="./")),
        tag(
            "li",
            tag("a", "Swap before and after", href=f"compare?{urlencode(swapped, doseq=True)}"),
        ),
        class_="facts",
    )
    body = build_body(
        compare_runs(paths[: len(before)], paths[len(before) :]),
        {
            "run": [
                tag("a", cut_middle(path.name, 48), href=f"runs/{quote_name(path.name)}/")
                for path in paths
            ]
        },
        links,
    )
    return compress_text(build_page(" and ".join(path.name for path in paths), body, ""))


def compress_text(text: str) -> bytes:
    """Return text as gzip content of a response."""
    return gzip.compress(text.encode("utf-8", "replace"), _GZIP_LEVEL)


def _build_captures(rows: Sequence[Capture], *, is_live: bool) -> Element | None:
    """Return the form that requests captures, and a table of the last captures and their files."""
    if not is_live and not rows:
        return None
    shown = rows[-_MAX_CAPTURES:][::-1]
    caption = "Profiles" + (
        f": the last {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
    )
    columns = [
        Column("profile", [row["id"] for row in shown], Quantity.TEXT),
        Column("rank", [row["rank"] for row in shown], Quantity.NUMBER),
        Column("result", [describe_capture(row) for row in shown], Quantity.TEXT),
        Column("files", [""] * len(shown), Quantity.TEXT),
    ]
    results = (
        build_table(
            Table("captured", caption, columns),
            {"files": [_build_file_links(row) for row in shown]},
        )
        if rows
        else None
    )
    return tag(
        "details",
        tag("summary", "Profile a few steps" + (f" ({len(rows)} so far)" if rows else "")),
        _build_capture_form() if is_live else None,
        tag("div", results, id="captured"),
        id="captures",
        class_="live-captures",
    )


def _build_file_links(row: Capture) -> list[Element | str]:
    links = [
        tag("a", f"{file['name']} ({format_bytes(file['bytes'], 'B')})", href=file["address"])
        for file in list_captured_files(row)
    ]
    return [part for link in links for part in (link, " ")]


def _build_capture_form() -> Element:
    forced = (
        f"allow more than {MAX_RANKS} ranks, or more than {MAX_KEPT_BYTES >> 30} GiB of profiles"
    )
    ranks = tag(
        "input", name="ranks", required="", pattern=r"[0-9,\-\/ ]+", placeholder="5, 0-3 or 0,5", size="14",
        autocomplete="off",
    )  # fmt: skip
    fields = [
        tag("label", "Ranks ", ranks),
        tag(
            "label",
            "Steps ",
            tag("input", name="steps", type="number", min="1", max=str(MAX_STEPS), value="3"),
        ),
        tag(
            "label",
            tag("input", name="python", type="checkbox", value="1"),
            " record Python frames and modules",
        ),
        tag("label", tag("input", name="force", type="checkbox", value="1"), f" {forced}"),
        tag("button", "Profile", type="submit"),
    ]
    return tag(
        "form",
        tag("p", _ABOUT, class_="note"),
        tag("p", [part for field in fields for part in (field, " ")]),
        tag("div", id="capture-status", role="status"),
        id="capture",
    )
