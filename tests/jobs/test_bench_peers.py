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
from benchmarks.peers import WORKS, takes_part
from benchmarks.peers_tools import CONTROL, TOOLS
from tests.support.processes import ROOT

TESTED = ("none", "torchlens_perf", "OpenTelemetry SDK", "torch.profiler", "Lightning profiler")
PAGES = (peers_tables.PAGE, peers_tables.README)


def values(scale: float, generations: int = 4, rounds: int = 10) -> list[list[float]]:
    """Return times around 1 ms times `scale`. Generations and rounds differ for all tools alike."""
    return [
        [1e6 * scale * (1 + 0.1 * generation + 0.01 * number) for number in range(rounds)]
        for generation in range(generations)
    ]


def made_up() -> dict[str, Any]:
    scales = {"none": 1.0, "torchlens_perf": 1.01, "VizTracer": 3.0, CONTROL: 1.0}
    memory = {"rank_bytes": 3e6, "helper_bytes": 4e6, "helper_cpu_s": 0.5}
    start = {"import_s": 0.1, "start_s": 0.2}
    files = {"exit_s": 1.0, "written_bytes": 5e6}
    module = {"ns": 1e6, "added_by_module_ns": 1500.0, "added_bytes": 2e6}
    return {
        "times_ns": {
            work: {tool: values(scale) for tool, scale in scales.items()} for work in WORKS
        },
        "resources": {
            tool: {
                "import_s": [0.1 * scale], "start_s": [0.2 * scale], "exit_s": [scale],
                "bytes_per_step": [100 * scale], "rank_bytes": [1e8 * scale], "helper_bytes": [0.0],
                "helper_cpu_s": [0.0],
            }
            for tool, scale in scales.items()
        },
        "growth": {
            "modules": {
                tool: dict.fromkeys(("10", "1000"), start | module)
                for tool in ("none", "torchlens_perf")
            },
            "steps": {
                "none": {"1000": memory | files},
                "VizTracer": {"1000": memory | files},
                "torchlens_perf": dict.fromkeys(("1000", "10000"), memory | files),
            },
            "ranks": {"torchlens_perf": {"64": memory | files | start}},
        },
        "steps_found": {"none": {"made": 118, "found": None}, "VizTracer": {"made": 118, "found": 117}},
        "versions": {"torch": "2.13.0"},
        "failed": {"TraceML": "no aggregator"},
        "rounds": 10,
        "clock": "wall",
        "machine": "a machine",
        "minutes": 11.0,
        "load_before": 0.1,
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
    assert "+1.00 % \\[+1.00, +1.00\\]" in rows[1]
    assert rows[2][1:3] == ["3 ms (3 to 3)", "10 ms (10 to 10)"]
    assert rows[3][1:] == ["1.50 / 1.50", "300 / 300", "2.0 / 2.0 |"]
    assert rows[4][-1] == "1.0 / 1.0 |"
    assert rows[5][1] == "4"
    assert "Failed: TraceML" in text
    assert re.search(r"^\| VizTracer \| .* \| 117 of 118 \|$", text, re.MULTILINE)
    assert re.search(r"^\| VizTracer \| \+200.00 %", text, re.MULTILINE)


def test_chart_has_a_dot_and_a_ring_for_each_tool_in_the_order_of_cost() -> None:
    drawn = ElementTree.fromstring(peers_tables.draw_chart(made_up()))
    space = "{http://www.w3.org/2000/svg}"
    texts = [each.text for each in drawn.iter(f"{space}text")]
    assert texts.index("torchlens_perf") < texts.index("VizTracer")
    assert CONTROL not in texts
    places = {
        kind: [float(each.get("cx", "")) for each in drawn.iter(f"{space}circle") if each.get("class") == kind]
        for kind in ("dot ours", "ring ours", "dot other", "ring other")
    }  # fmt: skip
    # The last ones are those of the legend.
    assert places["dot ours"] == places["ring ours"] < places["dot other"][:1]
    assert len(places["dot other"]) == len(places["ring other"]) == 2


def copy_pages(folder: Path) -> None:
    for page in (*PAGES, peers_tables.CHART, peers_tables.DATA):
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / page).exists():
            shutil.copy(ROOT / page, folder / page)


def test_pages_are_written_between_their_marks(tmp_path: Path) -> None:
    copy_pages(tmp_path)
    for _ in range(2):
        peers_tables.write(made_up(), tmp_path)
    for page, text in zip(PAGES, ("| VizTracer |", "peers.svg"), strict=True):
        before, after = (ROOT / page).read_text(), (tmp_path / page).read_text()
        (part,) = peers_tables.MARKED.findall(after)
        assert text in part[1]
        unmarked = [peers_tables.MARKED.sub("", each) for each in (before, after)]
        assert unmarked[0] == unmarked[1]


def test_pages_and_chart_are_those_of_the_committed_data(tmp_path: Path) -> None:
    """`python -m benchmarks.peers_tables` writes them."""
    copy_pages(tmp_path)
    data = peers_tables.load(ROOT)
    peers_tables.write(data, tmp_path)
    for page in PAGES:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text()
    charts = [folder / peers_tables.CHART for folder in (ROOT, tmp_path)]
    if data is None:
        assert not any(chart.exists() for chart in charts)
    else:
        assert charts[0].read_text() == charts[1].read_text()
        assert (ROOT / peers_tables.DATA).read_text() == peers_tables.to_json(data)


def test_readme_has_at_most_100_lines_with_the_chart(tmp_path: Path) -> None:
    copy_pages(tmp_path)
    peers_tables.write(made_up(), tmp_path)
    assert len((tmp_path / peers_tables.README).read_text().splitlines()) <= 100


def test_each_tool_has_an_environment_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (peers,) = re.findall(r"^PEERS := \$\(addprefix .venv-peers/,(.*)\)$", makefile, re.MULTILINE)
    assert {environment for _, environment in TOOLS.values()} == {"torch", *peers.split()}
    pinned = dict(re.findall(r"^PEER_(\S+) := (.+)$", makefile, re.MULTILINE))
    assert pinned.keys() == set(peers.split())
    assert all(
        "==" in each for package in pinned.values() for each in package.split() if each != "."
    )


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("works", "tools", "growth"),
    [
        (("gpt",), ("none", "torchlens_perf", "torch.profiler"), "none"),
        (("section", "modules", "ddp", "all_reduce"), TESTED, "small"),
    ],
)
def test_short_run_measures_each_tool(
    works: tuple[str, ...], tools: tuple[str, ...], growth: str, tmp_path: Path
) -> None:
    environments, data = tmp_path / "environments", tmp_path / "data.json"
    environments.mkdir()
    for tool in tools:
        place = environments / TOOLS[tool][1]
        if not place.exists():
            place.symlink_to(sys.prefix)
    command = [
        sys.executable, "-m", "benchmarks.peers", str(environments), "--generations", "1", "--rounds", "2",
        "--works", *works, "--tools", *tools, "--growth", growth, "--data", str(data),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    measured = json.loads(data.read_text())
    assert measured["failed"] == {}
    for work in works:
        times = measured["times_ns"][work]
        assert set(times) == {tool for tool in tools if takes_part(tool, work)}
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
        for tool in set(tools) - {"none"}:
            steps = measured["steps_found"][tool]
            assert steps["found"] == steps["made"]
    if growth == "small":
        for tool in tools:
            assert set(measured["growth"]["steps"][tool]) == {"20", "100"}
        ranks = measured["growth"]["ranks"]["torchlens_perf"]
        assert ranks["3"]["helper_bytes"] > 0
