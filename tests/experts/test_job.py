"""Real jobs whose experts exchange tokens between gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.experts_verdicts import run_cases

pytestmark = pytest.mark.distributed


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tokens", "machine"])
@pytest.mark.parametrize("serve", [False, True])
def test_slow_rank_has_its_cause(kind: str, tmp_path: Path, *, serve: bool) -> None:
    """The rank with more tokens and the rank with a slow machine are told apart."""
    (found,) = run_cases([(kind, 1)], tmp_path / "jobs", serve=serve)

    assert found["right"], found
    (measured,) = found["measured"]
    assert measured["of_mean_times"] == pytest.approx(found["truth"], abs=0.05)
