"""Tests of the programs that a watch starts.

A watch starts only a verified Python interpreter, and never the user's program again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import torchlens_perf as perf
from tests.support.leftovers import remaining_folders
from tests.support.long import long
from tests.support.processes import ROOT, clean_environ, run, run_warm, runs, wait_for_sidecar
from torchlens_perf import autoload
from torchlens_perf.config import CHILD
from torchlens_perf.errors import RunStoreError
from torchlens_perf.hooks.loop import first_step
from torchlens_perf.run import children
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.sidecar import page_file

APP = '#!/bin/sh\necho "$@" >> {log}\n'
LIBRARIES = sysconfig.get_path("purelib")
TRAIN = """
import sys
import torch
import torchlens_perf as perf
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, dir=sys.argv[-1], config=perf.Config(_exit_timeout_s=30)) as watch:
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
print("trained", watch.run_dir, flush=True)
"""


def programs(folder: Path) -> dict[str, object]:
    """Return values of sys.executable that are not this Python's interpreter."""
    app = folder / "app"
    app.write_text(APP.format(log=folder / "started"))
    app.chmod(0o755)
    named = folder / "bin"
    named.mkdir()
    for name in ("python", "python3.9"):
        shutil.copy(app, named / name)
    (folder / "link").symlink_to(app)
    (folder / "text").write_text("")
    return {
        "app": str(app), "link": str(folder / "link"), "named python": str(named / "python"),
        "of another version": str(named / "python3.9"), "none": None, "empty": "", "missing": str(folder / "gone"),
        "folder": str(folder), "no program": str(folder / "text"), "bytes": os.fsencode(app),
    }  # fmt: skip


KINDS = (
    "app", "link", "named python", "of another version", "none", "empty", "missing", "folder", "no program", "bytes",
    "frozen",
)  # fmt: skip


