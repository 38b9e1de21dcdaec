"""Imports follow the picture: data flows from hooks to ring to sidecar to report, and nothing reaches back."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import torchlens_perf as perf
from tests.support.processes import ROOT

PACKAGE = Path(perf.__file__).parent

# Packages, and files at the top; each may import those above it only. With why it is there.
RANKS = {
    "output": "prints and logs, whatever stderr is",
    "errors": "all raise them",
    "version": "a number",
    "config": "settings, checked where they come in",
    "run.place": "who a process is to its launcher, and what its node and its run are called",
    "run.rings": "where a ring's bytes lie, and how they get into the run directory",
    "run": "what both processes share: ring file, run directory, who a rank is",
    "run.device": "what both must know alike of a device's steps",
    # the training process
    "cuda": "what runs on a GPU, for hooks to use",
    "recorder": "writes marks; holds what hooks share, and knows none of them",
    "hooks.loop": "says where a step ends: the other hooks tell it",
    "hooks.on_device": "hooks about a device",
    "hooks": "all hooks, and the list of them",
    "results": "shows a watch's own run to who asks for it; asks the sidecar, or a child process",
    "watch": "makes the recorder and the hooks, attaches them, takes them away",
    "integrations": "callbacks of frameworks, which begin, step and end a watch",
    "autoload": "starts a watch in a script that does not know of us",
    "startup": "starts autoload where torch does not",
    "torchrun": "switches autoload on in workers",
    "instrumentation": "is loaded by OpenTelemetry's own tools, in whatever they start",
    "": "the public names",
    # the sidecar
    "store": "Parquet files: writes and reads them all",
    "analysis.statistics": "what one rank's records add up to",
    "analysis.collectives": "ranks' records of one collective, joined",
    "verdicts.stragglers": "who is slow",
    "verdicts.causes": "why",
    "verdicts.words": "sentences about all of that",
    "verdicts": "what is wrong, from when it was found to its end",
    "analysis": "all of it, as one node's state",
    "exporters.delivery": "sends through the SDK's exporters, and keeps what an endpoint does not take",
    "exporters.choice": "which steps are sent, and which ranks of them",
    "exporters": "who shows it to a backend",
    "exporters.prometheus": "who answers a backend that asks",
    "report": "who shows it to people",
    "page": "what a page holds",
    "page.gather": "reads a run directory into that",
    "page.pictures": "draws it",
    "page.sections": "puts pictures, words and tables together",
    "page.document": "puts sections together, and writes the file",
    "sidecar.rings": "reads rings",
    "sidecar.telemetry": "reads the node's hardware",
    "sidecar.host": "reads the kernel",
    "sidecar.nodes": "talks to other nodes' sidecars",
    "sidecar": "puts that together, round by round",
    "sidecar.start": "starts it, with next to nothing imported",
    "serve": "shows runs as pages to viewers, and follows them",
    "top": "shows a run in a terminal, while it goes on",
    # both
    "simulate": "writes rings as a training process does, and is replayed as a sidecar does",
    "commands": "calls any of them",
    "__main__": "calls a command",
}
_ORDER = list(RANKS)
_FIRST_OF_TRAINING, _FIRST_OF_SIDECAR, _FIRST_OF_BOTH = map(_ORDER.index, ("cuda", "store", "simulate"))
TRAINING = set(_ORDER[:_FIRST_OF_SIDECAR])

# Files of these compute on values: they know no file, no process and no clock.
PURE_PACKAGES = {
    "analysis.statistics", "analysis.collectives", "verdicts.stragglers", "verdicts.causes", "exporters.choice",
    "page.pictures", "page.sections",
}  # fmt: skip
PURE = {
    "verdicts.alert", "verdicts.finding_log", "verdicts.words.evidence", "verdicts.words.hang",
    "verdicts.words.oom", "verdicts.words.stragglers", "cuda.reduction",
    "exporters.series_room",
    "exporters.prometheus.names",
    "page.contents", "page.decoded", "page.gather.held", "page.gather.node_clocks", "page.gather.step_choice",
    "page.gather.step_collectives", "page.gather.step_grid", "page.gather.step_trace", "page.gather.thinning",
    "page.matrix", "recorder.sampling", "recorder.steps",
    "run.device.merged_rows", "run.device.step_parts", "run.fitting", "run.memory_readings", "run.oom_table",
    "run.rank_ranges", "run.records", "run.sketch", "run.verdicts", "sidecar.nodes.messages", "sidecar.nodes.summary",
    "sidecar.schedule", "top.cells", "top.frame", "top.grid", "top.help_text", "top.pace", "top.rank_lines",
    "top.verdict_lines",
}  # fmt: skip
THIRD_PARTY = {
    "anyio": {"serve.readers"},
    "cupy": {"cuda.kernels"},
    "grpc": {
        "exporters.delivery.grpc_calls", "sidecar.nodes.client", "sidecar.nodes.server", "sidecar.nodes.transport",
    },
    "msgspec": {
        "analysis.collectives.slow_link", "analysis.node_state", "verdicts.words.evidence",
        "exporters.choice.said", "exporters.tally",
        "page.gather.run_contents", "report.report_json",
        "sidecar.nodes.link_report",
        "sidecar.nodes.membership",
        "sidecar.nodes.messages",
    },
    "lightning": {"integrations.lightning"},
    "nvtx": {"hooks.nvtx", "commands.doctor"},
    "opentelemetry": {"exporters", "instrumentation.instrumentor", "instrumentation.resource_detector"},
    "rich": {
        "commands.progress", "report.brief", "report.heat_map", "report.rank_table", "report.tables", "report.terminal",
        "report.verdict_text", "top",
    },
    "IPython": {"results.notebook"},
    "prometheus_client": {"exporters.prometheus"},
    "pandas": {"results.tables"},
    "polars": {"results.tables"},
    "pyarrow": {"results.tables", "store"},
    "pynvml": {"sidecar.telemetry.gpu"},
    "starlette": {"serve"},
    "textual": {"top"},
    "transformers": {"integrations.huggingface"},
    "torch": {
        "commands.doctor", "commands.tap_build",
        "cuda.aggregate",
        "hooks",
        "recorder",
        "sidecar.nodes.job_store",
        "torchrun",
        "watch",
    },
    "uvicorn": {"serve"},
}  # fmt: skip
IMPURE = {"mmap", "os", "pathlib", "socket", "subprocess", "threading", "time"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imports(path: Path) -> set[str]:
    """What a file imports: at once, in a function, and for the type checker."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def assigned(path: Path) -> set[str]:
    """Attributes that a file sets on a session or on a part of one, which have methods for that."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            chain = ast.unparse(node.value).split(".")
            if {"session", "_session"} & set(chain[-2:]):
                found.add(node.attr)
    return found


@functools.cache
def modules() -> dict[str, set[str]]:
    """What each file of the package imports. Not read before a test asks: each worker collects this file."""
    return {module_name(path): imports(path) for path in PACKAGE.rglob("*.py")}


def ours(names: set[str]) -> set[str]:
    """The modules of the package among imported names, by their path inside it."""
    inside = {name.removeprefix("torchlens_perf").lstrip(".") for name in names if name.startswith("torchlens_perf")}
    inside.discard("_native")  # the extension: no file in Python
    return {
        max((m for m in modules() if m == name or f"{name}.".startswith(f"{m}.")), key=len, default="")
        for name in inside
        for name in inside
    }


def belongs(module: str, group: set[str]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in group if each) or module in group


def package_of(module: str) -> str:
    """The package that a file is in; a file at the top is its own."""
    if module in RANKS:  # its __init__, or a file at the top
        return module
    return module.rpartition(".")[0] or module


@functools.cache
def arrows() -> set[tuple[str, str]]:
    return {(module, other) for module, names in modules().items() for other in ours(names) if other != module}


def test_every_file_is_in_a_package_of_the_list() -> None:
    assert {package_of(module) for module in modules()} - set(RANKS) == set()


def test_nothing_is_imported_upward() -> None:
    """Neither at once, nor in a function, nor for the type checker."""
    upward = {
        (module, other)
        for module, other in arrows()
        if _ORDER.index(package_of(other)) > _ORDER.index(package_of(module))
    }
    assert upward == set()


def test_the_two_processes_share_what_both_need_only() -> None:
    """What runs in the training process, and the sidecar, know nothing of one another."""
    for module, other in arrows():
        first, second = (_ORDER.index(package_of(each)) for each in (module, other))
        if _FIRST_OF_SIDECAR <= first < _FIRST_OF_BOTH:
            assert not _FIRST_OF_TRAINING <= second < _FIRST_OF_SIDECAR, f"{module} imports {other}"


def test_no_cycles() -> None:
    """Not between files either, whatever their packages."""
    below: dict[str, set[str]] = defaultdict(set)
    for module, other in arrows():
        below[module].add(other)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(below[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())


def test_top_level_files_are_entry_points() -> None:
    """Each file beside the packages is an entry point, or used by all packages; everything else is in a package."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == {
        "__init__", "__main__", "watch", "autoload", "torchrun", "config", "errors", "output", "version",
    }  # fmt: skip


