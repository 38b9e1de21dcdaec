"""All screens show the same number for a fact.

Text in Chromium and tmux is compared with the report's JSON.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser.conftest import TabOf
from tests.page.browser.tab import need_browser
from tests.support.page_server import PageServer
from tests.support.processes import clean_environ
from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.view.step_words import describe_overhead

need_browser()
TMUX = shutil.which("tmux")
COMMAND = [sys.executable, "-m", "torchlens_perf"]
COLUMNS, LINES = 130, 100
APPEARS_WITHIN_S = 60.0
SLOW = 5
SIMULATED = [
    "--topology",
    "dp=8,tp=2",
    "--steps",
    "120",
    "--fault",
    f"constant:rank={SLOW},share=0.25,since=40",
]


def command(*arguments: str) -> str:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=True, env=clean_environ()
    ).stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a simulated run of 16 ranks, one of which is slow from step 40 on."""
    path = tmp_path_factory.mktemp("runs") / "slow-rank"
    command("simulate", *SIMULATED, "--out", str(path), "--quiet")
    return path


@pytest.fixture(scope="module")
def facts(run: Path) -> dict[str, str]:
    """Return the numbers that each screen must show, from the report's JSON."""
    report: dict[str, Any] = json.loads(command("report", str(run), "--json"))
    verdict = report["verdicts"][0]
    assert (verdict["kind"], verdict["rank"]) == ("straggler", SLOW)
    evidence = verdict["evidence"]
    return {
        "status": "SLOW RANK",
        "rank": f"rank {SLOW} ",
        "cost": format_duration(verdict["cost_s_per_step"]),
        "share": format_percent(verdict["cost_share"]),
        "since": f"since step {verdict['held']['since_step']}",
        "compute of the rank": f"computes {format_duration(evidence['work_s'])} per step",
        "compute of the others": f"the other ranks {format_duration(evidence['others_work_s'])}",
        "step p50": format_duration(report["steps"]["p50_s"]),
        "step p95": format_duration(report["steps"]["p95_s"]),
        "overhead": describe_overhead(report["quality"]),
    }


def missing(facts: dict[str, str], text: str, *without: str) -> dict[str, str]:
    """Return the facts that a screen does not show.

    `without` has the facts that the screen may omit.
    """
    shown = re.sub(r"[\s│║┃|]+", " ", text).casefold()
    return {
        name: value
        for name, value in facts.items()
        if name not in without and value.casefold() not in shown
    }


class Terminal:
    """A command in its own tmux session, and the text on its screen."""

    def __init__(self, *arguments: str) -> None:
        self.socket = f"torchlens-{time.monotonic_ns()}"
        line = shlex.join([*COMMAND, *arguments])
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        self._tmux("new-session", "-d", *size, f"{line}; sleep {APPEARS_WITHIN_S:g}")

    def _tmux(self, *arguments: str) -> str:
        full = ["tmux", "-L", self.socket, "-f", "/dev/null", *arguments]
        return subprocess.run(
            full,
            capture_output=True,
            text=True,
            check=False,
            env={**clean_environ(), "TERM": "xterm"},
        ).stdout

    def screen(self, expected: str) -> str:
        """Return the text of the screen once it shows the expected text, or after a timeout."""
        deadline_s = time.monotonic() + APPEARS_WITHIN_S
        text = ""
        while expected not in text and time.monotonic() < deadline_s:
            time.sleep(0.2)
            text = self._tmux("capture-pane", "-p")
        return text

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal_of() -> Iterator[Any]:
    if TMUX is None:
        pytest.skip("there is no tmux here: apt-get install tmux")
    made: list[Terminal] = []

    def make(*arguments: str) -> Terminal:
        made.append(Terminal(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_page_shows_the_numbers_of_the_report(
    run: Path, facts: dict[str, str], tab_of: TabOf, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    command("report", str(run), "--html", str(file), "--quiet")

    text = tab_of(file).open().page.inner_text("body")

    assert missing(facts, text) == {}


def test_page_without_scripts_shows_the_numbers_of_the_report(
    run: Path, facts: dict[str, str], tab_of: TabOf, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    command("report", str(run), "--html", str(file), "--quiet")
    tab = tab_of(file, scripts=False)
    tab.page.goto(file.as_uri())

    assert missing(facts, tab.page.inner_text("body")) == {}


def test_run_list_and_live_page_show_the_numbers_of_the_report(
    run: Path, facts: dict[str, str], tab_of: TabOf
) -> None:
    with PageServer(run.parent) as server:
        tab = tab_of(Path("/"))
        tab.page.goto(server.address)
        tab.page.wait_for_selector(f"main :text('{facts['status']}')")
        in_list = tab.page.inner_text("main")
        tab.page.click("main td a")
        tab.page.wait_for_selector("#live-status")
        tab.settle()
        in_page = tab.page.inner_text("body")

    in_list_too = {"status", "rank", "share", "step p50"}
    assert missing(facts, in_list, *facts.keys() - in_list_too) == {}
    assert missing(facts, in_page) == {}


def test_report_in_a_terminal_shows_the_numbers_of_its_json(
    run: Path, facts: dict[str, str], terminal_of: Any
) -> None:
    assert missing(facts, terminal_of("report", "--all", str(run)).screen("p95")) == {}


def test_top_in_a_terminal_shows_the_numbers_of_the_report(
    run: Path, facts: dict[str, str], terminal_of: Any
) -> None:
    assert missing(facts, terminal_of("top", str(run)).screen(facts["share"])) == {}
