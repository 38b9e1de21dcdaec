"""The native recorder built with AddressSanitizer and UndefinedBehaviorSanitizer: its tests again, and the fuzz.

What a plain build gets away with, a read beyond an array or of freed memory, ends the process there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g"
TESTS = (
    "recorder/test_recorder.py", "recorder/test_recorder_collectives.py", "recorder/test_collective_marks.py",
    "recorder/test_watch_ends_in_a_mark.py", "recorder/test_section_tasks.py", "run/test_ring.py",
    "run/test_ring_interrupted.py",
)  # fmt: skip


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the package with sanitized extensions, and the environment to run it in."""
    libraries = [
        subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(each).is_absolute() for each in libraries):
        pytest.skip(f"this compiler has no sanitizers: {libraries}")
    folder = tmp_path_factory.mktemp("sanitized")
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("torchlens_perf", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(
        build, cwd=folder, env={**os.environ, "CFLAGS": SANITIZE}, capture_output=True, text=True, check=False
    )
    assert list((folder / "torchlens_perf").glob("_native*.so")), built.stdout + built.stderr
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "LD_PRELOAD": " ".join(libraries),
        # Python keeps some until its end, and takes signals of its own.
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=1:abort_on_error=0:exitcode=77",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # so that objects of ours that are freed are seen too
    }
    return folder, environment


def run(sanitized: tuple[Path, dict[str, str]], *arguments: str) -> str:
    folder, environment = sanitized
    command = [sys.executable, "-W", "ignore", *arguments]
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1000
    )
    said = finished.stdout + finished.stderr
    assert finished.returncode == 0, said[-6000:]
    assert "runtime error" not in said, said[-6000:]
    return finished.stdout


def test_sanitizers_are_in(sanitized: tuple[Path, dict[str, str]]) -> None:
    program = "import torchlens_perf._native as n; print(n.__file__, 'libasan' in open('/proc/self/maps').read())"
    file, is_in = run(sanitized, "-c", program).split()
    assert Path(file).is_relative_to(sanitized[0])
    assert is_in == "True"
    assert b"__asan_init" in Path(file).read_bytes()


@pytest.mark.parametrize("file", TESTS)
def test_native_tests_again(sanitized: tuple[Path, dict[str, str]], file: str) -> None:
    marked = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compile", f"tests/{file}"]
    assert "passed" in run(sanitized, *marked)


@pytest.mark.parametrize("seed", [11, 12])
def test_fuzz(sanitized: tuple[Path, dict[str, str]], seed: int) -> None:
    assert run(sanitized, "tests/native/fuzz_recorder.py", str(seed), "100000").startswith("100000 ")
