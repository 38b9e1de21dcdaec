"""What all sections use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.view.html import table
from torchlens_perf.view.markup import Element

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents


def tables_of(contents: Contents, *keys: str) -> list[Element]:
    """Return the tables of the report that have these keys, in the order of the keys."""
    known = {each.key: each for each in contents["tables"]}
    return [table(known[key]) for key in keys if key in known]
