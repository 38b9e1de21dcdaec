"""Comparison of two runs of the list, which accepts only runs of the served folder."""

from __future__ import annotations

import pytest

from tests.support.page_server import Viewer


def test_run_compared_with_itself_is_not_slower(viewer: Viewer) -> None:
    found = viewer.json("/api/compare?before=done&after=done")
    assert found["status"] in ("SAME", "CANNOT SAY")
    assert found["before"][0]["id"] == found["after"][0]["id"] == "done"


@pytest.mark.parametrize(
    "names",
    ["before=done", "before=..&after=done", "before=done&after=a%2Fb", "before=done&after=no"],
)
def test_comparison_with_a_missing_or_invalid_run_name_is_not_found(
    names: str, viewer: Viewer
) -> None:
    assert viewer.ask(f"/api/compare?{names}").status == 404
