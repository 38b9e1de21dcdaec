"""Tests of the module search path of the sidecar, whose working directory is /."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.processes import ROOT, run, runs, wait_for_sidecar
from torchlens_perf.run import children

_JOB = """
import os, sys
import torch
import torchlens_perf as perf
os.chdir("elsewhere")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with perf.watch(model, optimizer, dir=sys.argv[1], config=perf.Config(_exit_timeout_s=30)):
    for _ in range(20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize("path", ["other:./package/", *long("package", ":other")])
def test_relative_python_path_works_after_a_change_of_directory(path: str, tmp_path: Path) -> None:
    """The tested command is `PYTHONPATH=src python train.py`, and the job changes its directory."""
    start = tmp_path if path != ":other" else tmp_path / "package"
    copied = shutil.copytree(ROOT / "torchlens_perf", tmp_path / "package" / "torchlens_perf")
    main = copied / "__main__.py"
    main.write_text(f"open({str(tmp_path / 'mark')!r}, 'w').write(__file__)\n{main.read_text()}")
    (start / "elsewhere").mkdir()
    done = run(
        [sys.executable, "-c", _JOB, str(tmp_path / "torchlens-perf")], start, PYTHONPATH=path
    )
    assert done.returncode == 0, done.stderr
    (made,) = runs(tmp_path)
    wait_for_sidecar(made)

    assert (tmp_path / "mark").read_text() == str(main)
    assert "20 steps" in done.stderr


def test_sidecar_gets_absolute_folders_without_the_scripts_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/script/train.py", raising=False)
    monkeypatch.setattr(sys, "path", ["/script", "", "src", "/x", *sys.path, "/x"])
    found = children.build_search_path()

    assert found[0] == "/x"
    assert not {"/script", "", "src"} & set(found)
    assert str(ROOT) in found
    assert len(set(found)) == len(found)


def test_python_path_of_children_has_absolute_folders_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Relative folders are resolved when Python starts, and folders stay in the user's order."""
    monkeypatch.setattr(sys, "path", ["/started/in/src", *sys.path])
    monkeypatch.setenv("PYTHONPATH", "src:/x")

    assert children.build_environment()["PYTHONPATH"] == "/started/in/src:/x"