def test_pure_parts_are_pure() -> None:
    """The parts that compute import no file, process, clock or thread."""
    pure = {*PURE, *(module for module in modules() if package_of(module) in PURE_PACKAGES)}
    for module in pure:
        roots = {name.partition(".")[0] for name in modules()[module]}
        assert roots & IMPURE == set(), module
        assert {each for each in ours(modules()[module]) if each == "run.directory"} == set()


def test_third_parties_stay_in_their_places() -> None:
    """Each library is imported in the few files that are about it."""
    for module, names in modules().items():
        for name in names:
            places = THIRD_PARTY.get(name.partition(".")[0])
            assert places is None or belongs(module, places), f"{module} imports {name}"


def test_no_collective_of_ours() -> None:
    """No file of ours issues a collective, joins a group or uses the job's store; none unpickles or evaluates."""
    forbidden = {
        "all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast", "broadcast_object_list", "new_group",
        "_get_default_store", "TCPStore", "synchronize", "eval", "exec", "loads",
    }  # fmt: skip
    allowed = {
        ("cuda.aggregate", "all_reduce"),  # aggregate="device", which is asked for
        ("hooks.on_device.cuda_device", "all_reduce"),
        ("hooks.on_device.cuda_device", "new_group"),
        ("results.alerts", "loads"),  # JSON, as all of these
        ("results.ask", "loads"),
        ("results.figures", "loads"),
        ("results.run", "loads"),
        ("run.captures", "loads"),
        ("run.fitting", "loads"),
        ("run.ring", "loads"),
        ("store.reader", "loads"),
        ("sidecar.host.stacks", "loads"),
        ("run.tap_requirements", "loads"),
        ("sidecar.nodes.job_store", "TCPStore"),  # a client that is no worker, in a process of its own
    }
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                assert name not in forbidden or (module_name(path), name) in allowed, f"{path.name}: {name}()"


