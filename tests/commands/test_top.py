"""`torchlens-perf top` without a full screen: one frame, lines in a pipe, and user mistakes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_simulation import LiveSimulation
from tests.support.processes import ROOT, clean_environ
from tests.support.terminal import OnTerminal
from torchlens_perf.commands.cli import main
from torchlens_perf.run.installation import build_install_command
from torchlens_perf.top.plain import PlainTop
from torchlens_perf.top.reading import RunReader
from torchlens_perf.top.text import Terminal

COMMAND = [sys.executable, "-m", "torchlens_perf", "top"]
WITHOUT_TEXTUAL = [
    sys.executable, "-c", "import sys; sys.modules['textual'] = None\n"
    "from torchlens_perf.commands.cli import main; sys.exit(main(sys.argv[1:]))", "top",
]  # fmt: skip


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveSimulation]:
    with LiveSimulation(
        tmp_path / "runs" / "live", 4, "constant:rank=3,share=0.3,since=64"
    ) as running:
        running.add_blocks(3)
        yield running


def test_top_once_prints_one_plain_frame_if_stdout_is_no_terminal(
    live: LiveSimulation, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output has no escape sequences."""
    assert main(["top", str(live.run.path), "--once"]) == 0
    out, err = capsys.readouterr()

    assert "SLOW RANK   rank 3 (node-0000)" in out
    assert "  4 ranks" in out
    assert "\x1b" not in out
    assert err == ""


def test_top_once_imports_no_textual_torch_or_pyarrow(live: LiveSimulation) -> None:
    """`--once` must start fast, and must work on a login node that lacks these three packages."""
    program = (
        "import sys; from torchlens_perf.commands.cli import main; main(sys.argv[1:])\nprint([name"
        " for name in ('textual', 'torch', 'pyarrow', 'asyncio') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, "top", str(live.run.path), "--once"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environ({"PYTHONPATH": str(ROOT)})
    )

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_top_once_without_data_is_one_line_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(tmp_path / "run"), "--once"]) == 2
    out, err = capsys.readouterr()

    assert (out, err) == ("", f"torchlens-perf: there is no directory {tmp_path}/run\n")


def test_top_of_a_folder_without_runs_is_one_line_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["top", "--once"]) == 2
    assert (
        "no run in the folder torchlens-perf: use `torchlens-perf top RUN_DIR`"
        in capsys.readouterr().err
    )


