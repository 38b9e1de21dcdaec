"""Tests that only the user, or on request also the group, can read the files of a run.

The process's umask makes no difference to the modes.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import run_warm, runs, wait_for_sidecar
from tests.support.ranks import make_run
from torchlens_perf.run import captures, ownership
from torchlens_perf.run.captures import Request
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import KINDS, Mailbox

# A program that trains and prints modes: of files in shared memory during the run, and of an
# out-of-memory table.
_JOB = """
import json, os, sys, time
os.umask(int(sys.argv[3], 8))
from pathlib import Path
import torch
from torch import nn
import torchlens_perf as perf
from torchlens_perf.run import directory, ownership
from torchlens_perf.recorder.folder_request import find_folder_problem
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, dir=sys.argv[1], share=sys.argv[2]) as watch:
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    found = {}
    for folder in directory.create_local_folders(watch.run_dir.name):
        for path in (folder.parent, folder, *folder.iterdir()):
            if not path.is_symlink():
                found[path.name] = path.lstat().st_mode
    oom = watch.run_dir / "oom"
    assert not find_folder_problem(oom, shared=sys.argv[2] == "group")
    ownership.write_private_file(oom / "rank00000-1.partial", "{}")
    umask = os.umask(0o777)
print("local", json.dumps(found), umask)
"""


def _train(folder: Path, umask: str, share: str) -> tuple[dict[str, int], int]:
    """Run a job in `folder`.

    Return the modes in shared memory during the run, and the job's umask at its end.
    """
    done = run_warm(
        [sys.executable, "-c", _JOB, str(folder / "torchlens-perf"), share, umask], folder
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("local "))
    modes, _, after = line.removeprefix("local ").rpartition(" ")
    return json.loads(modes), int(after)


def _wrong(modes: dict[str, int], folders: int, files: int) -> dict[str, str]:
    """Return the paths that have other modes than the given ones."""
    return {
        name: f"{stat.S_IMODE(mode):04o}"
        for name, mode in modes.items()
        if stat.S_IMODE(mode) & ~stat.S_ISGID != (folders if stat.S_ISDIR(mode) else files)
    }


@pytest.mark.parametrize(
    ("umask", "share", "folders", "files"),
    [("000", "off", 0o700, 0o600), ("002", "off", 0o700, 0o600), ("077", "group", 0o750, 0o640)],
)
def test_files_of_a_run_are_private_or_shared_like_their_folder(
    umask: str, share: str, folders: int, files: int, tmp_path: Path
) -> None:
    """The modes of folders, records, states, logs, tables and the report are checked.

    Shared memory is always private.
    """
    local, umask_after = _train(tmp_path, umask, share)
    (made,) = runs(tmp_path)
    wait_for_sidecar(made)
    everything = [made.path.parent, made.path, *made.path.rglob("*")]
    modes = {str(path): path.lstat().st_mode for path in everything}

    assert len([path for path in everything if path.is_file()]) >= 6, everything
    assert {"oom", "nodes", "steps", "spans", "report.txt"} <= {
        path.name for path in made.path.iterdir()
    }
    assert _wrong(modes, folders, files) == {}
    assert local
    assert _wrong(local, 0o700, 0o600) == {}
    assert umask_after == int(umask, 8), "the job's umask must not change"


def test_capture_folders_and_files_are_private(tmp_path: Path) -> None:
    """The modes of the folder, a request and a rank's files are checked."""
    made = make_run(tmp_path)
    before = os.umask(0)
    try:
        with ownership.restrict_new_files_like(made.nodes):
            captures.submit_request(made.captures, _request())
            folder = captures.rank_folder(made.captures, "one", 0)
            folder.mkdir(parents=True)
        ownership.write_private_file(folder / captures.SNAPSHOT, b"")
        assert os.umask(0) == 0
    finally:
        os.umask(before)

    assert (
        _wrong({str(path): path.lstat().st_mode for path in made.path.rglob("*")}, 0o700, 0o600)
        == {}
    )
    assert len(list(made.captures.rglob("*"))) == 4


def test_mailbox_is_private_even_in_a_shared_folder(tmp_path: Path) -> None:
    """In a shared folder, only the sidecar's log is shared."""
    before = os.umask(0)
    try:
        mailboxes = [Mailbox(tmp_path / "rank.ring", kind) for kind in KINDS]
        shared = RunDirectory(tmp_path / "runs" / "one", shared=True)
        shared.create()
        os.close(ownership.open_to_append(shared.node_log_path("host")))
    finally:
        os.umask(before)

    assert {stat.S_IMODE(mailbox.path.stat().st_mode) for mailbox in mailboxes} == {0o600}
    assert stat.S_IMODE(shared.node_log_path("host").stat().st_mode) == 0o640
    assert stat.S_IMODE(shared.path.parent.stat().st_mode) & 0o777 == 0o750
    for mailbox in mailboxes:
        mailbox.close()


def _request() -> Request:
    return Request("one", captures.BY_USER, time.time(), 0, (0,), 12, 3)
