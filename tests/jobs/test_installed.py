"""Tests of the wheel and the sdist, each in an empty environment, used from an empty folder.

The wheel is built from a tree with new packages, data and native sources that no list mentions.

The wheel must contain these new files, but no built files and no files of an earlier build.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import installations
from tests.support.installations import PACKAGE, ROOT, Environment, files, metadata, requirements
from tests.support.processes import only_report, report, runs

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(600)]

SCRIPTS = ROOT / "tests" / "scripts"
# New files of each kind that a change may add.
ADDED = {
    f"{PACKAGE}/added/__init__.py": "",
    f"{PACKAGE}/added/inner/__init__.py": "",
    f"{PACKAGE}/added/inner/module.py": (
        "from importlib import resources\n"
        "DATA = resources.files('torchlens_perf.added.inner').joinpath('table.new').read_text()\n"
    ),
    f"{PACKAGE}/added/inner/table.new": "data of a kind that was not there before",
    f"{PACKAGE}/added_without_init/module.py": "import torchlens_perf.added\n",
    f"{PACKAGE}/report/added.pyi": "",
    f"{PACKAGE}/native/added.c": '#include "added.h"\nconst char torchlens_perf_added[] = ADDED;\n',
    f"{PACKAGE}/native/added.h": '#define ADDED "a source that was added"\n',
    f"{PACKAGE}/native/deeper/added.cuh": "",
    "docs/added.md": "",
    "tests/added/test_added.py": "",
}
_BUILD_LIB = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
# Files that development leaves in a tree.
LEFT = (
    f"{PACKAGE}/_native.cpython-399-x86_64-linux-gnu.so",
    f"{PACKAGE}/native/_torchlens_perf_tap-9-0-cpython-399-0.so",
    f"{PACKAGE}/native/.build-x/said",
    f"{PACKAGE}/__pycache__/moved_away.cpython-311.pyc",
    f"{_BUILD_LIB}/{PACKAGE}/moved_away.py",
    f"{_BUILD_LIB}/{PACKAGE}/moved_package/__init__.py",
    "torchlens-perf/20260101-000000-0/report.txt",
    "tests/__pycache__/test_moved.cpython-311.pyc",
)


class Made(NamedTuple):
    source: Path
    wheel: Path
    sdist: Path
    by_wheel: Environment
    by_sdist: Environment


def tree(folder: Path) -> Path:
    """Copy the tree in a state of unfinished work."""
    source = installations.copy_tree(folder / "checkout")
    left = dict.fromkeys(LEFT, "left") | {f"{PACKAGE}.egg-info/SOURCES.txt": "\n".join(LEFT)}
    for name, text in (ADDED | left).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    return source


def by_wheel(folder: Path) -> tuple[Path, Path, Environment]:
    """Build the wheel, and install it into an empty environment.

    Other users of a group can write to the environment, so taps are built into the user's cache.
    """
    source = tree(folder)
    wheel = installations.make_wheel(source, folder / "dist")
    environment = installations.empty_environment(folder)
    installations.share_packages(environment, requirements(wheel))
    installations.install(wheel, environment)
    (environment.package / "native").chmod(0o775)
    for script in ("train.py", "train_two_ranks.py"):
        shutil.copy(SCRIPTS / script, environment.home)
    return source, wheel, environment


def by_sdist(folder: Path) -> tuple[Path, Environment]:
    """Build the sdist, and install it into another empty environment without a compiler."""
    sdist = installations.make_sdist(tree(folder), folder / "dist")
    environment = installations.empty_environment(folder)
    installations.share_packages(environment, requirements(sdist))
    installations.install(sdist, environment, CC="/bin/false", CXX="/bin/false")
    return sdist, environment


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make wheel and sdist at the same time, because most of the time is spent in pip."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(by_wheel, tmp_path_factory.mktemp("wheel"))
        second = pool.submit(by_sdist, tmp_path_factory.mktemp("sdist"))
        source, wheel, with_compiler = first.result()
        sdist, without_compiler = second.result()
    return Made(source, wheel, sdist, with_compiler, without_compiler)


@pytest.fixture(scope="module")
def compiling(
    made: Made, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """Run `torchlens-perf build-tap` in another home, in parallel with all tests that do not need
    the tap.
    """
    program = [str(made.by_wheel.folder / "bin" / "torchlens-perf"), "build-tap"]
    home = tmp_path_factory.mktemp("home")
    environ = made.by_wheel.environ(HOME=str(home))
    process = subprocess.Popen(
        program, cwd=made.by_wheel.work, env=environ, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.terminate()
    process.wait()


@pytest.fixture(scope="module")
def installed(made: Made, compiling: subprocess.Popen[str]) -> Environment:
    """Return the environment with the installed wheel."""
    return made.by_wheel


@pytest.fixture(scope="module")
def simulated(installed: Environment) -> Path:
    """Return a run directory made by `torchlens-perf simulate`."""
    out = installed.work / "simulated"
    said = installed.succeeds(
        "torchlens-perf",
        "simulate",
        "--ranks",
        "2",
        "--steps",
        "60",
        "--fault",
        "constant:rank=1,share=1",
        "--out",
        out,
    )
    assert "rank 1" in said
    return out


# -- contents


def expected(folder: str = "") -> set[str]:
    return {
        str(file)
        for file in (*installations.tree(), *map(Path, ADDED))
        if str(file).startswith(folder)
    }


def test_wheel_contains_exactly_the_files_of_the_package(made: Made) -> None:
    """The wheel contains every file of the package, including new ones, and the two libraries."""
    package = {name for name in files(made.wheel) if name.startswith(f"{PACKAGE}/")}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    libraries = {f"{PACKAGE}/{name}{suffix}" for name in ("_native", "_nccl_profiler")}

    assert package == expected(f"{PACKAGE}/") | libraries
    assert b"a source that was added" in files(made.wheel)[f"{PACKAGE}/_native{suffix}"]
    # Leftovers of an earlier build must be in a folder that builds use.
    assert [path.name for path in (made.source / "build").glob("lib*")] == [Path(_BUILD_LIB).name]


def test_wheel_contains_no_tests_benchmarks_or_docs(made: Made) -> None:
    """Outside the package, the wheel has only pip's metadata."""
    others = {
        name.partition("/")[0] for name in files(made.wheel) if not name.startswith(f"{PACKAGE}/")
    }

    assert others == {f"{PACKAGE}-{metadata(made.wheel)['Version']}.dist-info"}


