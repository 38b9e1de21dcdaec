"""Why iterations take long: the causes of the trainer's wait, each with what it costs. Pure.

A cost is the time by which iterations would be shorter without the cause, all other times the same.
Costs of several causes overlap. For a tool, a reward and weights, the cost is all of their time,
which is the most that could be gained.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from torchlens_perf.roles.iterations import Change, Iteration, Sample, Segment, widen_bounds
from torchlens_perf.run.grouping import group_values

LONG_SAMPLES, SLOW_ENGINE, LOADED_ENGINE = "long_samples", "slow_engine", "loaded_engine"
SLOW_TOOL, SLOW_REWARD, SLOW_WEIGHTS = "slow_tool", "slow_reward", "slow_weights"
SLOW_RANK, IDLE_ENGINES = "slow_trainer_rank", "idle_engines"
MIN_ITERATIONS = 3
# Causes that cost less than this share of the iterations have no verdict. A tool, a reward and weights
# always take some time, which is no excess.
_MIN_SHARE, _MIN_STAGE_SHARE = 0.1, 0.2
# Engines are idle if the optimizer steps take this share of the iterations.
_MIN_STEPS_SHARE = 0.5
# A sample is long from this many times the median's tokens, an engine slow from this many times the
# others' time per token, loaded from this many times their tokens.
_LONG, _SLOW, _LOADED = 2.0, 1.3, 1.5
_MOST_SAMPLES = 3


class LongSample(Struct, frozen=True):
    """A sample for which a trainer waited, and the median of its batch."""

    id: str
    batch: str
    engine: str
    tokens: int
    median_tokens: float


class Cause(Struct, frozen=True, kw_only=True):
    """One cause of long iterations."""

    kind: str
    seconds: float = 0.0
    """What it cost in all iterations together."""
    low_s: float = 0.0
    high_s: float = 0.0
    """Bounds of what iterations without it save."""
    together_s: float | None = None
    """What all large causes cost together; None for a small one and for a single one."""
    others: tuple[str, ...] = ()
    """Kinds of the other large causes."""
    share: float = 0.0
    """Share of the time of the iterations."""
    is_bound: bool = False
    """True if the cost is the most that could be gained."""
    is_large: bool = False
    """True if it is large enough for a verdict."""
    subject: str = ""
    """The process, such as "engine-1"; "" for causes that are not in one process."""
    value: float | None = None
    """Measured at the subject: seconds per token, tokens per iteration, or seconds of a call, of a
    transfer or of a step."""
    usual: float | None = None
    """The same of the other processes, as a median; for calls, the median of all calls."""
    iterations: int = 0
    """Number of iterations in which the trainer waited for a long sample."""
    samples: tuple[LongSample, ...] = ()
    """The longest samples that a trainer waited for."""


class RankStep(NamedTuple):
    """A step of a trainer rank that lies between the begin and the end of an iteration's steps."""

    batch: str
    process: str
    step: int
    own_s: float
    """Its time without waits for other ranks."""


class _Found(NamedTuple):
    cause: Cause
    """Its costs are not set. is_large is True if it is large for its share."""
    remove: Callable[[Iteration], Iteration]
    """Returns an iteration without the cause."""
    least: Callable[[Iteration], Iteration] | None = None
    """Returns an iteration in which as little of the cause is removed as is likely."""


def find_causes(
    iterations: Sequence[Iteration],
    steps: Sequence[RankStep] = (),
    steps_per_iteration: float = 1.0,
) -> list[Cause]:
    """Return the causes that cost something, the most expensive first.

    steps: steps of all trainer ranks in these iterations, without the first one of each.
    steps_per_iteration: number of all steps of a rank in an iteration.
    """
    if len(iterations) < MIN_ITERATIONS:
        return []
    found = [_set_costs(each, iterations) for each in _find(iterations, steps, steps_per_iteration)]
    found.sort(key=lambda each: -each.cause.seconds)
    large = [each for each in found if _is_large(each, iterations)]
    if large and large[0].cause.kind != IDLE_ENGINES:
        # A sample that is late for one reason may hide that others are late for another one.
        rest = [large[0].remove(each) for each in iterations]
        large += [each for each in found if each not in large and _is_large(each, rest)]
    # Engines can only be idle in what is left of the optimizer steps.
    large.sort(key=lambda each: each.cause.kind == IDLE_ENGINES)
    kinds = [each.cause.kind for each in large]
    if len(large) > 1:
        together_s = save(iterations, *(each.remove for each in large))
        large = [
            each._replace(
                cause=replace(
                    each.cause,
                    together_s=together_s,
                    others=tuple(kind for kind in kinds if kind != each.cause.kind),
                )
            )
            for each in large
        ]
    small = [
        replace(each.cause, is_large=False)
        for each in found
        if each.cause.kind not in kinds and each.cause.seconds > 0
    ]
    return [*sorted((each.cause for each in large), key=lambda each: -each.seconds), *small]


def save(iterations: Sequence[Iteration], *removes: Callable[[Iteration], Iteration]) -> float:
    """Return the time that these changes save, one after the other."""
    saved_s = 0.0
    for iteration in iterations:
        rest = functools.reduce(lambda left, remove: remove(left), removes, iteration)
        saved_s += iteration.seconds - rest.seconds
    return saved_s


