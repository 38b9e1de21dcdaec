"""The command line: its output, and its messages about user mistakes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import HOST, Rank, make_run, read_to_end
from torchlens_perf.commands import cli
from torchlens_perf.commands.cli import main
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.undelivered import Undelivered, UndeliveredStep, WholeRun
from torchlens_perf.verdicts import node_state
from torchlens_perf.version import VERSION

WORK = {"data": 1, "forward": 4, "backward": 6, "host": 1}


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    """Return the directory of a finished run."""
    run = make_run(tmp_path)
    rank = Rank(run, 0, 1)
    rank.steps(50, **WORK)
    rank.close()
    read_to_end(run)
    return run


def test_report_is_plain_text_if_stdout_is_no_terminal(
    finished: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(finished.path)]) == 0
    out = capsys.readouterr().out

    assert "50 steps" in out
    assert f"torchlens-perf report {finished.path} --all" in out
    assert "\x1b" not in out


def test_report_json_prints_one_json_value_with_its_schema_number(
    finished: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(finished.path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)

    assert (value["schema"], value["run"]["id"], value["steps"]["count"]) == (
        4,
        finished.run_id,
        50,
    )


def test_report_without_an_argument_uses_the_newest_run(
    finished: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest run is looked up in TORCHLENS_PERF_DIR."""
    monkeypatch.setenv("TORCHLENS_PERF_DIR", str(finished.path.parent))
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["id"] == finished.run_id


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "/nowhere"], "there is no directory /nowhere"),
        (["sidecar", "/nowhere"], "there is no directory /nowhere"),
        (["capture", "/nowhere", "--rank", "0"], "there is no directory /nowhere"),
        (["top", "/nowhere", "--once"], "there is no directory /nowhere"),
        (["report", "/etc"], "/etc is not a run directory"),
        (["report", "/etc/passwd"], "/etc/passwd is not a directory"),
        (
            ["reprot"],
            (
                "unknown command 'reprot': did you mean 'report'? Commands: run, capture, report,"
                " top, "
            ),
        ),
        (["qqq"], "unknown command 'qqq'. Commands: run, "),
        (["train.py"], "unknown command 'train.py': did you mean `torchlens-perf run train.py`?"),
        (
            ["report", "--jsno"],
            "unknown option '--jsno': did you mean '--json'? See `torchlens-perf report --help`",
        ),
        (["report", "--zz=3"], "unknown option '--zz'. See `torchlens-perf report --help`"),
        (["report", "one", "two"], "unexpected argument 'two'. See "),
        (["--quiet", "report"], "unknown option '--quiet'"),
        (
            ["capture"],
            (
                "the following arguments are required: run_dir, --rank. See `torchlens-perf capture"
                " --help`"
            ),
        ),
        (["simulate", "--ranks", "0", "--out", "x"], "--ranks must be 1 or more, got 0"),
        (["simulate", "--node-size", "0", "--out", "x"], "--node-size must be 1 or more, got 0"),
        (["run"], "a script is needed"),
        (["run", "-m"], "a script is needed"),
    ],
)
def test_user_mistake_gives_one_line_on_stderr_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the cause."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()

    assert out == ""
    assert err.startswith(f"torchlens-perf: {message}")
    assert err.count("\n") == 1


def test_report_explains_that_a_folder_has_no_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert (
        "no run in the folder torchlens-perf: record one with `torchlens-perf run train.py`"
        in capsys.readouterr().err
    )


