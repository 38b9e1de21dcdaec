"""A rank that is slow because of its tokens, or because of its machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.findings import episode
from torchlens_perf.experts.causes import add_token_causes
from torchlens_perf.verdicts.causes.metrics import encode_signals
from torchlens_perf.verdicts.stragglers.findings import Cause, Diagnosis
from torchlens_perf.verdicts.words.causes import describe_diagnosis

SLOW = 3
# The episode has an excess of 20 ms in a step of 100 ms. The usual experts take 40 ms.
USUAL = {"expert_ktokens": 4.0, "expert_share": 0.4}


def diagnose(
    slow: dict[str, float],
    usual: dict[str, float] = USUAL,
    before: dict[str, float] | None = None,
    earlier: tuple[Cause, ...] = (),
    **changed: Any,
) -> Diagnosis:
    """Return the diagnosis of rank SLOW of four ranks."""
    loads = {rank: slow if rank == SLOW else usual for rank in range(4)}
    during = {rank: encode_signals(load).astype(np.float32) for rank, load in loads.items()}
    past = None if before is None else encode_signals(before).astype(np.float32)
    found = Diagnosis(earlier, ("garbage collection",), (), {}, {})
    return add_token_causes(found, episode(SLOW, **changed), during, past)


def kinds(found: Diagnosis) -> list[str]:
    return [cause.kind for cause in found.causes]


def test_more_tokens_at_the_usual_pace_are_the_cause() -> None:
    found = diagnose({"expert_ktokens": 6.0, "expert_share": 0.6})

    assert kinds(found) == ["tokens"]
    assert found.causes[0].explains == pytest.approx(1.0, abs=0.01)
    assert describe_diagnosis(found, SLOW) == (
        "its tokens: its experts get 6,000 tokens at a time, 1.33 times the mean of 4,500, which explains"
        " 100% of the difference."
    )


def test_same_tokens_at_a_slower_pace_are_the_machine() -> None:
    found = diagnose({"expert_ktokens": 4.0, "expert_share": 0.52})

    assert kinds(found) == ["machine"]
    assert found.causes[0].explains == pytest.approx(1.0, abs=0.01)
    assert describe_diagnosis(found, SLOW) == (
        "its machine: its experts get 1.00 times the mean of tokens, yet it computes 33% longer,"
        " which explains 100% of the difference."
    )


def test_both_causes_are_named_if_both_explain_much() -> None:
    assert kinds(diagnose({"expert_ktokens": 5.2, "expert_share": 0.6})) == ["tokens", "machine"]


def test_tokens_that_the_rank_had_before_it_was_slow_are_not_the_cause() -> None:
    before = {"expert_ktokens": 6.0, "expert_share": 0.6}

    assert kinds(diagnose({"expert_ktokens": 6.0, "expert_share": 0.8}, before=before)) == [
        "machine"
    ]


@pytest.mark.parametrize(("gc", "expected"), [(0.8, ["gc"]), (0.32, ["machine", "gc"])])
def test_machine_explains_what_known_causes_do_not(gc: float, expected: list[str]) -> None:
    slow = {"expert_ktokens": 4.0, "expert_share": 0.6}
    found = diagnose(slow, earlier=(Cause("gc", gc, {}, {}),))

    assert kinds(found) == expected
    assert sum(cause.explains or 0.0 for cause in found.causes) <= 1.01


def test_without_times_of_the_experts_all_work_is_taken_to_grow_with_the_tokens() -> None:
    """The rank has 20 ms more than the 60 ms of the others."""
    usual = {"expert_ktokens": 4.0}
    more = diagnose({"expert_ktokens": 6.0}, usual)

    assert kinds(more) == ["tokens"]
    assert "1.33 times the mean of 4,500, if all of its computation grows" in describe_diagnosis(
        more, SLOW
    )
    assert kinds(diagnose({"expert_ktokens": 4.0}, usual)) == ["machine"]


@pytest.mark.parametrize(
    ("slow", "changed"), [({}, {}), ({"expert_ktokens": 6.0}, {"phase": "data"})]
)
def test_nothing_changes_without_tokens_or_where_experts_do_not_compute(
    slow: dict[str, float], changed: dict[str, Any]
) -> None:
    assert diagnose(slow, **changed) == Diagnosis((), ("garbage collection",), (), {}, {})


def test_larger_batches_are_not_the_machine() -> None:
    """The verdict names the batches, and tokens are among the checked causes."""
    found = diagnose({"expert_ktokens": 4.0, "expert_share": 0.42}, more_workload=0.3)

    assert describe_diagnosis(found, SLOW) == (
        "none found (checked: garbage collection, tokens of its experts)."
    )
