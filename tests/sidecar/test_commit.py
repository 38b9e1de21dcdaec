"""The sidecar records the commit and the settings of the training program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import only_report, run
from torchlens_perf.sidecar.commit import CommitReader

TRAIN = """
import time, torch, torchlens_perf as perf
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, modules="all", report="off"):
    for _ in range(40):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
"""


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    done = subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text(TRAIN)
    git(folder, "add", "train.py")
    git(folder, "commit", "-qm", "Train")
    return folder


def read_commit(folder: Path) -> str:
    reader = CommitReader(str(folder))
    reader.start()
    reader.join(30)
    return reader.commit


def test_changed_files_make_the_commit_dirty_and_new_files_do_not(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")[:12]
    (repository / "new.txt").touch()
    index = (repository / ".git/index").read_bytes()
    assert read_commit(repository) == commit
    (repository / "train.py").write_text("changed")
    assert read_commit(repository) == f"{commit}-dirty"
    assert (repository / ".git/index").read_bytes() == index


def test_commit_is_unknown_outside_a_repository_and_before_the_first_commit(
    tmp_path: Path,
) -> None:
    assert read_commit(tmp_path) == ""
    git(tmp_path, "init", "-q")
    assert read_commit(tmp_path) == ""


def test_run_has_the_commit_and_settings_of_its_program(repository: Path) -> None:
    elsewhere = repository.parent
    command = [sys.executable, str(repository / "train.py")]
    done = run(command, elsewhere, NCCL_ALGO="Ring", SECRET="hidden")
    assert done.returncode == 0, done.stderr
    settings = only_report(elsewhere)["run"]["settings"]
    import torch

    expected = {
        "commit": git(repository, "rev-parse", "HEAD")[:12],
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "watch modules": "all",
        "framework": "none",
        "OMP_NUM_THREADS": "1",
        "NCCL_ALGO": "Ring",
    }
    assert settings == settings | expected
    assert "SECRET" not in settings
