"""Tests of jobs with any kind of stderr and logging handlers.

A recorded job ends in the same way as without the package, and its recording is complete.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.long import long
from tests.support.processes import (
    SCRIPTS,
    clean_environ,
    report,
    run,
    run_warm,
    runs,
    wait_for_sidecar,
)
from torchlens_perf.run.directory import RunDirectory

TRAINS = str(SCRIPTS / "train_with_stderr.py")
KINDS = re.findall(r"^def (\w+)\(\):$", Path(TRAINS).read_text(), re.MULTILINE)
FEW = [
    "none", "write_only", "closed_file", "strict_ascii", "full_pipe_that_does_not_block", "raises_value_error",
    "no_stream_at_all", "broken_handler", "handler_on_closed_file",
]  # fmt: skip
SHELL = ["/bin/sh", "-c"]
# Limit for a program that hangs.
LIMIT_S = 240
SCRIPT = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def assert_whole(found: RunDirectory, steps: int = 20) -> None:
    """Check that the run directory and the report contain all steps."""
    wait_for_sidecar(found)
    assert report(found)["ranks"][0]["steps"] == steps
    assert f"{steps} steps" in found.report.read_text()


@pytest.mark.parametrize("kinds", [FEW, *long(KINDS)], ids=["few", "all"])
def test_training_completes_with_any_stderr_and_handler(kinds: list[str], tmp_path: Path) -> None:
    """Streams and handlers raise all kinds of errors. Messages are not printed on stdout instead."""
    done = run_warm(
        [sys.executable, TRAINS, str(tmp_path), *kinds], tmp_path, 600, TORCHLENS_PERF_RAISE="0"
    )
    lines = [line.split() for line in done.stdout.splitlines()]

    assert done.returncode == 0, done.stderr
    assert [kind for kind, _ in lines] == kinds
    for _, path in lines:
        assert_whole(RunDirectory(Path(path)))


def test_ctrl_c_in_the_users_stderr_passes_and_loses_no_record(tmp_path: Path) -> None:
    """isatty() or write() raises KeyboardInterrupt or SystemExit, which the user's code
    receives.
    """
    program = (
        f"import sys; sys.argv = ['', {str(tmp_path)!r}]; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "import train_with_stderr as t\n"
        "class Interrupted(t.WriteAndFlush):\n"
        "    def {method}(self, *text): raise {error}\n"
        "sys.stderr = Interrupted()\n"
        "try: t.train(sys.argv[1])\n"
        "except {error}: print('passed')\n"
    )
    for method, error in (
        ("isatty", "KeyboardInterrupt"),
        ("write", "KeyboardInterrupt"),
        ("flush", "SystemExit"),
    ):
        filled = program.replace("{method}", method).replace("{error}", error)
        # This replaces the logging of an error, which would raise the exception before the
        # training.
        filled = filled.replace(
            "import train_with_stderr as t\n",
            "import train_with_stderr as t; t.swallowed.add = print\n",
        )
        done = run_warm([sys.executable, "-c", filled], tmp_path, LIMIT_S)
        assert done.stdout.endswith("passed\n"), done.stderr
    found = sorted(path.parent for path in tmp_path.glob("*/nodes"))
    assert len(found) == 3
    for each in found:
        assert_whole(RunDirectory(each))


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "closed"),
    [
        ("switch", "2>&-"),
        *long(
            ("run", "0<&- 1>&- 2>&-"),
            ("switch", "1>&- 2>&-"),
            ("switch", "0<&- 1>&- 2>&-"),
            ("run", "2>&-"),
            ("run", "1>&- 2>&-"),
        ),
    ],
)
def test_script_with_closed_standard_streams_is_recorded(
    way: str, closed: str, tmp_path: Path
) -> None:
    """The variable or the command records an unmodified script."""
    line, script = f'exec "$@" {closed}', tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["-m", "torchlens_perf", "run"] if way == "run" else []
    switch = {"TORCHLENS_PERF_EXIT_TIMEOUT_S": "0"} | ({} if command else {"TORCHLENS_PERF": "1"})
    done = run(
        [*SHELL, line, "sh", sys.executable, *command, str(script)], tmp_path, LIMIT_S, **switch
    )
    (found,) = runs(tmp_path)

    assert done.returncode == 0
    assert report(found)["ranks"][0]["steps"] > 0
    assert "steps" in found.report.read_text()


DESCRIPTORS = """
import os, subprocess, sys
sys.path.insert(0, {scripts!r})
sys.argv = ["", {folder!r}]
import torch, torchlens_perf as perf

