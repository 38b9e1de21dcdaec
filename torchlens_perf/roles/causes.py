"""Why iterations take long: the causes of the trainer's wait, each with what it costs. Pure.

A cost is the time by which iterations would be shorter without the cause, all other times the same.
Costs of several causes overlap. For a tool, a reward and weights, the cost is all of their time,
which is the most that could be gained.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from torchlens_perf.roles.iterations import Iteration, Sample, Segment

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
    seconds: float
    """What it cost in all iterations together."""
    share: float
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
    total_s = sum(each.seconds for each in iterations)
    found = [
        _find_long_samples(iterations),
        *_find_engines(iterations),
        _find_stage(iterations, SLOW_TOOL, "tool"),
        _find_stage(iterations, SLOW_REWARD, "reward"),
        _find_weights(iterations),
    ]
    rank = _find_slow_rank(steps, steps_per_iteration)
    found += [rank, _find_idle_engines(iterations, 0.0 if rank is None else rank.seconds)]
    causes = [_set_share(each, total_s) for each in found if each is not None and each.seconds > 0]
    return sorted(causes, key=lambda each: (not each.is_large, -each.seconds))


def _set_share(cause: Cause, total_s: float) -> Cause:
    from msgspec.structs import replace

    share = cause.seconds / total_s if total_s else 0.0
    least = _MIN_STAGE_SHARE if cause.kind in (SLOW_TOOL, SLOW_REWARD, SLOW_WEIGHTS) else _MIN_SHARE
    return replace(cause, share=share, is_large=cause.is_large and share >= least)


def _sum_savings(
    iterations: Sequence[Iteration],
    changes: Callable[[Iteration], Callable[[Sample, Segment], float]],
) -> float:
    return sum(each.predict_saving(changes(each)) for each in iterations)


def _find_long_samples(iterations: Sequence[Iteration]) -> Cause | None:
    """Return what is gained if no sample has more tokens than the median of its batch."""
    long: list[LongSample] = []
    seconds = 0.0
    for each in iterations:
        known = [sample.tokens for sample in each.samples if sample.tokens]
        last = each.last_sample
        if not known or last is None:
            continue
        median = statistics.median(known)
        seconds += each.predict_saving(_cap_tokens(median))
        if last.tokens and last.tokens >= _LONG * median:
            long.append(LongSample(last.id, each.batch, last.engine, last.tokens, median))
    long.sort(key=lambda each: -each.tokens / each.median_tokens)
    return Cause(
        kind=LONG_SAMPLES,
        seconds=seconds,
        share=0.0,
        is_large=2 * len(long) >= len(iterations),
        iterations=len(long),
        samples=tuple(long[:_MOST_SAMPLES]),
    )


def _cap_tokens(median: float) -> Callable[[Sample, Segment], float]:
    def change(sample: Sample, segment: Segment) -> float:
        is_cut = segment.stage == "generation" and not segment.waiting and sample.tokens
        return segment.seconds * min(1.0, median / sample.tokens) if is_cut else segment.seconds  # type: ignore[operator]

    return change


def _find_engines(iterations: Sequence[Iteration]) -> Iterator[Cause]:
    """Yield the cost of the engine that is slower, and of the one that has more work, than others."""
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
    slow, ratio, usual = _most_above_others(pace)
    yield Cause(
        kind=SLOW_ENGINE,
        seconds=_sum_savings(iterations, lambda each: _speed_up(slow, ratio)),
        share=0.0,
        is_large=ratio >= _SLOW,
        subject=slow,
        value=pace[slow],
        usual=usual,
    )
    loaded, ratio, usual = _most_above_others(tokens)
    yield Cause(
        kind=LOADED_ENGINE,
        seconds=_sum_savings(iterations, lambda each: _queue_like_others(loaded, each)),
        share=0.0,
        is_large=ratio >= _LOADED,
        subject=loaded,
        value=tokens[loaded] / len(iterations),
        usual=usual / len(iterations),
    )


def _most_above_others(values: Mapping[str, float]) -> tuple[str, float, float]:
    """Return the key of the largest value, its ratio to the others' median, and that median."""
    key = max(values, key=lambda each: values[each])
    usual = statistics.median(value for other, value in values.items() if other != key)
    return key, max(1.0, values[key] / usual) if usual else 1.0, usual


