"""Tests of the release: the workflow's shell steps build the wheel, and the wheel is used where no
compiler exists.

DIST names a folder with built wheels, as in `make test-wheels`. Otherwise the wheel of this Python
is built.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from scripts.build_wheels import GLIBC, LIBRARIES, VERSIONS
from tests.docs.test_code_blocks import BLOCKS, SETUP, SETUP_OF_PAGE
from tests.support import installations
from tests.support.installations import PACKAGE, ROOT, Environment
from tests.support.processes import report, runs
from torchlens_perf.version import VERSION

WORKFLOWS = ROOT / ".github" / "workflows"
pytestmark = pytest.mark.skipif(not WORKFLOWS.exists(), reason="an sdist has no workflows")
COMPILERS = re.compile(
    r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|cpp|c89|c99|zig|ld|as)(-[\d.]+)?"
)
TRAIN = """
import os, time, torch
import torch.distributed as dist
model = torch.nn.Linear(32, 8)
several = "RANK" in os.environ
if several:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(30):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if several:
    time.sleep(0.3)  # gloo aborts if its threads are finishing the last collective
    dist.destroy_process_group()
"""


def workflow(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((WORKFLOWS / name).read_text()))


def script(job: str) -> str:
    """Return the shell steps of a job in a release."""
    steps = workflow("release.yml")["jobs"][job]["steps"]
    return "\n".join(
        step["run"]
        for step in steps
        if "run" in step and "matrix.machine" not in step.get("if", "")
    )


def test_wheels_are_built_and_tested_for_each_python_of_the_tests() -> None:
    tested = workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    release = workflow("release.yml")["jobs"]
    (installed,) = [
        step["with"]["python-version"].split()
        for step in release["build"]["steps"]
        if "setup-python" in step.get("uses", "")
    ]
    assert tuple(tested) == VERSIONS
    assert sorted(installed) == sorted(VERSIONS)
    assert release["test"]["strategy"]["matrix"]["python"] == tested
    assert (
        release["test"]["strategy"]["matrix"]["machine"]
        == (release["build"]["strategy"]["matrix"]["machine"])
    )


def test_release_publishes_tags_only_without_a_stored_token() -> None:
    publish = workflow("release.yml")["jobs"]["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "test"
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text()


def test_steps_of_the_release_are_commands_of_the_makefile() -> None:
    """The steps of the tests would run this file. Their commands are parsed only."""
    commands = [shlex.split(line) for line in script("test").splitlines()]
    assert commands == [["make", "test-wheels", "DIST=dist"]]
    for command in commands:
        done = subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("tag", "code"), [(f"v{VERSION}", 0), ("v0.0.1", 1)])
def test_release_stops_if_the_tag_is_not_the_version(tag: str, code: int) -> None:
    (check,) = [line for line in script("build").splitlines() if "GITHUB_REF_NAME" in line]
    done = subprocess.run(
        ["bash", "-e", "-c", check], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag}
    )
    assert done.returncode == code


class Installed(NamedTuple):
    wheel: Path
    environment: Environment
    path: str
    """PATH with all programs of this machine except compilers."""

    def run(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.environment.run(*command, PATH=self.path, **options)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of built wheels, by default from the release's steps in a shell."""
    if given := os.environ.get("DIST"):
        return ROOT / given
    source = installations.copy_tree(tmp_path_factory.mktemp("release"))
    steps = script("build").replace("sudo apt-get", "true apt-get")
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "GITHUB_REF_NAME": f"v{VERSION}",
        "WHEELS": str(ROOT / ".venv-wheels"),
        "PYTHONS": sys.executable,
    }
    done = subprocess.run(
        ["bash", "-e", "-c", steps], cwd=source, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
    return source / "dist"


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install the wheel into an empty environment, and hide all compilers."""
    (wheel,) = dist.glob(f"*-{sys.implementation.cache_tag.replace('cpython-', 'cp')}-*.whl")
    folder = tmp_path_factory.mktemp("installed")
    environment = installations.empty_environment(folder)
    installations.share_packages(environment, installations.requirements(wheel))
    installations.install(wheel, environment, CC="/bin/false", CXX="/bin/false")
    programs = folder / "programs"
    programs.mkdir()
    for place in os.environ["PATH"].split(os.pathsep)[::-1]:
        for program in Path(place).glob("*"):
            if not COMPILERS.fullmatch(program.name):
                (programs / program.name).unlink(missing_ok=True)
                (programs / program.name).symlink_to(program)
    return Installed(wheel, environment, f"{environment.folder / 'bin'}{os.pathsep}{programs}")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_wheel_contains_the_recorder_for_an_old_glibc(installed: Installed) -> None:
    """The libraries need no newer symbol and no folder of the machine that built them."""
    assert f"manylinux_{GLIBC.replace('.', '_')}_" in installed.wheel.name
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".so")]
        libraries = {Path(name).name.partition(".")[0]: wheel.read(name) for name in names}
    assert set(libraries) == set(LIBRARIES)
    assert b".note.stapsdt" in libraries["_native"]
    for content in libraries.values():
        newest = max(
            re.findall(rb"GLIBC_(\d+)\.(\d+)", content), key=lambda each: (*map(int, each),)
        )
        assert tuple(map(int, newest)) <= tuple(map(int, GLIBC.split(".")))
        for folder in (ROOT, Path(sys.base_prefix), Path.home()):
            assert str(folder).encode() not in content


@pytest.mark.long
@pytest.mark.timeout(900)
def test_doctor_finds_the_native_recorder_without_a_compiler(installed: Installed) -> None:
    done = installed.run("torchlens-perf", "doctor", "--verbose")
    lines = done.stdout.splitlines()
    assert "ok      recorder: native" in lines
    assert [line for line in lines if line.startswith("broken")] == []
    hidden = [name for name in ("cc", "gcc", "g++") if shutil.which(name, path=installed.path)]
    assert hidden == []
    assert any("g++" in line for line in lines), "doctor must say that the tap needs a compiler"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [
        command
        for block in BLOCKS
        if block.page == "README.md" and block.language == "sh"
        for command in block.commands()
        if command.words[:2] != ("pip", "install")
    ],
    ids=str,
)
def test_commands_of_the_readme_work_without_a_compiler(
    command: Any, installed: Installed, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    variables = dict(each.split("=", 1) for each in command.variables)
    program, *arguments = command.words
    launcher = {"torchrun": ("python", "-m", "torch.distributed.run")}.get(program, (program,))
    done = installed.run(*launcher, *arguments, folder=tmp_path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    if program in ("torchrun", "python"):
        (run,) = runs(tmp_path)
        value = report(run)
        assert all(rank["steps"] > 10 for rank in value["ranks"])
        assert (run.path / "report.html").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.timeout(900)
def test_script_of_the_readme_works_without_a_compiler(
    installed: Installed, tmp_path: Path
) -> None:
    blocks = [each for each in BLOCKS if each.page == "README.md" and each.language == "python"]
    setup = (SETUP + SETUP_OF_PAGE["README.md"]).replace("torch, pandas", "torch")
    (tmp_path / "train.py").write_text(setup + "\n".join(each.text for each in blocks))
    done = installed.run("python", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = runs(tmp_path)
    assert [rank["steps"] for rank in report(run)["ranks"]] == [12]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_wheel_records_into_its_own_folder_only(installed: Installed) -> None:
    """The package is imported from the installed wheel, with the recorder of the wheel."""
    program = (
        f"import {PACKAGE} as p; from {PACKAGE} import _native as n; print(p.__file__, n.__file__)"
    )
    done = installed.run("python", "-c", program)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert done.stdout.split() == [
        str(installed.environment.package / "__init__.py"),
        str(installed.environment.package / f"_native{suffix}"),
    ]
