"""`torchlens-perf run`: replace this process by a recorded Python.

::

    python -O -m torchlens_perf run train.py ARGS   ──execve──▶   python -O train.py ARGS

No wrapper runs the script, so it behaves exactly as with `python`. The process keeps its id, its
parent and its open files. Environment variables switch recording on: TORCHLENS_PERF=1, and
PYTHONPATH with startup/sitecustomize.py, which waits for the import of torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from torchlens_perf import config
from torchlens_perf.autoload import AUTOLOAD_SWITCH, is_autoload_off
from torchlens_perf.commands.command import Command
from torchlens_perf.errors import ConfigError, print_off, require
from torchlens_perf.run import children
from torchlens_perf.startup import sitecustomize

# An argument with short options: flags, and perhaps an option and its value, as in `-umNAME`.
_SHORT_OPTIONS = re.compile(r"-([^cmWX]*)([cmWX]?)(.*)", re.DOTALL)
_QUIET = "--quiet"  # not an option of Python itself
_LONG_WITH_VALUE = "--check-hash-based-pycs"
# -E and -I make Python ignore PYTHONPATH, and -S disables sitecustomize.
_NO_SITECUSTOMIZE = re.compile(r"-[^-WX]*[EIS]")


def exec_recorded_python(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a recorded `python ARGUMENTS`. Raises ConfigError if it fails."""
    quiet = list(arguments[:1]) == [_QUIET]
    arguments = arguments[quiet:]
    require(
        list(arguments) not in ([], ["-m"]), "a script is needed: torchlens-perf run train.py ARGS"
    )
    typed = python_options_of_this_process(sys.orig_argv)
    environment = children.environment_at_start()
    _switch_recording_on(environment, [*typed, *split_python_arguments(arguments)[0]], quiet=quiet)
    program = children.find_interpreter()
    try:
        os.execve(program, [sys.orig_argv[0], *typed, *arguments], environment)
    except OSError as error:
        raise ConfigError(f"cannot start {program}: {error.strerror}") from error


def python_options_of_this_process(command_line: Sequence[str]) -> list[str]:
    """Return Python's options in `python OPTIONS -m torchlens_perf ...`, which also apply to the
    script.

    For a console script, return []: the options in its first line come from the installer, not from
    the user.
    """
    options, command = split_python_arguments(command_line[1:])
    module = "".join(command[:2])  # `-mMODULE` and `-m MODULE` are equivalent.
    return options if module.startswith("-mtorchlens_perf") else []


def split_python_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of `python` into its options, and the script, `-m`, `-c` or `-` with all
    that follows.

    `-um module` becomes the option `-u` and `-m module`.
    """
    options: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        option = rest.pop(0)
        if option.startswith("--"):
            takes_next = option == _LONG_WITH_VALUE
        else:
            letters, last, value = _SHORT_OPTIONS.match(option).groups()  # type: ignore[union-attr] # always matches
            if last in ("c", "m"):
                if letters:
                    options.append(f"-{letters}")
                return options, [f"-{last}{value}", *rest]
            takes_next = last != "" and value == ""
        options.append(option)
        if takes_next and rest:
            options.append(rest.pop(0))
    return options, rest


def _switch_recording_on(
    environment: dict[str, str], options: Sequence[str], *, quiet: bool
) -> None:
    """Set the variables that make Python with these options record. quiet: no report."""
    if quiet:
        environment.setdefault(f"{config.ENVIRONMENT_PREFIX}REPORT", "quiet")
    try:
        wanted = config.is_recording_switched_on(environment)
    except ConfigError:
        wanted = True  # The recording process itself reports invalid variables.
    if wanted is False:
        if quiet:
            return
        off = config.CHILD if config.CHILD in environment else config.SWITCH
        print_off(f"{off}={environment[off]}", environment)
        return
    environment.setdefault(config.SWITCH, "1")
    path = environment.get("PYTHONPATH")
    first = path.split(os.pathsep)[0] if path else ""
    if any(map(_NO_SITECUSTOMIZE.match, options)) or os.pathsep in sitecustomize.FOLDER:
        # With -E, -I or -S, Python does not run sitecustomize. Only torch's entry point can record.
        if is_autoload_off(environment):
            print_off(
                f"{AUTOLOAD_SWITCH} is off, and with -E, -I or -S Python does not run sitecustomize,"
                " the other way to start recording",
                environment,
            )
    elif (
        first != sitecustomize.FOLDER
    ):  # The folder is already first if `run` was started by `run`.
        if path is not None:
            environment[sitecustomize.USERS_PATH] = path
        environment["PYTHONPATH"] = (
            f"{sitecustomize.FOLDER}{os.pathsep}{path}" if path else sitecustomize.FOLDER
        )


COMMAND = Command(
    name="run",
    summary="record a Python script",
    usage=(
        "torchlens-perf run [--quiet] [PYTHON'S OPTIONS] (SCRIPT | DIRECTORY | ZIP | -m MODULE"
        " | -c CODE | -) [ARGS]"
    ),
    description=(
        "A replacement for `python`: the script behaves as before and is recorded. With"
        " --quiet, which must be the first option, the report is not printed at the end, but"
        " only written to the run directory."
    ),
    # The new Python parses the arguments. Only `--help` reaches the parser.
    run=lambda options: 0,
)
