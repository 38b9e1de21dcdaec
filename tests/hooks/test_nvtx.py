"""NVTX ranges, received by a real injection library instead of Nsight Systems."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import SCRIPTS, run_warm

SOURCE = Path(__file__).parents[1] / "support" / "nvtx_counter.c"
compiler = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(
    compiler is None, reason="the NVTX injection library needs a C compiler"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the compiled injection library."""
    path = tmp_path_factory.mktemp("nvtx") / "libnvtx_counter.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", "-o", path, SOURCE], check=True)
    return path


# The counter writes its result in a destructor.
@pytest.mark.usefixtures("whole_ends")
def test_each_nvtx_range_ends_even_if_its_code_raises(library: Path, tmp_path: Path) -> None:
    """Steps, phases, modules and sections are NVTX ranges."""
    out = tmp_path / "counts"
    done = run_warm(
        [sys.executable, str(SCRIPTS / "nvtx_ranges.py"), str(tmp_path)],
        tmp_path,
        NVTX_INJECTION64_PATH=str(library),
        NVTX_COUNTER_OUT=str(out),
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in out.read_text().splitlines()]
    counts = {
        message: (int(begun), int(ended))
        for domain, message, begun, ended in rows
        if domain == "torchlens_perf"
    }

    assert counts == {
        "step": (8, 8),  # Seven finished steps, and the one in progress when the watch ends.
        "data": (8, 8),  # Seven batches, and the call that reaches the end of the data.
        "data workers start": (1, 1),
        "augment": (7, 7),
        "forward Net": (7, 7),
        "first": (7, 7),
        "second": (7, 7),
        "fails": (7, 7),
        "backward": (7, 7),
        "optimizer SGD": (7, 7),
    }
    assert rows[-1] == ["(bad pops)", "", "0", "0"]


def test_no_nvtx_call_is_made_if_no_profiler_is_attached(tmp_path: Path) -> None:
    program = (
        "import torchlens_perf as perf\n"
        "from torchlens_perf import watching\n"
        f"with perf.watch(dir={str(tmp_path)!r}, sidecar=False, report='off'):\n"
        "    session = watching._running._session\n"
        "    print('nvtx' in session.step_callbacks._each_step.values())\n"
    )
    done = run_warm([sys.executable, "-c", program], tmp_path)

    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
