"""Tests that the training process never unpickles, communicates, handles signals, opens sockets or
waits at its end.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import run, runs, wait_for_sidecar
from tests.test_architecture import PACKAGE, module_name

_TRAINING = {
    "", "autoload", "config", "cuda", "errors", "hooks", "instrumentation", "integrations", "output", "recorder",
    "results", "run", "startup", "torchrun", "version", "watching",
}  # fmt: skip
_NETWORK = {
    "aiohttp", "asyncio", "ftplib", "grpc", "http", "httpx", "opentelemetry", "requests", "smtplib", "socket",
    "socketserver", "ssl", "telnetlib", "urllib", "urllib3", "xmlrpc",
}  # fmt: skip
_UNPICKLES = {"cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
_BANNED = _NETWORK | _UNPICKLES | {"atexit", "concurrent", "multiprocessing", "signal"}
_COLLECTIVES = {
    "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object_list",
    "destroy_process_group", "gather", "init_process_group", "irecv", "isend", "monitored_barrier", "new_group", "recv",
    "reduce", "reduce_scatter", "scatter", "send", "TCPStore",
}  # fmt: skip
# The exceptions by file, with the reason.
_ALLOWED = {
    # Leaves the watch within the exit timeout, also in a process that multiprocessing has forked.
    "watching": {"atexit.register", "atexit.unregister", "multiprocessing.util.Finalize"},
    # Only reads which handlers the program has installed.
    "interruption": {"signal.getsignal", "signal.valid_signals"},
    "results.last_report": {
        "signal.SIGHUP",
        "signal.SIGTERM",
        "signal.SIGUSR1",
        "signal.SIGUSR2",
        "signal.SIGXCPU",
        "signal.getsignal",
    },
    # Prints a line about the user's program if nothing was recorded.
    "hooks.loop.first_step": {
        "atexit.register",
        "atexit.unregister",
        "multiprocessing.parent_process",
    },
    # Hooks of process groups that outlive the interpreter crash the process.
    "hooks.collectives.process_group_hooks": {"atexit.register", "atexit.unregister"},
    "config": {
        "urllib.parse.parse_qsl",
        "urllib.parse.urlencode",
        "urllib.parse.urlsplit",
    },  # A method of a text.
    "results.notebook": {"urllib.parse.quote"},  # A method of a text.
    "run.installation": {"urllib.parse.unquote", "urllib.parse.urlsplit"},  # A method of a text.
    "run.location": {"urllib.parse.unquote"},  # A method of a text.
    # Restores the user's handler.
    "hooks.stack": {"signal.SIG_DFL", "signal.getsignal", "signal.signal"},
    # Writes a memory snapshot for torch's own viewer.
    "recorder.torch_instruments": {"pickle.dumps"},
    "run.identity": {"socket.gethostname"},  # Opens no socket.
    "run.place.node": {"socket.gethostname"},
    "run.ring": {"signal.SIGUSR2"},
    # Loaded only by OpenTelemetry's own tools, if the user runs them in the process.
    "instrumentation.instrumentor": {"opentelemetry.instrumentation.instrumentor.BaseInstrumentor"},
    "instrumentation.resource_detector": {
        "opentelemetry.sdk.resources.Resource",
        "opentelemetry.sdk.resources.ResourceDetector",
        "socket.gethostname",
    },
    # Communicates for aggregate="device", which the user must request.
    "cuda.aggregate": {"dist.all_reduce"},
    "cuda.device": {"dist.all_reduce", "dist.new_group"},
    "hooks.collectives.data_parallel": {"dist.reduce"},  # The name of the wrapped function.
}
_THREADS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "start_new_thread"}

_JOB = """
import json, sys
import torch
from torch import nn
import torch.distributed
watched = sys.argv[1] == "watched"
if watched:
    import torchlens_perf as perf
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
import contextlib
with (perf.watch(model, optimizer, config=perf.Config(_exit_timeout_s=10)) if watched else contextlib.nullcontext()):
    for _ in range(40):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
