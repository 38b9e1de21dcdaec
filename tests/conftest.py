"""Fixtures of every test: no outside settings, internal errors raised, all hooks removed."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.support.cpu_budget import CpuBudget
from tests.support.strict import find_failed_sidecars
from tests.support.warm_python import WHOLE_END
from torchlens_perf import watching
from torchlens_perf.errors import RAISE, swallowed

pytest_plugins = [
    "tests.support.device.fixtures",
    "tests.support.memory_group",
    "tests.support.ranks",
    "tests.support.recorded_run",
]

# Threads that spin while waiting for each other use processors that parallel tests need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Shells start background programs with SIGINT ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Processes of tests inherit the setting, so tests could not interrupt them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A time limit for examples is meaningless on a busy machine. `make test-long` sets more examples.
settings.register_profile(
    "busy",
    deadline=None,
    max_examples=int(os.environ.get("EXAMPLES", "25")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("busy")


def pytest_configure(config: pytest.Config) -> None:
    """Limit the CPU time of `make test`."""
    if config.option.markexpr == "not long":
        config.pluginmanager.register(CpuBudget())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark property tests, and spread the files of tests/distributed over the run.

    Tests in tests/distributed start several processes each. Such files should not run at the same
    time, and none of them at the end, where it would run alone.
    """
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.examples)
    groups: dict[bool, dict[Path, list[pytest.Item]]] = {True: {}, False: {}}
    for item in items:
        groups["distributed" in item.path.parts].setdefault(item.path, []).append(item)
    placed = [
        (index / len(files) * (0.9 if several else 1), several, tests)
        for several, files in groups.items()
        for index, tests in enumerate(files.values())
    ]
    items[:] = [test for _, _, tests in sorted(placed, key=lambda each: each[:2]) for test in tests]


def pytest_collection_finish() -> None:
    """Leave all that the collection has made out of garbage collections.

    A process with all tests has some million objects, a user's far fewer.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith(("TORCHLENS_PERF", "OTEL_")):
            monkeypatch.delenv(variable)
    # Tests count the records of modules in steps that are much shorter than users' steps.
    monkeypatch.setenv("TORCHLENS_PERF_BUDGET", "0")
    # No page is written by default. Tests in tests/page request one.
    monkeypatch.setenv("TORCHLENS_PERF_REPORT", "text")
    # Counting the frozen objects of a process with all tests takes 0.1 s of a step.
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)


@pytest.fixture
def whole_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let warm programs deallocate everything at their end, as users' programs do."""
    monkeypatch.setenv(WHOLE_END, "1")


@pytest.fixture(autouse=True)
def _no_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, _clean_environment: None, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Make internal errors raise, in this process and in all that it starts.

    Make tests fail on errors that no caller can catch, too: those inside the native recorder, and
    those with which a sidecar has ended. tests/test_strict_errors.py lists the tests that plant
    errors.
    """
    unraisable: list[str] = []

    def remember(raised: sys.UnraisableHookArgs) -> None:
        unraisable.append(f"{raised.object!r}: {raised.exc_value!r}")

    monkeypatch.setattr(sys, "unraisablehook", remember)
    monkeypatch.setenv(RAISE, "1")
    before = swallowed.by_place.copy()
    uses_folder = "tmp_path" in request.fixturenames
    folder = request.getfixturevalue("tmp_path") if uses_folder else None
    yield
    left = watching._running
    if left is not None:
        left.stop()
    assert left is None
    assert unraisable == []
    assert swallowed.by_place == before
    if folder is not None and os.environ.get(RAISE) == "1":
        assert find_failed_sidecars(folder) == []
