"""A real JupyterLab on loopback for a browser, with its own settings, kernels and notebooks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import ROOT, clean_environ
from tests.support.servers import Server

TOKEN = "only-in-this-test"


class JupyterLab:
    """A JupyterLab for `folder`. The server and its kernels end with the context."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.folder = folder, folder / "notebooks"
        self._settings, self._runtime = folder / "settings", folder / "runtime"
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
        self._server = Server(
            [sys.executable, "-m", "jupyterlab", *options], self._folder, self._ports, environ
        )
        (ports,) = self._ports()
        self.origin = f"http://127.0.0.1:{json.loads(ports.read_text())['port']}"
        return self

    def __exit__(self, *error: object) -> None:
        # SIGTERM also ends the server's kernels.
        self._server.close()

    def _ports(self) -> list[Path]:
        """Return the file with the server's port, once the server has written it."""
        return list((self._runtime / "runtime").glob("jpserver-*.json"))
