"""Programs run unrecorded, and one line says why, where the native recorder cannot be used."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import torchlens_perf as perf
from scripts.build_wheels import VERSIONS
from tests.support.processes import ROOT
from torchlens_perf import watch, watching
from torchlens_perf.recorder import recorder

FREE_THREADED = next(
    filter(None, (shutil.which(f"python3.{minor}t") for minor in (13, 14, 15))), None
)
OFF = "torchlens_perf is off: "
MISSING = "the native recorder is missing"
TRAIN = """
import torch
import torchlens_perf as perf

@perf.section("step")
def step(x):
    with perf.section("forward"):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, dir="runs") as w:
    for _ in range(3):
        step(torch.ones(2, 4))
        w.step()
print(w.run_dir, model.weight.sum().item())
"""
FREE = """
import sys
import torchlens_perf as perf
with perf.watch() as w, perf.section("part"):
    pass
print(sys._is_gil_enabled(), w.run_dir)
"""
# Installed programs of the package would import the installed package.
CLI = "import sys; from torchlens_perf.commands.cli import main; sys.exit(main(sys.argv[1:]))"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the package without compiled files."""
    return Path(
        shutil.copytree(
            ROOT / "torchlens_perf",
            tmp_path / "copy" / "torchlens_perf",
            ignore=shutil.ignore_patterns("*.so", "__pycache__"),
        )
    )


@pytest.fixture
def run_python(package: Path, tmp_path: Path) -> Run:
    """Return a function that runs Python with the copy, in an empty folder."""
    (tmp_path / "work").mkdir()
    path = os.pathsep.join([str(package.parent), sysconfig.get_path("purelib")])

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        # With -S, an editable installation does not add its own compiled files.
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            env=environment, cwd=tmp_path / "work", capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_training_runs_unrecorded_and_one_line_says_what_to_do(
    run_python: Run, tmp_path: Path
) -> None:
    """The sections of the program do nothing."""
    done = run_python("-c", TRAIN)
    without = run_python("-c", TRAIN, TORCHLENS_PERF="0")

    assert (done.returncode, done.stdout) == (0, without.stdout)
    assert without.stdout.startswith("None ")
    (line,) = done.stderr.splitlines()
    pythons = f"CPython {VERSIONS[0]} to {VERSIONS[-1]}"
    assert line.startswith(f"{OFF}{MISSING}: reinstall the wheel (Linux, {pythons}), ")
    assert "or build with a C compiler and Python's headers: pip install " in line
    assert list((tmp_path / "work").iterdir()) == []


def test_line_appears_once_in_each_node_of_a_job(run_python: Run) -> None:
    """Each call of a decorated function is a watch."""
    program = "import torchlens_perf as perf\n@perf.watch()\ndef train(): pass\ntrain(); train()"
    written = [run_python("-c", program, LOCAL_RANK=rank).stderr for rank in ("0", "1")]

    assert [text.count(MISSING) for text in written] == [1, 0]


@pytest.mark.long
def test_recorded_program_runs_unrecorded(run_python: Run) -> None:
    """`torchlens-perf run` starts the program, whose watch writes the line."""
    program = "import torch; m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), 0.1)"
    program += "\nfor _ in range(4): m(torch.ones(1, 2)).sum().backward(); o.step()\nprint('ended')"
    done = run_python("-m", "torchlens_perf", "run", "-c", program)

    assert (done.returncode, done.stdout) == (0, "ended\n")
    assert [line.partition(MISSING)[0] for line in done.stderr.splitlines()] == [OFF]


@pytest.mark.long
def test_commands_that_need_the_recorder_fail_with_the_same_words(run_python: Run) -> None:
    written = run_python("-c", TRAIN).stderr.removeprefix(OFF).strip()
    problem, _, remedy = written.partition(": ")
    built = run_python("-c", CLI, "build-tap")
    doctor = run_python("-c", CLI, "doctor")
    every = run_python("-c", CLI, "doctor", "--verbose")

    assert (built.returncode, written in built.stderr) == (2, True)
    assert doctor.returncode == every.returncode == 1
    assert f"broken    recorder: {OFF}{problem}\n" in doctor.stdout
    assert f"fix: {remedy}\n" in doctor.stdout
    assert f"broken  recorder: {OFF}{problem}; {remedy}\n" in every.stdout
    assert "collectives" not in every.stdout


@pytest.mark.long
def test_simulated_run_needs_no_recorder(run_python: Run) -> None:
    done = run_python(
        "-c", CLI, "simulate", "--ranks", "2", "--steps", "64", "--out", "simulated"
    )  # fmt: skip
    shown = run_python("-c", CLI, "report", "simulated")

    assert (done.returncode, shown.returncode) == (0, 0), done.stderr + shown.stderr


@pytest.mark.long
def test_damaged_recorder_is_named_with_its_error(run_python: Run, package: Path) -> None:
    (package / "_native.abi3.so").write_bytes(b"\x7fELF, and then something else")
    done = run_python("-c", TRAIN)
    (line,) = done.stderr.splitlines()

    assert done.returncode == 0
    assert line.startswith(f"{OFF}the native recorder cannot be loaded (")
    assert "_native.abi3.so" in line
    assert ": reinstall the wheel" in line


def test_free_threaded_python_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The recorder is not built for such a Python. Here, the build's variable is replaced."""
    monkeypatch.setattr(watching, "already_printed", set())
    monkeypatch.setattr(recorder, "_import_error", ModuleNotFoundError())
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED")
    with caplog.at_level(logging.WARNING, "torchlens_perf"), watch(dir=str(tmp_path / "runs")) as w:
        pass
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"

    assert w.run_dir is None
    assert caplog.messages == [
        f"{OFF}the recorder relies on the GIL, and this Python is free-threaded: use {version} with"
        " the GIL"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    FREE_THREADED is None, reason="there is no free-threaded Python here (python3.13t or later)"
)
def test_package_does_not_switch_the_gil_on(tmp_path: Path) -> None:
    """A free-threaded Python imports the package and runs a watch and a section."""
    assert FREE_THREADED is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = [FREE_THREADED, "-W", "error", "-c", FREE]
    done = subprocess.run(
        run, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert done.stdout == "False None\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{OFF}the recorder relies on the GIL, and this Python is free-threaded")


def test_idle_section_refuses_what_a_section_refuses() -> None:
    """A program that runs without the recorder also runs with it."""

    def generator() -> object:
        yield

    for make in (recorder.IdleSection, perf.section):
        with make("part") as inside:
            assert (repr(inside), inside.name) == ("section('part')", "part")
        assert make("part")(len)([1, 2]) == 2
        with pytest.raises(TypeError, match="takes a name, got int"):
            make(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a section decorates a function, got int"):
            make("part")(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="is a generator or coroutine"):
            make("part")(generator)
