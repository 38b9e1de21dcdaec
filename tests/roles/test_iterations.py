"""Tests of iterations: their parts add up, and the critical path is that of the last sample."""

from __future__ import annotations

import pytest

from tests.roles.tables import job_events, job_iterations, shuffled
from torchlens_perf.roles.iterations import Event, build_iterations, sum_tokens
from torchlens_perf.roles.report import sum_parts

WHOLE_S = 0.01 + 0.3 + 0.03 + 0.03 + 0.01 + 0.2 + 0.05


@pytest.mark.parametrize(
    ("numbers", "total"), [([3, 4], 7), ([3, None], None), ([], None), ([0, 0], 0)]
)
def test_sum_of_tokens_is_unknown_if_a_part_is(
    numbers: list[int | None], total: int | None
) -> None:
    assert sum_tokens(numbers) == total


def test_parts_of_an_iteration_add_up_to_its_time() -> None:
    found = job_iterations()

    assert [each.batch for each in found] == ["0", "1", "2", "3", "4"]
    assert [each.seconds for each in found] == pytest.approx([WHOLE_S] * 5)
    assert sum(sum_parts(found).values()) == pytest.approx(5 * WHOLE_S)
    assert sum_parts(found[:1]) == pytest.approx(
        {
            "generation wait": 0.01, "generation": 0.3, "tool wait": 0.01, "tool": 0.02, "reward wait": 0.01,
            "reward": 0.02, "collecting": 0.01, "steps": 0.2, "weights": 0.05,
        }
    )  # fmt: skip


def test_critical_path_is_that_of_the_last_sample() -> None:
    """Sample 4 has a slow tool. The other samples are not on the path."""
    found = job_iterations(tool_s=lambda iteration, sample: 1.0 if sample == 4 else 0.02)

    last = found[1].last_sample
    assert last is not None
    assert last.id == "1-4"
    assert sum_parts(found)["tool"] == pytest.approx(5.0)


def test_samples_of_a_next_batch_that_were_sent_early_cost_only_the_wait() -> None:
    """An asynchronous job: a batch is sent 0.2 s before the trainer begins to wait for it."""
    events = [
        each._replace(time_s=each.time_s - 0.2) if each.id.startswith("1-") else each
        for each in job_events(iterations=2)
    ]
    found = build_iterations(shuffled(events))

    # Its samples are done 0.2 s before the batch is complete.
    assert found[1].rollout_s == pytest.approx(0.38)
    parts = sum_parts(found[1:])
    assert parts["generation"] == pytest.approx(0.11)
    assert parts["collecting"] == pytest.approx(0.21)
    assert sum(parts.values()) == pytest.approx(found[1].seconds)


def test_samples_that_are_no_part_of_the_batch_are_left_out() -> None:
    """A trainer that takes the first samples does not wait for the others."""
    late = [each for each in job_events(iterations=1) if each.id == "0-5"]
    events = [each for each in job_events(iterations=1) if each not in late]
    found = build_iterations(
        [*events, *(each._replace(time_s=each.time_s + 5) for each in late[1:]), late[0]]
    )

    assert len(found[0].samples) == 5


def test_saving_is_that_of_all_samples() -> None:
    """Without the long tool call of one sample, the next longest one counts."""
    found = job_iterations(
        tool_s=lambda iteration, sample: {4: 1.0, 2: 0.6}.get(sample, 0.02),
        queue_s=lambda iteration, sample: 0.0,
    )[1]

    shorter = found.changed(lambda sample, each: 0.0 if sample.id == "1-4" else each.seconds)
    assert found.seconds - shorter.seconds == pytest.approx(0.4)
    assert found.changed(lambda sample, each: each.seconds).seconds == found.seconds


def test_path_has_all_of_an_iteration_without_gaps() -> None:
    found = job_iterations()[1]
    parts = list(found.path())

    assert sum(each.end_s - each.begin_s for each in parts) == pytest.approx(found.seconds)
    assert parts[0].begin_s == found.begin_s
    assert parts[-1].end_s == pytest.approx(found.end_s)
    assert [each.process for each in parts if each.part == "tool"] == ["tool"]


def test_events_without_a_batch_make_no_iteration() -> None:
    assert not build_iterations(each for each in job_events() if each.name != "batch_complete")


