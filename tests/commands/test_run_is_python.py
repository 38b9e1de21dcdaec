"""Unusual scripts have the same results with `python` and with `torchlens-perf run`.

The tests compare stdout, stderr, the exit code or signal, and all written files. zoo/probe.py
prints everything that a script can see of its process.
"""

from __future__ import annotations

import difflib
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.long import long_except

ZOO = Path(__file__).parents[1] / "zoo"
CONSOLE_SCRIPT = Path(sysconfig.get_path("scripts")) / "torchlens-perf"

# The environment is copied once, because pytest changes it while the cases run on threads.
ENVIRON = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYT", "TORCHLENS", "OTEL_"))
}
# Text that is removed from both outputs, because it may differ, with the reason.
DIFFERENCES = (
    (
        rb'\s*"TORCHLENS_PERF": "1",?',
        "the variable that switches recording on; children inherit it, to be recorded too",
    ),
    (rb'\s*"sitecustomize.TorchImportHook",', "the finder that awaits torch"),
    (rb'\s*"_": "[^"]*",?', "bash's name of the program that it started"),
    (rb"0x[0-9a-f]+", "addresses of objects"),
)

# Shell command lines, in which {run} is "" or "-m torchlens_perf run".
SEEN = {
    "script": "{python} {run} probe.py a -b --help",
    "same folder": "{python} {run} ./probe.py",
    "absolute": '{python} {run} "$PWD/probe.py"',
    "folder below": "{python} {run} sub/probe.py",
    "way round": "{python} {run} sub/../probe.py",
    "folder above": "cd sub && {python} {run} ../probe.py",
    "symbolic link": "{python} {run} link.py",
    "link to a folder": "{python} {run} linked/probe.py",
    "no suffix": "{python} {run} train",
    "compiled": "{python} {run} compiled.pyc",
    "folder": "{python} {run} app x y",
    "this folder": "cd app && {python} {run} . x y",
    "zip": "{python} {run} app.zip x y",
    "module": "{python} {run} -m probe -m x",
    "module, one word": "{python} {run} -mprobe x",
    "module of a folder below": "{python} {run} -m namespace.probe",
    "package": "{python} {run} -m app",
    "code": "{python} {run} -c \"$(cat probe.py)\" -c x",
    "stdin": "{python} {run} - x y < probe.py",
    "pipe": "{python} {run} <(cat probe.py) x",
    "after --": "{python} {run} -- probe.py",
    "python of PATH": 'PATH="$(dirname {python}):$PATH"; "$(basename {python})" {run} probe.py',
    "python by a way round": 'cd "$(dirname {python})" && "./$(basename {python})" {run} "$OLDPWD/probe.py"',
    "spaces, accents": "{python} {run} 'd\u00e9j\u00e0 vu.py' '' ' ' \"'\" $'\\n'",
    "name that is no text": "{python} {run} $'\\xff.py' $'\\xfe'",
    "options before": "{python} -O -W error::UserWarning -X dev -bb {run} probe.py",
    "options after": "{python} {run} -OO -u -B -Xno_debug_ranges -Wignore probe.py -O",
    "-I": "PYTHONPATH=lib {python} {run} -I probe.py",
    "-I before": "PYTHONPATH=lib {python} -I {run} probe.py",
    "-E": "PYTHONPATH=lib {python} {run} -Es probe.py",
    "-S": "PYTHONPATH=lib {python} {run} -S probe.py",
    "-P": "{python} {run} -P probe.py",
    "-P before": "{python} -P {run} -m probe",
    "-q -v twice": "{python} {run} -qW error --check-hash-based-pycs always -X utf8 probe.py",
    "PYTHONSAFEPATH": "PYTHONSAFEPATH=1 {python} {run} probe.py",
    "PYTHONPATH": "PYTHONPATH=lib:/nowhere:lib {python} {run} probe.py",
    "PYTHONPATH with gaps": "PYTHONPATH=:lib: {python} {run} probe.py",
    "PYTHONPATH empty": "PYTHONPATH= {python} {run} probe.py",
    "variables": "PYTHONHASHSEED=3 PYTHONOPTIMIZE=1 PYTHONWARNINGS=error,default::UserWarning PYTHONUNBUFFERED=1 "
    "PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1 PYTHONDEVMODE=1 {python} {run} probe.py",
    "no variables": "env -i {python} {run} probe.py",
    "C locale": "unset LC_ALL LC_CTYPE; LANG=C {python} {run} probe.py",
    "C locale for good": "LC_ALL=C {python} {run} probe.py",
    "locale not installed": "unset LC_ALL; LANG=xx_XX.UTF-8 {python} {run} probe.py",
    "locale's encoding": "unset LC_ALL LC_CTYPE; LANG=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {python} {run} probe.py",
    "sitecustomize": "PYTHONPATH=site_prints {python} {run} probe.py",
    # The Python process that runs `run` prints the message too: `sort -u` makes one line of both.
    "sitecustomize that fails": "PYTHONPATH=site_fails {python} {run} probe.py 2> >(sort -u >&2)",
    "sitecustomize that misses a module": "PYTHONPATH=site_misses {python} {run} probe.py 2> >(sort -u >&2)",
    "sitecustomize that sends on": "PYTHONPATH=site_sends_on:site_prints {python} {run} probe.py",
    "script named sitecustomize": "{python} {run} site_prints/sitecustomize.py",
    "recorded twice": "{python} {run} {run} probe.py",
    "nohup": "trap '' INT HUP; {python} {run} probe.py",
    "limits": "umask 077; ulimit -n 200; ulimit -s 4096; nice -n 3 {python} {run} probe.py",
    "no stdin": "{python} {run} probe.py <&-",
    "no stderr": "{python} {run} probe.py 2>&-",
    "stdin from a file": "{python} {run} probe.py < package/part.py",
    "more descriptors": "{python} {run} probe.py 7< package/part.py",
}  # fmt: skip
DONE = {
    "annotations": "{python} {run} annotations.py --rate 0.5 --name x",
    "annotations as text": "{python} {run} future_annotations.py",
    "usage": "{python} {run} usage.py --help",
    "usage of a module": "{python} {run} -m usage --steps many",
    "package": "{python} {run} -m package a b",
    "module of a package": "{python} {run} -m package.part",
    "module of a namespace": "{python} {run} -m namespace.part",
    "module of a package as a script": "{python} {run} package/part.py",
    "module of the library": "echo '[1]' | {python} {run} -m json.tool",
    "module that runs a script": "{python} {run} -m trace --count -C counts --missing usage.py; ls counts",
    "pdb": "echo q | {python} {run} -m pdb annotations.py",
    "crash": "{python} {run} crash.py",
    "crash in a module": "{python} {run} -m crash",
    "crash in code": "{python} {run} -c 'def f(): 1/0\nf()'",
    "crash on stdin": "{python} {run} - < crash.py",
    "crash in a folder": "{python} {run} crashing_app",
    "crash in a zip": "{python} {run} crashing.zip",
    "crash in the library": "{python} {run} crash_in_library.py",
    "crash, less said": "{python} -X no_debug_ranges -X tracemalloc {run} crash.py",
    "import fails": "{python} {run} import_fails.py",
    "import of a module that is run fails": "{python} {run} -m broken",
    "import of what is missing": "{python} {run} import_missing.py",
    "group of exceptions": "{python} {run} group.py",
    "recursion": "{python} {run} recursion.py",
    "syntax": "{python} {run} syntax.py",
    "syntax in code": "{python} {run} -c 'if: pass'",
    "syntax in a module": "{python} {run} -m syntax",
    "indentation": "{python} {run} indentation.py",
    "null bytes": "{python} {run} null.py",
    "empty": "{python} {run} empty.py",
    "byte order mark": "{python} {run} bom.py",
    "line ends": "{python} {run} crlf.py",
    "coding": "{python} {run} latin.py",
    "unknown coding": "{python} {run} coding.py",
    "wrong coding": "{python} {run} wrong.py",
    "first line skipped": "{python} {run} -x first_line.py",
    "missing": "{python} {run} nofile.py",
    "not readable": "{python} {run} unreadable.py",
    "folder without __main__": "{python} {run} lib",
    "missing module": "{python} {run} -m nomod",
    "module with suffix": "{python} {run} -m crash.py",
    "missing module of a package": "{python} {run} -m package.nomod",
    "package without __main__": "{python} {run} -m lib",
    "missing code": "{python} {run} -c",
    "unknown option": "{python} {run} --no-such-option",
    "version": "{python} {run} -V",
    **{
        f"ends by {how}": f"{{python}} {{run}} exits.py '{how}'"
        for how in (
            "nothing", "none", "0", "3", "300", "negative", "text", "object", "tuple", "true", "subclass", "keyboard",
            "generator", "base", "broken pipe", "_exit", "abort", "SIGINT", "SIGTERM", "SIGKILL", "SIGHUP", "SIGSEGV",
            "SIGUSR1", "at exit", "exit at exit",
        )
    },
    **{
        f"raises our {name}": f"{{python}} {{run}} our_errors.py {name}"
        for name in ("TorchlensPerfError", "ConfigError", "RunStoreError", "HookUnavailable")
    },
    "closed pipe": "set -o pipefail; {python} {run} writes_to_closed_pipe.py | head -n 1",
    "closed pipe of a module": "set -o pipefail; {python} {run} -u -m writes_to_closed_pipe | head -n 1",
    "streams closed": "{python} {run} closes_streams.py",
    "disk full": "{python} {run} streams.py > /dev/full",
    "streams": "{python} {run} streams.py",
    "streams in another encoding": "PYTHONIOENCODING=latin-1:replace {python} {run} streams.py",
    "hooks": "{python} {run} hooks.py",
    "threads": "{python} {run} threads.py",
    "globals at exit": "{python} {run} globals_at_exit.py",
    "warnings": "{python} {run} warns.py",
    "warnings of a module": "{python} {run} -W default -m warns",
    "warnings are errors": "{python} -W error {run} warns.py",
    "source": "{python} {run} source.py",
    "source of a module": "{python} {run} -m source",
    "pickles": "{python} {run} pickles.py",
    "pickles of a module": "{python} {run} -m pickles",
    **{
        f"{method}{' of a module' * bool(dash_m)}": f"{{python}} {{run}} -O {dash_m}{name} {method}"
        for method in ("fork", "spawn", "forkserver")
        for dash_m, name in (("", "run/processes.py"), ("-m ", "processes"))
    },
    "children": "PYTHONPATH=lib {python} {run} children.py",
    "children without PYTHONPATH": "{python} {run} children.py",
    "starts itself again": "{python} {run} -O starts_itself_again.py x",
    "module starts itself again": "{python} {run} -m starts_itself_again x",
    "reads stdin": "printf 'one\\ntwo\\nthree\\n' | {python} {run} reads_stdin.py",
    "imports __main__": "{python} {run} imports_main.py",
    "unit tests": "{python} {run} unit_tests.py",
    "unit tests of a module": "{python} {run} -m doctest -v unit_tests.py",
    "finders": "{python} {run} reloads.py",
    "torch is missing": "{python} {run} looks_for_torch.py",
    "torch that cannot load": "{python} {run} broken_torch/train.py",
    "torch that is no package": "{python} {run} odd_torch/train.py",
    "torch that is reloaded": "{python} {run} reloaded_torch/train.py",
    "files": "cd sub && {python} {run} ../files.py",
    "interrupted event loop": "{python} {run} asynchronous.py",
    "afterwards from the keyboard": "echo 'value + 1' | {python} {run} -i interactive.py",
}  # fmt: skip
CASES = {f"sees: {name}": line for name, line in SEEN.items()} | DONE
BY_CONSOLE_SCRIPT = (
    "sees: script", "sees: module", "sees: code", "sees: options after", "sees: C locale", "crash", "ends by 3",
    "ends by broken pipe", "ends by SIGTERM", "raises our ConfigError", "missing", "missing module", "spawn",
)  # fmt: skip
CONSOLE = "console script: "
ALL = (*CASES, *(CONSOLE + name for name in BY_CONSOLE_SCRIPT))
# Other cases run only in `make test-long`. In most cases, `run` only replaces itself by Python.
USUAL = (
    "sees: script", "sees: zip", "sees: module", "sees: package", "sees: code", "sees: stdin", "sees: spaces, accents",
    "sees: name that is no text", "sees: options before", "sees: options after", "sees: -I", "sees: -S",
    "sees: PYTHONPATH", "sees: variables", "sees: C locale", "sees: sitecustomize that sends on",
    "sees: recorded twice", "sees: no stderr", "crash", "crash in a module", "syntax", "missing", "missing module",
    "ends by 3", "ends by SIGTERM", "ends by at exit", "raises our ConfigError", "closed pipe", "streams closed",
    "threads", "pickles", "spawn", "children", "starts itself again", "reads stdin", "torch is missing",
    "torch that cannot load", "torch that is reloaded", "afterwards from the keyboard", "console script: sees: script",
    "console script: ends by 3",
)  # fmt: skip


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the scripts, including those with unusual bytes or file types."""
    folder = tmp_path_factory.mktemp("zoo") / "pristine"
    shutil.copytree(ZOO, folder, ignore=shutil.ignore_patterns("__pycache__"))
    probe = (ZOO / "probe.py").read_text()
    scripts: dict[str, str | bytes] = {
        "sub/probe.py": probe,
        "app/__main__.py": probe,
        "app/__init__.py": "",
        "namespace/probe.py": probe,
        "train": "#!/usr/bin/env python\n" + probe,
        "d\u00e9j\u00e0 vu.py": probe,
        os.fsdecode(b"\xff.py"): probe,
        "crashing_app/__main__.py": "import os\ndef f(): raise ValueError(os.getcwd() != __file__)\nf()\n",
        "lib/__init__.py": "",
        "site_prints/sitecustomize.py": "import sys\nprint(__name__, __file__, sys.path[:2])\nextra = 1\n",
        "site_fails/sitecustomize.py": "undefined\n",
        "site_misses/sitecustomize.py": "import no_such_module\n",
        # Like the sitecustomize of ddtrace and OpenTelemetry, this one removes itself and imports
        # the next one.
        "site_sends_on/sitecustomize.py": "import os, sys\nsys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['sitecustomize']\nimport sitecustomize\n",
        "syntax.py": "def train():\n    return (1,\n\nprint('never')\n",
        "indentation.py": "if True:\n\tprint(1)\n        print(2)\n",
        "null.py": b"print(1)\n\0\nprint(2)\n",
        "empty.py": "",
        "bom.py": b"\xef\xbb\xbfprint(__file__, 'caf\xc3\xa9')\n1 / 0\n",
        "crlf.py": b'text = """a\r\nb"""\r\nprint(ascii(text))\r\nif text:\r\n    1 / 0\r\n',
        "latin.py": b"# -*- coding: latin-1 -*-\nprint(ascii('caf\xe9'))\nraise ValueError('caf\xe9')\n",
        "coding.py": "# coding: no-such-coding\nprint(1)\n",
        "wrong.py": b"print('caf\xe9')\n",
        "first_line.py": "this is for another program\nprint(__file__)\n1 / 0\n",
        "unreadable.py": "print('read after all')\n",
        "broken_torch/train.py": "import torch\n",
        "broken_torch/torch/__init__.py": "from torch import lib\n",
        "broken_torch/torch/lib.py": "import warnings\nwarnings.warn('old driver', stacklevel=2)\n"
        "raise OSError('libcudart.so.12: cannot open shared object file')\n",
        "odd_torch/train.py": "import torch\nprint(torch.value, vars(torch.__spec__.loader))\n",
        "odd_torch/torch.py": "value = 7\n",
        # The import of this torch succeeds at the third attempt. torchlens_perf is kept out,
        # because it needs a real torch.
        "reloaded_torch/train.py": "import importlib, sys\nsys.modules['torchlens_perf.autoload'] = sys\n"
        "sys.autoload = lambda by: setattr(sys, 'armed', getattr(sys, 'armed', 0) + 1)\nfor _ in range(2):\n"
        "    try:\n        import torch\n    except OSError as error:\n        print(error, 'torch' in sys.modules)\n"
        "import torch\nspec = torch.__spec__\nimportlib.reload(torch)\n"
        "print(torch.__spec__ is spec, torch.__spec__ == spec, vars(torch.__loader__))\n",
        "reloaded_torch/torch/__init__.py": "import sys\nsys.tried = getattr(sys, 'tried', 0) + 1\n"
        "if sys.tried < 3:\n    raise OSError('not yet')\n",
    }  # fmt: skip
    for name, text in scripts.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    (folder / "unreadable.py").chmod(0)
    (folder / "link.py").symlink_to("sub/probe.py")
    (folder / "linked").symlink_to("sub")
    py_compile.compile(str(folder / "probe.py"), str(folder / "compiled.pyc"), dfile="probe.py")
    for name in ("app", "crashing_app"):
        with zipfile.ZipFile(folder / f"{name.removesuffix('_app')}.zip", "w") as file:
            file.write(folder / name / "__main__.py", "__main__.py")
    return folder


def contents(folder: Path) -> dict[str, object]:
    """Return the bytes of all files in a folder, and only the names of compiled modules."""
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() and path.suffix != ".pyc" else None
        )
        for path in sorted(folder.rglob("*"))
    }


def outcome(line: str, zoo: Path, folder: Path) -> list[str]:
    """Return all effects of a command line in a copy of the scripts, as lines of text."""
    shutil.copytree(zoo, folder, symlinks=True)
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={"LANG": "C.UTF-8", **ENVIRON},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=100,
    )
    lines = [f"exit code {done.returncode}"]
    for name, stream in (("stdout", done.stdout), ("stderr", done.stderr)):
        for pattern, _ in DIFFERENCES:
            stream = re.sub(pattern, b"", stream)
        lines += [
            f"{name}: {line}" for line in stream.decode("utf-8", "backslashreplace").splitlines()
        ]
    before = contents(zoo)
    lines += [
        f"file {name}: {text!r}"
        for name, text in contents(folder).items()
        if before.get(name, "none") != text
    ]
    shutil.rmtree(folder)
    return lines


def different_lines(name: str, zoo: Path) -> str:
    """Return the differences between `run` and Python, or "".

    Both commands run in the same folder.
    """
    python, run = (
        (CONSOLE_SCRIPT, "run")
        if name.startswith(CONSOLE)
        else (sys.executable, "-m torchlens_perf run")
    )
    line = CASES[name.removeprefix(CONSOLE)]
    lines = [line.format(python=sys.executable, run=""), line.format(python=python, run=run)]
    folder = zoo.parent / str(list(ALL).index(name))
    return "\n".join(
        difflib.unified_diff(
            *(outcome(each, zoo, folder) for each in lines), *lines, n=0, lineterm=""
        )
    )


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, zoo: Path) -> Iterator[dict[str, Future[str]]]:
    """Run all selected cases, two at a time."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(different_lines, name, zoo) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", long_except(USUAL, ALL))
def test_run_has_the_same_results_as_python_for_unusual_scripts(
    name: str, running: dict[str, Future[str]]
) -> None:
    """`python -m torchlens_perf run` and `torchlens-perf run` are tested."""
    different = running[name].result()
    assert not different, different
