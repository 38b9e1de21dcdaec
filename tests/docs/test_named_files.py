"""Test that the files and tests exist that pages for contributors name in backticks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT

PAGES = [
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/internals/*.md")),
]
# Files outside this repository, with their owner.
ELSEWHERE = {
    "ATen/cuda/CUDAGraph.cpp": "torch's",
    "src/device/common.h": "NCCL's",
    "src/proxy.cc": "NCCL's",
    "straggler/reporting.py": "nvidia-resiliency-ext's",
    "_native.c": "a rejected design",
    "llama2.c": "a repository",
}
_FILE = re.compile(
    r"`((?:[\w-]+/)*[\w-]+\.(?:py|pyi|cpp|cc|c|h|js|css|md|toml|sh|svg|npz))(?:::(test_\w+))?`"
)
_TEST = re.compile(r"`((?:[\w-]+/)+test_\w+)::(test_\w+)`")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    return [f"/{line}" for line in listed.stdout.splitlines()] or [
        f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.*")
    ]


@pytest.mark.parametrize("page", PAGES)
def test_files_named_in_contributor_pages_exist(page: str, tracked: list[str]) -> None:
    """Pages may omit the leading folders of a path."""
    text = (ROOT / page).read_text()
    named = set(_FILE.findall(text)) | {(f"{file}.py", test) for file, test in _TEST.findall(text)}
    wrong = []
    for file, test in sorted(named):
        found = [path for path in tracked if path.endswith(f"/{file}")]
        if not found and file not in ELSEWHERE:
            wrong.append(file)
        elif test and not any(f"def {test}" in Path(f"{ROOT}{path}").read_text() for path in found):
            wrong.append(f"{file}::{test}")
    assert wrong == []
