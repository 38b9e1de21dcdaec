"""The build of the native tap by `torchlens-perf build-tap`: place of the file, and failures.

The real compiler builds a tiny source in place of the tap's.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.taps import TINY_SOURCE, cache, reset_tap_cache
from torchlens_perf.commands import tap_build
from torchlens_perf.commands.cli import main
from torchlens_perf.commands.doctor import run_checks
from torchlens_perf.commands.tap_build import BuildError
from torchlens_perf.recorder import native_tap, recorder

__all__ = ["cache", "reset_tap_cache"]  # Fixtures.


@pytest.fixture
def source(cache: Path) -> Path:
    """Return the source of a tap that compiles in a second."""
    path = native_tap.SOURCES / native_tap.SOURCE
    path.write_text(TINY_SOURCE)
    return path


def find_taps(folder: Path) -> list[str]:
    """Return the names of built and of partly built files in a folder."""
    return [path.name for path in folder.iterdir() if path.suffix not in (".c", ".h", ".cpp")]


# -- the place of the tap


def test_built_tap_is_written_next_to_the_package_and_loaded(source: Path, cache: Path) -> None:
    """The build leaves only the complete, executable tap there, for example in an image."""
    built = tap_build.build_tap()

    assert built == source.parent / native_tap.build_file_name()
    assert native_tap.find_loaded_tap_file() == built
    assert stat.S_IMODE(built.stat().st_mode) == 0o755
    assert (find_taps(source.parent), find_taps(cache)) == ([built.name], [])


@pytest.mark.parametrize("wrong", ["read-only", "writable by its group", "in a writable folder"])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_tap_is_built_in_a_private_cache_if_the_package_cannot_be_used(
    umask: int, wrong: str, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment shared by a group, each user builds in their own cache."""
    shutil.rmtree(cache.parent)
    package, access = source.parent, os.access
    if wrong == "read-only":
        # Root can write to any folder, so the kernel's answer for another user is simulated.
        monkeypatch.setattr(os, "access", lambda path, mode: path != package and access(path, mode))
    else:
        (package if "group" in wrong else package.parent).chmod(0o775)
    before = os.umask(umask)
    try:
        built = tap_build.build_tap()
    finally:
        os.umask(before)

    assert built == cache / native_tap.build_file_name() == native_tap.find_loaded_tap_file()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache.parent, cache)] == [0o700, 0o700]
    assert built.stat().st_mode & 0o022 == 0
    assert (find_taps(package), find_taps(cache)) == ([], [built.name])