def _speed_up(engine: str, ratio: float) -> Callable[[Sample, Segment], float]:
    # The wait for a slow engine is as much longer as its work.
    return lambda sample, segment: (
        segment.seconds / ratio
        if segment.stage == "generation" and segment.process == engine
        else segment.seconds
    )


def _queue_like_others(engine: str, iteration: Iteration) -> Callable[[Sample, Segment], float]:
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


def _find_stage(iterations: Sequence[Iteration], kind: str, stage: str) -> Cause | None:
    calls = [
        segment
        for each in iterations
        for sample in each.samples
        for segment in sample.segments
        if segment.stage == stage and not segment.waiting
    ]
    if not calls:
        return None
    longest = max(calls, key=lambda each: each.seconds)

    def without(each: Iteration) -> Callable[[Sample, Segment], float]:
        return lambda sample, segment: 0.0 if segment.stage == stage else segment.seconds

    return Cause(
        kind=kind,
        seconds=_sum_savings(iterations, without),
        share=0.0,
        is_bound=True,
        is_large=True,
        subject=longest.process,
        value=longest.seconds,
        usual=statistics.median(each.seconds for each in calls),
    )


def _find_weights(iterations: Sequence[Iteration]) -> Cause | None:
    takes: dict[str, list[float]] = defaultdict(list)
    for each in iterations:
        for take in each.takes:
            takes[take.process].append(take.end_s - take.begin_s)
    mean = {process: statistics.mean(times) for process, times in takes.items()}
    slowest = max(mean, key=lambda each: mean[each], default="")
    return Cause(
        kind=SLOW_WEIGHTS,
        seconds=sum(each.weights_s for each in iterations),
        share=0.0,
        is_bound=True,
        is_large=True,
        subject=slowest,
        value=mean.get(slowest),
        usual=statistics.median(mean.values()) if mean else None,
    )


def _find_slow_rank(steps: Sequence[RankStep], steps_per_iteration: float) -> Cause | None:
    """Return what other ranks wait for the rank with the longest steps; None for one rank."""
    by_step: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for each in steps:
        by_step[each.batch, each.step][each.process] = each.own_s
    ranks = {each.process for each in steps}
    whole = [each for each in by_step.values() if each.keys() == ranks]
    if len(ranks) < 2 or not whole:
        return None
    own_s = {rank: statistics.median(each[rank] for each in whole) for rank in ranks}
    slow, ratio, usual = _most_above_others(own_s)
    excess = (
        each[slow] - max(value for rank, value in each.items() if rank != slow) for each in whole
    )
    return Cause(
        kind=SLOW_RANK,
        # The first step of an iteration is as long as the others.
        seconds=sum(max(0.0, each) for each in excess)
        * steps_per_iteration
        / max(1.0, steps_per_iteration - 1),
        share=0.0,
        is_large=ratio >= _SLOW,
        subject=slow,
        value=own_s[slow],
        usual=usual,
    )


def _find_idle_engines(iterations: Sequence[Iteration], slow_rank_s: float) -> Cause | None:
    """Return what overlapping the samples of an iteration with the steps of another would save.

    slow_rank_s: the part of the steps that has another cause.
    """
    engines = engine_names(iterations)
    # A trainer that generates itself is not idle.
    if not engines or iterations[0].trainer in engines:
        return None
    steps_s = sum(each.steps_s for each in iterations) - slow_rank_s
    total_s = sum(each.seconds for each in iterations)
    rollout_s = sum(each.rollout_s for each in iterations)
    return Cause(
        kind=IDLE_ENGINES,
        seconds=max(0.0, min(steps_s, rollout_s)),
        share=0.0,
        is_bound=True,
        is_large=steps_s >= _MIN_STEPS_SHARE * total_s,
        value=steps_s / len(iterations),
        usual=rollout_s / len(iterations),
    )


def engine_names(iterations: Sequence[Iteration]) -> Collection[str]:
    """Return the processes that generated samples."""
    return sorted({sample.engine for each in iterations for sample in each.samples} - {""})
