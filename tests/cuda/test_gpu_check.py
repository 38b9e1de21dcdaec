"""The GPU check on a machine without a GPU: its runner, its result file, and planted faults."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_check.driver_calls import Calls, kind_of
from benchmarks.gpu_check.lines import FAIL, NOT_RUN, PASS
from benchmarks.gpu_check.one_gpu import refusal, small_shared_memory
from benchmarks.gpu_check.parts import ASYNC, MODULES, PARTS, Part
from benchmarks.gpu_check.results import DOCS_DATA, DOCS_PAGE, Results
from benchmarks.gpu_check.runner import DATA, FILE, Runner
from tests.device import device
from tests.support.processes import ROOT

FACTS = {"device": "none", "NCCL": "2.28.9"}
LONG_S = 30.0  # Time limit that is sufficient on a busy machine.


def part(name: str, limit_s: float = LONG_S, *, alone: bool = False) -> Part:
    return Part(name, f"tests.support.gpu_parts:{name}", alone, limit_s=limit_s)


def named(function: str, name: str, *, alone: bool = False) -> Part:
    target = f"tests.support.gpu_parts:{function}:{name}"
    return Part(f"{function}-{name}", target, alone, limit_s=LONG_S)


def run(
    out: Path, *parts: Part, seconds: float = 100.0, side_by_side: int = 1
) -> tuple[int, Results, str]:
    runner = Runner(out, "cuda", FACTS, seconds, side_by_side)
    code = runner.run(parts)
    assert Results.load(out / DATA) == runner.results
    return code, runner.results, (out / FILE).read_text()


def ended(pid: int) -> bool:
    """Return True if a process has ended, even if its parent has not reaped it."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_parts_run_in_order_and_the_result_file_has_all_their_output(tmp_path: Path) -> None:
    code, results, text = run(tmp_path, part("passes"), part("fails"))
    assert code == 1
    assert [line.part for line in results.lines] == ["passes"] * 3 + ["fails"]
    assert [line.result for line in results.lines] == ["", PASS, NOT_RUN, FAIL]
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
    assert results.seconds.keys() == {"passes", "fails"}


def test_exit_code_is_0_if_no_part_fails(tmp_path: Path) -> None:
    assert run(tmp_path, part("passes"))[0] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "ValueError: planted"),
        ("dies", "exit code -11"),
        ("killed", "exit code -9"),
        ("silent", "no line"),
    ],
)
def test_part_that_raises_fails_and_the_next_part_runs(
    tmp_path: Path, name: str, said: str
) -> None:
    code, results, text = run(tmp_path, part(name), part("passes"))
    assert code == 1
    assert results.failed == 1
    assert said in text
    assert results.lines[-1].part == "passes"
    assert (name in ("silent", "killed")) == ("before" not in text)


def test_part_that_hangs_is_killed_with_its_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    code, results, _ = run(tmp_path, part("hangs", limit_s=3), part("passes"))
    assert code == 1
    assert [line.result for line in results.lines[:2]] == [PASS, FAIL]
    assert results.lines[1].value == "was ended after 3 s"
    assert len(results.lines) == 5
    assert all(ended(int(pid)) for pid in (tmp_path / "pid").read_text().split())


def test_parts_after_the_time_limit_are_listed_as_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running part is terminated, and does not count as failed."""
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    code, results, text = run(tmp_path, part("hangs"), part("fails"), part("passes"), seconds=3)
    assert code == 3
    assert results.left == ["hangs", "fails", "passes"]
    assert (
        "0 FAIL of 1 lines with a bar; 3 not run; left for lack of time: hangs, fails, passes."
        in text
    )
    assert [line.value for line in results.lines[1:]] == ["ended before its end: 3 s were over"] + [
        "not begun: 3 s were over"
    ] * 2


def test_result_file_has_the_lines_written_before_the_check_is_killed(tmp_path: Path) -> None:
    """The process of the running part is killed too."""
    program = f"""
from pathlib import Path
from tests.cuda.test_gpu_check import run, part
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


def test_parts_that_measure_no_time_run_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meeting").mkdir()
    monkeypatch.setenv("MEETING", str(tmp_path / "meeting"))
    parts = named("meets", "first"), named("meets", "second")
    code, results, text = run(tmp_path, *parts, side_by_side=2)
    assert code == 0, text
    assert results.lines[0].what == results.lines[1].what == "came"


