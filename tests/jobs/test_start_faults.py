"""Tests of errors at the start of a watch.

Training is the same as without a watch, one line reports the error, and no hook stays.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

import torchlens_perf as perf
from tests.support.interruptions import failing, functions_called
from tests.support.leftovers import (
    end_sidecars,
    is_of_this_process,
    places,
    remaining_folders,
    remove,
)
from tests.support.long import long_except
from tests.support.process_state import changed_since, state
from tests.support.processes import wait_for_sidecar
from torchlens_perf import watching
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.run import dead_runs, directory
from torchlens_perf.run.directory import RunDirectory, find_local_run_folders
from torchlens_perf.run.sidecar_lock import SidecarLock

PACKAGE = str(Path(perf.__file__).parent)


@pytest.fixture(autouse=True)
def _lenient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Do not raise internal errors, as in a user's process."""
    monkeypatch.setenv(RAISE, "0")
    monkeypatch.setattr(swallowed, "by_place", type(swallowed.by_place)())
    yield
    swallowed.by_place.clear()
    end_sidecars()
    remove(tmp_path / "runs")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the lines logged since its last call."""

    def said() -> list[str]:
        messages = [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]
        caplog.clear()
        return messages

    return said


def trained(model: nn.Module) -> list[Any]:
    """Train two steps from a fixed start. Return the parameters."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with perf.section("all of it"):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


SIDECARS = (
    "recorder/folder_request.py",
    "recorder/sidecar.py",
    "run/children.py",
    "run/dead_runs.py",
    "run/sidecar_lock.py",
    "run/directory.py",
    "watching.py",
)


