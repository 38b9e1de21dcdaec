"""The name of the program that a process runs: what the user started, as reports and backends show it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

_NOTEBOOK = "notebook"
# sys.argv[0] where the code comes from the command line, from stdin or from the keyboard.
_NO_FILE = ("", "-", "-c", "-m")


def program_name(environ: Mapping[str, str]) -> str:
    """The program of this process: `train.py`, `package.module`, `train.ipynb` or `python`; no folder, no arguments."""
    return name_of(getattr(sys, "argv", []), sys.modules.get("__main__"), environ)


def name_of(arguments: Sequence[str], main: ModuleType | None, environ: Mapping[str, str]) -> str:
    """The program's name, from sys.argv, the module `__main__` and the environment.

    A script, folder or zip file: its name. `-m`: the module's. A notebook's kernel: the notebook's, or `notebook`
    where nobody says which. Code from the command line, stdin or the keyboard: `python`.
    """
    started = str(arguments[0]) if arguments else ""
    if started in _NO_FILE:
        return "python"
    spec = getattr(main, "__spec__", None)
    # What runs a script inside its own __main__, as cProfile does, has a spec too, but of another file.
    module = getattr(spec, "name", None) if getattr(spec, "origin", None) == started else None
    name = module.removesuffix(".__main__") if module else _file_name(started)
    # ipykernel_launcher.py, those of Colab and Databricks, and `python -m ipykernel`.
    if name.removesuffix(".py").endswith("kernel_launcher") or name == "ipykernel":
        return _notebook(main, environ)
    return name


def _file_name(path: str) -> str:
    """The last part of a path that says something; as text that can be exported, whatever bytes it has."""
    name = os.path.basename(path)
    if name in ("", ".", "..", "__main__.py"):
        try:
            path = os.path.realpath(path)
        except OSError:  # the working directory is gone
            return "python"
        name = os.path.basename(os.path.dirname(path) if name == "__main__.py" else path)
    return os.fsencode(name).decode(errors="replace") or "python"


def _notebook(main: ModuleType | None, environ: Mapping[str, str]) -> str:
    # VS Code sets the one among the notebook's names; Jupyter Server the other, for the kernel that it starts.
    for path in (getattr(main, "__vsc_ipynb_file__", None), environ.get("JPY_SESSION_NAME")):
        if isinstance(path, str) and path.endswith(".ipynb"):
            return _file_name(path)
    return _NOTEBOOK