def test_sdist_contains_every_file_of_the_repository(made: Made) -> None:
    """The sdist leaves out built files and files of git and CI."""
    not_for_users = {".gitignore", *expected(".ci/"), *expected(".github/")}
    made_by_setuptools = {"PKG-INFO", "setup.cfg"}
    found = {name for name in files(made.sdist) if ".egg-info/" not in name}

    assert found - made_by_setuptools == expected() - not_for_users


def test_files_of_wheel_and_sdist_equal_those_of_the_tree(made: Made) -> None:
    """All bytes are compared."""
    for packed in (files(made.wheel), files(made.sdist)):
        for file in installations.tree():
            if str(file) in packed:
                assert packed[str(file)] == (ROOT / file).read_bytes(), file


def test_wheel_and_sdist_contain_no_path_of_the_build_machine(made: Made) -> None:
    folders = [
        str(folder).encode() for folder in (made.source, made.source.parents[1], ROOT, Path.cwd())
    ]
    for packed in (files(made.wheel), files(made.sdist)):
        assert [
            name for name, content in packed.items() if any(folder in content for folder in folders)
        ] == []


# -- use after installation


IMPORT_ALL = """
import importlib, json, pathlib, sys
import torchlens_perf
from torchlens_perf.errors import ConfigError
top = pathlib.Path(torchlens_perf.__file__).parent
modules = []
extras_in = ("actions", "serve", "top", "instrumentation", "query")
extras = ("anyio", "duckdb", "kubernetes", "mcp", "opentelemetry", "packaging", "prometheus_client", "pyspark",
          "sqlglot", "starlette", "textual", "uvicorn")
for path in sorted(top.rglob("*.py")):
    parts = path.relative_to(top.parent).with_suffix("").parts
    modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    try:
        importlib.import_module(modules[-1])
    except ModuleNotFoundError as error:
        # Extras: their commands say what to install. What opentelemetry-instrument loads, it brings itself.
        assert parts[1] in extras_in or parts[1:3] == ("exporters", "prometheus"), error
        assert error.name.partition(".")[0] in extras, error
    except ConfigError as error:  # a framework that is not there: the user is told what to install
        assert parts[1] == "integrations" and "pip install" in str(error), error
from torchlens_perf.recorder import recorder
from torchlens_perf.added.inner.module import DATA
elsewhere = [name for name, module in sys.modules.items() if name.partition(".")[0] == "torchlens_perf"
             and getattr(module, "__file__", None) and not module.__file__.startswith(str(top))]
print(json.dumps([str(top), len(modules), DATA, recorder.find_recording_obstacle(), elsewhere, "torch" in sys.modules]))
"""


