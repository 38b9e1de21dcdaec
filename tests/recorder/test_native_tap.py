"""The native tap on collectives: where it is looked for, whose it must be, and doing without it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.support.recording import recorded
from tests.support.taps import cache, copy_of_sources, load_anew, tap
from torchlens_perf.commands.doctor import LIMITED, OK, Check, examine
from torchlens_perf.recorder import native_tap, recorder
from torchlens_perf.run import tap_requirements

__all__ = ["cache", "load_anew", "tap"]  # fixtures
SOMEBODY = 54321

pytestmark = pytest.mark.skipif(not recorder.NATIVE, reason="the native recorder is missing: there is no C compiler")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def put(tap: Path, folder: Path) -> Path:
    """A tap for what is running, in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(tap, folder / native_tap.file_name()))


def doctor() -> Check:
    (check,) = [check for check in examine() if check.subject == "tap on collectives"]
    return check


# -- places


def test_places(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the package first, then the cache as XDG has it, which need not exist."""
    assert tap_requirements.places() == [tap_requirements.SOURCES, cache]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))

    assert tap_requirements.places() == [tap_requirements.SOURCES, tmp_path / "elsewhere" / "torchlens_perf"]


def test_both_places_are_loaded_from(cache: Path, tap: Path) -> None:
    """A tap in the cache is loaded; one beside the package goes first."""
    in_cache = put(tap, cache)
    assert native_tap.loaded_from() == in_cache
    native_tap.load.cache_clear()
    beside = put(tap, tap_requirements.SOURCES)
    assert native_tap.loaded_from() == beside


def test_damaged_tap_hides_no_other(cache: Path, tap: Path) -> None:
    """Where the one beside the package cannot be loaded, that in the cache is."""
    in_cache = put(tap, cache)
    (tap_requirements.SOURCES / in_cache.name).write_bytes(b"\x7fELF, and no more")

    assert native_tap.loaded_from() == in_cache


@pytest.mark.parametrize("home", [None, "", ".", "home", "~", "../home"])
@pytest.mark.parametrize("cache_home", [None, "", ".", "cache", "./.cache", "../cache"])
def test_current_folder_is_no_place(
    cache_home: str | None, home: str | None, cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a relative, empty or missing HOME and XDG_CACHE_HOME nothing is loaded from where the job was started."""
    for variable, value in (("XDG_CACHE_HOME", cache_home), ("HOME", home)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    here = tmp_path / "work" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for folder in {cache_home or "", os.path.join(home or "", ".cache"), "", ".cache", "~/.cache", "cache"}:
        put(tap, Path(folder, "torchlens_perf"))

    assert tap_requirements.places() == [tap_requirements.SOURCES]
    assert native_tap.load() is None
    assert doctor().severity == LIMITED


def test_home_counts_where_the_cache_is_relative(cache: Path, tap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG: a relative XDG_CACHE_HOME is as if it were not set."""
    in_cache = put(tap, cache)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")

    assert native_tap.loaded_from() == in_cache


def test_package_in_a_relative_folder(cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python was told a relative path to the package, nothing beside it is loaded."""
    put(tap, tap_requirements.SOURCES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tap_requirements, "SOURCES", tap_requirements.SOURCES.relative_to(tmp_path))

    assert native_tap.load() is None
    assert "native is not an absolute path" in doctor().finding


# -- names


@pytest.mark.parametrize(
    "changed", ["torch", "commit", "python", "flags", "tap.cpp", "tap_timing.h", "collective.h", "a new header"]
)
def test_tap_of_something_else_is_not_found(
    changed: str, cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was built for another torch, Python or source would crash the job: its name is another one."""
    put(tap, cache)
    assert native_tap.load() is not None
    native_tap.load.cache_clear()
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "2.13.0+xpu")
    elif changed == "commit":
        monkeypatch.setattr(torch.version, "git_version", "0123456789abcdef")
    elif changed == "python":
        soabi = sysconfig.get_config_var("SOABI")
        monkeypatch.setattr(sysconfig, "get_config_var", {"SOABI": f"{soabi}-debug"}.get)
    elif changed == "flags":
        monkeypatch.setattr(native_tap, "COMPILER_FLAGS", (*native_tap.COMPILER_FLAGS, "-O0"))
    else:
        monkeypatch.setattr(tap_requirements, "SOURCES", copy_of_sources(tmp_path / "copy"))
        assert native_tap.load() is not None  # the same source elsewhere is the same
        native_tap.load.cache_clear()
        with open(tap_requirements.SOURCES / changed.replace("a new header", "new.h"), "a") as file:
            file.write("\n")

    assert native_tap.load() is None


@pytest.mark.parametrize("commit", [None, "", "missing"])
def test_torch_that_does_not_know_its_commit(
    commit: str | None, cache: Path, tap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that was built from an archive has a tap too."""
    if commit == "missing":
        monkeypatch.delattr(torch.version, "git_version")
    else:
        monkeypatch.setattr(torch.version, "git_version", commit)
    put(tap, cache)

    assert "-unknown-" in native_tap.file_name()
    assert native_tap.load() is not None


def test_package_without_sources(cache: Path, tap: Path) -> None:
    """Some packagers leave sources out: there is no tap, and no error."""
    put(tap, cache)
    shutil.rmtree(tap_requirements.SOURCES)

    assert native_tap.load() is None


# -- whose it must be


def writable_file(file: Path) -> None:
    file.chmod(0o775)


def everybodys_file(file: Path) -> None:
    file.chmod(0o757)


def writable_folder(file: Path) -> None:
    file.parent.chmod(0o770)


def sticky_folder(file: Path) -> None:
    file.parent.chmod(0o1777)


def writable_cache(file: Path) -> None:
    file.parent.parent.chmod(0o777)


def writable_home(file: Path) -> None:
    file.parent.parent.parent.chmod(0o775)


def another_users_file(file: Path) -> None:
    os.chown(file, SOMEBODY, -1)


def another_users_folder(file: Path) -> None:
    os.chown(file.parent, SOMEBODY, -1)


def another_users_home(file: Path) -> None:
    os.chown(file.parent.parent.parent, SOMEBODY, -1)


def link_into_a_writable_folder(file: Path) -> None:
    shared = file.parents[3] / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    shutil.move(file, shared / file.name)
    file.symlink_to(shared / file.name)


@pytest.mark.parametrize(
    "opened",
    [
        writable_file, everybodys_file, writable_folder, sticky_folder, writable_cache, writable_home,
        link_into_a_writable_folder,
        pytest.param(another_users_file, marks=as_root),
        pytest.param(another_users_folder, marks=as_root),
        pytest.param(another_users_home, marks=as_root),
    ],
)  # fmt: skip
def test_what_others_can_write_is_not_loaded(
    opened, cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code does not run, collectives are tapped from Python, and the doctor says what is wrong with which place."""
    trace = tmp_path / "trace"
    monkeypatch.setenv("TINY_TAP_TRACE", str(trace))
    file = put(tap, cache)
    opened(file)

    assert missed(tmp_path / "run", monkeypatch) == file.name
    check = doctor()
    assert check.severity == LIMITED
    assert f"{file} is not used: " in check.finding
    assert "can be written by" in check.finding or f"belongs to user {SOMEBODY}" in check.finding
    assert not trace.exists()


def test_the_trace_of_loading(cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: a tap that is loaded leaves its trace."""
    trace = tmp_path / "trace"
    monkeypatch.setenv("TINY_TAP_TRACE", str(trace))
    put(shutil.copy(tap, tmp_path / "another.so"), cache)

    assert native_tap.load() is not None
    assert trace.exists()


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link"])
def test_what_is_no_file(kind: str, cache: Path) -> None:
    """Something else under the tap's name is not opened: a FIFO would never end."""
    path = cache / native_tap.file_name()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(cache / "nothing")

    assert native_tap.load() is None
    assert native_tap.problems() == []


# -- doing without


def missed(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> str:
    """What a rank of so many tells the sidecar that it has missed. Nothing of ours fails, and it notes nothing."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with recorded(folder) as recording:
        pass
    assert (recording.internal_errors, recording.unbalanced) == (0, 0)
    assert not any("tap" in note for note in recording.notes)
    return str(recording.metadata["missing_tap"])


@pytest.mark.parametrize(("ranks", "tells"), [(2, True), (1, False)])
def test_missing_tap_is_told(
    ranks: int, tells: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has others tells which file it has not found; a lone process has no collectives."""
    assert missed(tmp_path / "run", monkeypatch, ranks) == (native_tap.file_name() if tells else "")


def test_native_tap_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, where it has been built."""
    if native_tap.load() is None:
        pytest.skip("the native tap has not been built: torchlens-perf build-tap")

    assert missed(tmp_path / "run", monkeypatch) == ""


def test_tap_that_cannot_be_loaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file, or one that lacks a symbol of this torch: collectives are tapped from Python."""
    file = cache / native_tap.file_name()
    file.write_bytes(b"\x7fELF, and no more")

    assert missed(tmp_path / "run", monkeypatch) == file.name
    check = doctor()
    assert check.severity == LIMITED
    assert f"{file} is not used: it cannot be loaded: " in check.finding


def test_no_native_recorder(cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tap writes with the native recorder: without that none is loaded, even if one is there."""
    trace = tmp_path / "trace"
    put(shutil.copy(tap, tmp_path / "another.so"), cache)
    monkeypatch.setenv("TINY_TAP_TRACE", str(trace))
    monkeypatch.setattr(recorder, "NATIVE", False)

    assert native_tap.load() is None
    assert "the native recorder is missing" in doctor().remedy
    assert not trace.exists()


def test_doctor_with_the_tap(cache: Path, tap: Path) -> None:
    """With the tap the doctor's line is a word."""
    put(tap, cache)

    check = doctor()
    assert (check.severity, str(check)) == (OK, "ok      tap on collectives: native")


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        (None, "torchlens-perf build-tap, or nothing: the next run of several ranks has the native one built"),
        ("0", "torchlens-perf build-tap"),
        ("perhaps", "torchlens-perf build-tap"),
    ],
)
def test_doctor_without_the_tap(setting: str | None, remedy: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor says what is lost, and that nothing need be done, where that is so."""
    if setting is not None:
        monkeypatch.setenv("TORCHLENS_PERF_BUILD_TAP", setting)
    check = doctor()

    assert (check.severity, check.remedy) == (LIMITED, remedy)
    assert check.finding == "from Python: costs 50 us a collective, and asynchronous ones have no end time"
