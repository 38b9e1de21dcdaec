"""Modules and the user's sections: where forward and backward time goes."""

from __future__ import annotations

from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.sections.section import build_tables
from torchlens_perf.view.html import build_section
from torchlens_perf.view.markup import Element, tag


def build_modules_section(contents: PageContents) -> Element | None:
    """Return the section on modules; None if neither modules nor user sections were timed."""
    found = build_tables(contents, "modules", "sections", "device_sections")
    note = tag("p", "Modules nested more deeply than those shown are not timed.", class_="note")
    deeper = note if contents["report"]["run"]["deeper_modules"] else None
    return build_section("modules", "Modules and sections", found, deeper) if found else None
