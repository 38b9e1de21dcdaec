"""Tests of events that TRL, openai and Hugging Face record without a call of their users."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, run
from tests.support.servers import wait_for
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import EVENTS
from torchlens_perf.store.reader import ParquetFile, ParquetFolder

JOBS = Path(__file__).parent / "jobs"
COLUMNS = ("event", "role", "name", "id", "batch", "tokens_in", "tokens_out", "monotonic_ns")


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
    tokens = [(each["tokens_in"], each["tokens_out"]) for each in requests]
    # The last request of each client has a streaming response, whose answer the program reads itself.
    assert tokens == ([(7, 2)] * 4 + [(None, None)] + [(7, 2)] * 4 + [(None, None)])
    begins = {each["id"]: each["monotonic_ns"] for each in events if "begin" in each["event"]}
    unread = [each for each in requests if each["tokens_in"] is None]
    assert all(each["monotonic_ns"] - begins[each["id"]] >= 0.2e9 for each in unread)
    generations = [each for each in ends if each["role"] == "tool"]
    assert [(each["tokens_in"], each["tokens_out"]) for each in generations] == [
        (3, 4),
        (None, None),
    ]
    # The request that failed has no end.
    assert Counter(each["event"] for each in events) == {
        "generation_begin": 12,
        "generation_end": 12,
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


@pytest.mark.long
@pytest.mark.distributed
@needs("trl")
def test_tools_of_grpo_are_not_generation(tmp_path: Path) -> None:
    """The samples of a batch call a tool of 0.1 s in none, one, two and one turns, one after the other."""
    expected = seen("trl_tools", tmp_path / "without")
    found = seen("trl_tools", tmp_path / "with", WATCHED="1")
    (folder,) = (tmp_path / "with/torchlens-perf").iterdir()
    report: Any = load_report(RunDirectory(folder), lost_time=False)
    iterations = report["iterations"]

    assert found == expected
    assert found["calls"] == 4 * 4
    assert iterations.count == 3
    # Three calls in the first turn, and one in the second one.
    assert iterations.parts["tool"] == pytest.approx(0.4, rel=0.3)
    ends = [each for each in rows(folder) if each["event"] == "generation_end"]
    turns = Counter(each["id"] for each in ends)
    assert [turns[f"{batch}-0-{index}"] for batch in range(4) for index in range(4)] == [
        1,
        2,
        3,
        2,
    ] * 4
    assert {each["tokens_out"] for each in ends} == {4}
    tools = Counter(each["id"] for each in rows(folder) if each["event"] == "tool_end")
    assert all(tools[sample] == count - 1 for sample, count in turns.items())


@pytest.mark.long
@pytest.mark.distributed
@needs("openai")
@pytest.mark.parametrize(
    ("arguments", "variables", "role"),
    [
        # It answers the model, so it is a tool.
        (("2",), {}, "tool"),
        # It may be a judge, or the trainer.
        (("1",), {}, ""),
        (("2", "torch"), {}, ""),
        (("2",), {"TORCHLENS_PERF_ROLE": "reward/judge"}, "reward"),
    ],
)
def test_role_of_a_process_that_only_asks_servers(
    arguments: tuple[str, ...], variables: dict[str, str], role: str, tmp_path: Path
) -> None:
    """Only a set role, or a chat that continues in a process without torch, says what it is."""
    run_id = f"t{os.getpid()}-{tmp_path.name}"
    folder = RunDirectory(tmp_path / "runs" / run_id)
    folder.create()
    script = [str(JOBS / "agent_client.py"), *arguments]
    environment = {"PYTHONPATH": str(ROOT), **variables}
    expected = run([sys.executable, *script], tmp_path, **environment)
    command = [sys.executable, "-m", "torchlens_perf", "run", "--quiet", *script]
    of_job = {"TORCHLENS_PERF_RUN_ID": run_id, "TORCHLENS_PERF_DIR": str(tmp_path / "runs")}
    done = run(command, tmp_path, **environment, **of_job)

    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    if not role:
        assert not folder.find_local_mailboxes(EVENTS)
        assert not (folder.path / "events").exists()
        return
    wait_for(lambda: not folder.find_local_mailboxes(EVENTS), 60)
    events = rows(folder.path)
    counts = Counter((each["role"], each["event"]) for each in events)
    # Without a set role, the first request of all is made before the role is known.
    assert counts["rollout", "generation_end"] == 5 + (role == "reward")
    assert counts["tool", "tool_begin"] == counts["tool", "tool_end"] == 3
    of_process = {each["role"] for each in events if not each["name"] and each["role"] != "rollout"}
    assert of_process == ({"tool"} if role == "tool" else set())
    assert "secret" not in str(events)