def test_ids_may_be_those_of_an_earlier_iteration() -> None:
    """A job that numbers the samples of each batch from 0 has the same iterations."""
    events = [each._replace(id=each.id.partition("-")[2]) for each in job_events()]
    found = build_iterations(shuffled(events))

    assert [each.seconds for each in found] == pytest.approx([WHOLE_S] * 5)
    assert [len(each.samples) for each in found] == [6] * 5
    assert sum_parts(found) == pytest.approx(sum_parts(job_iterations()))


def test_end_without_the_batch_of_its_begin_ends_it() -> None:
    events = [
        each._replace(batch="") if each.name in ("steps_end", "weights_publish_begin") else each
        for each in job_events()
    ]

    assert sum_parts(build_iterations(events)) == pytest.approx(sum_parts(job_iterations()))


def test_wait_for_other_samples_of_a_call_is_left_out() -> None:
    """Each rank of a trainer computes the rewards of its samples in one call, when the longest sample
    of all ranks is there.
    """
    events = [
        Event(0.0, f"rank {name[0]}", "sample_sent", name, "7") for name in ("0a", "0b", "1a", "1b")
    ]
    for name, end_s in (("0a", 1.0), ("0b", 4.0), ("1a", 1.0), ("1b", 2.0)):
        reward = f"reward {name[0]}"
        events.append(Event(0.0, "engine", "generation_begin", name, ""))
        events.append(Event(end_s, "engine", "generation_end", name, "", 10))
        events.append(Event(4.5, reward, "reward_begin", name, ""))
        events.append(Event(5.0, reward, "reward_end", name, ""))
    events.append(Event(5.0, "rank 0", "batch_complete", "", "7"))
    events.append(Event(5.5, "rank 0", "weights_publish_begin", "", ""))
    events.append(Event(6.0, "rank 0", "weights_publish_end", "", ""))
    (found,) = build_iterations(events)

    assert found.last_sample is not None
    assert found.last_sample.id == "0b"
    done = {each.id: each.done_s for each in found.samples}
    assert done == {"0a": 2.0, "0b": 5.0, "1a": 2.0, "1b": 3.0}
    assert {each.seconds("reward", waiting=True) for each in found.samples} == {0.5}
    halved = found.changed(
        lambda sample, segment: (
            segment.seconds / 2 if segment.stage == "generation" else segment.seconds
        )
    )
    assert found.seconds - halved.seconds == 2.0
    # Weights without a batch belong to the last one.
    assert found.weights_s == 0.5


@pytest.mark.parametrize(
    ("begin_s", "generation_s", "reward_s"), [(4.5, 4.0, 1.0), (3.0, 2.0, 3.0)]
)
def test_trainer_waits_for_the_last_sample_and_for_the_last_call_of_another_rank(
    begin_s: float, generation_s: float, reward_s: float
) -> None:
    """Rank 0 has the longest sample, and rank 1 the longest call for rewards.

    begin_s: of that call. If it began before the longest sample was there, the ranks did not wait for
    each other, and the last sample is one of rank 1.
    """
    events = []
    for rank, name, end_s in ((0, "0a", 1.0), (0, "0b", 4.0), (1, "1a", 1.0), (1, "1b", 2.0)):
        events.append(Event(0.0, f"rank {rank}", "sample_sent", name, "7"))
        events.append(Event(0.0, "engine", "generation_begin", name, ""))
        events.append(Event(end_s, "engine", "generation_end", name, "", 10))
        begin = begin_s if rank else 4.5
        events.append(Event(begin, f"reward {rank}", "reward_begin", name, ""))
        events.append(
            Event(begin_s + reward_s if rank else 4.7, f"reward {rank}", "reward_end", name, "")
        )
    events.append(Event(6.0, "rank 0", "batch_complete", "", "7"))
    (found,) = build_iterations(events)

    parts = sum_parts([found])
    assert parts["generation"] == generation_s
    assert parts["reward"] == reward_s
    assert {each.process for each in found.path() if each.part == "reward"} == {"reward 1"}
    longest = next(each for each in found.samples if each.id == "0b")
    assert longest.done_s == (5.5 if begin_s == 4.5 else 4.7)
