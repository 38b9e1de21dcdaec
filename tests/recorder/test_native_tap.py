"""The native tap on collectives: where it is searched, who must own it, and its absence."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.support.recording import recorded
from tests.support.taps import cache, copy_of_sources, reset_tap_cache, tap
from torchlens_perf.commands.doctor import LIMITED, OK, Check, run_checks
from torchlens_perf.hooks.collectives import process_group_hooks
from torchlens_perf.recorder import native_tap

# The following imports are fixtures.
__all__ = ["cache", "reset_tap_cache", "tap"]
SOMEBODY = 54321
BUILD = "torchlens-perf build-tap builds the native tap"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def put(tap: Path, folder: Path) -> Path:
    """Create a tap for the running torch in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(tap, folder / native_tap.build_file_name()))


def doctor() -> Check:
    (check,) = [check for check in run_checks() if check.subject == "tap on collectives"]
    return check


# -- folders that are searched


def test_tap_is_searched_in_the_package_and_then_in_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG's cache folder need not exist."""
    assert native_tap.tap_folders() == [native_tap.SOURCES, cache]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))

    assert native_tap.tap_folders() == [
        native_tap.SOURCES,
        tmp_path / "elsewhere" / "torchlens_perf",
    ]


def test_tap_in_the_package_is_loaded_before_the_one_in_the_cache(cache: Path, tap: Path) -> None:
    in_cache = put(tap, cache)
    assert native_tap.find_loaded_tap_file() == in_cache
    native_tap.load_tap.cache_clear()
    beside = put(tap, native_tap.SOURCES)
    assert native_tap.find_loaded_tap_file() == beside


def test_tap_in_the_cache_is_loaded_if_the_packages_is_damaged(cache: Path, tap: Path) -> None:
    in_cache = put(tap, cache)
    (native_tap.SOURCES / in_cache.name).write_bytes(b"\x7fELF, and no more")

    assert native_tap.find_loaded_tap_file() == in_cache


