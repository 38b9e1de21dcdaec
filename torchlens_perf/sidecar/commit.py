"""Read the git commit of the training program."""

from __future__ import annotations

import contextlib
import subprocess
import threading

from torchlens_perf.run import children

_TIMEOUT_S = 20.0
_DIGITS = 12
# Without locks and fsmonitor, git changes nothing in the repository and starts no process.
_STATUS = (
    "--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch",
    "--no-ahead-behind", "--untracked-files=no",
)  # fmt: skip


class CommitReader(threading.Thread):
    """Thread that runs git once. Nothing waits for git, whose disk may hang."""

    def __init__(self, folder: str) -> None:
        super().__init__(daemon=True)
        self.commit = ""
        """The commit, with "-dirty" if files were changed; "" while or if it is not known."""
        self._command = ["git", "-C", folder, *_STATUS]

    def run(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                self._command, env=children.build_environment(), stdin=subprocess.DEVNULL,
                capture_output=True, timeout=_TIMEOUT_S, check=False, cwd="/",
            )  # fmt: skip
            lines = done.stdout.decode(errors="replace").splitlines()
            commit = lines[0].removeprefix("# branch.oid ") if lines else ""
            is_dirty = any(not line.startswith("#") for line in lines)
            # A repository without a commit has "(initial)".
            self.commit = commit[:_DIGITS] + "-dirty" * is_dirty if commit.isalnum() else ""
