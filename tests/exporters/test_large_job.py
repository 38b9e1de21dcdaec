"""Exports of all nodes of a large job: bounded, consistent, and with counts of omitted data."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.export_scale import FAULTS, NODE_SIZE, Sent, send
from tests.support.long import long
from torchlens_perf.config import Config
from torchlens_perf.exporters import MAX_SLOW_RANKS, semantics
from torchlens_perf.exporters.trace_sampling import MIN_STEPS
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.simulation import Simulation, Topology

pytestmark = pytest.mark.slow

STEPS = 320
SMALL, LARGE = 72, 128  # Both jobs have too many ranks for per-rank series.
sent = functools.cache(send)


def points(job: Sent, metric: str) -> Iterator[Any]:
    """Return the points of a metric in the newest export of each node."""
    for node in job.nodes:
        for each in node.exported:
            if each.name == metric:
                yield from each.data.data_points


def attribute(point: Any, name: str) -> int | None:
    found: int | None = point.attributes.get(name)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "steps"), [(SMALL, STEPS), (LARGE, STEPS), *long((4096, 600))])
def test_spans_and_series_stay_within_their_limits_at_any_job_size(ranks: int, steps: int) -> None:
    """The spans per second and the series are counted over all nodes.

    Spans may exceed the limit by those of a minute.
    """
    job = sent(ranks, steps)
    assert 0 < job.spans.total() <= Config.export_limit / 10 * (job.seconds + 60)
    assert 0 < len(job.series) <= Config.export_limit


@pytest.mark.long
def test_series_of_steps_do_not_grow_with_the_job() -> None:
    """In a job with twice the nodes, only hardware metrics have more series."""

    def of_steps(job: Sent) -> int:
        return sum(not name.startswith("hw.") for _, name, *_ in job.series)

    assert of_steps(sent(LARGE, STEPS)) <= of_steps(sent(SMALL, STEPS)) + 2 * MAX_SLOW_RANKS


def reasons(job: Sent) -> dict[int, dict[int, str]]:
    """Return the reason of each trace by step and rank."""
    return {
        step: {rank: batch.chosen[step].because for rank, batch in of_step.items()}
        for step, of_step in job.traces().items()
    }


@pytest.mark.parametrize("ranks", [16, LARGE])
def test_a_node_sends_all_of_its_ranks_or_none(ranks: int) -> None:
    for because in reasons(sent(ranks, STEPS)).values():
        of_nodes = {rank // NODE_SIZE for rank in because}
        assert because.keys() == {rank for rank in range(ranks) if rank // NODE_SIZE in of_nodes}


def test_all_nodes_send_the_same_steps_by_number_without_an_exchange() -> None:
    found = reasons(sent(16, STEPS, exchange=False))
    numbered = {step: each for step, each in found.items() if step < 3 or step % 100 == 0}

    assert len(numbered) >= 2
    assert all(each.keys() == set(range(16)) for each in numbered.values())
    assert {why for each in numbered.values() for why in each.values()} <= {"first", "number"}


def test_step_of_a_large_job_has_some_nodes_and_its_root() -> None:
    """Other steps have other nodes, but always rank 0."""
    found = reasons(sent(LARGE, STEPS))
    numbered = [set(each) for step, each in found.items() if step < 3 or step % 100 == 0]

    assert numbered
    assert all(0 in each and len(each) < LARGE for each in numbered)
    assert len(set.union(*numbered)) > NODE_SIZE


def test_slow_steps_and_steps_of_verdicts_are_sent() -> None:
    found = reasons(sent(16, STEPS))
    topology = Topology(16, node_size=NODE_SIZE)
    simulation = Simulation(topology, faults=[parse_fault(text) for text in FAULTS])
    duration_ns = np.concatenate([part.duration_ns for part in simulation.steps(STEPS)])
    stalls = set(np.flatnonzero(duration_ns > 2 * np.median(duration_ns)).tolist())
    slow = {step for step, each in found.items() if "slow" in each.values()}

    assert min(step for step in stalls if step >= MIN_STEPS) in slow
    assert len(slow) < 0.1 * STEPS
    (verdict,) = (step for step, each in found.items() if "verdict" in each.values())
    assert verdict > 200  # Rank 5 is slow from step 200 on.
    assert {rank // NODE_SIZE for rank, why in found[verdict].items() if why == "verdict"} == {
        5 // NODE_SIZE
    }


def test_each_step_is_in_exactly_one_histogram() -> None:
    """Node 0 sends one histogram shared by most ranks, and a separate one for each slow rank."""
    job = sent(LARGE, STEPS)
    for metric in (semantics.STEP_DURATION, semantics.STEP_OWN_TIME):
        counts: Counter[int | None] = Counter()
        for point in points(job, metric):
            counts[attribute(point, semantics.RANK)] += point.count
        assert counts.total() == LARGE * STEPS
        assert set(counts) == {None, 5}
        assert 0 < counts[5] < STEPS
    assert sum(point.value for point in points(job, semantics.STEPS)) == LARGE * STEPS
    job_wide = [
        node
        for node in job.nodes
        for each in node.exported
        if each.name == semantics.PHASE_DURATION
    ]
    assert {node.state.host for node in job_wide} == {"node-0000"}
    memory = [
        point for point in points(job, semantics.MEMORY) if attribute(point, semantics.RANK) is None
    ]
    assert [point.value for point in memory] == [1 << 34]


def test_quantiles_over_ranks_show_the_rank_that_others_wait_for() -> None:
    """The rank that others wait for has the maximum work and the minimum wait."""
    found = {
        (metric, next(iter(point.attributes.values()))): point.value
        for metric in (semantics.RANKS_WORK, semantics.RANKS_WAIT)
        for point in points(sent(LARGE, STEPS), metric)
    }
    work, wait = ({q: found[metric, q] for q in ("min", "median", "p99", "max")} for metric in (
        semantics.RANKS_WORK, semantics.RANKS_WAIT,
    ))  # fmt: skip
    assert 0 < work["min"] < work["median"] <= work["p99"] < work["max"]
    assert work["max"] > 1.2 * work["median"]
    assert wait["min"] < 0.5 * wait["median"]


def test_exemplars_link_to_spans_that_were_sent() -> None:
    """Each exemplar has the ids of a span and its duration in seconds."""
    job = sent(8, STEPS)
    ids = {key: duration_ns for node in job.nodes for key, duration_ns in node.ids.items()}
    found = [each for point in points(job, semantics.STEP_DURATION) for each in point.exemplars]
    assert found
    for each in found:
        assert each.value == pytest.approx(ids[each.trace_id, each.span_id] / 1e9)


def test_small_job_sends_all_ranks_and_their_series() -> None:
    """Eight ranks have complete traces of steps sampled by number, and each has a histogram."""
    job = sent(8, STEPS)
    assert {0, 1, 100, 200, 300} <= job.traces().keys()
    assert all(each.keys() == set(range(8)) for each in job.traces().values())
    assert {
        attribute(point, semantics.RANK) for point in points(job, semantics.STEP_DURATION)
    } == set(range(8))


def test_each_node_sends_its_share_of_series_without_an_exchange() -> None:
    """Each node sends the most important series of its own ranks."""
    job = sent(SMALL, STEPS, exchange=False)
    assert 0 < job.spans.total() <= Config.export_limit / 10 * (job.seconds + 60)
    assert len(job.series) <= Config.export_limit
    assert sum(point.count for point in points(job, semantics.STEP_DURATION)) == SMALL * STEPS


def test_all_ranks_and_series_are_sent_without_limits() -> None:
    """Without limits all ranks of all sampled steps are sent, and each has its own series."""
    job = sent(SMALL, 64, export_limit=0)
    assert {frozenset(each) for each in job.traces().values()} == {frozenset(range(SMALL))}
    assert (
        len({attribute(point, semantics.RANK) for point in points(job, semantics.STEP_DURATION)})
        == SMALL
    )


def test_omitted_steps_are_counted_in_the_next_root() -> None:
    """The budget in this test is small.

    The number of omitted steps is also exported as a counter.
    """
    job = sent(SMALL, STEPS, export_limit=200)
    left_out = sum(point.value for point in points(job, semantics.STEPS_NOT_TRACED))
    of_rank_0 = [each[0] for _, each in sorted(job.traces().items()) if 0 in each]
    chosen = [each.chosen[each.traces[0].step] for each in of_rank_0]
    assert left_out >= sum(each.left_out for each in chosen) > 0
    root = _root(job, of_rank_0[-1])
    assert root[semantics.SAMPLED_BECAUSE] == chosen[-1].because
    assert root[semantics.STEPS_LEFT_OUT] == chosen[-1].left_out


def _root(job: Sent, batch: Any) -> dict[str, Any]:
    """Return the attributes of the root span of a step."""
    spans, _, _ = next(iter(job.nodes[0].spans_of.build_spans(batch).values()))
    (root,) = (span for span in spans if span.parent is None)
    return dict(root.attributes or {})
