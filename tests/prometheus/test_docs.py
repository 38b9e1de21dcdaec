"""The commands in docs/guides/prometheus.md, kubernetes.md and slurm.md work as printed there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, clean_environ, runs
from tests.support.prometheus_server import IS_THERE, MISSING
from tests.support.servers import free_port

DOCS = ROOT / "docs" / "guides"
_RETRY = (
    "for i in $(seq 300); do curl -sf {} | grep -q torch_train_steps_total && break; sleep 0.2;"
    " done\n"
)


def commands(page: str) -> str:
    """Return the page's shell blocks in order."""
    return "\n".join(re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.skipif(not IS_THERE, reason=MISSING)
@pytest.mark.parametrize("page", ["prometheus.md", "kubernetes.md", "slurm.md"])
def test_documented_commands_of_the_guides_run(page: str, tmp_path: Path) -> None:
    """The commands run with a training script and a free port.

    Installed packages are not installed again.
    """
    shutil.copy(ROOT / "examples" / "train_gpt.py", tmp_path / "train.py")
    url = "http://127.0.0.1:9464/metrics"
    script = (
        commands(page)
        .replace("pip install '.[prometheus]'\n", "")
        .replace(f"curl -s {url}", f"curl -sf {url}")
    )
    script = script.replace(f"curl -sf {url}", _RETRY.format(url) + f"curl -sf {url}").replace(
        "9464", str(free_port())
    )
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, module in (
        ("torchlens-perf", "torchlens_perf"),
        ("torchrun", "torch.distributed.run"),
    ):
        (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (bin_folder / name).chmod(0o755)
    added = {
        "PATH": f"{bin_folder}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "STEPS": "300",
    }
    done = subprocess.run(
        ["sh", "-ec", f"{script}\nwait"],
        cwd=tmp_path,
        env=clean_environ(added),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if page == "prometheus.md":
        assert "torch_train_steps_total" in done.stdout
        assert "rules found" in done.stdout
        runs(tmp_path)  # This call waits for the end of the sidecar.
