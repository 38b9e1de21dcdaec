"""Tests of `make bench-peers`: a short run with the tools of the test environment, and its tables and
chart.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import peers_tables
from benchmarks.peers import WORKS
from benchmarks.peers_tools import TOOLS
from tests.support.processes import ROOT

TESTED = ("none", "torchlens_perf", "OpenTelemetry SDK", "torch.profiler", "Lightning profiler")


def values(scale: float, generations: int = 4, rounds: int = 10) -> list[list[float]]:
    """Return times around 1 ms times `scale`. Generations and rounds differ for all tools alike."""
    return [
        [1e6 * scale * (1 + 0.1 * generation + 0.01 * number) for number in range(rounds)]
        for generation in range(generations)
    ]


def made_up() -> dict[str, Any]:
    scales = {"none": 1.0, "torchlens_perf": 1.01, "VizTracer": 3.0}
    return {
        "times_ns": {
            work: {tool: values(scale) for tool, scale in scales.items()} for work in WORKS
        },
        "resources": {
            tool: {
                "import_s": [0.1 * scale], "start_s": [0.2 * scale], "exit_s": [scale],
                "bytes_per_step": [100 * scale], "resident_bytes": [1e8 * scale], "helper_bytes": [0.0],
            }
            for tool, scale in scales.items()
        },
        "versions": {"torch": "2.13.0"},
        "failed": {"TraceML": "no aggregator"},
        "rounds": 10,
        "steps": 170,
        "machine": "a machine",
        "load": 0.1,
        "date": "2026-11-26",
    }  # fmt: skip


def test_intervals_contain_only_the_difference_between_tools() -> None:
    """The machine's speed changes between generations, and the ratio does not."""
    middle, low, high = peers_tables.interval(values(1.01), values(1.0), peers_tables._change)
    assert (middle, low, high) == pytest.approx((1.0, 1.0, 1.0))
    noisy = [[1e6, 1.2e6, 1e6, 1.1e6], [1e6, 1e6, 1.3e6, 1.1e6]]
    middle, low, high = peers_tables.interval(noisy, values(1.0, 2, 4), peers_tables._change)
    assert low < middle < high
    assert high - low > 5


def test_tables_have_a_row_for_each_tool_relative_to_none() -> None:
    text = "\n".join(peers_tables.draw_tables(made_up()))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| torchlens")]
    assert "+1.00 % (+1.00 to +1.00)" in rows[0]
    assert rows[1][1:3] == ["3 ms (3 to 3)", "10 ms (10 to 10)"]
    assert "Failed: TraceML" in text
    assert re.search(r"^\| VizTracer \| \+200.00 %", text, re.MULTILINE)


def test_chart_has_a_bar_for_each_tool_in_the_order_of_cost() -> None:
    drawn = ElementTree.fromstring(peers_tables.draw_chart(made_up()))
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    widths = [float(each.get("width")) for each in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert texts[1::2] == ["torchlens_perf", "VizTracer"]
    assert widths[0] < widths[1] / 100


def test_pages_are_written_between_their_marks(tmp_path: Path) -> None:
    for page in (peers_tables.PAGE, Path("README.md")):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    (tmp_path / peers_tables.CHART).parent.mkdir()
    for _ in range(2):
        peers_tables.write(made_up(), tmp_path)
    for page, text in ((peers_tables.PAGE, "| VizTracer |"), (Path("README.md"), "peers.svg")):
        before, after = (ROOT / page).read_text(), (tmp_path / page).read_text()
        (part,) = peers_tables.MARKED.findall(after)
        assert text in part[1]
        unmarked = [peers_tables.MARKED.sub("", each) for each in (before, after)]
        assert unmarked[0] == unmarked[1]


def test_each_tool_has_an_environment_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (peers,) = re.findall(r"^PEERS := \$\(addprefix .venv-peers/,(.*)\)$", makefile, re.MULTILINE)
    assert {environment for _, environment in TOOLS.values()} == {"torch", *peers.split()}
    pinned = dict(re.findall(r"^PEER_(\S+) := (?:[\w-]+==)?(\S+)$", makefile, re.MULTILINE))
    assert pinned.keys() == set(peers.split())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("works", "tools"),
    [
        (("gpt",), ("none", "torchlens_perf", "torch.profiler")),
        pytest.param(("section", "modules", "ddp", "all_reduce"), TESTED, marks=pytest.mark.long),
    ],
)
def test_short_run_measures_each_tool(
    works: tuple[str, ...], tools: tuple[str, ...], tmp_path: Path
) -> None:
    environments, data = tmp_path / "environments", tmp_path / "data.json"
    environments.mkdir()
    for tool in tools:
        place = environments / TOOLS[tool][1]
        if not place.exists():
            place.symlink_to(sys.prefix)
    command = [
        sys.executable, "-m", "benchmarks.peers", str(environments), "--generations", "1", "--rounds", "2",
        "--works", *works, "--tools", *tools, "--data", str(data),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    measured = json.loads(data.read_text())
    assert measured["failed"] == {}
    for work in works:
        asked = [tool for tool in tools if tool in WORKS[work].tools]
        times = measured["times_ns"][work]
        assert set(times) == set(asked)
        assert all(
            len(each) == 1 and len(each[0]) == 2 and min(each[0]) > 0 for each in times.values()
        )
    assert "| torch.profiler |" in done.stdout
    if "section" in works:
        section = measured["times_ns"]["section"]
        assert min(section["OpenTelemetry SDK"][0]) > max(section["torchlens_perf"][0])
    if "gpt" in works:
        written = {tool: each["bytes_per_step"][0] for tool, each in measured["resources"].items()}
        assert written["none"] == 0 < written["torchlens_perf"]
        assert written["torch.profiler"] > written["torchlens_perf"] / 10
