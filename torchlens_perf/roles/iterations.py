"""The iterations of a job with several roles: what happened to each sample, and what the trainer
waited for. Pure.

Times are seconds of one clock.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torchlens_perf.run.grouping import group_values

STAGES = ("generation", "tool", "logprobs", "reward")
_OF_BATCH = ("logprobs", "reward")
SENDING, COLLECTING = "sending", "collecting"
STEPS, WEIGHTS, OTHER = "steps", "weights", "other"
# Times that a change does not name stay the same, which is not quite true. The noise is that of the
# recorded iterations and of those after the change, each with two standard errors.
_MODEL_ERROR, _STANDARD_ERRORS = 0.1, 2 * 2**0.5
_ROUNDING_S = 1e-6


class Event(NamedTuple):
    """One event of a process."""

    time_s: float
    process: str
    name: str
    id: str
    batch: str
    tokens_out: int | None = None


class Interval(NamedTuple):
    """Time between a begin event and its end event on one process."""

    stage: str
    process: str
    id: str
    batch: str
    begin_s: float
    end_s: float
    tokens: int | None


class PathPart(NamedTuple):
    """A part of the critical path of an iteration."""

    part: str
    """A key of facts.PARTS."""
    process: str
    begin_s: float
    end_s: float


class Segment(NamedTuple):
    """A part of a sample's time: a stage, or the wait before it."""

    stage: str
    process: str
    waiting: bool
    """True for the time from the end of the previous stage until this stage begins."""
    seconds: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample, from sending its prompt to the end of its last stage.

    The time in which it waited for other samples, with which it shares a call, is left out.
    """

    id: str
    sent_s: float
    segments: tuple[Segment, ...]
    tokens: int | None
    """Generated tokens; None if not given."""
    engine: str
    """The process that generated it; "" if not known."""

    @property
    def done_s(self) -> float:
        return self.sent_s + sum(each.seconds for each in self.segments)

    def seconds(self, stage: str, *, waiting: bool = False) -> float:
        return sum(
            each.seconds
            for each in self.segments
            if each.stage == stage and each.waiting is waiting
        )


Change = Callable[[Sample, Segment], float]
"""Returns the seconds that a segment of a sample would take."""


def name_processes(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the label of each process. Processes with the same one get a number, in the order in which
    they started.

    labels: by the name of the process's file, which ends with the time of its start.
    """
    names: dict[str, str] = {}
    for process, label in labels.items():
        mates = sorted((o for o in labels if labels[o] == label), key=_start_of)
        names[process] = f"{label} {mates.index(process)}" if len(mates) > 1 else label
    return names


def _start_of(process: str) -> tuple[int, str]:
    ticks = process.rpartition("-")[2]
    return int(ticks) if ticks.isdigit() else 0, process


def sum_tokens(numbers: Iterable[int | None]) -> int | None:
    """Return the sum of numbers of tokens; None without numbers, or where one is not known."""
    known = list(numbers)
    return None if None in known or not known else sum(each or 0 for each in known)


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One iteration of the lead trainer. rollout_s, steps_s, weights_s and other_s add up to its
    time."""

    trainer: str
    """The process that collects the batches."""
    batch: str
    begin_s: float
    end_s: float
    asked_s: float
    """When the trainer began to wait for the samples."""
    complete_s: float
    samples: tuple[Sample, ...]
    steps: tuple[Interval, ...]
    """Optimizer steps of the lead trainer."""
    publishes: tuple[Interval, ...]
    """Intervals in which the lead trainer sent the weights."""
    takes: tuple[Interval, ...]
    """Intervals in which engines took the weights that this iteration published."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def rollout_s(self) -> float:
        """Time for which the trainer waited for the samples."""
        return max(0.0, self.complete_s - self.asked_s)

    @property
    def steps_s(self) -> float:
        return sum(each.end_s - each.begin_s for each in self.steps)

    @property
    def weights_s(self) -> float:
        return sum(each.end_s - each.begin_s for each in self.publishes)

    @property
    def other_s(self) -> float:
        return self.seconds - self.rollout_s - self.steps_s - self.weights_s

    @property
    def last_sample(self) -> Sample:
        """The sample that the trainer waited for."""
        return max(self.samples, key=lambda each: each.done_s)

    def path(self) -> Iterator[PathPart]:
        """Yield the critical path: for the trainer's wait, the segments of the last sample."""
        last = self.last_sample
        chain = [(OTHER, self.trainer, self.asked_s), (SENDING, self.trainer, last.sent_s)]
        end_s = last.sent_s
        for each in last.segments:
            end_s += each.seconds
            chain.append((f"{each.stage}{' wait' * each.waiting}", each.process, end_s))
        chain.append((COLLECTING, self.trainer, self.complete_s))
        own = [(STEPS, each) for each in self.steps] + [(WEIGHTS, each) for each in self.publishes]
        for part, interval in sorted(own, key=lambda each: each[1].begin_s):
            chain.append((OTHER, self.trainer, interval.begin_s))
            chain.append((part, self.trainer, interval.end_s))
        at_s = self.begin_s
        for part, process, end_s in chain:
            # What happened before the trainer began to wait cost it nothing.
            if end_s > at_s:
                yield PathPart(part, process, at_s, end_s)
                at_s = end_s

    def changed(self, change: Change) -> Iteration:
        """Return this iteration with segments of other durations. It is not longer than before.

        The waits of other samples stay the same.
        """
        samples = tuple(
            dataclasses.replace(
                sample,
                segments=tuple(
                    each._replace(seconds=change(sample, each)) for each in sample.segments
                ),
            )
            for sample in self.samples
        )
        done_s = max(each.done_s for each in samples)
        saved_s = min(self.rollout_s, max(0.0, self.last_sample.done_s - done_s))
        return dataclasses.replace(
            self,
            end_s=self.end_s - saved_s,
            complete_s=self.complete_s - saved_s,
            samples=samples,
        )


