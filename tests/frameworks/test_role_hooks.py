"""Tests of events that TRL, openai and Hugging Face record without a call of their users."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, run
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.reader import ParquetFile, ParquetFolder

JOBS = Path(__file__).parent / "jobs"
COLUMNS = ("event", "role", "name", "id", "batch", "tokens_in", "tokens_out")


def needs(*packages: str) -> Any:
    absent = [each for each in packages if importlib.util.find_spec(each) is None]
    return pytest.mark.skipif(
        bool(absent),
        reason=f"{' and '.join(absent)}: not in this environment: make test-frameworks",
    )


def seen(script: str, folder: Path, **environment: str) -> Any:
    """Return the last line of a job."""
    folder.mkdir()
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment}
    done = run([sys.executable, str(JOBS / f"{script}.py")], folder, timeout_s=250, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def rows(run_folder: Path) -> list[dict[str, Any]]:
    def read(file: ParquetFile) -> list[dict[str, Any]]:
        return file.read_table(COLUMNS).to_pylist()

    return [row for table in ParquetFolder(run_folder / "events").read_each(read) for row in table]


@pytest.mark.long
@pytest.mark.distributed
@needs("openai", "transformers")
def test_requests_and_generations_are_events_and_look_the_same(tmp_path: Path) -> None:
    """Only a process with a role is recorded. A watch in it starts the sidecar that reads events."""
    role = {"TORCHLENS_PERF_ROLE": "tool/agent", "TORCHLENS_PERF_RUN_ID": f"t{tmp_path.name}"}
    expected = seen("role_client", tmp_path / "without")
    found = seen("role_client", tmp_path / "with", TORCHLENS_PERF_DIR="runs", WATCHED="1", **role)

    # Addresses have other ports.
    assert found == expected
    assert not (tmp_path / "without/runs").exists()
    events = rows(tmp_path / "with/runs" / role["TORCHLENS_PERF_RUN_ID"])
    ends = [each for each in events if each["event"] == "generation_end"]
    requests = [each for each in ends if each["role"] == "rollout"]
    assert {each["name"].partition(":")[0] for each in requests} == {"127.0.0.1"}
    assert [(each["tokens_in"], each["tokens_out"]) for each in requests] == [(7, 2)] * 8
    generations = [each for each in ends if each["role"] == "tool"]
    assert [(each["tokens_in"], each["tokens_out"]) for each in generations] == [
        (3, 4),
        (None, None),
    ]
    # The request that failed has no end.
    assert Counter(each["event"] for each in events) == {
        "generation_begin": 10,
        "generation_end": 10,
    }
    assert "secret" not in str(events)


@pytest.mark.long
@pytest.mark.distributed
@needs("trl")
def test_batches_of_grpo_are_iterations(tmp_path: Path) -> None:
    """The role is detected. Losses and completions are those of a job without a watch."""
    expected = seen("trl_grpo", tmp_path / "without")
    found = seen("trl_grpo", tmp_path / "with", WATCHED="1")
    (folder,) = (tmp_path / "with/torchlens-perf").iterdir()
    report: Any = load_report(RunDirectory(folder), lost_time=False)
    iterations = report["iterations"]

    assert found == expected
    assert not (tmp_path / "without/torchlens-perf").exists()
    assert iterations.count == 3
    assert {"generation", "reward", "steps"} <= iterations.parts.keys()
    assert iterations.parts["reward"] == pytest.approx(0.1, rel=0.3)
    assert sum(iterations.parts.values()) == pytest.approx(iterations.mean_s)
    assert "the role of rank 0 was detected, not set: trainer" in report["quality"]["notes"]
    counts = Counter(each["event"] for each in rows(folder))
    assert counts["sample_sent"] == counts["generation_end"] == counts["reward_end"] == 4 * 12
    assert counts["batch_complete"] == counts["steps_end"] == 4
    tokens = [each["tokens_out"] for each in rows(folder) if each["event"] == "generation_end"]
    assert sum(tokens) == expected["tokens"]
