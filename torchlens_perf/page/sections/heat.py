"""Ranks by steps: where in the run which rank had more work than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.page.pictures.markup import Element, tag
from torchlens_perf.page.sections.section import figure, section

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents


def heat(contents: Contents) -> Element | None:
    if contents["steps"] is None:
        return None
    return section("heat", "Ranks by step", figure("heat", tag("svg"), "Each rank's work above that of the others."))
