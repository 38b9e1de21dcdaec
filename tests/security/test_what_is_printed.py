"""Tests that texts in outputs are escaped and cannot control a terminal.

The tests put hostile text into a node's state and into names of folders and files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import time
import unicodedata
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.ranks import HOST, make_run
from torchlens_perf.commands.cli import main
from torchlens_perf.commands.doctor import Check
from torchlens_perf.errors import ConfigError, RunStoreError, printable
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run import captures
from torchlens_perf.run.captures import Outcome, Request
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.view.terminal import render_full

_HOSTILE = [
    "\x1b[2J\x1b[31mred", "\x1b]8;;http://evil/\x1b\\click\x1b]8;;\x1b\\", "\x1b]0;title\x07", "\x9b2J", "\x90q\x9c",
    "\u202egpj.exe\u2066\u2069", "\u200f\u061c", "one\r\ntwo\x0b\x0c\u2028\u2029\x85", "\x00\x7f\x08\x08", "\ud800",
    "x" * 10_000, "\u4e00" * 3000, "[bold red]not markup[/]", "a\u0301" * 50, "\U000e0001\ufeff\ufff9",
]  # fmt: skip
hostile = st.one_of(
    st.sampled_from(_HOSTILE),
    st.builds("".join, st.lists(st.sampled_from(_HOSTILE[:10]), max_size=3)),
    st.text(st.characters(), max_size=30),
)
_BAD = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def assert_harmless(text: str, width: int | None = None) -> None:
    for line in text.split("\n"):
        bad = {hex(ord(each)) for each in line if unicodedata.category(each) in _BAD}
        assert bad == set(), line[:200]
        assert width is None or len(line) <= width, line[:200]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the saved state of a node whose rank has modules and sections."""
    run = RunDirectory(tmp_path_factory.mktemp("state") / "run")
    fault = "constant:rank=1,share=0.3"
    arguments = ("--ranks", "2", "--steps", "80", "--fault", fault, "--out", str(run.path))
    _printed("simulate", *arguments)
    (path,) = run.nodes.glob("*.json")
    return dict(json.loads(path.read_bytes()))


def texts_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all texts in a state."""
    if isinstance(value, str):
        return [path]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [found for key, each in items for found in texts_in(each, (*path, key))]


def planted(value: Any, path: tuple[Any, ...], text: str) -> Any:
    copied = json.loads(json.dumps(value))
    at = copied
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = text
    return copied


def _printed(*arguments: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    return out.getvalue() + err.getvalue()


@pytest.mark.long
@pytest.mark.slow
@given(data=st.data(), text=hostile, note=hostile, schema=hostile)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25
)
def test_texts_of_a_node_state_are_escaped_in_all_outputs(
    data: st.DataObject, text: str, note: str, schema: str, state: dict[str, Any], tmp_path: Path
) -> None:
    """Outputs are the report, its JSON and the errors of `capture`."""
    run = RunDirectory(tmp_path / "run")
    run.nodes.mkdir(parents=True, exist_ok=True)
    where = data.draw(st.sampled_from(texts_in(state)))
    value = planted(planted(state, where, text), ("notes",), [note, text])  # type: ignore[arg-type]
    for changed in (value, {**value, "schema": schema}):
        with contextlib.suppress(UnicodeEncodeError):
            run.node_state_path(HOST).write_text(json.dumps(changed))
        assert_harmless(_printed("report", str(run.path)))
        assert_harmless(_printed("report", "--json", str(run.path)))
        assert_harmless(_printed("capture", str(run.path), "--rank", "0", "--timeout", "1"))
    run.node_state_path(HOST).write_text(json.dumps(value))
    with contextlib.suppress(RunStoreError):  # Some texts in a state must be ranks or numbers.
        for color in (False, True):
            shown = render_full(load_report(run), str(run.path), columns=100, color=color)
            assert_harmless(
                re.sub(r"\x1b\[[0-9;]*m", "", shown) if color else shown, 100 + len(str(run.path))
            )


def test_hostile_notes_and_names_are_escaped_in_the_report(
    state: dict[str, Any], tmp_path: Path
) -> None:
    """All other characters are unchanged in the report."""
    run = RunDirectory(tmp_path / "run")
    run.nodes.mkdir(parents=True)
    value = json.loads(json.dumps(state))
    value["notes"] = [
        each for each in _HOSTILE if each != "\ud800"
    ]  # JSON cannot contain a lone surrogate.
    for process in value["processes"].values():
        process["identity"]["program"] = "\x1b]8;;http://evil/\x1b\\train.py"
    run.node_state_path(HOST).write_text(json.dumps(value))
    shown = render_full(load_report(run), str(run.path), columns=100, color=False)

    assert_harmless(shown, 100 + len(str(run.path)))
    assert "?]8;;http://evil/?\\train.py" in shown
    assert "?[2J?[31mred" in shown
    assert "SLOW RANK   rank 1 (node-0000)" in shown


@given(text=hostile)
@settings(deadline=None, max_examples=25)
def test_command_line_arguments_are_escaped_in_messages(text: str) -> None:
    """Users may paste names of runs, faults and options from untrusted text."""
    for arguments in (
        ["report", text], ["report", f"--{text}"], ["capture", text, "--rank", text], ["simulate", "--fault", text],
        ["simulate", "--topology", text], [text],
    ):  # fmt: skip
        with contextlib.suppress(
            OSError, ValueError
        ):  # With such arguments, the name may be invalid or contain a null byte.
            assert_harmless(_printed(*arguments))


@given(text=hostile)
@settings(deadline=None, max_examples=25)
def test_texts_of_a_captured_rank_are_escaped(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Outputs are those of `capture` and the report."""
    from torchlens_perf.commands import capture

    run = make_run(tmp_path_factory.mktemp("capture"))
    request = Request("one", captures.BY_USER, time.time(), 0, (0,), 12, 3)
    captures.submit_request(run.captures, request)
    folder = captures.rank_folder(run.captures, "one", 0)
    folder.mkdir(parents=True)
    outcome = Outcome("one", 0, ended=text, left_out={text: text, captures.TRACE: text})
    captures.write_capture_file(
        captures.outcome_path(folder), dataclasses.replace(outcome, first_step=3)
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        capture._wait_for_results(run, request, Namespace(timeout=10, quiet=False))
    assert "rank 0" in out.getvalue()
    assert_harmless(out.getvalue())


@given(text=hostile)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=10
)
def test_settings_are_escaped_by_doctor(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Check(2, text, text, text)]
    monkeypatch.setattr("torchlens_perf.commands.doctor.run_checks", lambda: iter(found))
    assert_harmless(_printed("doctor"))


def test_printable_returns_one_line_and_keeps_harmless_text() -> None:
    assert printable("blocks.0.attn") == "blocks.0.attn"
    assert printable("größe 测试 \U0001f600") == "größe 测试 \U0001f600"
    assert printable("\x1b[31m\u202e\ud800\n") == "?[31m???"
    for text in _HOSTILE:
        assert_harmless(str(ConfigError(printable(text))))
