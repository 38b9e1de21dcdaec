"""All sections in the order of the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchlens_perf.page.sections.heat import heat
from torchlens_perf.page.sections.verdicts import verdicts

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.page.pictures.markup import Element

# Fragment, label, and what makes it; that returns None where there is nothing to show.
SECTIONS: tuple[tuple[str, str, Callable[[Contents], Element | None]], ...] = (
    ("verdicts", "Verdicts", verdicts),
    ("heat", "Ranks by step", heat),
)
