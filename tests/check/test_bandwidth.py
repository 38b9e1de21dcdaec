"""Bandwidths of a check are those of an independent measurement in the same processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

_LINE = re.compile(r"^(\w+)(?:, 4.2 MB, world)? +([\d.]+) of the independent", re.MULTILINE)


@pytest.mark.long
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and tc, to limit a link"
)
def test_bandwidths_are_those_of_an_independent_measurement() -> None:
    """The benchmark has ratios of 0.99 to 1.02. The slack is for busy machines and few cycles."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.check_bandwidth", "--mbit", "500", "--minutes", "0.5"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    ratios = {name: float(ratio) for name, ratio in _LINE.findall(done.stdout)}

    assert ratios.keys() == {
        "allreduce", "allgather_base", "reduce_scatter_base", "alltoall_base", "broadcast", "transfers",
    }, done.stdout  # fmt: skip
    assert all(0.9 < each < 1.1 for each in ratios.values()), ratios
