"""A real JupyterLab on loopback for a browser, with its own settings, kernels and notebooks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support.processes import ROOT, clean_environ

TOKEN = "only-in-this-test"
STARTS_WITHIN_S = 90.0


class JupyterLab:
    """A JupyterLab for `folder`. The server and its kernels end with the context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "notebooks"
        self._settings, self._runtime = folder / "settings", folder / "runtime"
        self._log = folder / "log"
        self.folder.mkdir()
        # This setting suppresses a dialog that covers the notebook.
        self.set("notification", fetchNews="false", checkForUpdates=False)

    def set(self, name: str, **values: object) -> None:
        """Change settings of JupyterLab's front end for notebooks that are opened later."""
        path = self._settings / "@jupyterlab" / "apputils-extension" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    def write(self, name: str, cells: Sequence[str]) -> None:
        """Write a notebook with the given cells, which have not run."""
        code = [
            {"cell_type": "code", "execution_count": None, "id": f"cell-{number}", "metadata": {}, "outputs": [],
             "source": source} for number, source in enumerate(cells)
        ]  # fmt: skip
        kernel = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        }
        text = json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
        (self.folder / name).write_text(text)

    def url(self, name: str) -> str:
        """Return the notebook's address in a workspace without other open documents."""
        return f"{self.origin}/lab/tree/{name}?token={TOKEN}&reset"

    def __enter__(self) -> JupyterLab:
        places = {
            f"JUPYTER_{kind}_DIR": str(self._runtime / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")
        }  # fmt: skip
        places |= {
            "JUPYTERLAB_SETTINGS_DIR": str(self._settings),
            "JUPYTERLAB_WORKSPACES_DIR": str(self._runtime),
        }
        options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
        options += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={self.folder}"]
        environ = clean_environ({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **places})
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *options],
                env=environ,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        deadline_s = time.monotonic() + STARTS_WITHIN_S
        said = self._runtime / "runtime" / f"jpserver-{self._process.pid}.json"
        while not said.exists():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, self._log.read_text()
            time.sleep(0.1)
        self.origin = f"http://127.0.0.1:{json.loads(said.read_text())['port']}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # SIGTERM also ends the server's kernels.
        os.kill(self._process.pid, signal.SIGTERM)
        self._process.wait(60)
