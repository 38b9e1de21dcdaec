"""Run the native recorder's tests and the fuzzer again with sanitizers.

AddressSanitizer and UndefinedBehaviorSanitizer end the process after errors that a plain build
survives, such as a read of freed memory.

ThreadSanitizer ends the process after unordered accesses of two threads.
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
THREADS = "-fsanitize=thread -fno-omit-frame-pointer -O1 -g"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g"
TESTS = (
    "recorder/test_recorder.py", "recorder/test_recorder_collectives.py", "recorder/test_collective_marks.py",
    "recorder/test_watch_ends_in_a_mark.py", "recorder/test_section_tasks.py", "run/test_ring.py",
    "run/test_ring_interrupted.py",
)  # fmt: skip


# These tests make recording calls on several threads, with and without the GIL. ThreadSanitizer
# covers our code and the GIL's mutex.
THREADED = (
    "recorder/test_recorder.py", "recorder/test_recorder_collectives.py", "recorder/test_collective_marks.py",
    "recorder/test_watch_ends_in_a_mark.py", "recorder/test_section_tasks.py", "run/test_ring_interrupted.py",
)  # fmt: skip


def build(folder: Path, flags: str, *libraries: str) -> dict[str, str]:
    """Copy the package and build its extensions with the given flags.

    Return the environment to run it.
    """
    paths = [
        subprocess.run(
            ["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in libraries
    ]
    if not all(Path(each).is_absolute() for each in paths):
        pytest.skip(f"this compiler has no sanitizers: {paths}")
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("torchlens_perf", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "CFLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert list((folder / "torchlens_perf").glob("_native*.so")), built.stdout + built.stderr
    return {**os.environ, "PYTHONPATH": str(folder), "LD_PRELOAD": " ".join(paths)}


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a copy of the package with sanitized extensions and the environment to run it."""
    folder = tmp_path_factory.mktemp("sanitized")
    environment = {
        **build(folder, SANITIZE, "libasan.so", "libubsan.so"),
        # Python frees some memory only at its end, and handles signals itself.
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=1:abort_on_error=0:exitcode=77",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # This setting also detects uses of freed objects of ours.
    }
    return folder, environment


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a copy of the package built with ThreadSanitizer and its environment.

    Skip the test if ThreadSanitizer does not start, as on kernels with another memory layout.
    """
    folder = tmp_path_factory.mktemp("raced")
    suppressions = folder / "suppressions"
    # glibc frees a library's thread-local memory when the thread's stack is reused, which the
    # sanitizer cannot follow.
    suppressions.write_text("race:_dl_deallocate_tls\n")
    environment = {
        **build(folder, f"{THREADS} -Wno-tsan", "libtsan.so"),
        "TSAN_OPTIONS": f"exitcode=66:suppressions={suppressions}:log_path={folder / 'races'}",
    }
    started = subprocess.run(
        [sys.executable, "-c", ""], env=environment, capture_output=True, text=True, check=False
    )
    if started.returncode:
        pytest.skip(f"ThreadSanitizer does not start here: {started.stderr[-300:]}")
    return folder, environment


def run(sanitized: tuple[Path, dict[str, str]], *arguments: str) -> str:
    folder, environment = sanitized
    command = [sys.executable, "-W", "ignore", *arguments]
    finished = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    said = finished.stdout + finished.stderr
    assert finished.returncode == 0, said[-6000:]
    assert "runtime error" not in said, said[-6000:]
    return finished.stdout


def test_address_and_undefined_sanitizers_are_enabled(
    sanitized: tuple[Path, dict[str, str]],
) -> None:
    program = (
        "import torchlens_perf._native as n; print(n.__file__, 'libasan' in"
        " open('/proc/self/maps').read())"
    )
    file, is_in = run(sanitized, "-c", program).split()
    assert Path(file).is_relative_to(sanitized[0])
    assert is_in == "True"
    assert b"__asan_init" in Path(file).read_bytes()


@pytest.mark.parametrize("file", TESTS)
def test_native_tests_pass_with_sanitizers(
    sanitized: tuple[Path, dict[str, str]], file: str
) -> None:
    marked = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compile", f"tests/{file}"]
    assert "passed" in run(sanitized, *marked)


@pytest.mark.parametrize("seed", [11, 12])
def test_recorder_fuzzer_passes_with_sanitizers(
    sanitized: tuple[Path, dict[str, str]], seed: int
) -> None:
    assert run(sanitized, "tests/native/fuzz_recorder.py", str(seed), "100000").startswith(
        "100000 "
    )


def test_thread_sanitizer_is_enabled(raced: tuple[Path, dict[str, str]]) -> None:
    file = run(raced, "-c", "import torchlens_perf._native as n; print(n.__file__)").strip()
    assert Path(file).is_relative_to(raced[0])
    assert b"__tsan_write8" in Path(file).read_bytes()


@pytest.mark.parametrize("file", THREADED)
def test_threaded_recorder_tests_pass_with_thread_sanitizer(
    raced: tuple[Path, dict[str, str]], file: str
) -> None:
    folder, environment = raced
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not compile",
    ]
    finished = subprocess.run(
        [*command, f"tests/{file}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    races = [path.read_text()[:6000] for path in folder.glob("races.*")]

    assert (races, finished.returncode) == ([], 0), (
        finished.stdout[-6000:] + finished.stderr[-6000:]
    )
