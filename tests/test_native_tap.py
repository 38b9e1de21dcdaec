"""Building the native tap on collectives, finding it again, and doing without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.recording import recorded
from torchlens_perf import native_tap, recorder
from torchlens_perf.cli import main
from torchlens_perf.doctor import OK, WORSE, examine
from torchlens_perf.errors import TorchlensPerfError
from torchlens_perf.native_tap import BuildError

NOTE = "torchlens-perf build-tap compiles the native tap"

pytestmark = pytest.mark.skipif(not recorder.NATIVE, reason="the native recorder is missing: there is no C compiler")


@pytest.fixture(autouse=True)
def _load_anew() -> Iterator[None]:
    """load() remembers what it has found."""
    native_tap.load.cache_clear()
    yield
    native_tap.load.cache_clear()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where the tap is looked for and built: empty at first."""
    folder = tmp_path / "place"
    monkeypatch.setattr(native_tap, "places", lambda: [folder])
    return folder


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Makes CXX a program that does this instead."""
    program = folder / "compiler"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))


# -- building


class Installed(NamedTuple):
    """A package that its user may not write to, the user's home, and what building said there."""

    package: Path
    home: Path
    built: str


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """A package in folders that cannot be written, and the tap that its user has built."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root writes everywhere, and setpriv, which would take that right away, is missing")
    folder = tmp_path_factory.mktemp("installed")
    home = folder / "home"
    home.mkdir()
    ignored = shutil.ignore_patterns("_torchlens_perf_tap*", "__pycache__")
    package = shutil.copytree(Path(native_tap.__file__).parent, folder / "site" / "torchlens_perf", ignore=ignored)
    folders = [package, *(path for path in package.rglob("*") if path.is_dir())]
    for each in folders:
        each.chmod(0o555)
    built = command("build-tap", folder / "site", home)
    assert built.returncode == 0, built.stderr
    yield Installed(package, home, built.stdout)
    for each in folders:
        each.chmod(0o755)


def command(name: str, site: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of ours with that home, and without root's right to write everywhere."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHLENS", "XDG_"))}
    environ |= {"HOME": str(home), "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    unprivileged = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []
    program = [*unprivileged, sys.executable, "-m", "torchlens_perf", name]
    return subprocess.run(program, cwd=home, env=environ, capture_output=True, text=True, timeout=110)


@pytest.mark.slow
def test_build_where_the_package_cannot_be_written(installed: Installed) -> None:
    """It goes to the user's cache, whole and executable, and leaves nothing else in either place."""
    path = installed.home / ".cache" / "torchlens_perf" / native_tap.file_name()

    assert installed.built == f"{path}\n"
    assert path.stat().st_mode & 0o777 == 0o755
    assert list(path.parent.iterdir()) == [path]
    assert not list(installed.package.rglob("*tap*.so"))


@pytest.mark.slow
def test_building_again_builds_nothing(installed: Installed) -> None:
    """What is there for this torch, Python and source is told and not touched."""
    path = Path(installed.built.strip())
    before = path.stat()
    again = command("build-tap", installed.package.parent, installed.home)

    assert (again.returncode, again.stdout) == (0, installed.built)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


@pytest.mark.slow
def test_doctor_finds_what_was_built(installed: Installed) -> None:
    """The tap is looked for where it was built; without it the doctor says what that costs, and the command."""
    with_it = command("doctor", installed.package.parent, installed.home)
    elsewhere = installed.home / "empty"
    elsewhere.mkdir(exist_ok=True)
    without = command("doctor", installed.package.parent, elsewhere)

    assert "ok      tap on collectives: native\n" in with_it.stdout
    (line,) = [line for line in without.stdout.splitlines() if "tap on collectives" in line]
    assert line.startswith("worse   tap on collectives: Python: 50 us a collective")
    assert line.endswith("; torchlens-perf build-tap")


