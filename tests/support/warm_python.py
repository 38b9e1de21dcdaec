"""Run Python programs by forking a process that has already imported torch, with Popen's interface.

Importing torch and the parts that an optimizer needs takes four seconds of processor time, more
than the rest of most programs.

Each program is a child of the test with the given arguments, environment, folder and streams.

The programs ignore settings that only a starting interpreter reads: PYTHON* variables other than
PYTHONPATH and PYTHONUNBUFFERED, and variables that torch reads when it is loaded.

At its end, a program deallocates only what it has loaded itself, unless WHOLE_END is set.

The programs cannot start workers by `spawn`. Tests of a program's start use `subprocess`.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import types
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_NOT_OBEYED = ("PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONSAFEPATH")
_THREADS = "OMP_NUM_THREADS"
_MAX_MESSAGE_BYTES = 1 << 17

WHOLE_END = "WHOLE_END"
"""Variable with which a program deallocates everything at its end, as users' programs do."""

_servers: dict[tuple[str, str], socket.socket] = {}
"""Connections to the processes with torch loaded, by interpreter and preloaded modules.

These end with this process.
"""


class WarmPython(subprocess.Popen[Any]):
    """Replaces Popen([PYTHON, ...], ...) for a script, -m MODULE or -c CODE. One OpenMP thread."""

    # Popen has this method in Python 3.10 to 3.14.
    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, *descriptors_and_more: Any,
    ) -> None:  # fmt: skip
        stdin, _, _, stdout, _, stderr = pipes = descriptors_and_more[:6]
        start_new_session = descriptors_and_more[11]
        environ = dict(os.environ if env is None else env)
        if not os.path.basename(args[0]).startswith("python") or preexec_fn or pass_fds or shell:
            raise ValueError(f"only a Python program with streams, folder and environment: {args}")
        if unheeded := [name for name in _NOT_OBEYED if environ.get(name)]:
            raise ValueError(f"{unheeded} are obeyed by a Python that starts: use subprocess")
        if environ.get(_THREADS, "1") != "1":
            raise ValueError("OpenMP has read the number of its threads already: use subprocess")
        given = [
            1 + number if fd == -1 else fd for number, fd in enumerate((stdin, stdout, stderr), -1)
        ]
        request = {
            "arguments": [os.fspath(argument) for argument in args[1:]],
            "environ": environ,
            "folder": os.fspath(cwd or os.getcwd()),
            "session": bool(start_new_session),
        }
        try:
            self.pid = _fork(args[0], request, given)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    command: list[str], timeout_s: float = 90, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Python program as subprocess.run() does, and capture its output as text.

    Raises subprocess.TimeoutExpired.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with WarmPython(command, **{**streams, **options}) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _fork(python: str, request: dict[str, Any], descriptors: list[int]) -> int:
    """Start the program as a child of this process, and return its process id."""
    kind = python, request["environ"].get("LD_PRELOAD", "")
    server = _servers.get(kind) or _servers.setdefault(kind, _start_server(*kind))
    libc = ctypes.CDLL(None)
    # The server's child is orphaned at once, so it becomes a child of this process, which is set to
    # adopt orphans.
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        socket.send_fds(server, [json.dumps(request).encode()], descriptors)
        pid = int(server.recv(64))
        assert server.recv(64) == b"adopted"
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return pid


def _start_server(python: str, preloaded: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dropped = ("TORCHLENS", "OTEL_", "PYTHON")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # The programs load entry points themselves, with their own variables.
    environ |= {_THREADS: "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_PRELOAD": preloaded}
    subprocess.Popen(
        [python, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environ, cwd="/"
    )
    theirs.close()
    assert ours.recv(64) == b"ready"
    return ours


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request.

    Return only in the forked process, with the request and its three descriptors.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            program = os.fork()
            if program == 0:
                # Programs may ask for their parent's pid, so wait for the adoption.
                while os.getppid() == parent:
                    time.sleep(0.001)
                # Another object, for example of gloo, may soon reuse this descriptor number. The
                # socket object must not close the reused number when it is deleted.
                os.close(connection.detach())
                return json.loads(message), list(descriptors)
            connection.send(str(program).encode())
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(b"adopted")
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Apply the program's environment, folder and streams to this process."""
    if request["session"]:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    buffering = 1 if os.environ.get("PYTHONUNBUFFERED") else -1
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    # Compute the folder again, because the server's value comes from the server's own variables.
    tempfile.tempdir = None
    sys.orig_argv = [sys.executable, *request["arguments"]]
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        import torch

        # `import torch` makes the same call at its end.
        torch._import_device_backends()


def _execute(arguments: list[str]) -> None:
    """Run a command line as the interpreter does."""
    kind, *rest = arguments
    # torchrun passes -u, which has the effect of PYTHONUNBUFFERED here.
    if kind == "-u":
        sys.stdout.reconfigure(line_buffering=True)
        kind, *rest = rest
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if kind == "-m":
        sys.path[0], sys.argv = os.getcwd(), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        return
    sys.path[0], sys.argv = os.path.dirname(os.path.realpath(kind)), [kind, *rest]
    main.__file__ = kind
    with open(kind, "rb") as file:
        code = compile(file.read(), kind, "exec")
    exec(code, main.__dict__)


def _serve_torchrun() -> None:
    """Make torchrun fork its ranks from a copy of this process, which has already imported torch."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _run_programs(theirs)
        sys.exit()
    theirs.close()
    _servers[sys.executable, os.environ.get("LD_PRELOAD", "")] = ours
    subprocess_handler.Popen = WarmPython


_loaded_before_fork: dict[str, types.ModuleType] = {}


def _leave_loaded() -> None:
    """Keep Python from clearing the modules that were loaded before the fork.

    Clearing them, and the destructors of torch's libraries, take 0.3 seconds of processor time.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_loaded_before_fork))
    for name, module in _loaded_before_fork.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _end_fast() -> None:
    """Let the end of this program spare what was loaded before the fork."""
    _loaded_before_fork.update(sys.modules)
    for name in ("builtins", "sys"):
        del _loaded_before_fork[name]
    libc = ctypes.CDLL(None)
    # The C library calls these in the opposite order, after the destructors that the program adds.
    libc.on_exit(libc._exit, None)
    libc.on_exit(libc.fcloseall, None)


def _run_programs(connection: socket.socket) -> None:
    """Serve requests, and run the program in each forked process."""
    request, descriptors = _serve(connection)
    _become(request, descriptors)
    if not os.environ.get(WHOLE_END):
        _end_fast()
    if request["arguments"][:2] == ["-m", "torch.distributed.run"]:
        _serve_torchrun()
    _execute(request["arguments"])


def _main() -> None:
    # Python calls the function that was registered first at last.
    atexit.register(_leave_loaded)
    # Import this module now, because creating an optimizer imports it.
    import torch._dynamo
    import torch.distributed.run  # noqa: F401

    # Exclude the common objects from garbage collection, because each program would visit and copy
    # them at its end.
    gc.freeze()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.send(b"ready")
    _run_programs(connection)


if __name__ == "__main__":
    _main()
