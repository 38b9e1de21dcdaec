"""Facts of simulated processes."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchlens_perf.run.rank_facts import RankFacts

# The state of a process has its own failure.
_NAMES = {field.name for field in dataclasses.fields(RankFacts)} - {"failure"}


def take_facts(values: dict[str, Any]) -> RankFacts:
    """Remove the fields of RankFacts from `values`, and return the facts with these values."""
    return RankFacts(**{name: values.pop(name) for name in _NAMES & values.keys()})
