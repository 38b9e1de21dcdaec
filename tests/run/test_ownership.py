"""Who can change a file: folders, links and files of a path, with real modes and owners."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from torchlens_perf.run.ownership import TooLargeError, others_can_change, read_bytes

SOMEBODY = 54321

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file three folders deep, all of them this user's."""
    path = tmp_path / "home" / "cache" / "ours" / "tap.so"
    path.parent.mkdir(parents=True)
    path.touch()
    for each in (path, *list(path.parents)[:3]):
        each.chmod(0o755)
    return path


def test_own_file(file: Path) -> None:
    """This user's file in this user's folders is nobody else's to change, and neither are the system's own."""
    assert others_can_change(file) is None
    assert others_can_change(file.parent) is None
    assert others_can_change(Path("/bin/sh")) is None


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize(("bits", "who"), [(0o020, "group"), (0o002, "everybody"), (0o022, "everybody")])
def test_writable_by_others(level: int, bits: int, who: str, file: Path) -> None:
    """The file, its folder, or any above it, with one bit too many: refused, with the very part named."""
    part = [file, *file.parents][level]
    part.chmod(0o755 | bits)
    refused = others_can_change(file)

    assert refused is not None
    assert refused.startswith(f"{part} can be written by {who}")
    part.chmod(0o755)
    assert others_can_change(file) is None


@as_root
@pytest.mark.parametrize("level", range(4))
def test_another_users(level: int, file: Path) -> None:
    """The file, its folder, or any above it, belongs to somebody else: refused, whatever its mode."""
    part = [file, *file.parents][level]
    os.chown(part, SOMEBODY, -1)

    assert others_can_change(file) == f"{part} belongs to user {SOMEBODY}"


@as_root
def test_seen_by_another_user() -> None:
    """For an ordinary user, root's files are as good as the own ones; a third user's are not."""
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are closed to others
        folder = Path(made)
        folder.chmod(0o755)
        owners = {"roots": 0, "own": SOMEBODY, "theirs": SOMEBODY + 1}
        for name, owner in owners.items():
            (folder / name).touch()
            os.chown(folder / name, owner, -1)
        os.seteuid(SOMEBODY)
        try:
            refused = {name: others_can_change(folder / name) for name in owners}
        finally:
            os.seteuid(0)

        theirs = f"{folder / 'theirs'} belongs to user {SOMEBODY + 1}"
        assert refused == {"roots": None, "own": None, "theirs": theirs}


@as_root
def test_sticky_folders(file: Path) -> None:
    """Above, a sticky folder will do, as /tmp; not as the folder itself, and not somebody else's."""
    above = file.parent.parent
    above.chmod(0o1777)
    assert others_can_change(file) is None
    assert others_can_change(above) == f"{above} can be written by everybody"
    os.chown(above, SOMEBODY, -1)
    assert others_can_change(file) == f"{above} belongs to user {SOMEBODY}"


def chain(folder: Path, length: int, end: Path) -> Path:
    """A symbolic link to a link to a link ... to the end."""
    target = end
    for number in range(length):
        link = folder / f"link{number}"
        link.symlink_to(target)
        target = link
    return target


@pytest.mark.parametrize("make", [os.path.abspath, os.path.relpath], ids=["absolute", "relative"])
def test_links_are_followed(make: Callable[..., str], file: Path, tmp_path: Path) -> None:
    """Through links, the places that they lead over count: one that others can write to is found behind them."""
    start = tmp_path / "start"
    start.mkdir()
    target = make(file.parent) if make is os.path.abspath else make(file.parent, start)
    (start / "link").symlink_to(target)

    assert others_can_change(start / "link" / file.name) is None
    assert others_can_change(start / "link" / ".." / "ours" / file.name) is None
    file.parent.parent.chmod(0o777)
    assert others_can_change(start / "link" / file.name) == f"{file.parent.parent} can be written by everybody"


def test_links_place_counts_too(file: Path, tmp_path: Path) -> None:
    """Who can replace the link chooses where it leads to."""
    start = tmp_path / "start"
    start.mkdir()
    (start / "link").symlink_to(file)
    start.chmod(0o777)

    assert others_can_change(start / "link") == f"{start} can be written by everybody"


@as_root
def test_another_users_link(file: Path, tmp_path: Path) -> None:
    """In a sticky folder anybody can put a link: that to our own file is not ours."""
    start = tmp_path / "start"
    start.mkdir()
    start.chmod(0o1777)
    link = start / "link"
    link.symlink_to(file)
    assert others_can_change(link) is None
    os.lchown(link, SOMEBODY, -1)
    assert others_can_change(link) == f"{link} belongs to user {SOMEBODY}"


def test_links_without_end(file: Path, tmp_path: Path) -> None:
    """Forty links are followed, as by the kernel; a circle is an error, and no endless loop."""
    assert others_can_change(chain(tmp_path, 40, file)) is None
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        others_can_change(tmp_path / "a")


def test_what_is_not_there(file: Path) -> None:
    """Nothing there is an error of its own: who looks for a file must be able to tell it from one that is refused."""
    with pytest.raises(FileNotFoundError):
        others_can_change(file.parent / "missing.so")
    with pytest.raises(NotADirectoryError):
        others_can_change(file / "below.so")


@pytest.mark.parametrize("path", ["", "tap.so", "./tap.so", "../tap.so", "~/tap.so"])
def test_relative_paths(path: str, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """A path that depends on the current folder is refused, also where the file there would do."""
    monkeypatch.chdir(file.parent)
    refused = others_can_change(Path(path))

    assert refused is not None
    assert "not an absolute path" in refused


def test_file_that_has_more_than_its_size() -> None:
    """The kernel reports a size of 0 for files in /proc, as for a file that grows while it is read."""
    content = read_bytes("/proc/self/cmdline", 1 << 20)

    assert content == Path("/proc/self/cmdline").read_bytes()
    with pytest.raises(TooLargeError):
        read_bytes("/proc/self/cmdline", len(content) - 1)
    assert read_bytes("/proc/self/cmdline", len(content)) == content
