"""Tests of installed loggers and frameworks' own loggers. The tests read the loggers' data back."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.test_jobs import FOLDER
from tests.support.processes import ROOT, only_report, run
from torchlens_perf.errors import RAISE
from torchlens_perf.results.logged_verdicts import REPORT, VERDICT

NEEDS = ("tensorboard", "wandb", "mlflow")
SENTENCE = "started: Rank 3 is slow. Next: look at its host."


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDS)),
    reason=f"{', '.join(NEEDS)}: not all in this environment: make test-frameworks",
)
def test_each_logger_receives_a_verdict_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's rows are unchanged."""
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    done = run(
        [sys.executable, str(FOLDER / "jobs" / "loggers_loop.py")],
        tmp_path,
        timeout_s=200,
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    )
    report = only_report(tmp_path)
    assert report["ranks"][0]["steps"] == facts["steps"] == facts["moved"]

    begin = f"1 rank, {facts['steps']} steps"

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (report_text,) = board.Tensors(f"{REPORT}/text_summary")
    (verdict,) = board.Tensors(f"{VERDICT}/text_summary")
    assert begin in report_text.tensor_proto.string_val[0].decode()
    assert SENTENCE in verdict.tensor_proto.string_val[0].decode()
    assert (verdict.step, report_text.step) == (facts["steps"], facts["steps"])
    assert [row.step for row in board.Scalars("loss")] == list(range(facts["steps"]))

    client = MlflowClient(f"file:{tmp_path}/mlruns")
    (one,) = client.search_runs(["0"])
    assert set(one.data.metrics) == set()
    for name, sentence in ((REPORT, begin), (VERDICT, SENTENCE)):
        (path,) = tmp_path.glob(f"mlruns/**/{name}.txt")
        assert sentence in path.read_text()

    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    steps, summary = [], {}
    for data in chunks(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "loss" in row:
            steps.append(record.history.step.num)
        summary |= {
            item.key or item.nested_key[0]: item.value_json for item in record.summary.update
        }
    assert steps == list(range(facts["steps"])), "texts of ours moved the user's rows"
    assert begin in json.loads(summary[REPORT])
    assert SENTENCE in json.loads(summary[VERDICT])


WAYS = {
    "trainer": "transformers",
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
}
"""Packages that the ways need."""
CALLBACKS = ("trainer", "lightning")
OF_FRAMEWORKS = [
    pytest.param(
        way,
        marks=pytest.mark.skipif(
            not all(map(importlib.util.find_spec, ("tensorboard", package))),
            reason=f"tensorboard, {package}: not in this environment: make test-frameworks",
        ),
    )
    for way, package in WAYS.items()
]


def framework_loggers(way: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run the job. Return the job's last output line and its logged values."""
    folder.mkdir()
    script = str(FOLDER / "jobs" / "framework_loggers.py")
    environment = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        RAISE: "0",
    }
    done = run([sys.executable, script, way, *arguments], folder, timeout_s=200, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return (
        json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"losses"'))),
        done.stderr,
    )


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("way", OF_FRAMEWORKS)
def test_callback_adds_the_report_to_loggers_of_the_framework(way: str, tmp_path: Path) -> None:
    """One argument adds the report. All of the user's rows are stored.

    If our functions in a callback raise, the losses are the same, and one line reports each error.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    facts, _ = framework_loggers(way, tmp_path / "whole")
    report = only_report(tmp_path / "whole")
    assert report["ranks"][0]["steps"] == facts["steps"]

    board = EventAccumulator(str(tmp_path / "whole" / facts["board"]))
    board.Reload()
    (text,) = board.Tensors(f"{REPORT}/text_summary")
    assert f"1 rank, {facts['steps']} steps" in text.tensor_proto.string_val[0].decode()
    loss = "train/loss" if way == "trainer" else "loss"
    assert len(board.Scalars(loss)) == facts["count"] == facts["steps"]

    if way not in CALLBACKS:
        # A script without a callback calls our functions itself.
        return
    broken, said = framework_loggers(way, tmp_path / "broken", "breaks")
    assert {**broken, "board": ""} == {**facts, "board": ""}
    lines = [line for line in said.splitlines() if "a defect of ours" in line]
    assert lines
    assert all(line.startswith("torchlens_perf: ") and "training goes on" in line for line in lines)
    assert "Traceback" not in said


@pytest.mark.long
def test_callbacks_import_only_their_framework() -> None:
    """Importing torchlens_perf alone imports no framework."""
    frameworks = {
        "transformers",
        "lightning",
        "accelerate",
        "tensorboard",
        "wandb",
        "mlflow",
        "ray",
    }
    code = """
import sys, torchlens_perf, torchlens_perf.watching, torchlens_perf.results.loggers
before = set(sys.modules)
try:
    __import__(f"torchlens_perf.integrations.{sys.argv[1]}")
except torchlens_perf.ConfigError as error:
    print(error)
print(*sorted({name.partition(".")[0] for name in before}), "|", *sorted({name for name in sys.modules
    if name.startswith("torchlens_perf.integrations.")}))
"""
    for name, framework in (("huggingface", "transformers"), ("lightning", "lightning")):
        done = run(
            [sys.executable, "-W", "ignore", "-c", code, name],
            ROOT,
            timeout_s=100,
            PYTHONPATH=str(ROOT),
        )
        assert done.returncode == 0, done.stderr
        *said, last = done.stdout.splitlines()
        before, _, ours = last.partition(" | ")
        assert not frameworks & set(before.split())
        if importlib.util.find_spec(framework) is None:
            (line,) = said
            assert line.startswith(f"{framework} cannot be imported")
            assert line.endswith(f"pip install {framework}")
        else:
            assert set(ours.split()) == {
                f"torchlens_perf.integrations.{of}" for of in (name, "framework_run")
            }


def chunks(log: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's file: a header of 7 bytes, then LevelDB's log format in blocks of
    32 KiB.
    """
    at, parts = 7, b""
    while at < len(log):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _crc, size, kind = struct.unpack_from("<IHB", log, at)
        parts += log[at + 7 : at + 7 + size]
        at += 7 + size
        # A complete record, or the last part of one.
        if kind in (1, 4):
            yield parts
            parts = b""
