"""Test that all tests exist that docs/explanation/security.md names as evidence for its claims."""

from __future__ import annotations

import ast
import re

from tests.support.processes import ROOT


def test_tests_named_in_security_claims_exist() -> None:
    """Each test in this folder must belong to a claim."""
    text = (ROOT / "docs/explanation/security.md").read_text()
    named = re.findall(r"`([a-z_/]+\.py)(?:::([a-z_0-9]+))?`", text)
    assert len(named) > 20
    for path, function in named:
        tree = ast.parse((ROOT / "tests" / path).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not function or function in functions, f"{path}::{function}"
    files = {f"security/{path.name}" for path in (ROOT / "tests" / "security").glob("test_*.py")}
    assert files - {path for path, _ in named} == {"security/test_claims.py"}