def widen_bounds(
    iterations: Sequence[Iteration], low_s: float, high_s: float
) -> tuple[float, float]:
    """Return bounds of what all iterations together save, with the noise between iterations."""
    times = [each.seconds for each in iterations]
    noise_s = _STANDARD_ERRORS * statistics.stdev(times) * len(times) ** 0.5
    return (
        max(0.0, low_s * (1 - _MODEL_ERROR) - noise_s),
        min(sum(times), high_s * (1 + _MODEL_ERROR) + noise_s),
    )


def find_smallest_shift(lead: Iterable[Event], other: Iterable[Event]) -> float:
    """Return the smallest number of seconds to add to another node's times, for times of the lead's clock.

    Nothing happens to a sample before it is sent. Without such events, return -math.inf.
    """
    sent = [each for each in lead if each.name == "sample_sent"]
    # Later samples may have the ids of earlier ones, which cannot be told apart without a clock.
    counts = Counter(each.id for each in sent)
    times = {each.id: each.time_s for each in sent if counts[each.id] == 1}
    effects = (each for each in other if each.id in times and each.name != "sample_sent")
    least_s = max((times[each.id] - each.time_s for each in effects), default=-math.inf)
    return least_s + _ROUNDING_S


def build_iterations(events: Iterable[Event]) -> list[Iteration]:
    """Return the iterations of the trainer that collects the batches, in their order."""
    ordered = sorted(events, key=lambda each: each.time_s)
    complete = [each for each in ordered if each.name == "batch_complete"]
    if not complete:
        return []
    lead = Counter(each.process for each in complete).most_common(1)[0][0]
    intervals = sorted(pair_events(ordered), key=lambda each: each.begin_s)
    samples = _build_samples(ordered, intervals)
    of_lead: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    for each in intervals:
        if each.process == lead:
            # Weights without a batch come from the last complete one.
            at = bisect.bisect(complete, each.begin_s, key=lambda end: end.time_s)
            last = complete[max(0, at - 1)].batch
            of_lead[each.stage, each.batch or last].append(each)
    takes = [each for each in intervals if each.stage == "weights_take"]
    found: list[Iteration] = []
    for end in complete:
        # Samples that ended later were left out of the batch.
        mine = [each for each in samples[end.batch] if each.done_s <= end.time_s]
        if end.process != lead or not mine:
            continue
        steps, sent = of_lead["steps", end.batch], of_lead["weights_publish", end.batch]
        first_s = min(each.sent_s for each in mine)
        begin_s = found[-1].end_s if found else first_s
        end_s = max([end.time_s, *(each.end_s for each in (*steps, *sent))])
        found.append(
            Iteration(
                lead,
                end.batch,
                begin_s,
                end_s,
                max(begin_s, first_s),
                end.time_s,
                tuple(mine),
                tuple(steps),
                tuple(sent),
                tuple(
                    take
                    for take in takes
                    for each in sent
                    if each.begin_s <= take.begin_s <= each.end_s
                ),
            )
        )
    return found


