"""Predicted gains of changes of the job, replayed from the recorded samples. Pure.

A replay keeps the recorded times. Samples wait for a slot of their engine, in the order in which
they were sent. What the record does not show is between two bounds: for example, how much faster an
engine generates with fewer samples at once.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence

from torchlens_perf.roles.causes import (
    MIN_ITERATIONS,
    cap_tokens,
    engine_names,
    overlap_steps,
    save,
)
from torchlens_perf.roles.iterations import Iteration, Sample, widen_bounds
from torchlens_perf.run.grouping import group_values
from torchlens_perf.verdicts.words.report import PredictedChange

CUT, ONE_MORE, OVER_SAMPLING = "cut_at_p99", "one_engine_more", "over_sampling"
PARTIAL, ASYNCHRONOUS = "partial_rollouts", "asynchronous"
_MIN_SAMPLES = 100
"""A 99th percentile needs as many."""
_MOST_DRIFT = 0.1
"""No prediction by queues is made if their replay differs by more than this share of the waits."""
_DONE = operator.attrgetter("done_s")
_MORE_SHARE = 1 / 8
"""Share of samples that are sent in addition, or continued in the next iteration."""


class IterationChange(PredictedChange, frozen=True, kw_only=True):
    """The predicted gain of a change, in seconds of a mean iteration."""

    kind: str
    value: float | None = None
    """Most tokens of a sample, or number of samples that are sent in addition or continued."""


def predict_changes(iterations: Sequence[Iteration]) -> list[IterationChange]:
    """Return the changes that the record can answer."""
    engines = engine_names(iterations)
    if len(iterations) < MIN_ITERATIONS or not engines:
        return []
    queues = _Queues(iterations)
    usual = statistics.median(len(each.samples) for each in iterations)
    more = math.ceil(_MORE_SHARE * usual)
    found = [*_cut(iterations, queues), *_continue_samples(iterations, more)]
    if queues.is_valid:
        found += _change_queues(iterations, queues, more)
    ahead = [s for each in iterations[1:] for s in each.samples if s.sent_s < each.begin_s]
    # A trainer that generates, or does not wait for its samples, cannot overlap them with its steps.
    if not ahead and iterations[0].trainer not in engines:
        text = "asynchronous by one step"
        found.append(
            _predict(iterations, ASYNCHRONOUS, text, None, save(iterations, overlap_steps))
        )
    return sorted(found, key=lambda each: -each.gain_s)


def _predict(
    iterations: Sequence[Iteration], kind: str, text: str, value: float | None, *saved_s: float
) -> IterationChange:
    """Return a prediction. saved_s: what all iterations save, the most likely value first."""
    low_s, high_s = widen_bounds(iterations, min(saved_s), max(saved_s))
    count, total_s = len(iterations), sum(each.seconds for each in iterations)
    gain_s = min(max(saved_s[0], low_s), high_s) / count
    return IterationChange(
        text,
        gain_s,
        low_s / count,
        high_s / count,
        gain_s * count / total_s,
        kind=kind,
        value=value,
    )


class _Queues:
    """The samples of all iterations, and how many of them each engine generates at once."""

    def __init__(self, iterations: Sequence[Iteration]) -> None:
        self._iterations = iterations
        marks = group_values(
            (sample.engine, mark)
            for each in iterations
            for sample in each.samples
            for mark in _generation_marks(sample)
        )
        # An engine whose generation was not recorded has one.
        self._slots = {sample.engine: 1 for each in iterations for sample in each.samples} | {
            engine: max(itertools.accumulate(edge for _, edge in sorted(found)))
            for engine, found in marks.items()
        }
        less_s = [
            abs(self.end(each.samples) - max(map(_DONE, each.samples))) for each in iterations
        ]
        self.is_valid = sum(less_s) <= _MOST_DRIFT * sum(each.rollout_s for each in iterations)

    def end(self, samples: Collection[Sample], pace: float = 1.0, count: int = 0) -> float:
        """Return when the last sample is done, or this number of them if it is not 0.

        pace: factor of the time of generations.
        """
        free: dict[str, list[float]] = {}
        done: list[float] = []
        usual = max(self._slots.values())
        for each in sorted(samples, key=lambda each: each.sent_s):
            slots = free.setdefault(each.engine, [0.0] * self._slots.get(each.engine, usual))
            generation_s, first = each.seconds("generation"), each.segments[0]
            begin_s = max(each.sent_s, heapq.heappop(slots))
            heapq.heappush(slots, begin_s + pace * generation_s)
            rest_s = each.done_s - each.sent_s - generation_s - first.seconds
            done.append(begin_s + pace * generation_s + rest_s)
        return sorted(done)[count - 1]

    def save(self, change: Callable[[int], Sequence[Sample]], pace: float = 1.0) -> float:
        """Return what all iterations save. change: returns samples by the number of an iteration."""
        saved_s = 0.0
        for number, each in enumerate(self._iterations):
            changed_s = self.end(change(number), pace, len(each.samples))
            saved_s += min(each.rollout_s, max(0.0, self.end(each.samples) - changed_s))
        return saved_s


def _generation_marks(sample: Sample) -> Iterator[tuple[float, int]]:
    at_s = sample.sent_s
    for each in sample.segments:
        if each.stage == "generation" and not each.waiting:
            yield at_s, 1
            yield at_s + each.seconds, -1
        at_s += each.seconds


def _cut(iterations: Sequence[Iteration], queues: _Queues) -> Iterator[IterationChange]:
    tokens = sorted(
        sample.tokens for each in iterations for sample in each.samples if sample.tokens
    )
    if len(tokens) < _MIN_SAMPLES:
        return
    most = tokens[math.ceil(0.99 * len(tokens)) - 1]
    cut = [each.changed(cap_tokens(most)) for each in iterations]
    saved_s = save(iterations, lambda each: each.changed(cap_tokens(most)))
    # Samples that wait for a slot may begin earlier.
    earlier_s = queues.save(lambda at: cut[at].samples) if queues.is_valid else saved_s
    yield _predict(iterations, CUT, f"cut samples at {most} tokens (p99)", most, saved_s, earlier_s)


def _change_queues(
    iterations: Sequence[Iteration], queues: _Queues, more: int
) -> Iterator[IterationChange]:
    """Yield the gains of one engine more, and of over-sampling."""
    count = len(engine_names(iterations))

    def spread(number: int) -> list[Sample]:
        ordered = sorted(iterations[number].samples, key=lambda each: each.sent_s)
        return [
            dataclasses.replace(each, engine="") if at % (count + 1) == count else each
            for at, each in enumerate(ordered)
        ]

    # With fewer samples at once, an engine may generate them faster.
    found = [queues.save(spread, pace) for pace in (1.0, count / (count + 1))]
    yield _predict(iterations, ONE_MORE, "one engine more", None, *found)

    def add(number: int) -> list[Sample]:
        # Samples of the iteration before stand for those that are sent in addition.
        mine, others = (iterations[at].samples for at in (number, number - 1))
        sent_s = max(each.sent_s for each in mine)
        added = others[:: max(1, len(others) // more)][:more]
        return [*mine, *(dataclasses.replace(each, sent_s=sent_s) for each in added)]

    found = [queues.save(add, pace) for pace in (1.0, 1 + _MORE_SHARE)]
    # Engines may generate more samples at once than they did.
    found.append(save(iterations, lambda each: _leave_out(each, more)))
    text = f"send {more} more, take the first"
    yield _predict(iterations, OVER_SAMPLING, text, more, *found)


def _leave_out(iteration: Iteration, count: int) -> Iteration:
    """Return an iteration that does not wait for the last samples."""
    kept = sorted(iteration.samples, key=_DONE)[: max(1, len(iteration.samples) - count)]
    saved_s = min(iteration.rollout_s, max(map(_DONE, iteration.samples)) - kept[-1].done_s)
    return dataclasses.replace(
        iteration, end_s=iteration.end_s - saved_s, complete_s=iteration.complete_s - saved_s
    )


def _continue_samples(iterations: Sequence[Iteration], more: int) -> Iterator[IterationChange]:
    """Yield the gain if the last samples of an iteration are continued in the next one."""
    low_s = left_s = 0.0
    for each in iterations:
        less_s = each.seconds - _leave_out(each, more).seconds
        # At least, the iteration waits for the samples that it continues.
        low_s += min(less_s, max(0.0, each.rollout_s - left_s))
        left_s = less_s
    text = f"continue the last {more} in the next one"
    high_s = save(iterations, lambda each: _leave_out(each, more))
    yield _predict(iterations, PARTIAL, text, more, low_s, high_s)
