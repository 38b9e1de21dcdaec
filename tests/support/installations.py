"""Build the wheel and the sdist with users' tools, and install them into empty environments.

The environments borrow torch, the wheel's declared requirements and their dependencies from the
test environment, because installing torch takes minutes.

If the wheel does not declare a requirement, the requirement is missing in these environments.
"""

from __future__ import annotations

import email
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import warm_python

ROOT = Path(__file__).parents[2]
PACKAGE = "torchlens_perf"
_BUILT = (".so", ".pyc", ".partial")
_HIDDEN_OR_BUILT = ("build", "dist", "__pycache__", "torchlens-perf")


def tree() -> list[Path]:
    """Return the repository's tracked and new files, relative to its root, without built ones."""
    if (ROOT / ".git").exists():
        command = [
            "git",
            "-c",
            "safe.directory=*",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
        return [Path(name) for name in listed if name and (ROOT / name).is_file()]
    return sorted(_unpacked(ROOT))


def _unpacked(folder: Path) -> Iterator[Path]:
    """Return the files of an unpacked sdist as tree() does. Tests may have run in it."""
    for path in folder.iterdir():
        if (
            path.name.startswith(".")
            or path.name in _HIDDEN_OR_BUILT
            or path.suffix in (*_BUILT, ".egg-info")
        ):
            continue
        if path.is_dir():
            yield from _unpacked(path)
        elif path.name not in ("PKG-INFO", "setup.cfg"):
            yield path.relative_to(ROOT)


class Environment(NamedTuple):
    """An empty environment with its own home and an empty working folder."""

    folder: Path
    home: Path
    work: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def package(self) -> Path:
        """Return the package's installation folder.

        Tests check that the package is imported from this folder.
        """
        return _site(self.folder) / PACKAGE

    def environ(self, **changed: str) -> dict[str, str]:
        """Return variables without our settings, compilers, and Python's other search paths."""
        dropped = (
            "TORCHLENS",
            "OTEL_",
            "XDG_",
            "PYTHON",
            "CXX",
            "CC",
            "VIRTUAL_ENV",
            "COV_",
            "PYTEST",
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**kept, "HOME": str(self.home), "PATH": path, "OMP_NUM_THREADS": "1", **changed}

    def run(
        self,
        *command: str | Path,
        folder: Path | None = None,
        timeout_s: float = 300,
        **changed: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in `folder`, by default the empty one."""
        program = [str(self.folder / "bin" / command[0]), *map(str, command[1:])]
        return subprocess.run(
            program, cwd=folder or self.work, env=self.environ(**changed), capture_output=True, text=True,
            timeout=timeout_s,
        )  # fmt: skip

    def run_warm(
        self, *command: str | Path, folder: Path, **changed: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program of the environment with torch already loaded."""
        program = [str(self.python), *map(str, command)]
        return warm_python.run(program, 110, cwd=folder, env=self.environ(**changed))

    def succeeds(self, *command: str | Path, **options: str) -> str:
        """Run the program and return its output. The program must succeed."""
        done = self.run(*command, **options)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def empty_environment(folder: Path) -> Environment:
    """Create an environment that contains no packages, not even pip."""
    venv.create(folder / "venv", with_pip=False)
    made = Environment(folder / "venv", folder / "home", folder / "empty")
    made.home.mkdir()
    made.work.mkdir()
    return made


def install(what: Path, environment: Environment, **changed: str) -> None:
    """Install a wheel or an sdist with pip.

    pip checks that all dependencies are already present.
    """
    done = pip(environment, "install", "-q", "--no-compile", str(what), **changed)
    assert done.returncode == 0, done.stderr


def pip(
    environment: Environment, *arguments: str, **changed: str
) -> subprocess.CompletedProcess[str]:
    """Return the command by which the tests' pip installs into an environment without pip."""
    command = [sys.executable, "-m", "pip", "--python", str(environment.python), *arguments]
    environ = environment.environ(**changed)
    return subprocess.run(
        command, cwd=environment.work, env=environ, capture_output=True, text=True
    )


def share_packages(environment: Environment, requirements: Iterable[str]) -> None:
    """Make torch, `requirements` and their dependencies from the test environment importable."""
    lent = environment.folder / "lent"
    lent.mkdir()
    for distribution in _closure(["torch", *requirements]):
        for file in distribution.files or ():
            name = file.parts[0]
            source = Path(str(distribution.locate_file(name)))
            if name not in ("..", "__pycache__") and not (lent / name).exists():
                (lent / name).symlink_to(source)
    (_site(environment.folder) / "lent.pth").write_text(f"{lent}\n")


def _closure(requirements: Sequence[str]) -> list[importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    asked: set[tuple[str, str]] = set()
    to_come = [Requirement(text) for text in requirements]
    while to_come:
        requirement = to_come.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {
            extra for asked_name, extra in asked if asked_name == name
        }:
            asked.add((name, extra))
            distribution = found.setdefault(name, importlib.metadata.distribution(requirement.name))
            needs = map(Requirement, distribution.requires or ())
            to_come += [
                each
                for each in needs
                if each.marker is None or each.marker.evaluate({"extra": extra})
            ]
    assert canonicalize_name(PACKAGE) not in found
    return list(found.values())


def _site(folder: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"


def copy_tree(to: Path) -> Path:
    """Copy the repository's files without built ones."""
    for file in tree():
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, to / file)
    return to


def make_sdist(source: Path, out: Path) -> Path:
    """Build the sdist as for a release. `python -m build` leaves the source unchanged."""
    _make([sys.executable, "-m", "build", "--sdist", "--outdir", str(out), str(source)])
    (made,) = out.glob("*.tar.gz")
    return made


def make_wheel(source: Path, out: Path) -> Path:
    """Build the wheel in the same way as `pip install FOLDER`."""
    _make(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-v",
            "--no-deps",
            "--wheel-dir",
            str(out),
            str(source),
        ]
    )
    (made,) = out.glob("*.whl")
    return made


def _make(command: list[str]) -> None:
    # Python's variables belong to the test and are removed. Variables PIP_* set the package source
    # and are kept.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    # setuptools still accepts this setting, although it is deprecated.
    assert "it is absent from setuptools' `packages` configuration" not in said, said


def files(made: Path) -> dict[str, bytes]:
    """Return the contents of a wheel or an sdist by name."""
    if made.suffix == ".whl":
        with zipfile.ZipFile(made) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(made) as sdist:
        members = {
            member.name.partition("/")[2]: sdist.extractfile(member)
            for member in sdist
            if member.isfile()
        }
        return {name: file.read() for name, file in members.items() if file is not None}


def metadata(made: Path) -> email.message.Message:
    names = (
        name for name in files(made) if name.endswith(".dist-info/METADATA") or name == "PKG-INFO"
    )
    return email.message_from_bytes(files(made)[next(names)])


def requirements(made: Path) -> list[str]:
    """Return the declared requirements of the wheel."""
    return [each for each in metadata(made).get_all("Requires-Dist", []) if "extra ==" not in each]
