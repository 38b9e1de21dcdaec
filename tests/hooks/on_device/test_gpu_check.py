"""The GPU check on a machine without a GPU: its runner, its result file, and planted faults."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_check import planted
from benchmarks.gpu_check.driver_calls import Calls, kind_of
from benchmarks.gpu_check.lines import FAIL, NOT_RUN, PASS, Checks, Line
from benchmarks.gpu_check.one_gpu import refusal, small_shared_memory
from benchmarks.gpu_check.parts import ASYNC, MODULES, PARTS, Part
from benchmarks.gpu_check.runner import FILE, Runner
from tests.device import device
from tests.support.processes import ROOT

FACTS = {"device": "none", "NCCL": "2.28.9"}
LONG_S = 30.0  # Time limit that is sufficient on a busy machine.


def part(name: str, limit_s: float = LONG_S) -> Part:
    return Part(name, f"tests.support.gpu_parts:{name}", limit_s)


def run(out: Path, *parts: Part, seconds: float = 100.0) -> tuple[int, Runner, str]:
    runner = Runner(out, "cuda", FACTS, seconds)
    return runner.run(parts), runner, (out / FILE).read_text()


def ended(pid: int) -> bool:
    """Return True if a process has ended, even if its parent has not reaped it."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_parts_run_in_order_and_the_result_file_has_all_their_output(tmp_path: Path) -> None:
    code, runner, text = run(tmp_path, part("passes"), part("fails"))
    assert code == 1
    assert [line.part for line in runner.lines] == ["passes"] * 3 + ["fails"]
    assert [line.result for line in runner.lines] == ["", PASS, NOT_RUN, FAIL]
    for words in (
        "- date: 20",
        "- device: none",
        "- NCCL: 2.28.9",
        "1 FAIL of 2 lines with a bar; 1 not run.",
    ):
        assert words in text
    assert "| passes | a figure | 3 / 4 |  |  |" in text
    assert "| fails | one with a bar | 3 ms | <= 2 ms | FAIL |" in text
    assert "passes " in text.rpartition("Seconds of each part")[2]


def test_exit_code_is_0_if_no_part_fails(tmp_path: Path) -> None:
    assert run(tmp_path, part("passes"))[0] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "ValueError: planted"),
        ("dies", "exit code -11"),
        ("killed", "exit code -9"),
        ("silent", "said nothing"),
    ],
)
def test_part_that_raises_fails_and_the_next_part_runs(
    tmp_path: Path, name: str, said: str
) -> None:
    code, runner, text = run(tmp_path, part(name), part("passes"))
    assert code == 1
    assert runner.failed == 1
    assert said in text
    assert runner.lines[-1].part == "passes"
    assert (name in ("silent", "killed")) == ("before" not in text)


def test_part_that_hangs_is_killed_with_its_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    code, runner, _ = run(tmp_path, part("hangs", limit_s=3), part("passes"))
    assert code == 1
    assert [line.result for line in runner.lines[:2]] == [PASS, FAIL]
    assert runner.lines[1].value == "was ended after 3 s"
    assert len(runner.lines) == 5
    assert all(ended(int(pid)) for pid in (tmp_path / "pid").read_text().split())


def test_parts_after_the_time_limit_are_listed_as_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running part is terminated, and does not count as failed."""
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    code, runner, text = run(tmp_path, part("hangs"), part("fails"), part("passes"), seconds=3)
    assert code == 3
    assert runner.left == ["hangs", "fails", "passes"]
    assert (
        "0 FAIL of 1 lines with a bar; 3 not run; left for lack of time: hangs, fails, passes."
        in text
    )
    assert [line.value for line in runner.lines[1:]] == ["ended in its midst: 3 s were over"] + [
        "not begun: 3 s were over"
    ] * 2


def test_result_file_has_the_lines_written_before_the_check_is_killed(tmp_path: Path) -> None:
    """The process of the running part is killed too."""
    program = f"""
