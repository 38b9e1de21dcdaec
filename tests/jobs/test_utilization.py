"""FLOPs, rates and utilization in reports on real jobs on CPUs, and on all screens."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.long import long
from tests.support.processes import SCRIPTS, only_report, report, run, run_warm, runs, torchrun
from tests.support.reports import as_json
from torchlens_perf.recorder import native_tap

SCRIPT = str(SCRIPTS / "train_counted.py")

pytestmark = pytest.mark.skipif(
    native_tap.load_tap() is None,
    reason="the native tap is not built: torchlens-perf build-tap builds it",
)


def trained(folder: Path, *arguments: str, ranks: int = 1) -> tuple[dict[str, Any], int]:
    """Return the report on a job, and the FLOPs of a rank's step by torch's own counter."""
    launch = [sys.executable] if ranks == 1 else torchrun(ranks=ranks)
    done = run_warm([*launch, SCRIPT, *arguments], folder, 280)
    assert done.returncode == 0, done.stderr
    (flops,) = re.findall(r"^flops (\d+)$", done.stdout, re.MULTILINE)
    return as_json(only_report(folder)), int(flops)


def assert_operations_and_rates(value: dict[str, Any], flops: int, ranks: int) -> None:
    found = value["utilization"]

    assert found["not_measured"] is None
    assert found["model_flops"] == found["hardware_flops"] == ranks * flops
    assert found["precisions"] == {"fp32": 1}
    assert found["tokens_per_s"] == pytest.approx(ranks * 256 / found["step_s"])
    assert found["samples_per_s"] == pytest.approx(ranks * 8 / found["step_s"])
    assert found["mfu"] is found["hfu"] is found["peak_source"] is None
    assert {each["forward_flops_per_s"] for each in found["modules"]} == {None}
    assert {each["roofline_share"] for each in found["modules"]} == {None}
    assert 0 < found["counted_share"] <= 1
    assert len(found["ranks"]) == ranks


@pytest.mark.parametrize(
    ("backend", "ranks"), [(("aot_eager",), 1), *long(((), 2), (("inductor",), 1))]
)
def test_report_has_the_operations_and_rates_of_a_job(
    backend: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    assert_operations_and_rates(*trained(tmp_path, *backend, ranks=ranks), ranks)


def test_screens_show_the_table(tmp_path: Path) -> None:
    value, flops = trained(tmp_path)
    assert_operations_and_rates(value, flops, 1)
    (directory,) = runs(tmp_path)
    command = [sys.executable, "-m", "torchlens_perf", "report", "--all", str(directory.path)]
    terminal = run(command, tmp_path, 120).stdout
    page = (directory.path / "report.html").read_text()

    for text in (terminal, page):
        words = " ".join(text.split())
        assert "MFU is not measured: no peak is known for fp32 on this device." in words
        # Three of all operators are named.
        assert "the largest shares without counted FLOPs are " in words
        assert "FLOP/s" in words
        assert "of limit" not in words
    assert value["utilization"]["convention"].startswith("Attention is counted in full")
    assert as_json(report(directory))["utilization"] == value["utilization"]