def test_every_module_can_be_imported_from_the_installed_files(installed: Environment) -> None:
    """The environment has only torch and the declared requirements.

    Modules that need an extra are not imported.
    """
    done = installed.run("python", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    top, count, data, obstacle, elsewhere, torch = json.loads(done.stdout)

    assert (Path(top), elsewhere) == (installed.package, [])
    assert count == len([name for name in expected(f"{PACKAGE}/") if name.endswith(".py")])
    assert (data, obstacle, torch) == (ADDED[f"{PACKAGE}/added/inner/table.new"], None, True)


def test_every_command_prints_help(installed: Environment) -> None:
    """Commands are called by the program's name and by the module's name."""
    listed = installed.succeeds("torchlens-perf", "--help")
    commands = re.findall(r"^  (\S+)  ", listed, flags=re.MULTILINE)
    assert {"run", "report", "sidecar", "capture", "simulate", "build-tap", "doctor"} <= set(
        commands
    )
    for command in commands:
        assert "usage: torchlens-perf" in installed.succeeds(
            "python", "-m", PACKAGE, command, "--help"
        )


def test_simulated_run_is_reported_and_replayed(simulated: Path, installed: Environment) -> None:
    """`simulate` finds its data, `report` shows the run as text and as JSON, and `sidecar` replays
    it.
    """
    text = installed.succeeds("torchlens-perf", "report", simulated)
    value = json.loads(installed.succeeds("torchlens-perf", "report", simulated, "--json"))
    again = installed.succeeds("torchlens-perf", "sidecar", simulated)

    assert "60 steps" in text
    assert (value["steps"]["count"], len(value["ranks"]), value["quality"]["lost"]) == (60, 2, 0)
    assert "replayed 120 steps" in again


WATCH = """
import torch
import torchlens_perf as perf
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer) as w:
    for _ in range(12):
        with perf.section("augment"):
            x = torch.randn(4, 8)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(perf.__file__)
"""


@pytest.mark.parametrize("way", ["watch", "variable", "run"])
def test_single_process_is_recorded_in_each_documented_way(
    way: str, installed: Environment, tmp_path: Path
) -> None:
    """The ways are the README's lines, TORCHLENS_PERF=1, and `torchlens-perf run`."""
    script, environment = str(installed.home / "train.py"), {}
    if way == "watch":
        script = str(tmp_path / "watched.py")
        Path(script).write_text(WATCH)
    elif way == "variable":
        environment = {"TORCHLENS_PERF": "1"}
    command = ["torchlens-perf", "run", script] if way == "run" else ["python", script]
    start = (
        installed.run
        if way == "run"
        else lambda *each, **more: installed.run_warm(*each[1:], **more)
    )
    done = start(*command, folder=tmp_path, **environment)
    value = only_report(tmp_path)

    assert done.returncode == 0, done.stderr
    assert value["quality"]["lost"] == 0
    assert [rank["steps"] for rank in value["ranks"]] == [12 if way == "watch" else 29]
    assert value["run"]["program"] == Path(script).name
    if way == "watch":
        assert done.stdout == f"{installed.package / '__init__.py'}\n"
        assert [row["name"] for row in value["sections"]] == ["augment"]


@pytest.fixture(scope="module")
def real_tap(installed: Environment, compiling: subprocess.Popen[str]) -> Path:
    """Return the native tap, built from the sources in the wheel."""
    said, _ = compiling.communicate(timeout=300)
    assert compiling.returncode == 0
    return Path(said.strip())


def test_build_tap_writes_to_the_cache_and_doctor_finds_no_problem(
    real_tap: Path, installed: Environment
) -> None:
    """The tap is written to the user's cache, because a group can write to the package's folder."""
    home = real_tap.parents[2]
    said = installed.succeeds("torchlens-perf", "doctor", "--verbose", HOME=str(home)).splitlines()

    assert real_tap.parent == home / ".cache" / PACKAGE
    assert [line for line in said if line.startswith("broken")] == []
    works = ("recorder: native", "tap on collectives: native")
    entry_points = (
        f"entry point {group}: installed" for group in ("torch.backends", "torchrun.logs_specs")
    )
    assert {f"ok      {each}" for each in (*works, *entry_points)} <= set(said)


def test_run_uses_the_tap_that_was_built_after_the_run_before(
    real_tap: Path, installed: Environment, tmp_path: Path
) -> None:
    """The first run, under torchrun's flag, uses the Python tap and reports this fact."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--logs-specs", PACKAGE, str(installed.home / "train_two_ranks.py"), "30"]
    first = installed.run_warm(*command, folder=tmp_path)
    cache = installed.home / ".cache" / PACKAGE
    cache.mkdir(mode=0o700, parents=True)
    shutil.copy(real_tap, cache)
    second = installed.run_warm(*command, folder=tmp_path)
    reports = [report(each) for each in runs(tmp_path)]

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert [[rank["steps"] for rank in each["ranks"]] for each in reports] == [[29, 29], [29, 29]]
    missing = (
        "collectives were recorded from Python, which costs up to 50 us each and records no end"
        " times of asynchronous collectives; torchlens-perf build-tap builds the native tap"
    )
    assert [[note for note in each["quality"]["notes"] if "tap" in note] for each in reports] == [
        [missing],
        [],
    ]
    ended = [
        sum(row["ended"] for row in each["collectives"] if row["asynchronous"]) for each in reports
    ]
    assert ended[0] == 0 < ended[1]


# -- the sdist without a compiler


def test_package_from_the_sdist_is_off_without_a_compiler(made: Made, tmp_path: Path) -> None:
    """The program runs unrecorded. One line and `doctor` explain the fix."""
    environment = made.by_sdist
    (tmp_path / "watched.py").write_text(
        f"{WATCH}from torchlens_perf.commands.cli import main\nmain(['doctor'])\n"
    )
    done = environment.run("python", str(tmp_path / "watched.py"), folder=tmp_path)
    where, *doctor = done.stdout.splitlines()
    (line,) = done.stderr.splitlines()

    assert done.returncode == 0
    assert where == str(environment.package / "__init__.py")
    assert line.startswith("torchlens_perf is off: the native recorder is missing: reinstall the")
    assert list(tmp_path.iterdir()) == [tmp_path / "watched.py"]
    (at,) = [at for at, each in enumerate(doctor) if "the native recorder is missing" in each]
    assert doctor[at + 1].endswith(line.partition("missing: ")[2])
    installed_files = {
        str(path.relative_to(environment.package.parent))
        for path in environment.package.rglob("*.*")
    }
    assert expected(f"{PACKAGE}/") <= installed_files


def test_commands_leave_only_requested_files_in_the_working_folder(
    made: Made, simulated: Path
) -> None:
    assert list(made.by_wheel.work.iterdir()) == [simulated]
    assert list(made.by_sdist.work.iterdir()) == []
