"""Tests of what `import torchlens_perf` and the first use of its names import."""

from __future__ import annotations

import json
import subprocess
import sys

import torchlens_perf as perf
from tests.support.processes import ROOT

SHOW_IMPORTS = """
import json, sys
import torch
added = []
def note():
    added.append(sorted(set(sys.modules) - known))
    known.update(sys.modules)
known = {name for name in sys.modules if not name.startswith("torchlens_perf")}
note()
import torchlens_perf as perf
note()
listed = dir(perf)
for name in perf.__all__:
    getattr(perf, name)
note()
print(json.dumps([added, listed]))
"""


def show_imports(*, autoload: bool) -> tuple[list[list[str]], list[str]]:
    """Return the modules added by torch that are ours, by our import and by use; and dir(perf)."""
    environ = {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_IMPORTS],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    added, listed = json.loads(done.stdout)
    return added, listed


def test_import_of_the_package_imports_nothing_else() -> None:
    (_, by_import, by_use), listed = show_imports(autoload=False)

    assert by_import == ["torchlens_perf", "torchlens_perf.version"]
    assert set(perf.__all__) <= set(listed)
    assert [name for name in by_use if name.partition(".")[0] != "torchlens_perf"] == []
    # The hooks, and what reads results, are imported when a watch starts or a report is shown.
    packages = {name.partition("torchlens_perf.")[2].partition(".")[0] for name in by_use}
    assert not packages & {"cuda", "exporters", "sidecar", "store", "verdicts", "view"}


def test_autoload_without_the_switch_imports_one_module() -> None:
    """torch loads the entry point in every process, also in those that record nothing."""
    (by_torch, by_import, _), _ = show_imports(autoload=True)

    assert by_torch == ["torchlens_perf", "torchlens_perf.autoload", "torchlens_perf.version"]
    assert by_import == []


def test_unknown_name_raises_attribute_error() -> None:
    assert not hasattr(perf, "no_such_name")
