"""Each query of docs/guides/queries.md runs on a recorded run and returns rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.simulated_runs import simulate_run
from torchlens_perf.query.engine import run_query

GUIDE = Path(__file__).parents[2] / "docs/guides/queries.md"
QUERIES = re.findall(r"^([^\n]+\?)\n\n```sql\n(.*?)\n```", GUIDE.read_text(), re.M | re.S)
# A simulated run has no sections, checkpoints, or backward times of modules.
WITHOUT_ROWS = ("backward pass of each module", "my sections")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate_run(tmp_path_factory.mktemp("queries") / "run", ranks=4, steps=40)


def test_guide_has_seventeen_queries() -> None:
    assert len(QUERIES) == GUIDE.read_text().count("```sql") == 17


@pytest.mark.parametrize(("question", "sql"), QUERIES, ids=[each for each, _ in QUERIES])
def test_query_of_the_guide_runs(question: str, sql: str, run: Path) -> None:
    found = run_query(sql, [str(run)], [])
    assert found.names
    assert found.rows or any(words in question for words in WITHOUT_ROWS)