def test_broad_excepts_are_few() -> None:
    """Our errors are kept from the user by guard(); all others say which errors they mean."""
    allowed = {
        "cuda.kernels": 1,  # CuPy's errors have no root in common
        "errors": 2,  # guard(), as a decorator and over callbacks
        "output": 1,  # whatever the user's stderr and logging handlers raise
        "results.alerts": 1,  # whatever the user's callback raises
        "exporters.delivery.sender": 1,  # whatever a transport or a user's credential provider raises
        "exporters.delivery.http_session": 1,  # the same, judged beside the endpoint's answers
        "commands.doctor": 1,  # a check that fails is a line
        "analysis.node_state": 1,  # whatever is in a file that somebody has damaged
        "report.run_report": 2,  # as is what such a file makes of a report
        "store.reader": 1,
        "sidecar.start.process": 1,  # begins anew
        "serve.readers": 1,  # what such files make of a page: that viewer hears of it
        "serve.runs": 1,  # and of a line in the list of runs
        "top.app": 1,  # on the thread that reads: it is raised on the application's
        "top.reading": 1,  # whatever files of several nodes make of a report together
        "startup.sitecustomize": 2,  # before the script, where guard() is not imported yet
    }
    found: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None
                or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
            ):
                ends_raising = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                found[module_name(path)] = found.get(module_name(path), 0) + (not ends_raising)
            elif isinstance(node, ast.Call) and re.fullmatch(
                r"(contextlib\.)?suppress\((Base)?Exception\)", ast.unparse(node)
            ):
                found[module_name(path)] = found.get(module_name(path), 0) + 1

    assert {module: count for module, count in found.items() if count} == allowed


def test_startup_imports_nothing_before_the_script() -> None:
    """What Python loads before a script under `run` imports what Python has imported itself, and the next one."""
    tree = ast.parse((PACKAGE / "startup" / "sitecustomize.py").read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}

    assert imported == {"os", "sys"}
    assert not any(isinstance(node, ast.ImportFrom) for node in tree.body)


def test_public_names() -> None:
    """The public names are few, sorted, and all of them there."""
    public = {name for name in vars(perf) if not name.startswith("_")} - {
        module.partition(".")[0] for module in modules()
    }

    assert perf.__all__ == sorted(perf.__all__)
    assert set(perf.__all__) - {"watch"} == public - {"VERSION"}
    assert len(perf.__all__) <= 9


def test_hooks_set_nothing_on_the_session() -> None:
    """They report to it by its methods."""
    found = {module_name(path): assigned(path) for path in PACKAGE.rglob("*.py")}

    assert {module: names for module, names in found.items() if names} == {}


def test_named_tests_are_there() -> None:
    """docs/reliability.md names the test that holds each promise. One that begins with :: is in the file before it."""
    text, file, missing = (ROOT / "docs" / "reliability.md").read_text(), "", []
    for named in re.findall(r"`((?:\w+/)*test_\w+(?:::test_\w+)?|::test_\w+)`", text):
        path, _, function = named.partition("::")
        file = path or file
        source = ROOT / "tests" / f"{file}.py"
        if not source.is_file() or (function and f"def {function}(" not in source.read_text()):
            missing.append(f"{file}::{function}")

    assert missing == [], missing