def overlap_steps(iteration: Iteration) -> Iteration:
    """Return an iteration whose samples are generated during the optimizer steps of another one."""
    saved_s = min(iteration.rollout_s, iteration.steps_s)
    return dataclasses.replace(
        iteration,
        complete_s=iteration.complete_s - saved_s,
        end_s=iteration.end_s - saved_s,
    )


def _find(
    iterations: Sequence[Iteration], steps: Sequence[RankStep], steps_per_iteration: float
) -> Iterator[_Found]:
    yield _find_long_samples(iterations)
    yield from _find_engines(iterations)
    yield from _find_stage(iterations, SLOW_TOOL, "tool")
    yield from _find_stage(iterations, SLOW_REWARD, "reward")
    yield _find_weights(iterations)
    yield from (ranks := list(_find_slow_rank(iterations, steps, steps_per_iteration)))
    yield from _find_idle_engines(iterations, ranks)


def _set_costs(found: _Found, iterations: Sequence[Iteration]) -> _Found:
    seconds = save(iterations, found.remove)
    least_s = save(iterations, found.least or found.remove) * (not found.cause.is_bound)
    low_s, high_s = widen_bounds(iterations, least_s, seconds)
    return found._replace(
        cause=replace(
            found.cause,
            seconds=seconds,
            low_s=low_s,
            high_s=high_s,
            share=seconds / (sum(each.seconds for each in iterations) or 1.0),
        )
    )


def _is_large(found: _Found, iterations: Sequence[Iteration]) -> bool:
    is_stage = found.cause.kind in (SLOW_TOOL, SLOW_REWARD, SLOW_WEIGHTS)
    least_s = sum(each.seconds for each in iterations) * (
        _MIN_STAGE_SHARE if is_stage else _MIN_SHARE
    )
    return found.cause.is_large and 0 < least_s <= save(iterations, found.remove)


def _change_samples(
    change: Callable[[Iteration], Change],
) -> Callable[[Iteration], Iteration]:
    return lambda iteration: iteration.changed(change(iteration))


def _find_long_samples(iterations: Sequence[Iteration]) -> _Found:
    """Return what is gained if no sample has more tokens than the median of its batch."""
    long: list[LongSample] = []
    for each in iterations:
        last, median = each.last_sample, _nth_tokens(each, 0.5)
        if last.tokens and last.tokens >= _LONG * median:
            long.append(LongSample(last.id, each.batch, last.engine, last.tokens, median))
    long.sort(key=lambda each: -each.tokens / each.median_tokens)
    return _Found(
        Cause(
            kind=LONG_SAMPLES,
            is_large=2 * len(long) >= len(iterations),
            iterations=len(long),
            samples=tuple(long[:_MOST_SAMPLES]),
        ),
        _change_samples(lambda each: cap_tokens(_nth_tokens(each, 0.5))),
        # Usual samples have up to as many tokens as the most of the others.
        _change_samples(lambda each: cap_tokens(_nth_tokens(each, 0.9))),
    )


def cap_tokens(most: float) -> Change:
    """Return a change after which no sample has more tokens."""

    def change(sample: Sample, segment: Segment) -> float:
        is_cut = segment.stage == "generation" and not segment.waiting and sample.tokens
        return segment.seconds * min(1.0, most / sample.tokens) if is_cut else segment.seconds  # type: ignore[operator]

    return change


def _nth_tokens(iteration: Iteration, share: float) -> float:
    known = sorted(each.tokens for each in iteration.samples if each.tokens) or [0]
    return statistics.median(known) if share == 0.5 else known[int(share * (len(known) - 1))]


def _find_engines(iterations: Sequence[Iteration]) -> Iterator[_Found]:
    """Yield the engine that is slower, and the one that has more work, than others."""
    seconds: dict[str, float] = defaultdict(float)
    tokens: dict[str, float] = defaultdict(float)
    for each in iterations:
        for sample in each.samples:
            if sample.tokens and sample.engine:
                seconds[sample.engine] += sample.seconds("generation")
                tokens[sample.engine] += sample.tokens
    if len(tokens) < 2:
        return
    pace = {engine: seconds[engine] / tokens[engine] for engine in tokens}
    slow, slower, usual = _most_above_others(pace)
    yield _Found(
        Cause(
            kind=SLOW_ENGINE,
            is_large=slower >= _SLOW,
            subject=slow,
            value=pace[slow],
            usual=usual,
        ),
        _change_samples(lambda each: _speed_up(slow, slower)),
    )
    loaded, ratio, usual = _most_above_others(tokens)
    yield _Found(
        Cause(
            kind=LOADED_ENGINE,
            is_large=ratio >= _LOADED,
            subject=loaded,
            value=tokens[loaded] / len(iterations),
            usual=usual / len(iterations),
        ),
        _change_samples(lambda each: _queue_like_others(loaded, each)),
    )