def functions_to_fail(begin: Callable[[], perf.Watch], sidecar: bool) -> list[CodeType]:
    """Return the package's functions that run between watch() and the first step.

    `sidecar` selects only functions that concern the sidecar.

    errors.py handles errors and is excluded. Closing a lock is excluded, because its failure always
    leaves the lock open.
    """
    # The first run imports modules.
    for _ in range(2):
        begun: list[perf.Watch] = []
        functions = functions_called(lambda: begun.append(begin()), PACKAGE)  # noqa: B023
        begun[0].__exit__(None, None, None)
    first = next(i for i, code in enumerate(functions) if code is perf.Watch._start.__code__) + 1
    files = {code: str(Path(code.co_filename).relative_to(PACKAGE)) for code in functions[first:]}
    return [
        code
        for code, file in files.items()
        if file != "errors.py"
        and (not sidecar or file in SIDECARS)
        and code is not SidecarLock.close.__code__
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("sidecar", "every"),
    [
        pytest.param(False, 6, id="without a sidecar"),
        pytest.param(False, 1, id="without a sidecar, all", marks=pytest.mark.long),
        pytest.param(True, 1, id="with a sidecar"),
    ],
)
def test_error_in_any_function_at_the_start_does_not_change_training(
    sidecar: bool,
    every: int,
    tmp_path: Path,
    model: nn.Module,
    lines: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each function between watch() and the first step raises in turn, an ordinary error and a
    KeyboardInterrupt.

    The ordinary error is only logged, and the KeyboardInterrupt reaches the user.

    No hook stays, and the next watch works.
    """
    runs, expected = tmp_path / "runs", trained(model)
    # Leftovers of other tests on this node would cause calls that happen only once, so they are
    # removed.
    monkeypatch.setattr(
        dead_runs,
        "find_local_run_folders",
        lambda: (run for run in find_local_run_folders() if is_of_this_process(run[0])),
    )

    def begin() -> perf.Watch:
        return perf.watch(
            model, dir=str(runs), sidecar=sidecar, report="off", ring_records=1024
        ).__enter__()

    gc.collect()
    # A garbage collection could call our functions in one run and not in the next.
    gc.disable()
    try:
        functions = functions_to_fail(begin, sidecar)
    finally:
        gc.enable()
    end_sidecars()
    remove(runs)
    lines()
    gc.freeze()
    before, problems, off = state(), [], 0
    for code in functions[::every]:
        for error in (RuntimeError("planted"), KeyboardInterrupt()):
            name = f"{Path(code.co_filename).name} {code.co_name} {type(error).__name__}"
            watch, interrupted = None, False
            # Only the first few errors of each place are logged.
            swallowed.by_place.clear()
            try:
                with failing(code, error) as raised:
                    watch = begin()
            except KeyboardInterrupt:
                interrupted = True
            said, recording = lines(), watching._running is not None
            off += not recording
            # The traceback's frames refer to half-built objects.
            error.__traceback__ = None
            same = trained(model) == expected
            if watch is not None:
                watch.__exit__(None, None, None)
            end_sidecars()
            wrong = {
                "was not called again": not raised,
                "Ctrl-C did not go through, or an error did": (
                    interrupted != isinstance(error, KeyboardInterrupt)
                ),
                "nothing was said": not interrupted and not said,
                "records after Ctrl-C": recording and interrupted,
                "trains otherwise": not same,
                f"left files: {places(runs)}": (
                    not recording and not sidecar and bool(remaining_folders(runs))
                ),
            }
            remove(runs)
            gc.collect()
            different = changed_since(before)
            wrong[f"left attached: {different}"] = bool(different)
            before = state() if different else before
            problems += [f"{name}: {what}" for what, is_wrong in wrong.items() if is_wrong]
    again = begin()
    again.__exit__(None, None, None)
    lines()

    assert not problems, "\n".join(problems)
    assert len(functions) > (20 if sidecar else 60)
    assert off > 20 // every
    assert again.run_dir is not None


# -- resources that the machine refuses


def no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    return {"dir": "relative"}


def no_program(text: str | None) -> Callable[..., dict[str, Any]]:
    def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr(sys, "executable", text)
        return {}

    return change


def limit(kind: int, value: int) -> Callable[..., dict[str, Any]]:
    """Set a resource limit of the process."""

    def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        soft, hard = resource.getrlimit(kind)
        free = len(os.listdir("/proc/self/fd")) + 1 if value < 0 else value
        resource.setrlimit(kind, (free, hard))
        LIMITS.append((kind, soft, hard))
        return {}

    return change


LIMITS: list[tuple[int, int, int]] = []


def folder(make: Callable[[Path], str]) -> Callable[..., dict[str, Any]]:
    """Set `dir` to the path that `make` returns."""
    return lambda tmp_path, monkeypatch: {"dir": make(tmp_path)}


def through_a_file(tmp_path: Path) -> str:
    (tmp_path / "file").write_text("in the way")
    return str(tmp_path / "file" / "x")


def loop(tmp_path: Path) -> str:
    (tmp_path / "loop").symlink_to("loop")
    return str(tmp_path / "loop")


def no_local_place(how: str) -> Callable[..., dict[str, Any]]:
    """Make both shared memory and the temporary directory unusable."""

    def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        places = [tmp_path / "shm", tmp_path / "tmp"]
        for place in places:
            place.mkdir()
            inside = place / f"torchlens-perf-{os.getuid()}"
            if how == "not private":
                inside.mkdir()
                inside.chmod(0o777)
            elif how == "a file":
                inside.write_text("")
            elif how == "a link":
                inside.symlink_to(tmp_path)
        if how == "missing":
            places = [Path("/nonexistent"), Path("/proc/nonexistent")]
        monkeypatch.setattr(directory, "_SHARED_MEMORY", places[0])
        monkeypatch.setattr(tempfile, "tempdir", str(places[1]))
        return {}

    return change


REFUSALS = {
    "working directory": (no_working_directory, "the working directory cannot be found: No such file"),
    "no executable": (no_program(""), "no other process can be started: Python does not know its own program"),
    "executable is None": (no_program(None), "no other process can be started: Python does not know its own program"),
    "missing executable": (no_program("/nonexistent/python"), "/nonexistent/python (sys.executable) cannot be run"),
    "executable is no program": (no_program("/etc/passwd"), "/etc/passwd (sys.executable) cannot be run"),
    "open files": (limit(resource.RLIMIT_NOFILE, -1), "Too many open files"),
    "file size": (limit(resource.RLIMIT_FSIZE, 4096), "no place for a ring file of 339968 bytes"),
    "a file in the way": (folder(through_a_file), "cannot write to "),
    "a loop of links": (folder(loop), "Too many levels of symbolic links"),
    "a long name": (folder(lambda tmp_path: str(tmp_path / ("x" * 300))), "File name too long"),
    "a long path": (folder(lambda tmp_path: str(tmp_path / "/".join(["x" * 100] * 50))), "File name too long"),
    "the kernel's folder": (folder(lambda tmp_path: "/proc/runs"), "cannot write to /proc/runs"),
    "another kernel's folder": (folder(lambda tmp_path: "/sys/runs"), "cannot write to /sys/runs"),
    **{
        f"local folders: {how}": (no_local_place(how), "")
        for how in ("missing", "not private", "a file", "a link")
    },
}  # fmt: skip
SOME_REFUSALS = {
    "working directory",
    "missing executable",
    "open files",
    "file size",
    "a file in the way",
    "local folders: a link",
}


@pytest.mark.parametrize("name", long_except(SOME_REFUSALS, REFUSALS))
def test_refused_resource_disables_recording_with_one_line(
    name: str,
    tmp_path: Path,
    model: nn.Module,
    lines: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line contains the reason, there is no run directory, and training is the same.

    A later watch works.
    """
    change, said = REFUSALS[name]
    expected = trained(model)
    with perf.watch(model, dir=str(tmp_path / "earlier"), sidecar=False, report="off"):
        # A first use imports modules.
        trained(model)
    gc.collect()
    before, folder = state(), os.getcwd()
    with monkeypatch.context() as changes:
        settings = {"dir": str(tmp_path / "runs"), "ring_records": 1024, "report": "off"}
        settings |= change(tmp_path, changes)
        try:
            with perf.watch(model, **settings) as watch:
                recording = watching._running
                parameters = trained(model)
        finally:
            while LIMITS:
                kind, soft, hard = LIMITS.pop()
                resource.setrlimit(kind, (soft, hard))
    told = lines()
    os.chdir(folder)

    assert parameters == expected
    assert (recording, watch.run_dir) == (None, None)
    assert len(told) == 1
    assert told[0].startswith("torchlens_perf is off: ")
    assert said in told[0]
    assert "mistake" not in told[0]
    assert not remaining_folders(tmp_path / "runs")
    gc.collect()
    assert not changed_since(before) - {"folder"}
    with perf.watch(model, dir=str(tmp_path / "runs"), report="off") as watch:
        assert watch.run_dir is not None
        assert watch.run_dir.is_dir()
        trained(model)
    assert lines() == []
    wait_for_sidecar(RunDirectory(watch.run_dir))


@pytest.mark.parametrize("folder", ["", "a\0b", "\ud800", 5])
def test_invalid_dir_setting_raises_an_error(folder: Any) -> None:
    with pytest.raises(perf.ConfigError, match=r"^dir=.*: must be a folder's name"):
        perf.watch(dir=folder)


@pytest.mark.parametrize("sidecar", [True, False])
def test_limit_of_the_process_is_reported_once(
    sidecar: bool, tmp_path: Path, lines: Callable[[], list[str]]
) -> None:
    """A limit of the file size applies in every folder, so one folder is named."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with perf.watch(dir=str(tmp_path), sidecar=sidecar, report="off"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    (line,) = lines()
    assert line.count("File too large") == 1
    assert "; " not in line
