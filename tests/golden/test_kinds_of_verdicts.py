"""Tests of sentence and figures of each kind of verdict, with each type of evidence, against golden
files.

The golden files change only on purpose. `UPDATE_GOLDEN=1` writes them, and the commit explains why.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.golden_text import expected_text, golden_text
from tests.report.test_schema import STATES
from tests.support.ranks import make_run
from tests.support.reports import checked
from torchlens_perf.report.build import build_report

KEPT = Path(__file__).parent / "kinds"


@pytest.mark.parametrize(
    ("kind", "evidence"), STATES, ids=lambda each: getattr(each, "__name__", each)
)
def test_report_with_each_kind_of_verdict_equals_its_golden_file(
    kind: str, evidence: type, tmp_path: Path
) -> None:
    report = checked(build_report("run", [STATES[kind, evidence](make_run(tmp_path))]))
    text = golden_text(f"{kind} by {evidence.__name__}", report)

    assert text == expected_text(text, KEPT / f"{kind}_{evidence.__name__}.txt")


def test_each_golden_file_belongs_to_a_case() -> None:
    assert {each.stem for each in KEPT.iterdir()} == {
        f"{kind}_{evidence.__name__}" for kind, evidence in STATES
    }
