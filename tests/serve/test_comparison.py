"""The page that compares runs of the list, which accepts only runs of the served folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.serve.conftest import simulate
from tests.support.page_server import PageServer, Viewer


def test_page_of_two_ticked_runs_has_the_older_one_before(runs: Path, tmp_path: Path) -> None:
    """Verdicts, step, ranks and modules are compared. Runs are links, and sides can be swapped."""
    shutil.copytree(runs / "done", tmp_path / "a slow")
    simulate(tmp_path / "later")
    with PageServer(tmp_path) as server:
        viewer = server.viewer()
        text = viewer.comparison("run=later&run=a%2520slow").text
        assert text == viewer.comparison("before=a%2520slow&after=later").text
    assert re.findall(r'<a href="(runs/[^"]*)"', text) == ["runs/a%20slow/", "runs/later/"]
    assert "GONE</b> <span>SLOW RANK rank 3" in text
    assert text.index("GONE</b>") < text.index("A typical step took")
    for words in ("Compute time of each rank", "Modules, sections, collectives", "<polyline "):
        assert words in text
    assert 'href="compare?before=later&amp;after=a%2520slow"' in text
    assert "<script" not in text


def test_run_compared_with_itself_is_not_slower(viewer: Viewer) -> None:
    text = viewer.comparison("before=done&after=done").text
    assert re.search(r">(SAME|CANNOT SAY)<", text)
    assert "No verdict came, went or changed." in text


@pytest.mark.parametrize(
    "names",
    [
        "",
        "before=done",
        "run=done",
        "before=..&after=done",
        "before=done&after=a%2Fb",
        "before=done&after=a%252Fb",
        "before=done&after=no",
    ],
)
def test_comparison_without_two_valid_runs_is_not_found(names: str, viewer: Viewer) -> None:
    answer = viewer.comparison(names, accept="text/html")
    assert answer.status == 404
    assert "All runs</a>" in answer.text
