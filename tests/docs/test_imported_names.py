"""Test that the names exist that benchmarks, scripts and examples import from the package."""

from __future__ import annotations

import ast
import importlib
import re

from tests.support.processes import ROOT

FOLDERS = "benchmarks", "scripts", "examples"
# Both patterns also find the imports of programs that are in texts.
_MODULE = re.compile(r"\bimport (torchlens_perf(?:\.\w+)*)")
_NAMES = re.compile(r"\bfrom (torchlens_perf[\w.]*) import (\([^)]*\)|[\w, ]+)")
_USED = re.compile(r"\bperf\.(\w+)")


def list_imports(text: str) -> set[tuple[str, str]]:
    """Return each imported module with each imported name, which is "" for the module alone."""
    found = {(module, "") for module in _MODULE.findall(text)}
    for module, names in _NAMES.findall(text):
        (node,) = ast.parse(f"from {module} import {names}").body
        assert isinstance(node, ast.ImportFrom)
        found |= {(module, each.name) for each in node.names}
    if "import torchlens_perf as perf" in text:
        found |= {("torchlens_perf", name) for name in _USED.findall(text)}
    return found


def exists(module: str, name: str) -> bool:
    try:
        parent = importlib.import_module(module)
        return (
            not name or hasattr(parent, name) or bool(importlib.import_module(f"{module}.{name}"))
        )
    except ModuleNotFoundError:
        return False


def test_names_imported_by_benchmarks_scripts_and_examples_exist() -> None:
    imports = {
        (module, name, str(path.relative_to(ROOT)))
        for folder in FOLDERS
        for path in ROOT.joinpath(folder).rglob("*.py")
        for module, name in list_imports(path.read_text())
    }
    assert len(imports) > 100
    missing = [each for each in sorted(imports) if not exists(*each[:2])]
    assert missing == []
