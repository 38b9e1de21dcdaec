"""Two runs of the list can be compared, but only runs of the served folder."""

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
def test_other_names_are_not_found(names: str, viewer: Viewer) -> None:
    assert viewer.ask(f"/api/compare?{names}").status == 404
