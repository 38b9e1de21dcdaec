"""General actions suppose nothing of a job: no setting that it may have already, or cannot have.

Precise actions are in test_actions.py, each with a job for which it is right and one for which it is
wrong.
"""

from __future__ import annotations

import re

import pytest

from tests.verdicts.words.test_bottleneck import BASE, report_on
from torchlens_perf.verdicts.words import bottleneck, long_steps
from torchlens_perf.verdicts.words.bottleneck import general_action

SETTINGS = re.compile(
    r"num_workers|persistent_workers|pin_memory|prefetch|DataLoader|bucket|no_sync|accumulat|"
    r"torch\.compile|reduce-overhead|CUDA graph|fused|foreach|checkpoint\(|bf16|autocast|"
    r"epoch|expert|router|OMP_NUM_THREADS|fewer ranks|larger batch",
    re.IGNORECASE,
)
SLEEPING: dict[str, dict[str, float]] = {
    "data": {"data": 40.0},
    "host": {"host": 40.0},
    "communication": {"communication": 40.0},
    "cpu": {"forward": 44.0, "cpu": 40.0},
    "computing": {},
}
"""For each key of a general action, the parts of a step for which it is given, in ms."""


@pytest.mark.parametrize("key", SLEEPING)
def test_general_action_is_given_for_its_use_of_the_step(key: str) -> None:
    report = report_on([{**BASE, **SLEEPING[key]}] * 160)
    assert general_action(key, report) in [each.action for each in report["verdicts"]]


@pytest.mark.parametrize("key", [*bottleneck._ADVICE, "cpu", "computing"])
def test_general_action_names_no_setting_of_the_job(key: str) -> None:
    """With one rank, an unknown number of threads, and no loader workers."""
    report = report_on([{**BASE}] * 160)
    assert not SETTINGS.findall(general_action(key, report))


@pytest.mark.parametrize("kind", long_steps.ACTIONS_ON_KINDS)
def test_action_on_long_steps_names_no_setting_of_the_job(kind: str) -> None:
    assert not SETTINGS.findall(long_steps.ACTIONS_ON_KINDS[kind])


def test_each_general_action_is_planted_or_needs_a_device() -> None:
    on_device = {"launches", "compiled_launches"}
    of_ranks = {"ranks"}
    assert set(SLEEPING) | on_device | of_ranks == {*bottleneck._ADVICE, "cpu", "computing"}