def test_loadable_tap_is_not_built_again(source: Path) -> None:
    """A job on another node may have mapped the tap."""
    built = tap_build.build_tap()
    before = built.stat()
    native_tap.load_tap.cache_clear()

    assert tap_build.build_tap() == built
    assert (built.stat().st_ino, built.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_damaged_tap_is_replaced_by_a_new_build(source: Path) -> None:
    """The doctor suggests a build if the tap cannot be loaded."""
    damaged = source.parent / native_tap.build_file_name()
    damaged.write_bytes(b"\x7fELF, and no more")
    damaged.chmod(0o755)

    assert tap_build.build_tap() == damaged == native_tap.find_loaded_tap_file()


PROGRAM = """
import sys
from pathlib import Path
from torchlens_perf.commands.cli import main
from torchlens_perf.recorder import native_tap
native_tap.SOURCES = Path(sys.argv[1])
sys.exit(main(["build-tap"]))
"""


def start_build(source: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(source.parent)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.long
def test_concurrent_builds_all_return_the_same_loadable_tap(source: Path) -> None:
    """No build fails or leaves a file, whichever ends first."""
    builds = [start_build(source) for _ in range(3)]
    said = {build.communicate(timeout=200)[0].strip() for build in builds}

    assert [build.returncode for build in builds] == [0, 0, 0]
    assert said == {str(native_tap.find_loaded_tap_file())}
    assert find_taps(source.parent) == [native_tap.build_file_name()]


def test_tap_of_a_build_that_ended_first_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may have mapped the first tap in the meantime."""
    compile_tap, first = tap_build._compile, []

    def compile_after_another(folder: str) -> Path:
        if not first:
            first.append(0)
            first[0] = tap_build.build_tap().stat().st_ino
            native_tap.load_tap.cache_clear()
        return compile_tap(folder)

    monkeypatch.setattr(tap_build, "_compile", compile_after_another)

    assert tap_build.build_tap().stat().st_ino == first[0]


def test_build_does_not_run_ninja(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ninja is often missing. The ninja of this test fails and leaves a file."""
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text(f"#!/bin/sh\ntouch {tmp_path / 'run'}\nexit 1\n")
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ninja.parent}:{os.environ['PATH']}")

    assert tap_build.build_tap().is_file()
    assert not (tmp_path / "run").exists()


# -- what is missing


def test_missing_compiler_is_one_line_with_the_package_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command exits with 2, and the doctor has the same line."""
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setenv("CXX", "a-compiler-that-is-nowhere")
    message = "no C++ compiler (a-compiler-that-is-nowhere): install g++, or name one in CXX"

    assert main(["build-tap"]) == 2
    assert capsys.readouterr().err == f"torchlens-perf: {message}\n"
    assert [each.remedy for each in run_checks() if each.subject == "tap on collectives"] == [
        message
    ]


def test_missing_python_headers_are_reported_before_compiling(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian without python3-dev lacks the headers."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BuildError, match=r"Python's headers are missing in .*\(python3-dev"):
        tap_build.build_tap()


def test_missing_setuptools_is_reported(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "setuptools", None)
    with pytest.raises(BuildError, match=r"torch.utils.cpp_extension cannot .*: .*setuptools"):
        tap_build.build_tap()


def test_build_without_the_c_sources_is_refused(cache: Path) -> None:
    shutil.rmtree(native_tap.SOURCES)
    with pytest.raises(BuildError, match="without its native sources"):
        tap_build.build_tap()


def test_tap_is_not_built_without_the_native_recorder(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_import_error", ModuleNotFoundError())
    with pytest.raises(BuildError, match="the native recorder is missing: reinstall the wheel"):
        tap_build.build_tap()


@pytest.mark.parametrize(
    "wrong", ["relative home", "no home", "file in the way", "home not there", "writable home"]
)
def test_unusable_folders_are_all_listed_with_their_problems(
    wrong: str, source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.parent.chmod(0o777)
    home = tmp_path / "home"
    shutil.rmtree(cache.parent)
    expected = str(home)
    if wrong == "relative home":
        monkeypatch.setenv("HOME", "relative")
        expected = "neither HOME nor XDG_CACHE_HOME is an absolute path"
    elif wrong == "no home":
        monkeypatch.delenv("HOME")
        expected = "neither HOME nor XDG_CACHE_HOME is an absolute path"
    elif wrong == "file in the way":
        (home / ".cache").touch()
    elif wrong == "home not there":
        home.rmdir()
    else:
        home.chmod(0o777)
    with pytest.raises(BuildError, match="no folder for the tap: ") as caught:
        tap_build.build_tap()

    assert f"{source.parent} can be written by everybody" in str(caught.value)
    assert expected in str(caught.value)
    assert find_taps(source.parent) == []


# -- a build that fails


def test_compilers_message_is_printed_and_no_file_is_left(source: Path) -> None:
    """The command exits with 2."""
    source.write_text("#error this torch is too old\n")
    build = start_build(source)
    out, err = build.communicate(timeout=200)

    assert (build.returncode, out) == (2, "")
    assert "error: #error this torch is too old" in err
    assert err.splitlines()[-1].startswith("torchlens-perf: the compiler failed: ")
    assert find_taps(source.parent) == []


def test_built_tap_that_cannot_be_loaded_is_not_installed(source: Path) -> None:
    """The compiler may not fit Python or torch."""
    source.write_text('extern "C" __attribute__((visibility("default"))) int nothing;\n')
    with pytest.raises(BuildError, match=r"^the built tap cannot be loaded: "):
        tap_build.build_tap()

    assert find_taps(source.parent) == []
