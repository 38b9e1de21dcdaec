"""Fixtures with a recorded run for all backends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.backends.recorded import STEPS, TRACE_EVERY, TRACEPARENT, Recorded
from tests.support.processes import SCRIPTS
from tests.support.recorded_run import train, wait_for_sidecar


def trained(folder: Path, told: Mapping[str, str]) -> Recorded:
    """Return a finished run. told: further variables, such as the sidecar's endpoint."""
    ours = {"TORCHLENS_PERF_TRACE_EVERY": str(TRACE_EVERY), "TRACEPARENT": TRACEPARENT}
    run = train(folder, {**ours, **told}, STEPS, SCRIPTS / "train_slow_rank.py")
    wait_for_sidecar(run, 60)
    return Recorded(run, folder)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a finished run that has not been exported yet."""
    return trained(tmp_path_factory.mktemp("run"), {})
