"""Collectives and links: how long ranks wait, for whom, and which links are slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.page.sections.section import tables_of
from torchlens_perf.view.html import section

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.view.markup import Element


def collectives(contents: Contents) -> Element | None:
    """Return the section; None where no rank communicates."""
    found = tables_of(contents, "collectives", "slow_links")
    return section("collectives", "Collectives and links", found) if found else None