@pytest.mark.parametrize("sidecar", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_sys_executable_that_is_no_interpreter_is_never_started(
    kind: str,
    sidecar: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Recording is off with one line, before a ring is created.

    Even without a sidecar, no program is started.
    """
    # Also test a frozen program whose sys.executable is a real interpreter.
    if kind == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        programs(tmp_path)
    else:
        monkeypatch.setattr(sys, "executable", programs(tmp_path)[kind])
    model, folder = torch.nn.Linear(4, 4), tmp_path / "runs"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with perf.watch(model, optimizer, dir=str(folder), sidecar=sidecar, report="off") as watch:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    assert not (tmp_path / "started").exists()
    if sidecar:
        assert watch.run_dir is None
        assert len(said) == 1
        assert "torchlens_perf is off: no other process can be started: " in said[0]
        assert remaining_folders(folder) == []


@pytest.mark.parametrize(
    "function",
    [
        children.build_command,
        lambda: children.build_script_command("x.py"),
        children.check_sidecar_can_start,
    ],
)
def test_every_command_line_is_built_with_a_checked_interpreter(
    function: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every function that builds a command line calls find_interpreter()."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(RunStoreError, match="is frozen"):
        function()  # type: ignore[operator]


def test_sys_executable_is_read_in_one_place_only() -> None:
    """Command lines of our processes are built in the place that reads it."""
    allowed = {
        "run/children.py",
        "sidecar/host/stacks.py",  # py-spy is in the same folder as the interpreter.
    }
    package = Path(perf.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "sys.executable" in path.read_text()
    }

    assert found == allowed


def test_nothing_is_recorded_in_a_process_started_by_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There, watch(), TORCHLENS_PERF=1 and `run` record nothing, whatever the process runs."""
    monkeypatch.setenv(CHILD, "1")
    monkeypatch.setenv("TORCHLENS_PERF", "1")
    with perf.watch(dir=str(tmp_path / "runs")) as watch:
        pass
    autoload.autoload()
    done = run(
        [sys.executable, "-m", "torchlens_perf", "run", "-c", "import torch; print('ran')"],
        tmp_path,
    )

    assert watch.run_dir is None
    assert not (tmp_path / "runs").exists()
    assert first_step._waiting is None
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert f"torchlens_perf is off: {CHILD}=1" in done.stderr


@pytest.mark.parametrize(
    ("typed", "passed_on"),
    [
        (["-I"], ["-I"]),
        (["-E", "-s"], ["-E", "-s"]),
        (["-B", "-X", "utf8"], ["-B", "-X", "utf8"]),
        (["-X", "pycache_prefix=/nowhere", "-X", "dev"], ["-X", "pycache_prefix=/nowhere"]),
        (["-W", "error", "-O", "-X", "importtime"], []),
    ],
)
def test_interpreter_options_for_module_paths_are_passed_to_children(
    typed: list[str], passed_on: list[str]
) -> None:
    """Options that inspect the user's program are not passed on."""
    code = (
        "from torchlens_perf.run import children; import json;"
        " print(json.dumps(children.build_command('x')))"
    )
    command = [sys.executable, *typed, "-c", code]
    environ = {
        name: value for name, value in clean_environ().items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    program, *options = json.loads(done.stdout)

    assert program == sys.executable
    assert options == [*passed_on, str(Path(perf.__file__).parent), "x"]


@pytest.mark.long
def test_children_of_an_isolated_program_are_isolated(tmp_path: Path) -> None:
    """A sitecustomize on PYTHONPATH runs neither in the job nor in its children."""
    mark, folder = tmp_path / "mark", tmp_path / "path"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import sys; open({str(mark)!r}, 'a').write(repr(sys.argv))"
    )
    done = run(
        [sys.executable, "-I", "-c", TRAIN, str(tmp_path / "torchlens-perf")],
        tmp_path,
        PYTHONPATH=str(folder),
    )
    (made,) = runs(tmp_path)
    wait_for_sidecar(made)

    assert "20 steps" in done.stderr
    assert not mark.exists()


@pytest.mark.parametrize(
    ("folder", "first"),
    [
        # The package is in the folder of `pip install --target`.
        ("lib/site-packages", "import sys; sys.path.insert(0, {folder!r})"),
        *long(
            ("lib", "import sys; sys.path.append({folder!r})"),  # PEX and shiv do so.
            (".", ""),  # The package is a copy in the script's folder.
        ),
    ],
)
def test_sidecar_imports_the_package_that_the_job_imported(
    folder: str, first: str, tmp_path: Path
) -> None:
    target, script = tmp_path / folder, tmp_path / "train.py"
    copied = shutil.copytree(ROOT / "torchlens_perf", target / "torchlens_perf", dirs_exist_ok=True)
    main = copied / "__main__.py"
    main.write_text(f"open({str(tmp_path / 'mark')!r}, 'w').write(__file__)\n{main.read_text()}")
    # The path must precede the finder that the tests' editable installation has added.
    finders = (
        "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in"
        " repr(each)]\n"
    )
    script.write_text(finders + first.format(folder=str(target)) + TRAIN)
    command = [sys.executable, str(script), str(tmp_path / "torchlens-perf")]
    # Autoload would import the tests' package.
    done = run_warm(command, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    (made,) = runs(tmp_path)
    wait_for_sidecar(made)

    assert "20 steps" in done.stderr
    assert (tmp_path / "mark").read_text() == str(main)


def test_missing_library_disables_recording_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the library there would be no sidecar, so no ring is created.

    The printed line names the missing library.
    """
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != LIBRARIES])
    with pytest.raises(RunStoreError, match="numpy, pyarrow, msgspec, rich not found"):
        children.check_sidecar_can_start()


def test_package_in_an_archive_disables_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes could not run a package from an archive."""
    monkeypatch.setattr(children, "_PACKAGE", str(tmp_path / "app.pyz" / "torchlens_perf"))
    with pytest.raises(RunStoreError, match="is not in a folder"):
        children.check_sidecar_can_start()


def test_page_of_a_process_that_aborts_after_writing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete page is reported without a note. If the page is missing or old, a note says so."""
    made = RunDirectory(tmp_path / "run")
    made.path.mkdir()
    page = made.report.with_suffix(".html")
    writes = (
        f"import os; open('{page}.partial', 'w').write('page'); os.replace('{page}.partial',"
        f" '{page}'); os.abort()"
    )
    said = []
    for code in ("import os; os.abort()", writes, "import os; os.abort()"):
        monkeypatch.setattr(
            children, "build_command", lambda *arguments, code=code: [sys.executable, "-c", code]
        )
        said.append(page_file.write_page_in_child_process(made, lambda: False))

    assert said == ["its process ended with -6", "", "its process ended with -6"]


def test_exit_code_of_a_child_is_kept_if_its_libraries_abort(tmp_path: Path) -> None:
    """Threads of C++ libraries may abort a process at its end."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os; atexit.register(os.abort)")
    command = [sys.executable, "-m", "torchlens_perf", "report", str(tmp_path / "missing")]
    codes = [
        run(command, tmp_path, PYTHONPATH=str(tmp_path), **more).returncode
        for more in ({CHILD: "1"}, {})
    ]

    assert codes == [2, -6]


EMBEDDING = r"""
#include <Python.h>
int main(int argc, char **argv) {
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.parse_argv = 0;
    PyConfig_SetBytesString(&config, &config.program_name, argv[0]);
    PyConfig_SetBytesString(&config, &config.executable, argv[0]);
    PyConfig_SetBytesArgv(&config, argc, argv);
    if (PyStatus_Exception(Py_InitializeFromConfig(&config))) return 3;
    int failed = PyRun_SimpleString(CODE);
    return Py_FinalizeEx() < 0 || failed ? 4 : 0;
}
"""


@pytest.mark.long
def test_program_that_embeds_python_is_never_started_again(tmp_path: Path) -> None:
    """sys.executable of this C program is the program itself, which trains once."""
    get = sysconfig.get_config_var
    count = f"open({str(tmp_path / 'started')!r}, 'a').write('started\\n')\n"
    (tmp_path / "code.h").write_text("#define CODE " + json.dumps(count + TRAIN) + "\n")
    (tmp_path / "app.c").write_text('#include "code.h"\n' + EMBEDDING)
    library = [f"-L{get('LIBDIR')}", f"-Wl,-rpath,{get('LIBDIR')}", f"-lpython{get('LDVERSION')}"]
    if not get("Py_ENABLE_SHARED"):
        library = [f"{get('LIBPL')}/{get('LIBRARY')}", *get("LINKFORSHARED").split()]
    command = [
        "gcc",
        "app.c",
        f"-I{get('INCLUDEPY')}",
        "-o",
        "app",
        *library,
        *get("LIBS").split(),
        "-ldl",
        "-lm",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    path = os.pathsep.join([LIBRARIES, str(ROOT)])
    where = {"PYTHONHOME": sys.base_prefix, "PYTHONPATH": path}
    done = run([str(tmp_path / "app"), str(tmp_path / "torchlens-perf")], tmp_path, **where)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained None\n"
    assert (tmp_path / "started").read_text() == "started\n"
    assert (
        f"torchlens_perf is off: no other process can be started: {tmp_path / 'app'}"
        " (sys.executable)" in done.stderr
    )
    assert not (tmp_path / "torchlens-perf").exists()


# Torch and the package are not packed into the program, because packing takes minutes and tests
# nothing more.
FROZEN = """
import os, sys
sys.path[:0] = {path!r}
for name, module in list(sys.modules.items()):  # the program has parts of the standard library's packages
    if hasattr(module, "__path__"):
        module.__path__ = [*module.__path__, os.path.join({path!r}[0], *name.split("."))]
with open({started!r}, "a") as file:
    file.write(f"{{sys.frozen}} {{sys.executable}}\\n")
exec({code!r})
"""


@pytest.mark.long
def test_pyinstaller_program_is_never_started_again(tmp_path: Path) -> None:
    """sys.executable is a real PyInstaller program, which ignores its arguments.

    The program trains once and records nothing.
    """
    stdlib = [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib")) / "lib-dynload")]
    path, started = [*stdlib, LIBRARIES, str(ROOT)], tmp_path / "started"
    (tmp_path / "app.py").write_text(FROZEN.format(path=path, started=str(started), code=TRAIN))
    build = [
        sys.executable,
        "-m",
        "PyInstaller",
        "--onedir",
        "--noconfirm",
        "--log-level",
        "ERROR",
        "app.py",
    ]
    subprocess.run(build, cwd=tmp_path, env=dict(os.environ), check=True)
    app = tmp_path / "dist" / "app" / "app"
    done = run([str(app), str(tmp_path / "torchlens-perf")], tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained None\n"
    assert started.read_text() == f"True {app}\n"
    assert (
        done.stderr.count(
            "torchlens_perf is off: no other process can be started: this program is frozen"
        )
        == 1
    )
    assert not (tmp_path / "torchlens-perf").exists()
