"""A comparison as one HTML file without scripts."""

from __future__ import annotations

from pathlib import Path

from torchlens_perf.compare.comparison import Comparison
from torchlens_perf.compare.screens import (
    build_headline,
    build_notes,
    build_tables,
    throughput_text,
)
from torchlens_perf.page.document.html import build_static_document
from torchlens_perf.page.document.write import write_page_file
from torchlens_perf.view.html import build_section, build_table, build_verdict_card
from torchlens_perf.view.markup import Element, tag


def build_body(compared: Comparison) -> list[Element]:
    """Return the elements of the page: the result, the tables and the notes."""
    card = build_verdict_card(build_headline(compared), "comparison")
    texts = (throughput_text(compared), *build_notes(compared))
    return [
        build_section("verdicts", "Comparison", card),
        build_section("changes", "Changes", *map(build_table, build_tables(compared))),
        build_section("notes", "Notes", tag("ul", [tag("li", text) for text in texts if text])),
    ]


def write_comparison_page(compared: Comparison, path: Path) -> None:
    """Write the page. Raise RunStoreError if the file cannot be written."""
    names = [f"{side[0].run.run_id}" for side in (compared.before, compared.after)]
    write_page_file(path, build_static_document(" and ".join(names), build_body(compared)))
