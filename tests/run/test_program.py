"""Tests of the name of a program, which is what the user started."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from torchlens_perf.run.identity import derive_program_name

KERNEL = "/env/lib/python3.11/site-packages/ipykernel_launcher.py"
# Print the name in this process and in one that multiprocessing starts.
SHOW = (
    "import os; from torchlens_perf.run.identity import detect_identity;"
    " print(detect_identity(os.environ, lambda *_, **__: 'run').program, flush=True)"
)
SCRIPT = f"""
import multiprocessing, sys

def show():
    exec({SHOW!r})

if __name__ == "__main__":
    show()
    if "spawn" in sys.argv:
        child = multiprocessing.get_context("spawn").Process(target=exec, args=({SHOW!r},))
        child.start()
        child.join()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with programs of all kinds."""
    for name in ("train.py", "sub/train.py", "package/__init__.py", "package/__main__.py", "package/part.py",
                 "namespace/part.py", "app/__main__.py", os.fsdecode(b"\xff.py"), "start"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if path.name == "__init__.py" else SCRIPT)
    (tmp_path / "gone").mkdir()
    (tmp_path / "link.py").symlink_to("sub/train.py")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as file:
        file.writestr("__main__.py", SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("train.py a.py", ["train.py"]),
        ("train.py spawn", ["train.py", "train.py"]),
        ("sub/../sub/train.py", ["train.py"]),
        ("link.py", ["link.py"]),
        ("start", ["start"]),
        ("$'\\xff.py'", ["\ufffd.py"]),
        ("-m train spawn", ["train", "train"]),
        ("-m package", ["package"]),
        ("-m package spawn", ["package", "package"]),
        ("-m package.part spawn", ["package.part", "package.part"]),
        ("-m namespace.part", ["namespace.part"]),
        ("package/part.py", ["part.py"]),
        ("app", ["app"]),
        ("app/", ["app"]),
        ("app/__main__.py", ["app"]),
        ("app.pyz", ["app.pyz"]),
        ("-c 'import train; train.show()'", ["python"]),
        ("- < train.py", ["python"]),
        ("< train.py", ["python"]),
        ("-i < train.py", ["python"]),
        ("-m cProfile -o profile train.py", ["train.py"]),
        ("-m trace --trackcalls train.py | head -n 1", ["train.py"]),
        ("-c 'import sys, train; sys.argv = []; train.show(); del sys.argv; train.show()'", ["python", "python"]),
        ("-c 'import os, sys, train; os.chdir(\"gone\"); os.rmdir(\"../gone\"); sys.argv = [\".\"]; train.show()'",
         ["python"]),
    ],
)  # fmt: skip
def test_program_is_named_by_the_script_folder_or_module(
    arguments: str, names: list[str], folder: Path
) -> None:
    """A program without a file is named `python`."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {arguments}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout.splitlines() == names, done.stderr


def test_program_started_with_python_dot_is_named_by_its_folder(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "."], cwd=folder / "app", capture_output=True, text=True, timeout=60
    )

    assert done.stdout == "app\n"


@pytest.mark.parametrize("launcher", [KERNEL, "/x/colab_kernel_launcher.py", "/x/db_ipykernel_launcher.py",
                                      "/x/ipykernel/__main__.py"])  # fmt: skip
@pytest.mark.parametrize(
    ("vscode", "environ", "name"),
    [
        (None, {}, "notebook"),
        (None, {"JPY_SESSION_NAME": "/home/me/work/GAN on faces.ipynb"}, "GAN on faces.ipynb"),
        (None, {"JPY_SESSION_NAME": "/home/me/Console 1"}, "notebook"),
        (None, {"JPY_SESSION_NAME": ""}, "notebook"),
        (
            "/home/me/mine.ipynb",
            {"JPY_SESSION_NAME": "/home/me/work/mine-jvsc-4f3a.ipynb"},
            "mine.ipynb",
        ),
        (7, {}, "notebook"),
    ],
)
def test_notebook_is_named_by_its_file(
    launcher: str, vscode: object, environ: dict[str, str], name: str
) -> None:
    """Jupyter Server or VS Code provides the name. If the notebook's name is unknown, the program
    is named `notebook`.
    """
    main = types.ModuleType("__main__")
    if vscode is not None:
        main.__vsc_ipynb_file__ = vscode  # type: ignore[attr-defined]

    assert derive_program_name([launcher, "-f", "connection.json"], main, environ) == name


def test_script_started_by_a_notebook_is_named_by_its_file() -> None:
    """The script inherits the variable in which Jupyter provides the notebook's name."""
    assert (
        derive_program_name(
            ["/x/train.py"], types.ModuleType("__main__"), {"JPY_SESSION_NAME": "/x/a.ipynb"}
        )
        == "train.py"
    )


def test_any_value_of_sys_argv_gives_a_program_name() -> None:
    """A script may put any value into sys.argv."""
    assert derive_program_name([Path("/x/train.py")], None, {}) == "train.py"  # type: ignore[list-item]
    assert derive_program_name([7], None, {}) == "7"  # type: ignore[list-item]
    assert derive_program_name(["/"], None, {}) == "python"