def pair_events(ordered: Sequence[Event]) -> Iterator[Interval]:
    """Yield an interval for each end event whose begin event is known."""
    open_events: dict[tuple[str, str, str], Event] = {}
    for each in ordered:
        stage, _, edge = each.name.rpartition("_")
        key = each.process, stage, each.id
        if edge == "begin":
            open_events[key] = each
        elif edge == "end" and (begin := open_events.pop(key, None)) is not None:
            batch = each.batch or begin.batch
            yield Interval(
                stage, each.process, each.id, batch, begin.time_s, each.time_s, each.tokens_out
            )


def _build_samples(
    ordered: Sequence[Event], intervals: Sequence[Interval]
) -> dict[str, list[Sample]]:
    """Return the samples that were sent and generated, by batch.

    Later samples may have the ids of earlier ones: each stage belongs to the last sample before it.
    """
    sends = group_values((each.id, each) for each in ordered if each.name == "sample_sent")
    stages: dict[Event, list[Interval]] = defaultdict(list)
    for each in intervals:
        earlier = (
            bisect.bisect(sends[each.id], each.begin_s, key=lambda sent: sent.time_s)
            if each.stage in STAGES and each.id in sends
            else 0
        )
        if earlier:
            stages[sends[each.id][earlier - 1]].append(each)
    calls = Counter((each[:2], each.begin_s) for mine in stages.values() for each in mine)
    _give_last_calls(stages, calls)
    arrivals = _find_arrivals(stages, calls)
    found: dict[str, list[Sample]] = defaultdict(list)
    for sent, mine in sorted(stages.items(), key=lambda each: each[0].time_s):
        generated = [one for one in mine if one.stage == "generation"]
        found[sent.batch].append(
            Sample(
                sent.id,
                sent.time_s,
                tuple(_split(sent, mine, arrivals)),
                sum_tokens(one.tokens for one in generated),
                generated[-1].process if generated else "",
            )
        )
    return found


def _give_last_calls(
    stages: MutableMapping[Event, list[Interval]], calls: Mapping[Any, int]
) -> None:
    """Give the sample that was ready last in its batch the calls that ended last.

    If all samples were ready before these calls, the ranks of the trainer waited for each other. They do
    so after the calls, too: the trainer waited for one rank's last sample and another one's calls.
    """
    batches: dict[str, list[tuple[Event, list[Interval], list[Interval]]]] = defaultdict(list)
    for sent, mine in stages.items():
        shared = [
            each for each in mine if each.stage in _OF_BATCH and calls[each[:2], each.begin_s] > 1
        ]
        own = [each for each in mine if each not in shared]
        if shared and own:
            batches[sent.batch].append((sent, own, shared))
    for found in batches.values():
        sent, own, _ = max(found, key=lambda each: each[1][-1].end_s)
        _, _, last = max(found, key=lambda each: each[2][-1].end_s)
        if own[-1].end_s <= last[0].begin_s:
            stages[sent] = own + last


def _find_arrivals(
    stages: Mapping[Event, Sequence[Interval]], calls: Mapping[Any, int]
) -> dict[tuple[str, str], list[float]]:
    """Return by batch and stage when samples were ready for a call of several samples, such as the
    rewards of a batch.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for sent, mine in stages.items():
        at_s = sent.time_s
        for each in mine:
            if calls[each[:2], each.begin_s] > 1:
                bisect.insort(found[sent.batch, each.stage], at_s)
            at_s = max(at_s, each.end_s)
    return found


def _split(
    sent: Event, stages: Sequence[Interval], arrivals: Mapping[tuple[str, str], Sequence[float]]
) -> Iterator[Segment]:
    at_s = sent.time_s
    for each in stages:
        # A sample's wait for other samples ends earlier if those are faster, so it does not count. All
        # ranks of a trainer wait for each other.
        others = arrivals.get((sent.batch, each.stage), ())
        ready_s = max([at_s, *others[: bisect.bisect(others, each.begin_s)][-1:]])
        begin_s, end_s = max(ready_s, each.begin_s), max(ready_s, each.end_s)
        yield Segment(each.stage, each.process, True, begin_s - ready_s)
        yield Segment(each.stage, each.process, False, end_s - begin_s)
        at_s = end_s
