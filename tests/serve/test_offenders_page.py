"""The page on nodes that many jobs name shows the table of the folder, and makes none."""

from __future__ import annotations

from pathlib import Path

from benchmarks.offenders import write_fleet
from tests.serve.conftest import simulate
from tests.support.page_server import PageServer
from torchlens_perf.actions.fleet import NAME


def test_offenders_are_shown_once_there_is_a_table(tmp_path: Path) -> None:
    simulate(tmp_path / "done")
    with PageServer(tmp_path) as server:
        viewer = server.viewer()
        assert 'href="offenders"' in viewer.ask("/").text
        missing = viewer.ask("/offenders", accept="text/html")
        assert missing.status == 404
        assert "torchlens-perf offenders" in missing.text
        assert not (tmp_path / NAME).exists()
        bad = write_fleet(tmp_path, 500, 0)
        shown = viewer.ask("/offenders", accept="text/html")
        while shown.status in (202, 503):
            shown = viewer.ask("/offenders", accept="text/html")
    assert shown.status == 200
    assert "more often than luck explains" in shown.text
    assert any(node in shown.text for node in bad)
    assert "Rank hours lost by user" in shown.text
    assert "Rank hours lost by framework" in shown.text