def _most_above_others(values: Mapping[str, float]) -> tuple[str, float, float]:
    """Return the key of the largest value, its ratio to the others' median, and that median."""
    key = max(values, key=lambda each: values[each])
    usual = statistics.median(value for other, value in values.items() if other != key)
    return key, max(1.0, values[key] / usual) if usual else 1.0, usual


def _speed_up(engine: str, ratio: float) -> Change:
    # The wait for a slow engine is as much longer as its work.
    return lambda sample, segment: (
        segment.seconds / ratio
        if segment.stage == "generation" and segment.process == engine
        else segment.seconds
    )


def _queue_like_others(engine: str, iteration: Iteration) -> Change:
    others = [
        each.seconds("generation", waiting=True)
        for each in iteration.samples
        if each.engine != engine
    ]
    usual_s = statistics.median(others) if others else 0.0
    return lambda sample, segment: (
        min(segment.seconds, usual_s)
        if segment.stage == "generation" and segment.process == engine and segment.waiting
        else segment.seconds
    )


def _find_stage(iterations: Sequence[Iteration], kind: str, stage: str) -> Iterator[_Found]:
    calls = [
        segment
        for each in iterations
        for sample in each.samples
        for segment in sample.segments
        if segment.stage == stage and not segment.waiting
    ]
    if not calls:
        return
    longest = max(calls, key=lambda each: each.seconds)

    def without(each: Iteration) -> Change:
        return lambda sample, segment: 0.0 if segment.stage == stage else segment.seconds

    yield _Found(
        Cause(
            kind=kind,
            is_bound=True,
            is_large=True,
            subject=longest.process,
            value=longest.seconds,
            usual=statistics.median(each.seconds for each in calls),
        ),
        _change_samples(without),
    )


def _find_weights(iterations: Sequence[Iteration]) -> _Found:
    takes = group_values(
        (take.process, take.end_s - take.begin_s) for each in iterations for take in each.takes
    )
    mean = {process: statistics.mean(times) for process, times in takes.items()}
    slowest = max(mean, key=lambda each: mean[each], default="")
    return _Found(
        Cause(
            kind=SLOW_WEIGHTS,
            is_bound=True,
            is_large=True,
            subject=slowest,
            value=mean.get(slowest),
            usual=statistics.median(mean.values()) if mean else None,
        ),
        lambda each: dataclasses.replace(each, publishes=(), end_s=each.end_s - each.weights_s),
    )


def _find_slow_rank(
    iterations: Sequence[Iteration], steps: Sequence[RankStep], steps_per_iteration: float
) -> Iterator[_Found]:
    """Yield the rank with the longest steps, for which other ranks wait; nothing for one rank."""
    by_step: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for each in steps:
        by_step[each.batch, each.step][each.process] = each.own_s
    ranks = {each.process for each in steps}
    whole = [each for each in by_step.values() if each.keys() == ranks]
    if len(ranks) < 2 or not whole:
        return
    own_s = {rank: statistics.median(each[rank] for each in whole) for rank in ranks}
    slow, ratio, usual = _most_above_others(own_s)
    excess = (
        each[slow] - max(value for rank, value in each.items() if rank != slow) for each in whole
    )
    # The first step of an iteration is as long as the others.
    seconds = (
        sum(max(0.0, each) for each in excess)
        * steps_per_iteration
        / max(1.0, steps_per_iteration - 1)
    )
    share = min(1.0, seconds / (sum(each.steps_s for each in iterations) or 1.0))
    yield _Found(
        Cause(
            kind=SLOW_RANK, is_large=ratio >= _SLOW, subject=slow, value=own_s[slow], usual=usual
        ),
        lambda iteration: shorten_steps(iteration, share),
    )


def shorten_steps(iteration: Iteration, share: float) -> Iteration:
    """Return an iteration whose optimizer steps take less time by this share."""
    steps = [
        each._replace(end_s=each.end_s - share * (each.end_s - each.begin_s))
        for each in iteration.steps
    ]
    return dataclasses.replace(
        iteration, steps=tuple(steps), end_s=iteration.end_s - share * iteration.steps_s
    )


def _find_idle_engines(
    iterations: Sequence[Iteration], slow_ranks: Sequence[_Found]
) -> Iterator[_Found]:
    """Yield what overlapping the samples of an iteration with the steps of another would save.

    slow_ranks: these have a part of the steps.
    """
    engines = engine_names(iterations)
    # A trainer that generates itself is not idle.
    if not engines or iterations[0].trainer in engines:
        return
    # What has another cause is not the engines' idle time.
    steps_s = sum(each.steps_s for each in iterations) - save(
        iterations, *(each.remove for each in slow_ranks)
    )
    total_s = sum(each.seconds for each in iterations)
    yield _Found(
        Cause(
            kind=IDLE_ENGINES,
            is_bound=True,
            is_large=steps_s >= _MIN_STEPS_SHARE * total_s,
            value=steps_s / len(iterations),
            usual=sum(each.rollout_s for each in iterations) / len(iterations),
        ),
        overlap_steps,
    )


def engine_names(iterations: Sequence[Iteration]) -> Collection[str]:
    """Return the processes that generated samples."""
    return sorted({sample.engine for each in iterations for sample in each.samples} - {""})
