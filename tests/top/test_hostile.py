"""No text in a run directory can control the terminal or break a screen of top."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from tests.security.test_what_is_printed import assert_harmless, hostile, planted, texts_in
from tests.support.live_simulation import LiveSimulation
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top import overview
from torchlens_perf.top.live_runs import RunRow, build_run_table, list_runs
from torchlens_perf.top.rank_screen import rank_lines
from torchlens_perf.top.ranks import build_rank_list
from torchlens_perf.top.reading import RunReader, View
from torchlens_perf.top.text import Terminal, lines_around_cursor

HOST = "node-0000"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a live node's state with ranks of two nodes, one of which is slow."""
    folder = tmp_path_factory.mktemp("hostile")
    with LiveSimulation(folder / "run", 4, "constant:rank=3,share=0.3", node_size=2) as live:
        live.add_blocks(3)
        return dict(json.loads(live.run.node_state_path(HOST).read_bytes()))


def all_lines(view: View, width: int, terminal: Terminal) -> list[Text]:
    """Return the lines of every screen."""
    table, ranks = build_rank_list(view)
    texts = overview.build_overview(view, width, 50, terminal, table, 0)
    for rank in ranks:
        texts += rank_lines(view, rank, width)
    texts += [*overview.all_finding_lines(view, width), *overview.note_lines(view, width)]
    return [*terminal.lines(texts, width), *overview.build_frame(view, width, terminal)]


@given(
    data=st.data(),
    text=hostile,
    note=hostile,
    width=st.sampled_from([20, 80]),
    ascii_only=st.booleans(),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30
)
def test_any_text_of_a_state_is_drawn_as_text(
    data: st.DataObject,
    text: str,
    note: str,
    width: int,
    ascii_only: bool,
    state: dict[str, Any],
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.nodes.mkdir(parents=True, exist_ok=True)
    value = planted(state, data.draw(st.sampled_from(texts_in(state))), text)
    value["notes"] = [note, text]
    with contextlib.suppress(UnicodeEncodeError):
        run.node_state_path(HOST).write_text(json.dumps(value))
    for line in all_lines(RunReader(run).poll(), width, Terminal(ascii_only)):
        assert_harmless(line.plain)
        assert "\n" not in line.plain
        assert cell_len(line.plain) <= width
        assert line.plain.isascii() or not ascii_only


@pytest.mark.parametrize(
    "text", ["\x1b[2J\x1b[31mred", "\u202egpj.exe", "one\r\ntwo\x0b\x85", "x" * 10_000]
)
def test_hostile_names_cannot_control_the_terminal(
    text: str, state: dict[str, Any], tmp_path: Path
) -> None:
    """The names of program, host, modules and open spans are hostile at the same time."""
    run = RunDirectory(tmp_path / "run")
    run.nodes.mkdir(parents=True)
    value = json.loads(json.dumps(state))
    for process in value["processes"].values():
        process["identity"].update(program=text, host=text)
        names = process["statistics"]["modules"]
        process["statistics"]["modules"] = {f"{text} {name}": each for name, each in names.items()}
        process["open_spans"] = [text]
    run.node_state_path(HOST).write_text(json.dumps(value))
    view = RunReader(run).poll()
    assert view.report is not None, view.trouble
    assert view.report["run"]["program"] == text
    for line in all_lines(view, 80, Terminal()):
        assert_harmless(line.plain, 80)


@given(name=hostile, problem=hostile)
def test_run_folders_may_have_any_name(name: str, problem: str) -> None:
    table = build_run_table([RunRow(Path(name.replace("/", "-") or "x"), 0.0, name, problem)])
    for line in lines_around_cursor(table, 80, 10, 0):
        assert_harmless(line.plain)


def test_folders_that_are_not_runs_do_not_break_the_list(tmp_path: Path) -> None:
    """The examples are files, empty folders, links, a run without a state, and an unreadable
    one.
    """
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begins" / "nodes").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "begins")
    (tmp_path / "damaged" / "nodes").mkdir(parents=True)
    (tmp_path / "damaged" / "nodes" / "a.json").write_text("{")
    rows = {row.path.name: row for row in list_runs(tmp_path)}

    assert set(rows) == {"begins", "damaged"}
    assert (rows["begins"].state, rows["damaged"].state) == ("starting", "damaged")
    assert "cannot be read" in rows["damaged"].about
    assert list_runs(tmp_path / "nowhere") == []
    lines = [
        line.plain for line in lines_around_cursor(build_run_table(list(rows.values())), 80, 10, 0)
    ]
    assert any("starting" in line for line in lines)
    assert any("damaged" in line for line in lines)
