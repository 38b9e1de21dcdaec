"""Tests of checks that no other user can change a file, with real modes, owners and links."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from torchlens_perf.run.ownership import (
    TooLargeError,
    read_regular_file,
    replace_private_file,
    why_others_can_change,
)

SOMEBODY = 54321

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file three folders deep. The given user owns file and folders."""
    path = tmp_path / "home" / "cache" / "ours" / "tap.so"
    path.parent.mkdir(parents=True)
    path.touch()
    for each in (path, *list(path.parents)[:3]):
        each.chmod(0o755)
    return path


def test_own_file_is_accepted(file: Path) -> None:
    """Files of the system, which belong to root, are accepted too."""
    assert why_others_can_change(file) is None
    assert why_others_can_change(file.parent) is None
    assert why_others_can_change(Path("/bin/sh")) is None


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize(
    ("bits", "who"), [(0o020, "group"), (0o002, "everybody"), (0o022, "everybody")]
)
def test_path_that_others_can_write_to_is_refused(
    level: int, bits: int, who: str, file: Path
) -> None:
    """The error names the writable part of the path."""
    part = [file, *file.parents][level]
    part.chmod(0o755 | bits)
    refused = why_others_can_change(file)

    assert refused is not None
    assert refused.startswith(f"{part} can be written by {who}")
    part.chmod(0o755)
    assert why_others_can_change(file) is None


@as_root
@pytest.mark.parametrize("level", range(4))
def test_path_of_another_user_is_refused(level: int, file: Path) -> None:
    """File, folder and all parents must belong to the user, whatever their mode is."""
    part = [file, *file.parents][level]
    os.chown(part, SOMEBODY, -1)

    assert why_others_can_change(file) == f"{part} belongs to user {SOMEBODY}"


@as_root
def test_only_own_and_roots_files_are_accepted() -> None:
    """For any user, root's files are as safe as the user's own ones."""
    # pytest's own folders are closed to other users.
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        owners = {"roots": 0, "own": SOMEBODY, "theirs": SOMEBODY + 1}
        for name, owner in owners.items():
            (folder / name).touch()
            os.chown(folder / name, owner, -1)
        os.seteuid(SOMEBODY)
        try:
            refused = {name: why_others_can_change(folder / name) for name in owners}
        finally:
            os.seteuid(0)

        theirs = f"{folder / 'theirs'} belongs to user {SOMEBODY + 1}"
        assert refused == {"roots": None, "own": None, "theirs": theirs}


@as_root
def test_sticky_folder_is_accepted_only_as_a_parent(file: Path) -> None:
    """/tmp is such a parent. A parent that belongs to another user is not accepted."""
    above = file.parent.parent
    above.chmod(0o1777)
    assert why_others_can_change(file) is None
    assert why_others_can_change(above) == f"{above} can be written by everybody"
    os.chown(above, SOMEBODY, -1)
    assert why_others_can_change(file) == f"{above} belongs to user {SOMEBODY}"


def chain(folder: Path, length: int, end: Path) -> Path:
    """Return a symbolic link to a link to a link ... to `end`."""
    target = end
    for number in range(length):
        link = folder / f"link{number}"
        link.symlink_to(target)
        target = link
    return target


@pytest.mark.parametrize("make", [os.path.abspath, os.path.relpath], ids=["absolute", "relative"])
def test_writable_folder_behind_a_link_is_refused(
    make: Callable[..., str], file: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    target = make(file.parent) if make is os.path.abspath else make(file.parent, start)
    (start / "link").symlink_to(target)

    assert why_others_can_change(start / "link" / file.name) is None
    assert why_others_can_change(start / "link" / ".." / "ours" / file.name) is None
    file.parent.parent.chmod(0o777)
    assert (
        why_others_can_change(start / "link" / file.name)
        == f"{file.parent.parent} can be written by everybody"
    )


def test_link_in_a_writable_folder_is_refused(file: Path, tmp_path: Path) -> None:
    """A user who can replace the link decides where it leads."""
    start = tmp_path / "start"
    start.mkdir()
    (start / "link").symlink_to(file)
    start.chmod(0o777)

    assert why_others_can_change(start / "link") == f"{start} can be written by everybody"


@as_root
def test_link_of_another_user_is_refused(file: Path, tmp_path: Path) -> None:
    """Any user can make a link to this user's file in a sticky folder."""
    start = tmp_path / "start"
    start.mkdir()
    start.chmod(0o1777)
    link = start / "link"
    link.symlink_to(file)
    assert why_others_can_change(link) is None
    os.lchown(link, SOMEBODY, -1)
    assert why_others_can_change(link) == f"{link} belongs to user {SOMEBODY}"


def test_cycle_of_links_raises_an_error(file: Path, tmp_path: Path) -> None:
    """Up to forty links are followed, as in the kernel."""
    assert why_others_can_change(chain(tmp_path, 40, file)) is None
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        why_others_can_change(tmp_path / "a")


def test_missing_path_raises_os_error_instead_of_being_refused(file: Path) -> None:
    """A caller must be able to distinguish a missing file from a refused one."""
    with pytest.raises(FileNotFoundError):
        why_others_can_change(file.parent / "missing.so")
    with pytest.raises(NotADirectoryError):
        why_others_can_change(file / "below.so")


@pytest.mark.parametrize("path", ["", "tap.so", "./tap.so", "../tap.so", "~/tap.so"])
def test_relative_path_is_refused(path: str, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Such a path depends on the current folder, even if the file there is safe."""
    monkeypatch.chdir(file.parent)
    refused = why_others_can_change(Path(path))

    assert refused is not None
    assert "not an absolute path" in refused


def test_file_larger_than_its_reported_size_is_read_completely() -> None:
    """The kernel reports size 0 for files in /proc. Other files may grow during a read."""
    content = read_regular_file("/proc/self/cmdline", 1 << 20)

    assert content == Path("/proc/self/cmdline").read_bytes()
    with pytest.raises(TooLargeError):
        read_regular_file("/proc/self/cmdline", len(content) - 1)
    assert read_regular_file("/proc/self/cmdline", len(content)) == content


def test_file_is_replaced_at_once_or_not_at_all(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    report.write_text("old")
    replace_private_file(report, "new")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_private_file(tmp_path / "folder", "new")

    assert (report.read_text(), report.stat().st_mode & 0o777) == ("new", 0o600)
    assert {path.name for path in tmp_path.iterdir()} == {"report.txt", "folder"}
