"""Installing from source where there is no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Prints which recorder is in use, how many records it has written, and where it was imported from.
PROGRAM = """
import torchlens_perf as perf
from torchlens_perf import recorder
with perf.watch(sidecar=False, report=False) as watch:
    with perf.section("work"):
        pass
    watch.step()
    print(recorder.NATIVE, watch._session.recorder.written, perf.__file__)
"""


def test_without_a_compiler(tmp_path: Path) -> None:
    """It installs, records through the Python twin, and `doctor` says what to do."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "torchlens_perf", source / "torchlens_perf", ignore=shutil.ignore_patterns("*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(source)]
    subprocess.run(pip, env={**os.environ, "CC": "/bin/false"}, check=True, capture_output=True)
    # -S below: the package's own installation in this environment would lend its native recorder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), sysconfig.get_path("purelib")])}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    native, written, where = run("-c", PROGRAM).split()
    assert (native, int(written), Path(where).parent) == ("False", 2, site / "torchlens_perf")
    assert (site / "torchlens_perf" / "cuda" / "kernels.cu").exists()  # CuPy compiles it where there is a device
    (line,) = [line for line in run("-m", "torchlens_perf", "doctor").splitlines() if "Python twin" in line]
    assert "pip install" in line
