"""The pages on backends agree with the tests.

The files, variables and versions named by docs/internals/backend-tests.md and
docs/guides/backends.md exist.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.exporters.test_endpoint_comes_right import FAULTS
from tests.support.processes import ROOT

GUIDE = (ROOT / "docs/guides/backends.md").read_text()
PAGE = (ROOT / "docs/internals/backend-tests.md").read_text()
_FILE = r"[a-z_/]+\.py"


def table(header_pattern: str, page: str = PAGE) -> list[list[str]]:
    """Return the cells of the table whose header row matches a pattern, including that row."""
    (start,) = re.findall(rf"^\| {header_pattern} \|.*\n(?:\|.*\n)+", page, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in start.splitlines()]
    return [rows[0], *rows[2:]]


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_backend_of_the_guide_has_tests() -> None:
    _, *claimed = table("backend .* traces .*", GUIDE)
    _, *tested = table("backend .* tests .*")
    assert [name.partition(",")[0] for name, *_ in claimed] == [name for name, *_ in tested]
    for name, files, _ in tested:
        named = re.findall(rf"`({_FILE})`", files)
        assert named, name
        assert all(functions(file) for file in named), name


def test_named_files_of_backend_tests_exist_and_every_one_is_named() -> None:
    named = set(re.findall(rf"`({_FILE})`", PAGE))
    assert len(named) > 15
    assert [path for path in named if not (ROOT / "tests" / path).is_file()] == []
    files = {f"backends/{path.name}" for path in (ROOT / "tests" / "backends").glob("test_*.py")}
    assert files <= named


def test_table_of_faults_lists_the_cases_of_the_test() -> None:
    _, *rows = table("the endpoint")
    assert {
        case for row in rows for cell in row for case in re.findall(r"\[([^]`]+)\]", cell)
    } == set(FAULTS)


def test_documented_backend_versions_are_the_installed_ones() -> None:
    script = (ROOT / "scripts" / "install_backend.sh").read_text()
    versions = re.findall(r'="from_\w+ (?:trixie )?(\w[\w-]*)(?:==|@|=)([\w.]+)', script)
    assert len(versions) == 6
    for name, version in versions:
        assert re.search(rf"(?<![\d.]){re.escape(version)}(?![\d])", GUIDE), f"{name} {version}"


@pytest.mark.parametrize("name", ["mlflow", "phoenix", "autotel", "rotel", "victoria_metrics"])
def test_documented_backend_settings_are_those_of_the_test(name: str) -> None:
    """The page names exactly the variables that the test sets, with the same paths and headers."""
    title = {
        "autotel": "autotel-devtools",
        "victoria_metrics": "VictoriaMetrics",
        "mlflow": "MLflow",
    }.get(name, name)
    (section,) = re.findall(
        rf"^## (?:Arize )?{title}\n(.*?)(?=^## )", GUIDE, re.MULTILINE | re.DOTALL | re.IGNORECASE
    )
    lines = re.findall(r"^export (\w+)=(\S+)$", section, re.MULTILINE)
    tests = ROOT / "tests" / "backends"
    code = (tests / f"test_{name}.py").read_text() + (tests / "rotel.py").read_text() * (
        name == "rotel"
    )
    set_by_test = set(re.findall(r'"(OTEL_EXPORTER_OTLP_\w+)"', code)) - {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    }
    assert {variable for variable, _ in lines} == set_by_test
    for variable, value in lines:
        path = re.sub(r"^http://[^/]+", "", value)
        assert not variable.endswith(("ENDPOINT", "HEADERS")) or path in code, value