def test_top_without_an_argument_shows_the_live_run(
    live: LiveSimulation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live run is shown although a newer run has ended. An argument selects another run."""
    with LiveSimulation(live.run.path.with_name("ended"), 2) as other:
        other.add_blocks()
    monkeypatch.setenv("TORCHLENS_PERF_DIR", str(live.run.path.parent))
    assert main(["top", "--once"]) == 0
    assert "  live  4 ranks" in capsys.readouterr().out
    assert main(["top", "ended", "--once"]) == 0
    assert "  ended  2 ranks" in capsys.readouterr().out
    live.end_run()
    assert main(["top", "--once"]) == 0
    assert "ENDED" in capsys.readouterr().out


def test_top_of_a_folder_shows_its_live_run(
    live: LiveSimulation, capsys: pytest.CaptureFixture[str]
) -> None:
    """No environment variable is set."""
    assert main(["top", str(live.run.path.parent), "--once"]) == 0
    assert "  live  4 ranks" in capsys.readouterr().out


def test_top_ends_without_an_error_when_its_pipe_is_closed(live: LiveSimulation) -> None:
    live.end_run()
    command = f"{' '.join(COMMAND)} {live.run.path} | head -n 1"
    environ = clean_environ({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=environ
    )

    assert (done.stdout.count("\n"), done.stderr, done.returncode) == (1, "", 0)


def test_output_to_a_pipe_has_first_frame_new_verdicts_and_last_frame(live: LiveSimulation) -> None:
    """The last frame says that the run has ended."""
    file, states = io.StringIO(), ["goes on", "waits", "goes on", "ends"]

    def next_state() -> None:
        state = states.pop(0)
        if state == "goes on":
            live.add_blocks()
        elif state == "ends":
            live.end_run()

    with LiveSimulation(
        live.run.path.with_name("other"), 4, "constant:rank=2,share=0.4,since=64"
    ) as live:
        live.add_blocks(2)
        reader = RunReader(live.run, monotonic=lambda: 0.0)
        PlainTop(file, 80, Terminal(color=False)).print_until_end(reader.poll, next_state)
    lines = file.getvalue().splitlines()

    assert states == []
    assert lines[0].startswith("simulation  other  4 ranks")
    assert (
        sum(line.startswith("  SLOW RANK   rank 2 (node-0000)") for line in lines) == 2
    )  # The verdict is printed when it is found, and again in the last frame.
    frames = [index for index, line in enumerate(lines) if line.startswith("simulation  other")]
    assert [line.rpartition("  ")[2].split()[0] for line in (lines[index] for index in frames)] == [
        "LIVE",
        "ENDED",
    ]
    assert "\x1b" not in file.getvalue()
    assert max(map(len, lines)) <= 80


def test_read_error_is_printed_once_to_a_pipe(live: LiveSimulation) -> None:
    """In this test, several reads in succession fail."""
    file, rests = io.StringIO(), []
    path = live.run.node_state_path("node-0000")
    good = path.read_bytes()

    def next_state() -> None:
        rests.append(len(file.getvalue()))
        if len(rests) == 1:
            path.write_bytes(b"")
        elif len(rests) == 5:
            path.write_bytes(good)
            live.end_run()

    reader = RunReader(live.run, monotonic=lambda: 0.0)
    PlainTop(file, 80, Terminal(color=False)).print_until_end(reader.poll, next_state)

    assert "cannot be read" in file.getvalue()
    assert rests[2] == rests[3] == rests[4] > rests[0]


def test_dumb_terminal_gets_no_escape_sequences(live: LiveSimulation) -> None:
    """TERM is "dumb". Ctrl-C prints no traceback."""
    with OnTerminal([*COMMAND, str(live.run.path)], {"TERM": "dumb"}) as terminal:
        terminal.wait_for("data: 0 of")
        terminal.process.send_signal(2)
        code = terminal.end()
        text = terminal.written.decode()

    assert code == 0
    assert "SLOW RANK   rank 3 (node-0000)" in text
    assert "\x1b" not in text
    assert "Traceback" not in text


def test_missing_textual_is_one_line_and_once_still_works(live: LiveSimulation) -> None:
    """The line names the package to install, and the exit code is 2. --once prints colours."""
    with OnTerminal([*WITHOUT_TEXTUAL, str(live.run.path)]) as terminal:
        code = terminal.end()
        said = terminal.written.decode()
    with OnTerminal([*WITHOUT_TEXTUAL, str(live.run.path), "--once"]) as terminal:
        once = terminal.end()
        frame = terminal.written.decode()

    assert code == 2
    assert said.startswith("torchlens-perf: top ")
    assert build_install_command("top") in said
    assert said.count("\n") == 1
    assert once == 0
    assert re.search(r"\x1b\[1;31mSLOW RANK", frame)


def test_top_output_is_ascii_in_a_locale_without_unicode(live: LiveSimulation) -> None:
    """Python may choose any encoding for the locale."""
    environ = clean_environ({"PYTHONPATH": str(ROOT), "LC_ALL": "C"})
    done = subprocess.run(
        [*COMMAND, str(live.run.path), "--once"], capture_output=True, env=environ
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_top_once_has_no_colours_with_no_color_set(live: LiveSimulation) -> None:
    with OnTerminal([*COMMAND, str(live.run.path), "--once"], {"NO_COLOR": "1"}) as terminal:
        assert terminal.end() == 0
        assert b"\x1b[31m" not in terminal.written
        assert b"\x1b[1;31m" not in terminal.written
