"""Verdicts on host code, sections and data loading name the line that most stack samples show."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.reports import as_json, checked
from tests.verdicts.words.test_bottleneck import BASE, state_of
from torchlens_perf.report.build import build_report
from torchlens_perf.run.training_settings import LoaderSettings, TrainingSettings
from torchlens_perf.verdicts.node_state import NodeState

LOSS, LOG, OTHER = "train.py:42 in loss_fn", "train.py:50 in log", "train.py:60 in main"
LOADING = TrainingSettings(loader=LoaderSettings(workers=0, pin_memory=False))


def verdict_on(
    *ranks: dict[str, int], loader: TrainingSettings = LOADING, **parts: float
) -> dict[str, Any]:
    """Return the first verdict on a job. ranks: stack samples by part and line."""
    states = [
        state_of(rank, len(ranks), [{**BASE, **parts}] * 60, training=loader)
        for rank in range(len(ranks))
    ]
    for state, lines in zip(states, ranks, strict=True):
        for sums in state.statistics.by_length.values():
            sums.lines = lines
    node = NodeState("h", {state.identity.key: state for state in states})
    found = as_json(checked(build_report("r", [node])))["verdicts"]
    return next(each for each in found if each["evidence"]["type"] == "typical_step")


def test_line_of_most_samples_in_host_code_is_named_with_their_number() -> None:
    """The rank with the most samples counts."""
    few, many = (
        {f"host at {LOG}": 6},
        {f"host at {LOSS}": 17, f"host at {LOG}": 3, f"data at {LOG}": 9},
    )
    verdict = verdict_on(few, many, host=80)

    assert (
        f"Of the stack samples of rank 1 in host code, 17 of 20 (85%) are at {LOSS}."
        in verdict["text"]
    )
    assert verdict["action"] == f"look at {LOSS}, where most of this time is spent."
    assert verdict["evidence"]["lines"] == {
        "part": "host", "rank": 1, "samples": 20, "lines": {LOSS: 17},
    }  # fmt: skip


def test_two_lines_are_named_if_none_has_a_majority() -> None:
    verdict = verdict_on(
        {f"host at {LOSS}": 9, f"host at {LOG}": 8, f"host at {OTHER}": 3}, host=80
    )

    assert f"9 of 20 (45%) are at {LOSS} and 8 of 20 (40%) are at {LOG}." in verdict["text"]


@pytest.mark.parametrize(
    "lines",
    [
        {f"host at {LOSS}": 4},
        {
            f"host at {LOSS}": 4,
            f"host at {LOG}": 4,
            f"host at {OTHER}": 4,
            "host at a.py:1 in f": 4,
        },
        {"host at ": 9, f"host at {LOSS}": 1},
        {f"data at {LOSS}": 20},
    ],
    ids=["few samples", "many lines", "no line is known", "another part"],
)
def test_no_line_is_named_without_a_majority_of_samples(lines: dict[str, int]) -> None:
    verdict = verdict_on(lines, host=80)

    assert "stack samples" not in verdict["text"]
    assert verdict["evidence"]["lines"] is None


@pytest.mark.parametrize("workers", [0, 4])
def test_line_of_data_loading_is_named_unless_workers_load(workers: int) -> None:
    loader = TrainingSettings(loader=LoaderSettings(workers=workers, pin_memory=False))
    verdict = verdict_on({"data at data.py:7 in __getitem__": 9}, loader=loader, data=80)
    text = "Of the stack samples of rank 0 in data loading, 9 of 9 (100%) are at data.py:7 in __getitem__"

    assert verdict["kind"] == "data_bound"
    assert (text in verdict["text"]) == (workers == 0)
