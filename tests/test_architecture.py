"""Rules on the code that no linter covers.

The import rules are in pyproject.toml for `lint-imports`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import torchlens_perf as perf
from tests.support.processes import ROOT

PACKAGE = Path(perf.__file__).parent


def module_name(path: Path) -> str:
    return (
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        .removesuffix("__init__")
        .rstrip(".")
    )


def nodes_of(path: Path, pattern: str) -> Iterable[ast.AST]:
    """Return all nodes of a file that the pattern matches, else none. Parsing all files is slow."""
    text = path.read_text()
    return ast.walk(ast.parse(text)) if re.search(pattern, text) else ()


def assigned(path: Path) -> set[str]:
    """Return the attributes that a file sets on a session or its parts instead of calling their
    methods. The facts about the rank are a record, which hooks fill in.
    """
    found = set()
    for node in nodes_of(path, r"session\b"):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            chain = ast.unparse(node.value).split(".")
            if {"session", "_session"} & set(chain[-2:]) and chain[-1] != "facts":
                found.add(node.attr)
    return found


def test_top_level_files_are_entry_points_or_used_everywhere() -> None:
    """All other files are in packages."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == {
        "__init__", "__main__", "watching", "autoload", "torchrun", "config", "errors", "interruption", "output",
        "version",
    }  # fmt: skip


def test_package_issues_no_collective() -> None:
    """The package also joins no group, and does not use the job's store or evaluate.

    A check before a job (`check/`) is a program of its own.

    Only sidecar/hang_witness/flight_recorder.py unpickles, and nothing but containers.
    """
    forbidden = {
        "all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast", "broadcast_object_list", "new_group",
        "_get_default_store", "TCPStore", "synchronize", "eval", "exec", "loads",
    }  # fmt: skip
    allowed = {
        ("cuda.aggregate", "all_reduce"),  # aggregate="device", which the user requests.
        ("cuda.device", "all_reduce"),
        ("cuda.device", "new_group"),
        ("actions.agents", "loads"),
        ("actions.ledger", "loads"),
        ("results.alerts", "loads"),  # This and the following entries load JSON, not pickles.
        ("results.ask", "loads"),
        ("results.run", "loads"),
        ("roles.event_file", "loads"),
        ("run.captures", "loads"),
        ("run.fitting", "loads"),
        ("run.installation", "loads"),
        ("run.ring", "loads"),
        ("store.reader", "loads"),
        ("sidecar.host.stacks", "loads"),
        ("sidecar.hang_witness.flight_recorder", "loads"),
        (
            "sidecar.nodes.job_store",
            "TCPStore",
        ),  # A client that is no worker, in a separate process.
    }
    for path in PACKAGE.rglob("*.py"):
        if module_name(path).startswith("check."):
            continue
        for node in nodes_of(path, rf"\b({'|'.join(forbidden)})\("):
            if isinstance(node, ast.Call):
                function = node.func
                name = (
                    function.attr
                    if isinstance(function, ast.Attribute)
                    else getattr(function, "id", "")
                )
                assert name not in forbidden or (module_name(path), name) in allowed, (
                    f"{path.name}: {name}()"
                )


def test_broad_excepts_are_only_in_listed_places() -> None:
    """guard() keeps errors of this package from the user. All other handlers list their errors."""
    allowed = {
        "cuda.kernels": 1,  # CuPy's errors have no common base class.
        "errors": 2,  # guard(), as a decorator and over callbacks.
        "hooks.failure": 1,  # Any errors of the user's exceptions when they are made text.
        "output": 1,  # Any errors of the user's stderr and logging handlers.
        # Any errors of a transport or a user's credential provider.
        "exporters.delivery.sender": 1,
        "exporters.delivery.http_session": (
            1
        ),  # Errors of a transport, classified like the endpoint's responses.
        "commands.doctor": 1,  # A failed check is a line.
        # In a reader process, an error that cannot be unpickled would end all readers.
        "serve.readers": 1,
        "sidecar.start.process": 1,  # The sidecar starts again after any error.
        # On the reading thread; the error is raised again on the application's thread.
        "top.app": 1,
        "startup.sitecustomize": 2,  # Before the script, where guard() has not been imported yet.
    }
    found: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path, r"except:|Exception\b"):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None
                or re.fullmatch(r"(ours\()?(Base)?Exception\)?", ast.unparse(node.type))
            ):
                ends_raising = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                found[module_name(path)] = found.get(module_name(path), 0) + (not ends_raising)
            elif isinstance(node, ast.Call) and re.fullmatch(
                r"(contextlib\.)?suppress\((Base)?Exception\)", ast.unparse(node)
            ):
                found[module_name(path)] = found.get(module_name(path), 0) + 1

    assert {module: count for module, count in found.items() if count} == allowed


def test_startup_under_run_imports_only_modules_already_imported() -> None:
    """Modules that Python loads before a script under `run` import only each other and already
    imported ones.
    """
    tree = ast.parse((PACKAGE / "startup" / "sitecustomize.py").read_text())
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names
    }

    assert imported == {"os", "sys"}
    assert not any(isinstance(node, ast.ImportFrom) for node in tree.body)


def test_package_has_at_most_eleven_sorted_public_names() -> None:
    public = {name for name in dir(perf) if not name.startswith("_")} - {
        path.stem for path in PACKAGE.iterdir()
    }

    assert perf.__all__ == sorted(perf.__all__)
    assert set(perf.__all__) == public - {"VERSION"}
    assert len(perf.__all__) <= 11


def test_hooks_call_methods_of_the_session_and_set_no_attributes() -> None:
    found = {module_name(path): assigned(path) for path in PACKAGE.rglob("*.py")}

    assert {module: names for module, names in found.items() if names} == {}


def test_kind_of_verdicts_is_known_to_three_files_of_the_package() -> None:
    """CONTRIBUTING.md names this kind as the example for a new one. Its module, its record, and the
    list of calls: no other file knows it. A fourth one is the test of the schema.
    """
    known = {
        module_name(path)
        for path in PACKAGE.rglob("*.[pj][ys]")
        if re.search(r'"growing_steps"|words\.growth\b', path.read_text())
    }

    assert known <= {
        "verdicts.kinds",
        "verdicts.words.growth",
        "verdicts.words.verdict",
    }
    assert "verdicts.words.growth" in known


def test_no_reader_asks_for_the_type_of_evidence() -> None:
    """Readers use fields of verdicts. A type in one of them would be a place to change for each kind."""
    asked = [
        module_name(path)
        for path in PACKAGE.rglob("*.py")
        if re.search(r"isinstance\([^()]*Evidence\b", path.read_text())
    ]

    assert asked == []


def test_tests_named_in_docs_exist() -> None:
    """docs/internals/reliability.md has a test for each promise.

    A name that begins with :: is in the file before it.
    """
    text, file, missing = (ROOT / "docs/internals/reliability.md").read_text(), "", []
    for named in re.findall(r"`((?:\w+/)*test_\w+(?:::test_\w+)?|::test_\w+)`", text):
        path, _, function = named.partition("::")
        file = path or file
        source = ROOT / "tests" / f"{file}.py"
        if not source.is_file() or (function and f"def {function}(" not in source.read_text()):
            missing.append(f"{file}::{function}")

    assert missing == [], missing
