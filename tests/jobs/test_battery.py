"""Programs from public reports (tests/jobs/battery) do the same with and without a watch."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.battery import autograd, compilers, modules, programs  # noqa: F401
from tests.jobs.battery.registry import CASES
from tests.support.long import long_except
from tests.support.processes import ROOT
from tests.support.warm_python import run

# One case of each kind of fault. `make test-long` runs all of them.
FEW = tuple(name for name, case in CASES.items() if not case.slow)[::4]
MODES = {
    "watch": {},
    "environment": {
        "TORCHLENS_PERF": "1",
        "TORCHLENS_PERF_SIDECAR": "0",
        "TORCHLENS_PERF_REPORT": "off",
    },
}


class Outcomes:
    """Outcomes of all chosen cases in each mode, which one program per mode runs."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder, self._names = folder, names
        self._ran: set[str] = set()

    def read(self, mode: str, name: str) -> dict[str, Any]:
        if mode not in self._ran:
            self._run(mode)
            self._ran.add(mode)
        place = self._folder / mode / name
        outcome: dict[str, Any] = json.loads((place / "outcome").read_text())
        log = (place / "stderr").read_text()
        ours = [line for line in log.splitlines() if line.startswith("torchlens_perf")]
        return {
            **outcome,
            "stdout": (place / "stdout").read_text(),
            "code": (place / "code").read_text(),
            "log": ours,
        }

    def _run(self, mode: str) -> None:
        folder = self._folder / mode
        folder.mkdir()
        command = [sys.executable, "-m", "tests.jobs.battery", mode, str(folder), *self._names]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", **MODES.get(mode, {})}
        done = run(command, 280, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run the cases whose tests were chosen, and no others."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
    ]
    return Outcomes(tmp_path_factory.mktemp("battery"), sorted(set(chosen)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", long_except(FEW, CASES))
def test_program_does_the_same_inside_a_watch(name: str, mode: str, outcomes: Outcomes) -> None:
    plain, watched = outcomes.read("plain", name), outcomes.read(mode, name)

    assert plain["log"] == []
    for part in plain:
        assert watched[part] == plain[part], part


def test_sources_are_threads_on_github() -> None:
    sources = [case.source for case in CASES.values() if case.source]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", each) for each in sources)
    assert len(set(sources)) == len(sources) >= 25