from pathlib import Path
from tests.hooks.on_device.test_gpu_check import run, part
run(Path({str(tmp_path)!r}), part("passes"), part("hangs"), part("fails"))
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HANGING": str(tmp_path / "pid")}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environ, cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"| hangs"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    text = (tmp_path / FILE).read_text()
    assert "| passes | one with a bar | 1 ms | <= 2 ms | PASS |" in text
    assert "| hangs | before | 1 | 1 | PASS |" in text
    assert "0 FAIL of 2 lines with a bar; 1 not run; not ended: hangs, fails." in text
    part_pid, child_pid = map(int, (tmp_path / "pid").read_text().split())
    deadline_s = time.monotonic() + 10
    while not ended(part_pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    os.kill(child_pid, signal.SIGKILL)
    assert ended(part_pid)


def test_every_part_of_the_check_has_a_function() -> None:
    """The modules are parsed, because some cannot be imported without a GPU.

    The most important part comes first.
    """
    for each in PARTS:
        module, _, function = each.target.partition(":")
        assert (
            f"\ndef {function}(checks: Checks)"
            in (ROOT / (module.replace(".", "/") + ".py")).read_text()
        )
    assert [each.name for each in PARTS[:5]] == [
        "planted",
        "overhead",
        "waits",
        "synchronizations",
        "beside",
    ]
    assert len({each.name for each in PARTS}) == len(PARTS)
    assert [each.name for each in PARTS if ASYNC in each.devices] == ["planted"]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("cuMemAlloc_v2", "device memory"), ("cudaFree_v3020", "device memory"), ("cuMemFreeHost", "host memory"),
        ("cudaHostAlloc_v3020", "host memory"), ("cuModuleLoadDataEx", "module"), ("cuLibraryLoadData", "module"),
        ("cuMemcpyDtoH_v2", "blocking copy"), ("cudaMemcpy_v3020", "blocking copy"), ("cudaMemcpyAsync_v3020", None),
        ("cuMemcpyDtoHAsync_v2_ptsz", None), ("cuStreamSynchronize_ptsz", "synchronize"), ("cuEventQuery", None),
        ("cuMemsetD8Async", None), ("cuMemsetD8_v2", "blocking copy"), ("cuLaunchKernel", None),
        ("cuMemGetInfo_v2", None), ("cudaMallocAsync_v11020", None), ("cudaFreeAsync_v11020", None),
    ],
)  # fmt: skip
def test_cuda_calls_that_wait_for_the_device_are_recognized(
    function: str, kind: str | None
) -> None:
    assert kind_of(function) == kind


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_cuda_calls_are_counted_from_cupti_callbacks(tmp_path: Path) -> None:
    library = tmp_path / "libfake_cupti.so"
    source = ROOT / "tests" / "support" / "fake_cupti.c"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60
    )
    calls, fake = Calls(str(library)), ctypes.CDLL(str(library))
    fake.fake_call(1, ctypes.c_uint32(1))  # Called before counting starts.
    with calls.counted() as found:
        for domain, number in ((1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 6), (3, 3)):
            fake.fake_call(domain, ctypes.c_uint32(number))
    fake.fake_call(1, ctypes.c_uint32(1))
    assert found == {
        "device memory: cuMemAlloc_v2": 2,
        "device memory: cudaMalloc_v3020": 1,
        "synchronize: cudaStreamSynchronize_v3020": 1,
        "module: loaded": 1,
    }
    with pytest.raises(RuntimeError, match="CUPTI error 39"):
        Calls(str(library))


def test_small_shared_memory_is_mounted_or_the_reason_is_returned() -> None:
    prefix = small_shared_memory()
    if isinstance(prefix, str):
        assert "not permitted" in prefix or "no unshare" in prefix
        return
    before = os.statvfs("/dev/shm")
    program = "import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize)"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program], capture_output=True, text=True, timeout=20
    )
    assert done.stdout.strip() == str(64 << 20), done.stderr
    assert os.statvfs("/dev/shm").f_blocks == before.f_blocks


def test_errors_of_nccl_for_missing_features_differ_from_other_failures() -> None:
    words = (
        "x\nncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 40\n"
    )
    assert "Duplicate GPU detected" in refusal(words)
    assert refusal("ValueError: no") == ""


# This test needs a quiet machine: a rank that waits for a CPU could be reported first.
@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.skipif(
    device.missing() is not None,
    reason=f"the device cannot be built: {device.missing()}",
)
def test_check_finds_the_planted_fault_on_the_fake_asynchronous_device(tmp_path: Path) -> None:
    """The fault is planted in one training loop, in the same way as on CUDA."""
    lines: list[Line] = []
    planted.check(Checks(lines.append), MODULES, kinds=("launch-clean", "ddp-backward"), steps=90)
    assert [line.result for line in lines] == [PASS, PASS], lines
    assert [line.value for line in lines] == ["nobody", "rank 1, backward"]


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.skipif(
    device.missing() is not None,
    reason=f"the device cannot be built: {device.missing()}",
)
@pytest.mark.parametrize("name", [ASYNC, MODULES])
def test_complete_check_passes_on_the_fake_asynchronous_device(tmp_path: Path, name: str) -> None:
    """The check is run from its command line."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_check",
        "--device",
        name,
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 FAIL of 6 lines with a bar." in (tmp_path / FILE).read_text()