def test_part_that_measures_time_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third part is not alone, and waits for the end of the second one."""
    monkeypatch.setenv("MEETING", str(tmp_path))
    parts = [named("excludes", str(number), alone=number < 2) for number in range(3)]
    code, results, text = run(tmp_path, *parts, side_by_side=4)
    assert code == 0, text
    assert [line.part for line in results.lines] == [each.name for each in parts]


def test_part_that_hangs_loses_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that runs at the same time reports, and parts after it run."""
    monkeypatch.setenv("HANGING", str(tmp_path / "pid"))
    parts = part("hangs", limit_s=8), part("passes"), part("fails", alone=True)
    _, results, text = run(tmp_path, *parts, side_by_side=2)
    kinds = [(line.part, line.result) for line in results.lines if line.result in (PASS, FAIL)]
    assert sorted(kinds[:2]) == [("hangs", PASS), ("passes", PASS)]
    assert kinds[2:] == [("hangs", FAIL), ("fails", FAIL)]
    rows = [
        row.split(" | ")[0] for row in text.splitlines() if row.startswith(("| hangs", "| passes"))
    ]
    assert len(list(itertools.groupby(rows))) == 2, "rows of one part stand together"


def test_programs_that_a_part_starts_find_what_the_caller_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_caller.py").write_text("VALUE = 7")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, _, text = run(tmp_path, part("imports"))
    assert code == 0, text


def test_every_part_of_the_check_has_a_function() -> None:
    """The modules are parsed, because some cannot be imported without a GPU.

    The most important parts come first, and no part takes long.
    """
    for each in PARTS:
        module, function, *arguments = each.target.split(":")
        text = (ROOT / (module.replace(".", "/") + ".py")).read_text()
        parameters = ", ".join(["checks: Checks", *(r"\w+: str" for _ in arguments)])
        assert re.search(rf"\ndef {function}\({parameters}\) -> None:", text), each.name
    assert [each.name for each in PARTS[:4]] == [
        "overhead",
        "overhead-device",
        "busy",
        "planted-ddp-backward",
    ]
    assert len({each.name for each in PARTS}) == len(PARTS)
    assert [each.name for each in PARTS if each.limit_s > 20] == ["hang"]
    on_tests = {each.name.partition("-")[0] for each in PARTS if ASYNC in each.devices}
    assert on_tests == {"planted", "loop", "hang", "fsdp", "tensor", "peer"}


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
    fake = ctypes.CDLL(str(library))
    with Calls(str(library)) as calls:
        fake.fake_call(1, ctypes.c_uint32(1))  # Called before counting starts.
        with calls.counted() as found:
            for domain, number in ((1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 6), (3, 3)):
                fake.fake_call(domain, ctypes.c_uint32(number))
        fake.fake_call(1, ctypes.c_uint32(1))
        with pytest.raises(RuntimeError, match="CUPTI error 39"):
            Calls(str(library))
    assert found == {
        "device memory: cuMemAlloc_v2": 2,
        "device memory: cudaMalloc_v3020": 1,
        "synchronize: cudaStreamSynchronize_v3020": 1,
        "module: loaded": 1,
    }
    # CUPTI has no subscriber any more, which it would call after the end of Python.
    with Calls(str(library)):
        pass


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


def test_page_of_the_documentation_is_written_from_the_results() -> None:
    assert DOCS_PAGE.read_text() == Results.load(DOCS_DATA).markdown()


# This test needs a quiet machine: a rank that waits for a CPU could be reported first.
@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.skipif(
    device.missing() is not None,
    reason=f"the device cannot be built: {device.missing()}",
)
@pytest.mark.parametrize("name", [ASYNC, MODULES])
def test_complete_check_passes_on_the_fake_asynchronous_device(tmp_path: Path, name: str) -> None:
    """The check is run from its command line, and ends within four minutes."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_check",
        "--device",
        name,
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    results = Results.load(tmp_path / DATA)
    assert results.failed == 0
    assert {"loop-checkpoint", "hang", "fsdp", "tensor"} <= results.seconds.keys()
