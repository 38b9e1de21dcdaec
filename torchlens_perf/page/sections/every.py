"""All sections in the order of the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchlens_perf.page.sections.collectives import collectives
from torchlens_perf.page.sections.heat import heat
from torchlens_perf.page.sections.memory import memory
from torchlens_perf.page.sections.modules import modules
from torchlens_perf.page.sections.phases import phases
from torchlens_perf.page.sections.quality import quality
from torchlens_perf.page.sections.ranks import ranks
from torchlens_perf.page.sections.step import step
from torchlens_perf.page.sections.steps import outliers, steps
from torchlens_perf.page.sections.telemetry import telemetry
from torchlens_perf.page.sections.verdicts import verdicts

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.view.markup import Element

SECTIONS: tuple[tuple[str, str, Callable[[Contents], Element | None]], ...] = (
    ("verdicts", "Verdict", verdicts),
    ("heat", "Heat map", heat),
    ("steps", "Step time", steps),
    ("ranks", "Ranks", ranks),
    ("phases", "Phases", phases),
    ("modules", "Modules", modules),
    ("step", "One step", step),
    ("outliers", "Outlier steps", outliers),
    ("collectives", "Collectives", collectives),
    ("memory", "Memory", memory),
    ("telemetry", "Hardware", telemetry),
    ("quality", "Data quality", quality),
)
"""Fragment, label, and what makes the section; it returns None where there is nothing to show."""