@pytest.mark.parametrize("home", [None, "", ".", "home", "~", "../home"])
@pytest.mark.parametrize("cache_home", [None, "", ".", "cache", "./.cache", "../cache"])
def test_tap_is_not_searched_in_the_working_directory(
    cache_home: str | None,
    home: str | None,
    cache: Path,
    tap: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HOME and XDG_CACHE_HOME are relative, empty or missing."""
    for variable, value in (("XDG_CACHE_HOME", cache_home), ("HOME", home)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    here = tmp_path / "work" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for folder in {
        cache_home or "",
        os.path.join(home or "", ".cache"),
        "",
        ".cache",
        "~/.cache",
        "cache",
    }:
        put(tap, Path(folder, "torchlens_perf"))

    assert native_tap.tap_folders() == [native_tap.SOURCES]
    assert native_tap.load_tap() is None
    assert doctor().severity == LIMITED


def test_home_is_used_if_the_path_in_xdg_cache_home_is_relative(
    cache: Path, tap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative XDG_CACHE_HOME counts as unset by the XDG specification."""
    in_cache = put(tap, cache)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")

    assert native_tap.find_loaded_tap_file() == in_cache


def test_tap_is_not_searched_in_a_relative_package_folder(
    cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's path to the package may be relative."""
    put(tap, native_tap.SOURCES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(native_tap, "SOURCES", native_tap.SOURCES.relative_to(tmp_path))

    assert native_tap.load_tap() is None
    assert "native is not an absolute path" in doctor().finding


# -- file names


@pytest.mark.parametrize(
    "changed",
    [
        "torch",
        "commit",
        "python",
        "tap.cpp",
        "tap_timing.h",
        "collective.h",
        "a new header",
    ],
)
def test_tap_built_for_another_torch_or_python_is_not_found(
    changed: str, cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tap for another torch, Python or source would crash the job. Its file name differs."""
    put(tap, cache)
    assert native_tap.load_tap() is not None
    native_tap.load_tap.cache_clear()
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "2.13.0+xpu")
    elif changed == "commit":
        monkeypatch.setattr(torch.version, "git_version", "0123456789abcdef")
    elif changed == "python":
        soabi = sysconfig.get_config_var("SOABI")
        monkeypatch.setattr(sysconfig, "get_config_var", {"SOABI": f"{soabi}-debug"}.get)
    else:
        monkeypatch.setattr(native_tap, "SOURCES", copy_of_sources(tmp_path / "copy"))
        # The same source in another folder gives the same file name.
        assert native_tap.load_tap() is not None
        native_tap.load_tap.cache_clear()
        with open(native_tap.SOURCES / changed.replace("a new header", "new.h"), "a") as file:
            file.write("\n")

    assert native_tap.load_tap() is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("_torchlens_perf_tap-2.12.1+cu128-{rest}", "torch 2.12.1+cu128, not {torch.__version__}"),
        (
            "_torchlens_perf_tap-{torch.__version__}-0123456789ab-{rest}",
            "another Python, build of torch or version of torchlens_perf",
        ),
    ],
)
def test_tap_built_for_another_torch_is_refused_with_the_reason(
    name: str,
    reason: str,
    cache: Path,
    tap: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run and the doctor have the reason. The tap is not loaded."""
    trace = tmp_path / "trace"
    monkeypatch.setenv("TINY_TAP_TRACE", str(trace))
    rest = f"cpython-{sysconfig.get_config_var('SOABI')}-0123456789ab.so"
    shutil.copy(tap, cache / name.format(torch=torch, rest=rest))
    expected = f"the native tap was built for {reason.format(torch=torch)}"

    assert missed(tmp_path / "run", monkeypatch) == f"{BUILD} ({expected})"
    assert doctor().finding.startswith(f"{expected}. ")
    assert not trace.exists()


@pytest.mark.parametrize("commit", [None, "", "missing"])
def test_torch_without_a_commit_still_has_a_tap_name(
    commit: str | None, cache: Path, tap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that was built from an archive has no commit."""
    if commit == "missing":
        monkeypatch.delattr(torch.version, "git_version")
    else:
        monkeypatch.setattr(torch.version, "git_version", commit)
    put(tap, cache)

    assert "-unknown-" in native_tap.build_file_name()
    assert native_tap.load_tap() is not None


def test_package_without_c_sources_has_no_tap(cache: Path, tap: Path) -> None:
    """Some packagers leave the C sources out. The missing tap is no error."""
    put(tap, cache)
    shutil.rmtree(native_tap.SOURCES)

    assert native_tap.load_tap() is None


# -- owners


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
def test_tap_that_other_users_can_write_is_not_loaded(
    opened, cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives are tapped from Python instead, and the doctor reports the problem of each
    folder.
    """
    trace = tmp_path / "trace"
    monkeypatch.setenv("TINY_TAP_TRACE", str(trace))
    file = put(tap, cache)
    opened(file)

    assert f"{BUILD} ({file} is not used: " in missed(tmp_path / "run", monkeypatch)
    check = doctor()
    assert check.severity == LIMITED
    assert f"{file} is not used: " in check.finding
    assert "can be written by" in check.finding or f"belongs to user {SOMEBODY}" in check.finding
    assert not trace.exists()


def test_loaded_tap_leaves_the_trace_that_shows_its_loading(
    cache: Path, tap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this control, the test above could pass for the wrong reason."""
    trace = tmp_path / "trace"
    monkeypatch.setenv("TINY_TAP_TRACE", str(trace))
    put(shutil.copy(tap, tmp_path / "another.so"), cache)

    assert native_tap.load_tap() is not None
    assert trace.exists()


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link"])
def test_tap_that_is_not_a_regular_file_is_not_opened(kind: str, cache: Path) -> None:
    """Opening a FIFO would block forever."""
    path = cache / native_tap.build_file_name()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(cache / "nothing")

    assert native_tap.load_tap() is None
    assert native_tap.list_tap_problems() == []


# -- recording without a tap


def missed(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> str:
    """Return the sentence on the missing tap in the metadata of a rank, one of `ranks`.

    Recording has no errors and no note.
    """
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with recorded(folder) as recording:
        pass
    assert (recording.internal_errors, recording.unbalanced) == (0, 0)
    assert not any("tap" in note for note in recording.notes)
    return str(recording.metadata["missing_tap"])


@pytest.mark.parametrize(("ranks", "tells"), [(2, True), (1, False)])
def test_missing_tap_is_noted_in_jobs_of_several_ranks(
    ranks: int, tells: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note has the command that builds it. A single process has no collectives."""
    assert missed(tmp_path / "run", monkeypatch, ranks) == (BUILD if tells else "")


def test_no_note_is_given_if_the_native_tap_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses the real tap if it has been built."""
    if native_tap.load_tap() is None:
        pytest.skip("the native tap has not been built: torchlens-perf build-tap")

    assert missed(tmp_path / "run", monkeypatch) == ""


def test_tap_that_cannot_be_loaded_is_in_the_metadata_and_in_doctor(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is damaged or lacks a symbol of this torch."""
    file = cache / native_tap.build_file_name()
    file.write_bytes(b"\x7fELF, and no more")

    assert f"{file} is not used: it cannot be loaded" in missed(tmp_path / "run", monkeypatch)
    check = doctor()
    assert check.severity == LIMITED
    assert f"{file} is not used: it cannot be loaded: " in check.finding


def test_doctor_reports_an_available_tap(cache: Path, tap: Path) -> None:
    put(tap, cache)

    check = doctor()
    why = ", which costs less than torch's own hooks" * process_group_hooks.are_available()
    assert (check.severity, str(check)) == (OK, f"ok      tap on collectives: native{why}")


def test_doctor_reports_a_missing_tap_with_the_command_that_builds_it(cache: Path) -> None:
    check = doctor()

    assert (check.severity, check.remedy) == (LIMITED, "torchlens-perf build-tap")
    cost_us = 9 if process_group_hooks.are_available() else 50
    assert check.finding == (
        f"not compiled for this torch. Each collective takes {cost_us} us longer, asynchronous ones have"
        " no end times, and FLOPs are not counted"
    )