def test_no_compiler(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what to install; the command ends with 2 and that one line."""
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setenv("CXX", "a-compiler-that-is-nowhere")
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler: install g\+\+, or name one in CXX$"):
        native_tap.build()

    assert main(["build-tap"]) == 2
    assert capsys.readouterr().err == "torchlens-perf: no C++ compiler: install g++, or name one in CXX\n"
    assert issubclass(BuildError, TorchlensPerfError)


def test_compiler_fails(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has its first error, not its warnings; nothing half done stays, and there is no tap."""
    errors = "tap.cpp:1: warning: old\ntap.cpp:7:10: fatal error: Python.h: No such file\ntap.cpp:8: error: more\n"
    (tmp_path / "said").write_text(errors)
    compiler(tmp_path, monkeypatch, f"cat {tmp_path / 'said'} >&2; exit 1")
    with pytest.raises(BuildError, match=r"^the compiler failed: tap.cpp:7:10: fatal error: Python.h: No such file$"):
        native_tap.build()

    assert list(place.iterdir()) == []
    assert native_tap.find() is None


def test_compiler_that_is_killed(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends without a word of an error, as the out-of-memory killer ends it, is told by its last words."""
    compiler(tmp_path, monkeypatch, "echo 'Killed signal terminated program cc1plus' >&2; exit 4")
    with pytest.raises(BuildError, match="the compiler failed: Killed signal terminated program cc1plus"):
        native_tap.build()

    assert list(place.iterdir()) == []


def test_compiler_that_does_not_end(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, and told so."""
    monkeypatch.setattr(native_tap, "_BUILD_TIMEOUT_S", 0.2)
    compiler(tmp_path, monkeypatch, "exec sleep 100")
    with pytest.raises(BuildError, match="the compiler did not end within"):
        native_tap.build()

    assert list(place.iterdir()) == []


def test_torch_without_headers(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some distributions leave them out: the message says where they were looked for."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(BuildError, match="this torch came without its headers") as caught:
        native_tap.build()

    assert str(tmp_path / "torch" / "include") in str(caught.value)


def test_no_place_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places that were tried are named."""
    (tmp_path / "file").write_text("in the way")
    places = [tmp_path / "file" / "a", tmp_path / "file" / "b"]
    monkeypatch.setattr(native_tap, "places", lambda: places)
    with pytest.raises(BuildError, match="none of these can be written") as caught:
        native_tap.build()

    assert all(str(place) in str(caught.value) for place in places)


def test_no_native_recorder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tap writes with the native recorder: without that none is built, nor loaded if one is there."""
    place.mkdir()
    (place / native_tap.file_name()).touch()
    assert native_tap.find() is not None
    monkeypatch.setattr(recorder, "NATIVE", False)

    assert native_tap.load() is None
    with pytest.raises(BuildError, match="the native recorder is missing: install a C compiler and reinstall"):
        native_tap.build()


# -- finding


@pytest.mark.parametrize("changed", ["torch", "python", "tap.cpp", "tap_timing.h", "collective.h"])
def test_tap_of_something_else_is_not_found(
    changed: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was built for another torch, Python or source would crash the job: its name is another one."""
    place.mkdir()
    (place / native_tap.file_name()).touch()
    assert native_tap.find() == place / native_tap.file_name()
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    elif changed == "python":
        soabi = sysconfig.get_config_var("SOABI")
        monkeypatch.setattr(sysconfig, "get_config_var", {"SOABI": f"{soabi}-debug"}.get)
    else:
        sources = shutil.copytree(
            native_tap._SOURCES, tmp_path / "native", ignore=shutil.ignore_patterns("*.so", "*.partial")
        )
        monkeypatch.setattr(native_tap, "_SOURCES", sources)
        assert native_tap.find() is not None  # the same source elsewhere is the same
        with open(sources / changed, "a") as file:
            file.write("\n")

    assert native_tap.find() is None


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the package first, then the cache as XDG has it, which need not exist."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = native_tap.places()

    assert first == Path(native_tap.__file__).parent / "native"
    assert second == tmp_path / "cache" / "torchlens_perf"
    assert native_tap.find() is None or native_tap.find().parent == first


# -- doing without


def notes(folder: Path) -> list[str]:
    with recorded(folder) as recording:
        pass
    assert (recording.internal_errors, recording.unbalanced) == (0, 0)
    return recording.notes


@pytest.mark.parametrize(("ranks", "noted"), [(2, True), (1, False)])
def test_python_tap_is_noted(
    ranks: int, noted: bool, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of several ranks is told what it lacks and what to do; a lone process has no collectives."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert native_tap.load() is None

    assert any(NOTE in note for note in notes(tmp_path / "run")) == noted


def test_native_tap_needs_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has been built there is nothing to tell."""
    if native_tap.find() is None:
        native_tap.build()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    assert native_tap.load() is not None
    assert not any(NOTE in note for note in notes(tmp_path / "run"))


def test_tap_that_cannot_be_loaded(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file, or one that lacks a symbol of this torch: collectives are tapped from Python, with the note."""
    place.mkdir()
    (place / native_tap.file_name()).write_bytes(b"\x7fELF, and no more")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    assert any(NOTE in note for note in notes(tmp_path / "run"))
    (check,) = [check for check in examine() if check.subject == "tap on collectives"]
    assert (check.severity, check.remedy) == (WORSE, "torchlens-perf build-tap")
    assert "the native one cannot be loaded: " in str(check)
    assert native_tap.file_name() in str(check)


def test_doctor_line(place: Path) -> None:
    """Without the tap the doctor's line is a warning with the remedy, with it a word."""

    def line() -> tuple[int, str]:
        (check,) = [check for check in examine() if check.subject == "tap on collectives"]
        return check.severity, str(check)

    severity, text = line()
    assert severity == WORSE
    assert text.endswith("torchlens-perf build-tap")
    native_tap.load.cache_clear()
    place.mkdir()
    built = Path(native_tap.__file__).parent / "native" / native_tap.file_name()
    if not built.exists():
        pytest.skip("torchlens-perf build-tap has not been run here")
    shutil.copy(built, place)
    assert line() == (OK, "ok      tap on collectives: native")