def test_empty_run_no_run_and_folder_of_runs_have_different_messages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A run without data, a folder that is no run, and a folder of runs need different remedies."""
    make_run(tmp_path)
    (run,) = (path.parent for path in tmp_path.rglob("nodes"))
    for command in (["report", str(run)], ["top", str(run), "--once"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"torchlens-perf: {run} has no data yet. A run that starts")
        assert f"torchlens-perf sidecar {run}" in err
    assert main(["report", str(run.parent)]) == 2
    assert capsys.readouterr().err.endswith(
        f"{run.parent} is a folder of runs: name one of them, as in {run}\n"
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 99}', '{"schema": 1, "host": 3}', "\x00\x01"]
)
def test_damaged_state_file_gives_one_line_and_exit_code_2(
    finished: RunDirectory, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished.node_state_path(HOST).write_text(text)
    assert main(["report", str(finished.path)]) == 2
    err = capsys.readouterr().err

    assert err.startswith(f"torchlens-perf: {finished.node_state_path(HOST)}")
    assert err.count("\n") == 1


def test_report_ends_without_an_error_when_its_pipe_is_closed(finished: RunDirectory) -> None:
    command = f"{sys.executable} -m torchlens_perf report {finished.path} --json | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)

    assert (done.stdout, done.stderr, done.returncode) == ("{\n", "", 0)


@pytest.mark.parametrize(
    ("output", "error", "code"),
    [(">&-", "", 0), ("> /dev/full", "torchlens-perf: [Errno 28] No space left on device\n", 2)],
)
def test_report_that_cannot_be_printed_ends_without_a_traceback(
    finished: RunDirectory, output: str, error: str, code: int
) -> None:
    command = f"{sys.executable} -m torchlens_perf report {finished.path} --json {output}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)

    assert (done.stdout, done.stderr, done.returncode) == ("", error, code)


def test_sidecar_command_replays_a_finished_run_and_prints_a_summary(
    finished: RunDirectory,
) -> None:
    """The summary has what was sent and what was not sent."""
    command = [
        sys.executable,
        "-m",
        "torchlens_perf",
        "sidecar",
        str(finished.path),
        "--host",
        HOST,
    ]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == "replayed 50 steps, 200 records; no OTLP endpoint is configured, so nothing was sent\n"
    )


def test_replay_of_one_undelivered_signal_keeps_the_notes_on_others(
    finished: RunDirectory,
) -> None:
    """If no undelivered signal is enabled, the summary says so."""
    path = finished.node_state_path(HOST)
    state = node_state.load(path)
    ((key, _),) = state.processes.items()
    state.undelivered = Undelivered([UndeliveredStep(key, 3, 2)], whole_run=[WholeRun.METRICS])
    of_points = "OTLP: 9 of 9 metric points were not delivered"
    state.notes = ["OTLP: 2 of 2 spans were not delivered", of_points]
    state.save(finished)

    def replay(signal: str) -> str:
        command = [sys.executable, "-m", "torchlens_perf", "sidecar", str(finished.path)]
        command += ["--host", HOST]
        environment = {**os.environ, f"OTEL_{signal}_EXPORTER": "otlp_json_file"}
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    without = "none of the undelivered signals (metrics, traces) is enabled, so nothing was sent\n"
    assert replay("LOGS").endswith(without)
    assert len(node_state.load(path).notes) == 2
    assert replay("TRACES").endswith("; sent only what an endpoint had not accepted\n")
    after = node_state.load(path)
    assert (after.notes, after.undelivered.signals) == ([of_points], {"metrics"})


def test_help_does_not_import_torch() -> None:
    program = (
        "import contextlib, sys; from torchlens_perf.commands.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout.startswith("Start here:\n  torchlens-perf run train.py")
    assert done.stdout.endswith("False\n")


def test_version_option_prints_versions_without_importing_torch() -> None:
    """The versions are those of this package, torch and Python."""
    program = (
        "import sys; from torchlens_perf.commands.cli import main\n"
        "assert main(['--version']) == 0\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    torch = importlib.metadata.version("torch")
    python = ".".join(map(str, sys.version_info[:3]))
    assert done.stdout == f"torchlens-perf {VERSION} (torch {torch}, Python {python})\nFalse\n"


def test_version_option_works_if_torch_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["--version"]) == 0
    assert "(torch is not installed, Python 3." in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["help"]])
def test_help_lists_each_public_command_once(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The help begins with three commands for new users."""
    assert main(arguments) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "Start here:"
    assert [line.split()[1] for line in lines[:3]] == ["run", "report", "doctor"]
    assert max(map(len, lines)) <= 100
    listed = [line.split()[0] for line in lines[3:] if line.startswith("  ")]
    everything = cli._build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert sorted([*listed, "results"]) == sorted(everything)  # type: ignore[type-var,arg-type]


def test_help_does_not_list_hidden_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["result"], ["qqq"]):
        main(arguments)
        assert "results" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_each_command_has_a_description_in_the_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    usage, description, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: torchlens-perf {command} ")
    assert description[0].isupper()
    assert description.endswith(".")
