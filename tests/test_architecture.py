"""Imports follow the picture: data flows from hooks to ring to sidecar to report, and nothing reaches back."""

from __future__ import annotations

import ast
from pathlib import Path

import torchlens_perf as perf

PACKAGE = Path(perf.__file__).parent

# What a training process may load, and what only the sidecar and the command line may.
TRAINING = {
    "", "_native_twin", "capture_files", "clock", "config", "cuda.aggregate", "cuda.driver", "cuda.events",
    "cuda.kernels", "cuda.reduction", "cuda.stamps", "device_sections", "devices", "errors", "first_step", "fitting",
    "folder_request", "hooks", "identity", "late_report", "launch", "make_folders", "native_tap", "ownership",
    "probe_schedule", "processes", "program", "rank_ranges", "recorder", "report_mailbox", "ring", "run_directory",
    "session", "sidecar_lock", "sidecar_status", "site", "sketch", "sketch_records", "start_sidecar", "startup",
    "steps", "torch_instruments", "torch_private", "memory_readings", "nccl_plugin", "oom_table", "training_loop",
    "version", "watch",
}  # fmt: skip
# These compute on values: they know no file, no process and no clock.
PURE = {
    "alert", "alerts", "board", "capture_choice", "collective_channel", "collective_join", "collective_semantics",
    "collective_statistics", "continuation", "cuda.reduction", "culprits", "device_statistics", "diagnosis", "episodes",
    "excess", "exchange_posts", "generations", "grouping", "hang", "module_times", "node_judge", "pacing",
    "population", "probe_schedule", "rank_ranges", "rank_statistics", "records", "report.hang_words",
    "report.straggler_words", "signals", "sketch", "sketch_records", "slow_link", "statistics", "step_rows", "steps",
    "straggler", "summary", "suspects",
    "fitting", "memory_readings", "memory_statistics", "oom_table", "report.oom_words",
    "telemetry",
}  # fmt: skip
THIRD_PARTY = {
    "cupy": {"cuda.kernels"},
    "nvtx": {"hooks.nvtx", "doctor"},
    "opentelemetry": {"exporters"},
    "rich": {"report.heat_map", "report.memory_table", "report.rank_table", "report.tables", "report.terminal"},
    "pyarrow": {"run_store", "telemetry_store"},
    "pynvml": {"cuda.telemetry"},
    "torch": {
        "bounded_store",
        "cuda.aggregate", "cuda.events",
        "hooks",
        "native_tap", "nccl_plugin", "tap_build",
        "torch_instruments",
        "torch_private",
        "torchrun_flag",
        "watch",
        "devices", "doctor",
        "first_step", "session",
    },
}  # fmt: skip
IMPURE = {"mmap", "os", "pathlib", "socket", "subprocess", "threading", "time"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imports(path: Path) -> set[str]:
    """What a file imports when it runs; types for the checker do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = {module_name(path): imports(path) for path in PACKAGE.rglob("*.py")}


def ours(names: set[str]) -> set[str]:
    """The modules of the package among imported names, by their path inside it."""
    inside = {name.removeprefix("torchlens_perf").lstrip(".") for name in names if name.startswith("torchlens_perf")}
    return {
        max((m for m in MODULES if f"{name}.".startswith(f"{m}.") or m == name), key=len, default="") for name in inside
    }


def belongs(module: str, group: set[str]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in group if each) or module in group


def test_training_side_knows_no_sidecar() -> None:
    """What runs in the training process imports no statistics, export, report or store."""
    for module, names in MODULES.items():
        if belongs(module, TRAINING):
            assert {each for each in ours(names) if not belongs(each, TRAINING)} == set(), module


def test_hooks_know_no_exporter_and_exporters_no_hook() -> None:
    """Hooks write marks and nothing else; what exports and reports knows no hook, no session and no recorder."""
    for module, names in MODULES.items():
        if belongs(module, {"exporters", "report", "statistics", "straggler", "sidecar", "run_store", "replay"}):
            assert {
                each for each in ours(names) if belongs(each, {"hooks", "session", "recorder", "watch"})
            } == set(), module


def test_pure_parts_are_pure() -> None:
    """The parts that compute import no file, process, clock or thread."""
    for module in PURE:
        roots = {name.partition(".")[0] for name in MODULES[module]}
        assert roots & IMPURE == set(), module
        assert {each for each in ours(MODULES[module]) if each in {"sidecar", "run_store", "run_directory"}} == set()


def test_third_parties_stay_in_their_places() -> None:
    """Each library is imported in the few files that are about it."""
    for module, names in MODULES.items():
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
        ("hooks.stamps", "all_reduce"),
        ("hooks.stamps", "new_group"),
        ("capture_files", "loads"),
        ("fitting", "loads"),
        ("node_state", "loads"),
        ("oom_files", "loads"),
        ("ring", "loads"),
        ("run_store", "loads"),
        ("stacks", "loads"),
        ("tap_build", "loads"),
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
        "cuda.kernels": 2,  # CuPy's errors have no root in common
        "errors": 3,  # guard()
        "torch_private": 1,  # a probe that fails is a no
        "doctor": 1,  # a check that fails is a line
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
        module.partition(".")[0] for module in MODULES
    }

    assert perf.__all__ == sorted(perf.__all__)
    assert set(perf.__all__) - {"watch"} == public - {"VERSION"}
    assert len(perf.__all__) <= 8
