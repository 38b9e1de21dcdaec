"""`torchlens-perf run`: this process becomes Python anew, with what follows `run` as its command line, and is recorded.

::

    python -O -m torchlens_perf run train.py ARGS   ──execve──▶   python -O train.py ARGS

Nothing of ours is between Python and the script, so it means what it means without us. The process keeps its id, its
parent and its open files. Recording is switched on by the environment: TORCHLENS_PERF=1, and startup/sitecustomize.py,
which awaits the import of torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torchlens_perf import config
from torchlens_perf.autoload import AUTOLOAD_SWITCH, is_autoload_off
from torchlens_perf.errors import ConfigError, printable
from torchlens_perf.output import say
from torchlens_perf.run import children
from torchlens_perf.startup import sitecustomize

# One argument with short options: letters, then perhaps one that takes all that follows, or else the next argument.
_SHORT_OPTIONS = re.compile(r"-([^cmWX]*)([cmWX]?)(.*)", re.DOTALL)
_QUIET = "--quiet"  # Python has no such option
_LONG_WITH_VALUE = "--check-hash-based-pycs"
# -E and -I make Python ignore PYTHONPATH, -S the sitecustomize.
_NO_SITECUSTOMIZE = re.compile(r"-[^-WX]*[EIS]")


def run(arguments: Sequence[str]) -> NoReturn:
    """Becomes `python ARGUMENTS`, recorded. Raises ConfigError or RunStoreError if that is not possible."""
    quiet = list(arguments[:1]) == [_QUIET]
    arguments = arguments[quiet:]
    if not arguments or list(arguments) == ["-m"]:
        raise ConfigError("a script is needed: torchlens-perf run train.py ARGS")
    typed = typed_options(sys.orig_argv)
    environment = environment_at_start()
    _switch_on(environment, [*typed, *split_options(arguments)[0]], quiet=quiet)
    program = children.interpreter()
    try:
        os.execve(program, [sys.orig_argv[0], *typed, *arguments], environment)
    except OSError as error:
        raise ConfigError(f"cannot start {program}: {error.strerror}") from error


def describe(commands: Any) -> None:
    """Adds the help on `run` to the command line's subparsers. They never parse one: run() does."""
    commands.add_parser(
        "run",
        usage="torchlens-perf run [--quiet] [PYTHON'S OPTIONS] (SCRIPT | DIRECTORY | ZIP | -m MODULE | -c CODE | -) "
        "[ARGS]",
        description="A drop-in for `python`: the script behaves as before, and is recorded. With --quiet, which comes "
        "first, the report at the end is not printed, and is in the run directory only.",
    )


def typed_options(command_line: Sequence[str]) -> list[str]:
    """Python's options in `python OPTIONS -m torchlens_perf ...`, which hold for the script too.

    A console script has those of its first line, which are the installer's and not the user's: none.
    """
    options, command = split_options(command_line[1:])
    module = "".join(command[:2])  # -mMODULE, as one argument or as two
    return options if module.startswith("-mtorchlens_perf") else []


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits what follows `python` into options, and the script, `-m`, `-c` or `-` with all that follows.

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


def environment_at_start() -> dict[str, str]:
    """The environment that this process was started with.

    os.environ is not that: in the C locale Python adds LC_CTYPE to it, and Python started with that is in another mode.
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = [entry.partition(b"=") for entry in file.read().split(b"\0")]
    except OSError:
        entries = []
    environment: dict[str, str] = {}
    for name, _, value in entries:
        if name:
            environment.setdefault(os.fsdecode(name), os.fsdecode(value))
    return environment or {name: value for name, value in os.environ.items() if name != "LC_CTYPE"}


def _switch_on(environment: dict[str, str], options: Sequence[str], *, quiet: bool) -> None:
    """Makes Python, started with this environment and these options, record. quiet: without a report at the end."""
    if quiet:
        environment.setdefault(f"{config.ENVIRONMENT_PREFIX}REPORT", "quiet")
    try:
        wanted = config.is_on(environment)
    except ConfigError:
        wanted = True  # the recording process says so itself, as of any variable that cannot be used
    if wanted is False:
        if quiet:
            return
        off = config.CHILD if config.CHILD in environment else config.SWITCH
        _say_off(environment, f"{off}={environment[off]}")
        return
    environment.setdefault(config.SWITCH, "1")
    path = environment.get("PYTHONPATH")
    first = path.split(os.pathsep)[0] if path else ""
    if any(map(_NO_SITECUSTOMIZE.match, options)) or os.pathsep in sitecustomize.FOLDER:
        # Then torch's entry point is all there is.
        if is_autoload_off(environment):
            _say_off(environment, f"{AUTOLOAD_SWITCH} is off, and -E, -I or -S keeps out what would do without it")
    elif first != sitecustomize.FOLDER:  # it is, where `run` runs `run`
        if path is not None:
            environment[sitecustomize.USERS_PATH] = path
        environment["PYTHONPATH"] = f"{sitecustomize.FOLDER}{os.pathsep}{path}" if path else sitecustomize.FOLDER


def _say_off(environment: Mapping[str, str], reason: str) -> None:
    if environment.get("LOCAL_RANK", "0") == "0":  # one line a node, not one a rank
        say(f"torchlens_perf is off: {printable(reason)}\n")