def standard():
    found = []
    for each in (0, 1, 2):
        try:
            found.append(os.readlink(f"/proc/self/fd/{{each}}"))
        except OSError:
            found.append("closed")
    return found

def child(close_fds):
    code = "import os; print(*[each if os.path.lexists(f'/proc/self/fd/{{each}}') else '-' for each in (0, 2)])"
    return subprocess.run([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, close_fds=close_fds).stdout

before = standard(), child(True), child(False)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, dir=sys.argv[1], config=perf.Config(_exit_timeout_s=0)) as watch:
    watch.on_verdict(lambda verdict: None)
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    inside = standard(), child(True), child(False)
    with open(sys.argv[1] + "/answer", "wb") as answer:
        answer.write(repr([before, inside]).encode())
"""


def test_closed_standard_descriptor_is_not_reused_for_a_ring(tmp_path: Path) -> None:
    """Native code or a child may write to the descriptor.

    Child processes find the descriptor closed too.
    """
    program = DESCRIPTORS.format(scripts=str(SCRIPTS), folder=str(tmp_path))
    done = run(
        [*SHELL, 'exec "$@" 0<&- 2>&-', "sh", sys.executable, "-c", program], tmp_path, LIMIT_S
    )
    assert done.returncode == 0
    before, inside = eval((tmp_path / "answer").read_text())

    assert before[0][2] == "closed"
    assert inside == before
    (found,) = [RunDirectory(path.parent) for path in tmp_path.glob("*/nodes")]
    assert_whole(found)


@pytest.mark.parametrize("sigpipe", ["SIG_IGN", "SIG_DFL"])
def test_job_continues_after_the_stderr_reader_is_gone(sigpipe: str, tmp_path: Path) -> None:
    """With a closed pipe the exit code is 0, not 120 for a failed flush.

    SIGPIPE does not kill the process.
    """
    program = (
        f"import signal, sys; sys.path.insert(0, {str(SCRIPTS)!r}); import train_with_stderr as t\n"
        f"signal.signal(signal.SIGPIPE, signal.{sigpipe}); print(t.train({str(tmp_path)!r}))\n"
    )
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stderr:
        environ = clean_environ({"TORCHLENS_PERF_RAISE": "0"})
        done = warm_python.run([sys.executable, "-c", program], LIMIT_S, env=environ, stderr=stderr)

    assert done.returncode == 0, (
        signal.Signals(-done.returncode).name if done.returncode < 0 else done.returncode
    )
    assert_whole(RunDirectory(Path(done.stdout.strip())))


@pytest.mark.long
def test_report_is_printed_in_the_encoding_of_stderr(tmp_path: Path) -> None:
    """Tested encodings are the C locale without UTF-8 mode, and one with strict errors."""
    environ = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii:strict",
    }
    done = run(
        [sys.executable, TRAINS, str(tmp_path), "ordinary"],
        tmp_path,
        LIMIT_S,
        TORCHLENS_PERF_RAISE="0",
        **environ,
    )

    assert done.returncode == 0, done.stderr
    assert "a hook that fails in a test \\u2603 failed and was skipped" in done.stderr
    assert done.stderr.rstrip().isascii()


@pytest.mark.parametrize("stderr", ["None", "io.BytesIO()", "io.StringIO()"])
def test_messages_without_a_watch_never_fail_with_any_stderr(stderr: str, tmp_path: Path) -> None:
    """Cases are an invalid setting, no recording, and torchrun's flag without its entry point."""
    program = (
        "import io, os, sys\n"
        f"sys.stderr = {stderr}\n"
        "import torch\n"
        "del os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD']\n"
        "torch._import_device_backends()\n"  # `import torch` calls the same function at its end.
        "from torchlens_perf.torchrun import LogsSpecs\n"
        "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "LogsSpecs()\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
        "print('done')\n"
    )
    for settings in ({}, {"TORCHLENS_PERF_RING_RECORDS": "many"}):
        switches = {"TORCHLENS_PERF": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        done = run_warm([sys.executable, "-c", program], tmp_path, LIMIT_S, **switches, **settings)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
