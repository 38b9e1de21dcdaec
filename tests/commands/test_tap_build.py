"""The build of the native tap on collectives: requirements, location, and messages if it fails."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.taps import (
    cache,
    compiler,
    copying,
    environ_with_torch,
    has_ended,
    reset_tap_cache,
    runs,
    tap,
    tap_name,
    tiny_torch,
)
from torchlens_perf.commands import tap_build
from torchlens_perf.commands.cli import main
from torchlens_perf.errors import TorchlensPerfError
from torchlens_perf.recorder import native_tap, recorder
from torchlens_perf.run import tap_requirements
from torchlens_perf.run.tap_requirements import BuildError

__all__ = ["cache", "reset_tap_cache", "tap"]  # Fixtures.
pytestmark = pytest.mark.skipif(
    not recorder.NATIVE, reason="the native recorder is missing: there is no C compiler"
)


@pytest.fixture
def cxx(tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set CXX to a compiler that copies a prebuilt tap."""
    made = copying(tmp_path / "cxx", tap)
    monkeypatch.setenv("CXX", str(made))
    return made


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets CXX to a script with the given commands."""

    def make(script: str) -> None:
        monkeypatch.setenv("CXX", str(compiler(tmp_path / "cxx", script)))

    return make


def made_in(place: Path) -> set[str]:
    """Return the names of the files that a build left in a folder, without its lock."""
    return {
        path.name for path in place.iterdir() if path.suffix not in (".lock", ".c", ".h", ".cpp")
    }


def in_background() -> Path:
    return tap_build.build_in_background(native_tap.build_file_name())


# -- the location of the tap


def test_built_tap_is_written_next_to_the_package(cache: Path, cxx: Path) -> None:
    """The build leaves only the complete, executable tap there, for example in an image."""
    built = tap_build.build_tap()

    assert (
        built
        == tap_requirements.SOURCES / native_tap.build_file_name()
        == native_tap.find_loaded_tap_file()
    )
    assert stat.S_IMODE(built.stat().st_mode) == 0o755
    assert not list(tap_requirements.SOURCES.glob(".build-*"))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("wrong", ["package writable by its group", "package in a writable folder"])
def test_tap_is_built_in_the_cache_if_others_can_write_to_the_package(
    wrong: str, cache: Path, cxx: Path
) -> None:
    """In an environment shared by a group, each user builds in their own cache."""
    (tap_requirements.SOURCES if "group" in wrong else tap_requirements.SOURCES.parent).chmod(0o775)

    assert (
        tap_build.build_tap()
        == cache / native_tap.build_file_name()
        == native_tap.find_loaded_tap_file()
    )
    assert not list(tap_requirements.SOURCES.glob("*.so"))


def test_background_build_writes_the_tap_to_the_cache(cache: Path, cxx: Path) -> None:
    """All environments of a user share the tap, and no file is added to those installed by pip."""
    assert (
        in_background() == cache / native_tap.build_file_name() == native_tap.find_loaded_tap_file()
    )
    assert made_in(tap_requirements.SOURCES) == set()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_built_files_are_private_for_any_umask(
    variable: str,
    umask: int,
    cache: Path,
    cxx: Path,
    tap: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tap, its folders and the compiler's temporary files are included."""
    shutil.rmtree(cache.parent)
    if variable == "XDG_CACHE_HOME":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "made"))
    seen = tmp_path / "seen"
    copying(cxx, tap, f'stat -c %a . "$TMPDIR" > {seen}; touch new; stat -c %a new >> {seen}')
    before = os.umask(umask)
    try:
        built = in_background()
    finally:
        os.umask(before)

    made = [path for path in (tmp_path / "home").rglob("*") if not path.is_symlink()]
    assert built in made
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    assert [stat.S_IMODE(path.stat().st_mode) for path in (built.parent, built.parent.parent)] == [
        0o700,
        0o700,
    ]
    assert seen.read_text().split() == ["700", "700", "600"]


