"""`torchlens-perf report RUN --html FILE` writes a page, or fails with exit code 2."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from torchlens_perf.commands.cli import main
from torchlens_perf.run.directory import RunDirectory


def test_page_is_written_and_its_path_is_printed_to_stderr(
    simulated: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is private to its user, or shared like its folder."""
    tmp_path.chmod(0o700)
    page = tmp_path / "page.html"
    assert main(["report", str(simulated.path), "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    text = page.read_text()

    assert out == ""
    assert re.fullmatch(rf"torchlens-perf: wrote {re.escape(str(page))}, \d\.\d\d MB\n", err)
    assert f"{len(text.encode()) / 1e6:.2f} MB" in err
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert text.endswith("</html>\n")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("run", "page", "message"),
    [
        ("nowhere", "page.html", "there is no directory "),
        ("", "missing/page.html", "missing/page.html cannot be written: No such file"),
        ("", ".", " cannot be written: "),
        ("", "folder", "folder cannot be written: Is a directory"),
    ],
)
def test_failed_page_command_prints_one_line_and_leaves_no_file(
    simulated: RunDirectory,
    tmp_path: Path,
    run: str,
    page: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder").mkdir()
    which = str(tmp_path / run) if run else str(simulated.path)
    assert main(["report", which, "--html", str(tmp_path / page)]) == 2
    out, err = capsys.readouterr()

    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert list((tmp_path / "folder").iterdir()) == []
