"""Updates of a notebook's cell: how often they happen, and what they cost.

Tests of real cells are in tests/frameworks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import Rank
from tests.support.recorders import FakeClock
from torchlens_perf.results import notebook
from torchlens_perf.results.ask import Results, RunHandle
from torchlens_perf.results.notebook import NotebookCell
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import VIEW, deliver_text


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Handle:
    """A replacement for IPython's handle. An update takes time, as in a remote front end."""

    def __init__(self, clock: Clock, of_marks: FakeClock) -> None:
        self._clock = clock
        self._of_marks = of_marks
        self.takes_s = 0.0
        self.texts: list[str] = []

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self._clock.now_s += self.takes_s
        self._of_marks.advance(round(self.takes_s * 1e9))
        self.texts.append(bundle["text/plain"])


class Shown:
    """A rank with a cell, and the sidecar's side of its mailbox."""

    def __init__(self, rank: Rank, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(notebook, "ensure_sidecar_runs", lambda recorded: None)
        self.clock = Clock()
        self.handle = Handle(self.clock, rank.clock)
        self.session = rank.session
        self.cell = NotebookCell(self.clock)
        self.cell._handle = self.handle
        self.live = self.cell._update_live(RunHandle(run, self.session, True, ""))

    def write(self, text: str) -> None:
        value = json.dumps({"text": text, "html": "", "summary": {}, "page": ""}) if text else ""
        deliver_text(str(self.session.ring_path.with_suffix(VIEW)), value)

    def step_ends(self, at_s: float) -> list[str]:
        """End a step and return the texts that the cell then shows."""
        self.clock.now_s = max(self.clock.now_s, 1000.0 + at_s)
        before = len(self.handle.texts)
        (work,) = self.session.step_callbacks._throttled
        work()
        return self.handle.texts[before:]


@pytest.fixture
def shown(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    rank = Rank(run, 0, 1)
    made = Shown(rank, run, monkeypatch)
    with made.live:
        yield made
    assert made.session.step_callbacks._throttled == {}
    assert not made.session.ring_path.with_suffix(VIEW).exists()
    rank.close()


def test_cell_is_updated_at_most_once_a_second_with_new_content(shown: Shown) -> None:
    """The frequency of steps and of the sidecar's messages makes no difference."""
    shown.write("first")
    assert shown.step_ends(0.0) == ["first"]
    shown.write("second")
    assert [shown.step_ends(at_s) for at_s in (0.01, 0.5, 0.99, 1.01)] == [[], [], [], ["second"]]
    assert [shown.step_ends(at_s) for at_s in (2.1, 3.2)] == [[], []]


def test_slow_front_end_gets_fewer_cell_updates(shown: Shown) -> None:
    """After an update of 0.2 s, 20 s pass without one: at most a hundredth of the time."""
    shown.handle.takes_s = 0.2
    shown.write("first")
    assert shown.step_ends(0.0) == ["first"]
    shown.write("second")
    assert [shown.step_ends(at_s) for at_s in (1.5, 19.9, 20.1)] == [[], [], ["second"]]


def test_time_of_a_cell_update_is_charged_to_this_package(shown: Shown) -> None:
    """The time is charged to the step with the update."""
    before_ns = shown.session.recorder.tool_ns
    shown.handle.takes_s = 0.003
    shown.write("first")
    shown.step_ends(0.0)

    assert (
        shown.session.step._overhead_ns == shown.session.recorder.tool_ns - before_ns == 3_000_000
    )


def test_cell_of_a_large_job_is_not_updated(shown: Shown) -> None:
    """In large jobs the sidecar only responds to requests."""
    shown.write("")
    assert shown.step_ends(0.0) == []
    assert shown.cell._newest.missing == notebook.TOO_MANY


def test_cell_links_to_the_page_in_the_folder_of_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook cannot open pages elsewhere."""
    page = str(tmp_path / "runs" / '<a "b">' / "report.html")
    found = Results("text", "<div></div>", {}, "", page)
    monkeypatch.chdir(tmp_path)
    here = notebook.to_mime_bundle(found)["text/html"]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")

    assert 'href="runs/%3Ca%20%22b%22%3E/report.html"' in here
    assert notebook.to_mime_bundle(found)["text/html"] == "<div></div>"
    assert notebook.to_mime_bundle(found._replace(page=""))["text/html"] == "<div></div>"
