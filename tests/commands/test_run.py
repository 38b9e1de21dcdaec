"""The command `run`: its Python options, and its messages if recording is impossible."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.processes import run
from torchlens_perf.commands.run import python_options_of_this_process, split_python_arguments

RUN = [sys.executable, "-m", "torchlens_perf", "run"]
TRAIN_AND_IMPORT = """
import torch
import torchlens_perf as perf

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, report="off"):
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
import openai
"""


@pytest.mark.parametrize(
    ("arguments", "options", "rest"),
    [
        ([], [], []),
        (["x.py", "-O"], [], ["x.py", "-O"]),
        (["-O", "-u", "x.py", "-m"], ["-O", "-u"], ["x.py", "-m"]),
        (["-W", "error", "-Xdev", "x.py"], ["-W", "error", "-Xdev"], ["x.py"]),
        (["-OW", "-m", "-X", "-c", "x.py"], ["-OW", "-m", "-X", "-c"], ["x.py"]),
        (["-uOm", "x", "-O"], ["-uO"], ["-m", "x", "-O"]),
        (["-umx", "y"], ["-u"], ["-mx", "y"]),
        (["-Ic", "pass", "-c"], ["-I"], ["-c", "pass", "-c"]),
        (["-cpass\n1"], [], ["-cpass\n1"]),
        (["-"], [], ["-"]),
        (["-O", "--", "-m"], ["-O"], ["--", "-m"]),
        (
            ["--check-hash-based-pycs", "always", "x.py"],
            ["--check-hash-based-pycs", "always"],
            ["x.py"],
        ),
        (["--version", "x.py"], ["--version"], ["x.py"]),
        (["-X"], ["-X"], []),
    ],
)
def test_interpreter_options_are_separated_from_the_script_as_in_python(
    arguments: list[str], options: list[str], rest: list[str]
) -> None:
    """Options end at a script, -m, -c, - or --. The value of -W or -X may follow its option."""
    assert split_python_arguments(arguments) == (options, rest)


@pytest.mark.parametrize(
    ("command_line", "options"),
    [
        (["python", "-m", "torchlens_perf", "run", "-O", "x.py"], []),
        (["python", "-O", "-X", "dev", "-m", "torchlens_perf", "run", "x.py"], ["-O", "-X", "dev"]),
        (["python", "-um", "torchlens_perf", "run", "x.py"], ["-u"]),
        (["python", "-umtorchlens_perf.__main__", "run", "x.py"], ["-u"]),
        (["python", "-sP", "/usr/bin/torchlens-perf", "run", "x.py"], []),
        (["python", "-I", "-c", "import torchlens_perf.commands.cli"], []),
        (["python", "-O"], []),
    ],
)
def test_options_before_the_module_apply_to_the_script(
    command_line: list[str], options: list[str]
) -> None:
    """Options before `-m torchlens_perf` apply to the script.

    Options in the first line of a console script do not apply to the script.
    """
    assert python_options_of_this_process(command_line) == options


def test_script_imports_its_neighbours_despite_options_of_the_console_script(
    tmp_path: Path,
) -> None:
    """Distributions install console scripts with `-I` or `-sP`."""
    installed = (Path(sysconfig.get_path("scripts")) / "torchlens-perf").read_text()
    console = tmp_path / "torchlens-perf"
    console.write_text(f"#!{sys.executable} -I\n" + installed.partition("\n")[2])
    console.chmod(0o755)
    (tmp_path / "neighbour.py").write_text("import sys; print(sys.flags.isolated)")
    (tmp_path / "train.py").write_text("import neighbour")
    done = run([str(console), "run", "train.py"], tmp_path)

    assert (done.stdout, done.stderr) == ("0\n", "")


def test_run_imports_no_modules_from_the_working_directory(tmp_path: Path) -> None:
    """A module in the working directory may have the name of a library."""
    for name in ("dataclasses", "tempfile", "logging", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("import dataclasses; print('trained')")
    done = run(
        [str(Path(sysconfig.get_path("scripts")) / "torchlens-perf"), "run", "src/train.py"],
        tmp_path,
    )

    assert (done.stdout, done.stderr) == ("trained\n", "")


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_run_help_is_printed_only_before_the_script(option: str, tmp_path: Path) -> None:
    """After a script, -h is an argument of the script."""
    done = run([*RUN, option], tmp_path)
    (tmp_path / "x.py").write_text("import sys; print(sys.argv)")
    scripts = run([*RUN, "x.py", option], tmp_path)

    assert done.returncode == 0
    assert "SCRIPT | DIRECTORY | ZIP | -m MODULE" in done.stdout
    assert scripts.stdout == f"['x.py', '{option}']\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "torchlens-perf: a script is needed: torchlens-perf run train.py ARGS"),
        (["-m"], 2, "torchlens-perf: a script is needed: torchlens-perf run train.py ARGS"),
        (["nofile.py"], 2, "{python}: can't open file '{folder}/nofile.py': [Errno 2] No such file or directory"),
        (["-m", "nomod"], 1, "{python}: No module named nomod"),
        (["-m", "os.nomod"], 1, "{python}: Error while finding module specification for 'os.nomod' "
         "(ModuleNotFoundError: __path__ attribute not found on 'os' while trying to find 'os.nomod')"),
    ],
)  # fmt: skip
def test_script_that_cannot_run_is_one_line_with_the_exit_code_of_python(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    done = run([*RUN, *arguments], tmp_path)

    assert done.returncode == code
    assert done.stderr == message.format(python=sys.executable, folder=tmp_path) + "\n"


def test_deleted_interpreter_is_one_line_with_exit_code_2(tmp_path: Path) -> None:
    program = (
        "import sys; sys.executable = '/nowhere/python'\n"
        "from torchlens_perf.commands.cli import main; sys.exit(main(['run', 'x']))"
    )
    done = run([sys.executable, "-c", program], tmp_path)

    assert done.returncode == 2
    assert (
        done.stderr
        == "torchlens-perf: no other process can be started: /nowhere/python (sys.executable)"
        " cannot be run\n"
    )


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ([], {}, ""),
        ([], {"TORCHLENS_PERF": "0"}, "torchlens_perf is off: TORCHLENS_PERF=0\n"),
        ([], {"TORCHLENS_PERF": "0", "LOCAL_RANK": "1"}, ""),
        (["-I"], {}, ""),
        ([], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, ""),
        *(
            (
                options,
                {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                "torchlens_perf is off: TORCH_DEVICE_BACKEND_AUTOLOAD is off, and with -E, -I or -S Python"
                " does not run sitecustomize, the other way to start recording\n",
            )
            for options in (["-I"], ["-OE"], ["-W", "ignore", "-S"])
        ),
        (["-W", "ignore::UserWarning", "-X", "int_max_str_digits=0"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, ""),
    ],
)  # fmt: skip
def test_script_runs_with_one_line_if_recording_is_impossible(
    options: list[str], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    """The line has the reason."""
    done = run([*RUN, *options, "-c", "print('ran')"], tmp_path, **environment)

    assert (done.stdout, done.stderr, done.returncode) == ("ran\n", said, 0)


def test_script_runs_with_one_line_if_the_package_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("value = 7")
    (tmp_path / "x.py").write_text(
        "import sys; sys.modules['torchlens_perf'] = None\nimport torch; print(torch.value)"
    )
    done = run([*RUN, "x.py"], tmp_path)

    assert (done.stdout, done.returncode) == ("7\n", 0)
    assert done.stderr.startswith("torchlens_perf is off: ModuleNotFoundError: ")
    assert done.stderr.count("\n") == 1


def test_script_starts_if_proc_self_environ_is_unreadable(tmp_path: Path) -> None:
    """os.environ is used instead of /proc/self/environ."""
    program = (
        "import builtins, os, sys\nopened = builtins.open\ndef no_proc(path, *more):\n    if"
        " str(path).startswith('/proc/'): raise PermissionError(13, 'no')\n    return opened(path,"
        " *more)\nbuiltins.open = no_proc\nfrom torchlens_perf.commands.cli import"
        " main\nmain(['run', '-c', 'import os; print(os.environ[\"KEPT\"],"
        ' os.environ["TORCHLENS_PERF"])\'])\n'
    )
    done = run([sys.executable, "-c", program], tmp_path, KEPT="as it was")

    assert done.stdout == "as it was 1\n"


def test_import_of_openai_after_a_watch_starts_no_recording(tmp_path: Path) -> None:
    (tmp_path / "openai").mkdir()
    (tmp_path / "openai" / "__init__.py").touch()
    (tmp_path / "train.py").write_text(TRAIN_AND_IMPORT)
    done = run([*RUN, "train.py"], tmp_path)

    assert done.returncode == 0, done.stderr
    assert "recorded nothing" not in done.stdout + done.stderr