print("modules", json.dumps(sorted(sys.modules)))
import signal, threading
handled = {str(int(each)): str(signal.getsignal(each)) for each in signal.valid_signals()}
print("process", json.dumps([handled, threading.active_count()]))
"""


def _said(kind: str, folder: Path) -> tuple[set[str], list[object]]:
    done = run([sys.executable, "-c", _JOB, kind], folder)
    assert done.returncode == 0, done.stderr
    found = dict(
        line.split(" ", 1)
        for line in done.stdout.splitlines()
        if line.startswith(("modules ", "process "))
    )
    return set(json.loads(found["modules"])), json.loads(found["process"])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """Return the modules that a watched and an unwatched process have loaded at their end.

    Check that threads and signal handlers of both processes are equal.
    """
    folder = tmp_path_factory.mktemp("job")
    watched, process = _said("watched", folder)
    unwatched, process_without = _said("unwatched", folder)
    for each in runs(folder):
        wait_for_sidecar(each)
    assert process == process_without
    return watched, unwatched


def _used(tree: ast.AST) -> Iterator[str]:
    """Yield the banned uses of modules, threads and collectives in a file, as "module.name"."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                if root in _BANNED:
                    names[alias.asname or root] = root
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _BANNED:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            function = node.func
            name = (
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            if name in _THREADS:
                yield f"threading.{name}"
            # A generator's send() is no communication, so only calls of torch.distributed count.
            owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            if name in _COLLECTIVES and (not owner or "dist" in owner):
                yield f"dist.{name}"
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
        ):
            yield f"{names[node.value.id]}.{node.attr}"


def _found(modules: set[str]) -> dict[str, set[str]]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        module = module_name(path)
        if module in modules or module.partition(".")[0] in _TRAINING:
            found[module] = set(_used(ast.parse(path.read_text()))) - _ALLOWED.get(module, set())
    return {module: used for module, used in found.items() if used}


def test_files_of_the_training_process_use_no_banned_function(
    loaded: tuple[set[str], set[str]],
) -> None:
    prefix = "torchlens_perf."
    ours = {name.removeprefix(prefix) for name in loaded[0] if name.startswith(prefix)}

    assert len(ours) > 40
    assert _found(ours) == {}


def test_source_search_finds_every_banned_use() -> None:
    source = "\n".join([
        "import pickle, ssl as s", "from signal import signal", "import torch.distributed as dist", "import atexit",
        "pickle.loads(b'')", "s.create_default_context()", "dist.barrier()", "atexit.register(thread.join)",
        "threading.Thread(target=f)",
    ])  # fmt: skip
    assert set(_used(ast.parse(source))) == {
        "pickle.loads", "ssl.create_default_context", "signal.signal", "dist.barrier", "atexit.register",
        "threading.Thread",
    }  # fmt: skip


def test_watch_loads_no_network_pickle_or_sidecar_modules(
    loaded: tuple[set[str], set[str]],
) -> None:
    """torch itself loads some of these modules from the standard library."""
    watched, unwatched = loaded
    more = watched - unwatched
    roots = {name.partition(".")[0] for name in more}

    assert "torchlens_perf" in roots
    assert roots & (_NETWORK | _UNPICKLES | {"concurrent", "multiprocessing"}) == set()
    assert roots & {"msgspec", "pyarrow", "rich", "pynvml", "IPython", "pandas", "polars"} == set()
    assert {
        name
        for name in more
        if name.startswith(("torchlens_perf.sidecar", "torchlens_perf.exporters"))
    } == set()
    # Of the modules for results, only those that every watch needs are loaded.
    shows = {name for name in watched if name.startswith("torchlens_perf.results.")}
    of_watch = ("last_report", "methods")
    assert shows == {f"torchlens_perf.results.{name}" for name in of_watch}
