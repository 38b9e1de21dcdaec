"""w.mlperf() writes logs that MLCommons' own checker accepts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.recording import recorded
from torchlens_perf import watch

PRECISIONS = dict.fromkeys(
    [f"lowest_numerical_precision_in_{each}" for each in ("linear", "attn", "comm")], "fp32"
)
PARALLELISM = dict.fromkeys(
    [f"{each}_parallelism" for each in ("tensor", "pipeline", "context", "expert")], 1
)
VALUES: dict[str, Any] = {
    "submission_org": "reference",
    "submission_platform": "1xCPU",
    "submission_division": "closed",
    "submission_benchmark": "llama2_70b_lora",
    "submission_status": "research",
    "submission_poc_name": "reference",
    "submission_poc_email": "poc@example.com",
    "cache_clear": True,
    "seed": 1,
    "train_samples": 64,
    "eval_samples": 8,
    "global_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "micro_batch_size": 8,
    "opt_name": "adamw",
    "opt_base_learning_rate": 0.1,
    "opt_learning_rate_training_steps": 8,
    "opt_learning_rate_warmup_factor": 0.0,
    "opt_gradient_clip_norm": 0.3,
    "opt_adamw_weight_decay": 0.0,
    "lora_alpha": 32,
    "lora_rank": 16,
    "config_filename": "reference.yaml",
    **PRECISIONS,
    **PARALLELISM,
}


def train(folder: Path, log: Path, **settings: Any) -> list[dict[str, Any]]:
    """Train eight steps with two evaluations. Return the lines of the log."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(folder, model, optimizer) as recording:
        result = recording.watch.mlperf(log, **VALUES, **settings)
        result.start()
        for accuracy, status in (0.95, ""), (0.92, "success"):
            for _ in range(4):
                model(torch.ones(8, 2)).sum().backward()
                optimizer.step()
            result.start_evaluation()
            result.end_evaluation(accuracy, status)
    lines = log.read_text().splitlines()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def test_samples_are_those_of_the_steps(tmp_path: Path) -> None:
    lines = train(tmp_path / "runs", tmp_path / "result_0.txt")

    found = [(each["value"], each["metadata"]["samples_count"]) for each in lines
             if each["key"] == "eval_accuracy"]  # fmt: skip
    assert found == [(0.95, 32), (0.92, 64)]
    assert {Path(each["metadata"]["file"]).name for each in lines[-4:]} == {Path(__file__).name}
    assert [each["key"] for each in lines if each["event_type"].startswith("INTERVAL")] == [
        *("init_start", "init_stop", "run_start", "block_start"),
        *("block_stop", "eval_start", "eval_stop", "block_start"),
        *("block_stop", "eval_start", "eval_stop", "run_stop"),
    ]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with recorded(tmp_path) as recording:
        recording.watch.mlperf(tmp_path / "result_0.txt", global_batch_size=1).start()

    assert not (tmp_path / "result_0.txt").exists()


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, {}), ({"count_samples": lambda: 5}, {"samples_count": 5})]
)
def test_samples_are_missing_if_nothing_counts_them(
    tmp_path: Path, settings: dict[str, Any], expected: dict[str, int]
) -> None:
    """A watch that is not entered records no steps."""
    watch(dir=str(tmp_path)).mlperf(tmp_path / "log", global_batch_size=1, **settings).start()

    last = json.loads((tmp_path / "log").read_text().rpartition(":::MLLOG ")[2])
    assert last["key"] == "block_start"
    assert {key: last["metadata"][key] for key in last["metadata"] if "samples" in key} == expected


@pytest.mark.parametrize("is_complete", [True, False])
def test_compliance_checker_accepts_a_complete_run(tmp_path: Path, is_complete: bool) -> None:
    log = tmp_path / "result_0.txt"
    train(tmp_path / "runs", log)
    if not is_complete:
        log.write_text("\n".join(log.read_text().splitlines()[:-1]))
    checked = subprocess.run(
        [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", "6.1.0", str(log)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip

    assert (checked.returncode == 0) == is_complete, checked.stderr
    assert ("SUCCESS" if is_complete else "run_stop") in checked.stderr
