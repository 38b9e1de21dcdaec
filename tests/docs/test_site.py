"""Tests that the site is built without a warning, such as a broken link, and documents every public
name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchlens_perf
from tests.support.processes import ROOT

pytest.importorskip("mkdocs", reason="the site is built by mkdocs, of the extra `test`")
# Select the package's function, which has the same short name as its module.
WATCH = "torchlens_perf.watching.watch"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_public_name_has_an_entry_with_text(site: Path) -> None:
    page = (site / "reference" / "api" / "index.html").read_text()
    documented = set()
    for entry in re.split(r'<div class="doc doc-object', page)[1:]:
        anchor, text = re.search(r'id="(torchlens_perf[\w.]*)"', entry), re.search(r"<p>\w", entry)
        if anchor and text:
            documented.add(anchor[1])
    assert WATCH in documented
    assert set(torchlens_perf.__all__) - {name.rpartition(".")[2] for name in documented} == set()