def test_loadable_tap_is_not_built_again(cache: Path, cxx: Path) -> None:
    """A job on another node may have the tap mapped."""
    built = tap_build.build_tap()
    before = built.stat()
    native_tap.load_tap.cache_clear()

    assert tap_build.build_tap() == in_background() == built
    assert (built.stat().st_ino, built.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(runs(cxx)) == 1


@pytest.mark.parametrize("content", [b"", b"\x7fELF, and no more", b"text"])
@pytest.mark.parametrize("build", [tap_build.build_tap, in_background])
def test_damaged_tap_is_replaced_by_a_new_build(
    build: Callable[[], Path],
    content: bytes,
    cache: Path,
    cxx: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The doctor suggests a build if the tap cannot be loaded."""
    damaged = (
        tap_requirements.SOURCES if build is tap_build.build_tap else cache
    ) / native_tap.build_file_name()
    damaged.write_bytes(content)
    damaged.chmod(0o755)

    assert build() == damaged
    assert native_tap.find_loaded_tap_file() == damaged


def test_folder_left_by_a_killed_build_is_removed(cache: Path, cxx: Path) -> None:
    """The next build removes the folder, and keeps other files."""
    (cache / ".build-old").mkdir()
    (cache / ".build-old" / "part.o").touch()
    (cache / "another-torch.so").touch()
    in_background()

    assert made_in(cache) == {native_tap.build_file_name(), "another-torch.so"}


# -- requirements of the build


@pytest.mark.parametrize("build", [tap_build.build_tap, in_background])
def test_missing_compiler_is_one_line_with_the_package_to_install(
    build: Callable[[], Path],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command exits with 2."""
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setenv("CXX", "a-compiler-that-is-nowhere")
    message = "no C++ compiler: install g++, or name one in CXX"
    with pytest.raises(BuildError) as caught:
        build()

    assert (
        str(caught.value)
        == message
        == tap_requirements.why_not_buildable(native_tap.build_file_name())
    )
    assert main(["build-tap"]) == 2
    assert capsys.readouterr().err == f"torchlens-perf: {message}\n"
    assert issubclass(BuildError, TorchlensPerfError)


@pytest.mark.parametrize("command", ["{cxx} -O1", "env -u NOTHING {cxx}", "'{cxx}' -DA='b c'"])
def test_cxx_may_contain_arguments(
    command: str, cache: Path, cxx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is "ccache g++"."""
    monkeypatch.setenv("CXX", command.format(cxx=cxx))

    assert tap_build.build_tap().is_file()
    (arguments,) = runs(cxx)
    assert ("-O1" in arguments.split()) == ("-O1" in command)


def test_unbalanced_quote_in_cxx_is_reported_in_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback is printed."""
    monkeypatch.setenv("CXX", "g++ 'a")

    assert (
        tap_requirements.why_not_buildable(native_tap.build_file_name())
        == "CXX cannot be read: No closing quotation"
    )


def test_missing_python_headers_are_reported_before_compiling(
    cache: Path, cxx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian without python3-dev lacks the headers."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))

    assert "install them (python3-dev" in (
        tap_requirements.why_not_buildable(native_tap.build_file_name()) or ""
    )
    with pytest.raises(BuildError, match="Python's headers are missing in "):
        tap_build.build_tap()
    assert runs(cxx) == []


def test_missing_torch_headers_are_reported_with_the_searched_folder(
    cache: Path, cxx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some distributions omit the headers."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(BuildError, match="the installed torch lacks its C") as caught:
        tap_build.build_tap()

    assert str(tmp_path / "torch" / "include") in str(caught.value)
    assert runs(cxx) == []


def test_build_without_the_c_sources_is_refused(cache: Path, cxx: Path) -> None:
    name = native_tap.build_file_name()
    shutil.rmtree(tap_requirements.SOURCES)

    assert (
        tap_requirements.why_not_buildable(name)
        == "the package came without its native sources: reinstall torchlens_perf"
    )
    with pytest.raises(BuildError, match="without its native sources"):
        tap_build.build_tap()


def test_tap_is_not_built_without_the_native_recorder(
    cache: Path, cxx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "NATIVE", False)
    with pytest.raises(
        BuildError, match="the native recorder is missing: install a C compiler and reinstall"
    ):
        tap_build.build_tap()


@pytest.mark.parametrize(
    "wrong", ["no home", "file in the way", "home not there", "writable home", "no variables"]
)
def test_unusable_folders_are_all_listed_with_their_problems(
    wrong: str, cache: Path, cxx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder is created."""
    tap_requirements.SOURCES.chmod(0o777)
    shutil.rmtree(cache.parent)
    said = str(tmp_path / "home")
    if wrong == "no home":
        monkeypatch.setenv("HOME", "relative")
        said = "neither HOME nor XDG_CACHE_HOME is an absolute path"
    elif wrong == "no variables":
        monkeypatch.delenv("HOME")
        said = "neither HOME nor XDG_CACHE_HOME is an absolute path"
    elif wrong == "file in the way":
        (tmp_path / "home" / ".cache").touch()
    elif wrong == "home not there":
        (tmp_path / "home").rmdir()
    else:
        (tmp_path / "home").chmod(0o777)
    for attempt in (tap_build.build_tap, in_background):
        with pytest.raises(BuildError, match="no folder for the tap: ") as caught:
            attempt()
        assert f"{tap_requirements.SOURCES} can be written by everybody" in str(caught.value)
        assert said in str(caught.value)

    assert said in str(tap_requirements.why_not_buildable(native_tap.build_file_name()))
    assert not any(path.is_dir() for path in (tmp_path / "home").glob("*"))


def test_folder_on_a_file_system_without_modes_is_refused(
    cache: Path, cxx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some network disks all users can write to every folder, whatever its mode."""
    tap_requirements.SOURCES.chmod(0o777)
    shutil.rmtree(cache.parent)
    mkdir = os.mkdir

    def mkdir_for_all(path: str, *arguments: int, **options: int) -> None:
        mkdir(path, *arguments, **options)
        os.chmod(path, 0o777)

    monkeypatch.setattr(os, "mkdir", mkdir_for_all)
    with pytest.raises(BuildError, match=r"can be written by everybody"):
        in_background()

    assert runs(cxx) == []


def test_unwritable_folders_are_refused(
    cache: Path, cxx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test runs as root, so the kernel's answers for another user are simulated."""
    refused = {tap_requirements.SOURCES, cache}
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path not in refused and access(path, mode))

    assert (
        tap_requirements.why_not_buildable(native_tap.build_file_name())
        == f"no folder for the tap: {cache} cannot be written; {tap_requirements.SOURCES} cannot be"
        " written"
    )


# -- a compiler that fails


def test_message_has_the_first_compiler_error_and_no_file_is_left(
    cache: Path, says: Callable[[str], None]
) -> None:
    """The message has no warnings and no control characters."""
    says(
        'echo part > "$out"; printf "a.cpp:1: warning: old\\na.cpp:7: error: \\033[31mno file\\n"'
        " >&2; exit 1"
    )
    with pytest.raises(BuildError) as caught:
        tap_build.build_tap()

    assert str(caught.value) == "the compiler failed: a.cpp:7: error:  [31mno file"
    assert not list(tap_requirements.SOURCES.glob("*.so")) + list(
        tap_requirements.SOURCES.glob(".build-*")
    )
    assert native_tap.load_tap() is None


def test_compiler_runs_in_the_c_locale(
    cache: Path, says: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is searched for "error", so it must not be in the user's language."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    says('[ "$LC_ALL" = C ] && echo "x.cpp:1: error: found" || echo "x.cpp:1: Fehler"; exit 1')
    with pytest.raises(BuildError, match=r"the compiler failed: x.cpp:1: error: found"):
        tap_build.build_tap()


def test_message_has_the_exit_status_of_a_compiler_without_output(
    cache: Path, says: Callable[[str], None]
) -> None:
    says("exit 3")
    with pytest.raises(BuildError, match=r"^the compiler failed: status 3$"):
        tap_build.build_tap()


def test_executable_file_that_is_no_compiler_is_reported(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cxx").write_bytes(b"\x00\x01")
    (tmp_path / "cxx").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    with pytest.raises(BuildError, match="cxx cannot be run: "):
        tap_build.build_tap()


def test_built_tap_that_cannot_be_loaded_is_not_installed(
    cache: Path, says: Callable[[str], None]
) -> None:
    """The compiler may not fit Python or torch."""
    says('echo nothing > "$out"')
    with pytest.raises(BuildError, match=r"^the built tap cannot be loaded: "):
        tap_build.build_tap()

    assert not list(tap_requirements.SOURCES.glob("*.so"))


def test_endless_compiler_is_killed_with_its_children(
    cache: Path, says: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says that the compiler was killed."""
    monkeypatch.setattr(tap_build, "_TIMEOUT_S", 1)
    says(f"sleep 1000 & echo $! > {tmp_path / 'child'}; wait")
    with pytest.raises(BuildError, match="the compiler did not end within 1 s"):
        tap_build.build_tap()

    assert has_ended(int((tmp_path / "child").read_text()))
    assert not list(tap_requirements.SOURCES.glob(".build-*"))


# -- builds in the background


def test_failed_background_build_is_not_repeated_with_the_same_compiler(
    cache: Path, says: Callable[[str], None], tmp_path: Path
) -> None:
    """The message has the compiler's error and the remedy. A manual build is repeated."""
    says(f"echo x >> {tmp_path / 'cxx.runs'}; echo 'tap.cpp:7: error: too old' >&2; exit 1")
    name = native_tap.build_file_name()
    for _ in range(3):
        with pytest.raises(BuildError, match=r"^the compiler failed: tap.cpp:7: error: too old$"):
            in_background()

    assert len(runs(tmp_path / "cxx")) == 1
    again = "correct that, then run torchlens-perf build-tap"
    assert (
        tap_requirements.why_not_buildable(name)
        == f"the compiler failed: tap.cpp:7: error: too old; {again}"
    )
    assert (
        tap_requirements.why_not_buildable(name.replace("cpython", "pypy")) is None
    )  # No failed build is recorded for another Python.
    with pytest.raises(BuildError):
        tap_build.build_tap()
    assert len(runs(tmp_path / "cxx")) == 2


@pytest.mark.parametrize("changed", ["the compiler", "its arguments", "another compiler"])
def test_failed_build_is_repeated_with_another_compiler(
    changed: str,
    cache: Path,
    tap: Path,
    says: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler may have been updated. If the build succeeds, the failure is forgotten."""
    says(
        f'[ -e {tmp_path / "mended"} ] && cat {tap} > "$out" && exit; echo "error: too old" >&2;'
        " exit 1"
    )
    with pytest.raises(BuildError):
        in_background()
    (tmp_path / "mended").touch()
    with pytest.raises(BuildError):
        in_background()
    if changed == "the compiler":
        os.utime(tmp_path / "cxx")
    elif changed == "its arguments":
        monkeypatch.setenv("CXX", f"{tmp_path / 'cxx'} -O1")
    else:
        monkeypatch.setenv("CXX", str(copying(tmp_path / "another", tap)))

    assert in_background().is_file()
    assert made_in(cache) == {native_tap.build_file_name()}


@pytest.mark.parametrize(
    "script",
    [
        "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        "echo 'fatal error: error writing to /tmp/x.s: No space left on device' >&2; exit 1",
        "echo 'virtual memory exhausted: Cannot allocate memory' >&2; exit 1",
        "kill -KILL $$",
    ],
)
def test_build_is_tried_again_after_a_transient_failure(
    script: str, cache: Path, says: Callable[[str], None], tap: Path, tmp_path: Path
) -> None:
    """Memory or the disk ran out in the first build."""
    says(f'[ -e {tmp_path / "room"} ] && cat {tap} > "$out" && exit; {script}')
    with pytest.raises(BuildError, match="the compiler failed: "):
        in_background()
    (tmp_path / "room").touch()

    assert in_background().is_file()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"compiler": 3}', "\0"])
def test_unreadable_record_of_a_failed_build_is_ignored(
    content: str, cache: Path, cxx: Path
) -> None:
    (cache / native_tap.build_file_name().replace(".so", ".failed")).write_text(content)

    assert tap_requirements.why_not_buildable(native_tap.build_file_name()) is None
    assert in_background().is_file()


def test_no_tap_is_built_if_the_ranks_have_another_torch(cache: Path, cxx: Path) -> None:
    """The script may import another torch than its sidecar."""
    with pytest.raises(
        BuildError,
        match="the ranks and their sidecar use different versions of torch: run torchlens-perf",
    ):
        tap_build.build_in_background(native_tap.build_file_name().replace("tap-", "tap-9."))

    assert runs(cxx) == []


@pytest.mark.parametrize("build", [tap_build.build_tap, in_background])
def test_second_process_does_not_wait_for_a_running_build(
    build: Callable[[], Path], cache: Path, cxx: Path
) -> None:
    """The second process reports why there is no tap yet."""
    place = tap_requirements.SOURCES if build is tap_build.build_tap else cache
    with open(place / "tap.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match=r"^another process is building the tap$"):
            build()
        assert runs(cxx) == []

    assert build().is_file()


def test_lock_that_is_a_link_is_not_followed(cache: Path, cxx: Path, tmp_path: Path) -> None:
    """No file is created at the link's target."""
    (cache / "tap.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match="no lock in "):
        in_background()

    assert not (tmp_path / "elsewhere").exists()


PROGRAM = """
import sys
from torchlens_perf.commands import tap_build
from torchlens_perf.run.tap_requirements import BuildError
try:
    print(tap_build.build_in_background(sys.argv[1]))
except BuildError as error:
    print("none:", error)
"""


def processes(count: int, site: Path, *arguments: str, **environ: str) -> list[str]:
    """Run PROGRAM in several processes at the same time, and return their output.

    The processes use the torch in `site`.
    """
    command = [sys.executable, "-c", PROGRAM, *arguments]
    started = [
        subprocess.Popen(
            command, env=environ_with_torch(site, **environ), stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    return [process.communicate(timeout=110)[0].strip() for process in started]


def test_one_of_eight_sidecars_builds_the_tap_and_none_waits(
    cache: Path, tap: Path, tmp_path: Path
) -> None:
    """Only one sidecar of a user compiles, in whatever environment, and the others do not wait."""
    site = tiny_torch(tmp_path / "site")
    cxx = copying(
        tmp_path / "cxx", tap, before=f"while [ ! -e {tmp_path / 'go'} ]; do sleep 0.01; done"
    )
    name = tap_name(site)
    # The process with the lock keeps it until the seven others have ended.
    command = [sys.executable, "-c", PROGRAM, name]
    first = subprocess.Popen(
        command, env=environ_with_torch(site, CXX=str(cxx)), stdout=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 60
    while not runs(cxx) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    others = processes(7, site, name, CXX=str(cxx))
    (tmp_path / "go").touch()

    assert first.communicate(timeout=60)[0].strip() == str(cache / name)
    assert others == ["none: another process is building the tap"] * 7
    assert processes(1, site, name, CXX=str(cxx)) == [str(cache / name)]
    assert len(runs(cxx)) == 1
    assert made_in(cache) == {name}


def test_obstacles_to_a_build_are_found_before_torch_is_imported(
    cache: Path, tmp_path: Path
) -> None:
    """The import of torch takes seconds."""
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    no_compiler = {"CXX": "nowhere", "PATH": str(tmp_path)}

    assert processes(1, site, "a-tap.so", **no_compiler) == [
        "none: no C++ compiler: install g++, or name one in CXX"
    ]
    with open(cache / "tap.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert processes(1, site, "a-tap.so") == ["none: another process is building the tap"]
