"""Divide the life of a job into classes of time: goodput and everything else. Pure.

Each moment of a rank is in exactly one class, so the classes add up to the wall clock. If several
classes apply, the first of these rules decides:

1. Steps that a later attempt made again are lost work, except for what they evaluate and save.
2. A hang lasts as long as its finding. A straggler's loss is the `lost_s` of its verdicts.
3. Steps that compile, evaluate or save are as long as the median of the other steps. The excess
   belongs to compilation, then evaluation, then passes without gradients, then saving.
   `torch.save` in an evaluating step is saving. Untagged passes without gradients may be rollouts of
   reinforcement learning.
4. The rest of a step is divided by its parts: data loading, comm wait, and
   productive time, which includes host code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from torchlens_perf.analysis.statistics.step_mix import (
    MEASURED,
    Bin,
    StepMix,
    duration_quantile_ns,
    mean_duration_ns,
    sum_time,
)
from torchlens_perf.diagnosis.lost_time import join_shared_costs
from torchlens_perf.run.records import PASSES
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.report_goodput import Goodput, JobAttempt, TimeClass
from torchlens_perf.verdicts.words.report_hardware import Gpu

CLASSES = {
    "productive": "productive",
    "startup": "start-up and compilation",
    "data_stall": "data loading",
    "straggler": "slow ranks",
    "communication": "exposed communication",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "without_gradients": PASSES,
    "restart": "restart",
    "lost_work": "lost work",
    "hang": "hang",
    "idle": "idle",
    "other": "other",
}
"""The name of each class on screens."""
_REPEATED = ("productive", "data_stall", "straggler", "communication")
"""Classes of which a part is lost work if the steps are made again."""
_WAITS = {"data_stall": "data", "communication": "communication"}
"""The part of the steps whose time is in each class."""
_EXCESS: Mapping[Flag, str] = {
    Flag.STOPPED: "idle",
    Flag.CAPTURED: "other",
    Flag.COMPILED: "startup",
    Flag.EVALUATED: "evaluation",
    Flag.EVALUATION: "without_gradients",
    Flag.CHECKPOINT: "checkpoint",
}
"""The class of a step's excess over the median, by its flag. The first flag of a step decides."""
_SAVING = list(MEASURED).index(Flag.CHECKPOINT)


class StragglerLoss(NamedTuple):
    """Job time that some ranks have cost."""

    seconds: float
    ranks: int
    in_data: bool
    """True if these ranks waited for data meanwhile."""


def find_losses(rows: Sequence[Verdict]) -> list[StragglerLoss]:
    """Return the losses by slow ranks. Verdicts that share one cost have one loss: the largest."""
    return [
        max(
            StragglerLoss(
                row.lost_s or 0.0, len({*row.ranks, *row.evidence.slow_too}), row.phase == "data"
            )
            for row in group
        )
        for group in join_shared_costs(rows)
    ]


def build_goodput(
    nodes: Sequence[NodeState], losses: Sequence[StragglerLoss], gpus: Sequence[Gpu] = ()
) -> Goodput | None:
    """Return the goodput of a run; None without steps and without known process starts.

    losses: losses in the latest attempt. Earlier attempts have no findings any more, so their
    losses by stragglers are in other classes.
    """
    attempts: list[JobAttempt] = []
    launchers: set[tuple[str, int]] = set()
    worlds = list(_group_by_attempt(nodes))
    for place, world in enumerate(worlds, 1):
        attempt = world[0].identity.attempt
        hung_s = {
            step: seconds
            for node in nodes
            for step, seconds in node.records.hung_s.get(attempt, {}).items()
        }
        is_last = place == len(worlds)
        found = _account_attempt(world, hung_s, losses if is_last else (), is_last=is_last)
        if found is None:
            continue
        before = launchers
        launchers = {(each.identity.host, each.identity.launcher_pid) for each in world}
        gap_s = found.began_unix_s - attempts[-1].ended_unix_s if attempts else 0.0
        if gap_s > 0 and before & launchers:
            seconds = {**found.seconds, "restart": found.seconds["restart"] + gap_s}
            began_s = found.began_unix_s - gap_s
            found = structs.replace(found, began_unix_s=began_s, seconds=seconds)
        attempts.append(found)
    if not attempts:
        return None
    goodput = combine_attempts(attempts)
    joules = [each["energy_j"] for each in gpus]
    if not joules or None in joules:
        return goodput
    energy_j = sum(filter(None, joules))
    steps = sum(each.steps for each in attempts)
    ranks = [each.statistics for world in worlds for each in world]
    is_known = all(each.operators.workload_steps == each.counted_steps for each in ranks)
    tokens = sum(each.operators.workload for each in ranks) if is_known else 0
    return structs.replace(
        goodput,
        energy_j=energy_j,
        energy_j_per_step=energy_j / steps if steps else None,
        energy_j_per_token=energy_j / tokens if tokens else None,
    )


def combine_attempts(attempts: Iterable[JobAttempt]) -> Goodput:
    """Return the goodput of at least one attempt.

    Time between attempts, in which no process of the job existed, is idle.
    """
    in_order = sorted(attempts, key=lambda each: each.began_unix_s)
    found, source = _count_lost_steps(in_order)
    total_s, device_s = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(CLASSES, 0.0)
    ended_s = found[0].began_unix_s
    for each in found:
        total_s["idle"] += max(0.0, each.began_unix_s - ended_s)
        ended_s = each.ended_unix_s
        lost_share = (each.lost_steps or 0) / max(1, each.steps)
        for name, seconds in each.seconds.items():
            lost_s = lost_share * seconds if name in _REPEATED else 0.0
            for into, part_s in ((name, seconds - lost_s), ("lost_work", lost_s)):
                total_s[into] += part_s
                device_s[into] += part_s * each.devices
    lost_steps = [each.lost_steps for each in found]
    unknown = {name for each in found for name in each.not_measured}
    unknown |= {"lost_work"} if None in lost_steps else set()
    for name in unknown:
        total_s["productive"] += total_s[name]
        device_s["productive"] += device_s[name]
    wall_s = sum(seconds for name, seconds in total_s.items() if name not in unknown)

    def build_class(name: str) -> TimeClass:
        if name in unknown:
            return TimeClass(None, None, None, None)
        share = total_s[name] / wall_s if wall_s else 0.0
        return TimeClass(total_s[name], share, device_s[name] / 3600, None)

    return Goodput(
        wall_s=wall_s,
        classes={name: build_class(name) for name in CLASSES},
        attempts=found,
        lost_steps=None if None in lost_steps else sum(filter(None, lost_steps)),
        lost_steps_from=source,
        energy_j=None,
        energy_j_per_step=None,
        energy_j_per_token=None,
        price_per_device_hour=None,
        cost=None,
    )


def with_price(goodput: Goodput | None, price: float | None) -> Goodput | None:
    """Return the goodput with the cost of each class and of the job.

    price: that of an hour of one device. Without it, return the goodput as it is.
    """
    if goodput is None or price is None:
        return goodput
    costs = {
        name: None if each.device_hours is None else price * each.device_hours
        for name, each in goodput.classes.items()
    }
    classes = {
        name: structs.replace(each, cost=costs[name]) for name, each in goodput.classes.items()
    }
    cost = sum(filter(None, costs.values()))
    return structs.replace(goodput, price_per_device_hour=price, classes=classes, cost=cost)


def _count_lost_steps(attempts: Sequence[JobAttempt]) -> tuple[list[JobAttempt], str]:
    """Return the attempts with the steps that a later one made again, and the source of these.

    An attempt without a step counter is assumed to continue with the last recorded checkpoint.
    """
    training = [each for each in attempts if each.steps]
    starts: list[int | None] = []
    saved: int | None = None
    source = "step counter" if len(training) > 1 else ""
    for each in training:
        start = each.first_step
        if start is None and starts:
            start, source = saved, "checkpoints"
        starts.append(start or (0 if not starts else start))
        if each.saved_step is not None and starts[-1] is not None:
            saved = starts[-1] + each.saved_step
    found = [each for each in attempts if not each.steps]
    for place, (each, start) in enumerate(zip(training, starts, strict=True)):
        later = starts[place + 1 :]
        known = [of for of in later if of is not None]
        lost: int | None = 0
        if start is None or len(known) < len(later):
            lost, source = None, ""
        elif later:
            lost = min(each.steps, max(0, start + each.steps - min(known)))
        found.append(structs.replace(each, lost_steps=lost))
    return sorted(found, key=lambda each: each.began_unix_s), source


# -- one attempt


def _group_by_attempt(nodes: Sequence[NodeState]) -> Iterator[list[ProcessState]]:
    """Yield the newest process of each rank, by attempt and world size, oldest attempt first.

    Processes that a rank has started, and that are recorded as jobs of their own, are left out.
    """
    groups: dict[tuple[int, int], dict[int, ProcessState]] = {}
    processes = (process for node in nodes for process in node.processes.values())
    for each in sorted(processes, key=lambda each: (each.identity.attempt, each.anchor.unix_ns)):
        world = each.identity.attempt, each.identity.world_size
        groups.setdefault(world, {})[each.identity.rank] = each
    pids: set[tuple[str, int]] = set()
    for ranks in groups.values():
        who = [each.identity for each in ranks.values()]
        if not any((each.host, each.launcher_pid) in pids for each in who):
            yield list(ranks.values())
            pids.update((each.host, each.pid) for each in who)


def _account_attempt(
    processes: Sequence[ProcessState],
    hung_s: Mapping[int, float],
    losses: Sequence[StragglerLoss],
    *,
    is_last: bool,
) -> JobAttempt | None:
    """Return an attempt with the mean time of its ranks by class; None if its times are unknown."""
    # Ranks whose state is missing are assumed to be like the others.
    devices = processes[0].identity.world_size
    last_step = min(each.statistics.last_step or 0 for each in processes)
    fatal_s = sum(seconds for step, seconds in hung_s.items() if step > last_step)
    began = [
        _to_unix_ns(each, each.facts.process_began_ns or each.statistics.started_ns)
        for each in processes
    ]
    ended = [_to_unix_ns(each, each.statistics.ended_ns) for each in processes]
    # The step in progress of a live job does not count before its end, unless it hangs.
    is_live = is_last and any(not each.ended for each in processes)
    if fatal_s or not is_live or not any(ended):
        ended += [_to_unix_ns(each, each.seen_ns) for each in processes]
    if not any(began) or not any(ended):
        return None
    began_ns, ended_ns = min(filter(None, began)), max(filter(None, ended))
    has_failed = not is_last and any(each.ended in ("died", "failed") for each in processes)
    tail = "restart" if has_failed else "idle"
    means_s = dict.fromkeys(CLASSES, 0.0)
    for process in processes:
        for name, seconds in _account_rank(process, began_ns, ended_ns, tail).items():
            means_s[name] += seconds / len(processes)
    _move(means_s, "hang", (tail,), fatal_s)
    _claim(means_s, "hang", StragglerLoss(sum(hung_s.values()) - fatal_s, 1, False), devices)
    for loss in losses:
        _claim(means_s, "straggler", loss, devices)
    is_untimed = any(each.facts.on_device and each.judged_by != DEVICE for each in processes)
    firsts = {each.facts.step_offset for each in processes}
    mixes = [each.statistics.mix for each in processes]
    saved = [max(each.steps) for mix in mixes for each in _bins_with(mix, Flag.CHECKPOINT)]
    skipped = max(sum(each.count for each in _bins_with(mix, Flag.SKIPPED)) for mix in mixes)
    made = [each.statistics.last_step for each in processes]
    return JobAttempt(
        attempt=processes[0].identity.attempt,
        devices=devices,
        began_unix_s=began_ns / 1e9,
        ended_unix_s=ended_ns / 1e9,
        steps=min(0 if step is None else step + 1 - skipped for step in made),
        first_step=firsts.pop() if len(firsts) == 1 else None,
        saved_step=max(saved, default=None),
        lost_steps=0,
        seconds=means_s,
        not_measured=list(_WAITS) if is_untimed else [],
    )


def _account_rank(
    process: ProcessState, began_ns: int, ended_ns: int, tail: str
) -> dict[str, float]:
    """Return a rank's time in an attempt by class. tail: the class of the time after its steps."""
    statistics, found = process.statistics, dict.fromkeys(CLASSES, 0.0)
    begin = "idle" if process.facts.interactive else "startup"
    first_ns = _to_unix_ns(process, statistics.started_ns)
    last_ns = _to_unix_ns(process, statistics.ended_ns)
    if first_ns is None or last_ns is None:
        found[begin] = (ended_ns - began_ns) / 1e9
        return found
    bins = [(key >> 32, each) for key, each in statistics.mix.bins.items()]
    plain = [each for flags, each in bins if not _excess_class(flags)]
    in_order = sorted(plain or [each for _, each in bins], key=mean_duration_ns)
    median_ns = duration_quantile_ns(in_order, 0.5)
    warm_up = statistics.warm_up
    excess_ns = max(0.0, warm_up.sum_ns - warm_up.count * median_ns)
    found["startup"] += excess_ns / 1e9
    recorded_ns = float(warm_up.sum_ns)
    rest_ns = recorded_ns - excess_ns
    for flags, each in bins:
        recorded_ns += each.duration_ns
        excess_ns, name = each.duration_ns - each.count * median_ns, _excess_class(flags)
        if not name or excess_ns <= 0:
            rest_ns += each.duration_ns
            continue
        rest_ns += each.duration_ns - excess_ns
        if flags & Flag.EVALUATION and flags & Flag.CHECKPOINT:
            saving_ns = min(excess_ns, float(each.explained_ns[_SAVING]))
            found["checkpoint"] += saving_ns / 1e9
            excess_ns -= saving_ns
        found[name] += excess_ns / 1e9
    if process.judged_by == DEVICE and statistics.device_mix:
        timed = statistics.device_mix.bins.items()
        plain = [each for key, each in timed if not _excess_class(key >> 32)]
    usual = sum_time(plain)
    found["productive"] += rest_ns / 1e9
    for name, part in _WAITS.items():
        share = usual.sum_ns([part]) / usual.wall_ns if plain else 0.0
        _move(found, name, ("productive",), float(share) * rest_ns / 1e9)
    found[begin] += (first_ns - began_ns) / 1e9
    found[tail] += (ended_ns - last_ns) / 1e9
    # Steps without records, for example because a ring was overwritten.
    found["other"] += (last_ns - first_ns - recorded_ns) / 1e9
    return found


def _excess_class(flags: int) -> str:
    """Return the class of the excess of steps with these flags; "" for steps that only train."""
    return next((name for flag, name in _EXCESS.items() if flags & flag), "")


def _bins_with(mix: StepMix, flag: Flag) -> list[Bin]:
    return [each for key, each in mix.bins.items() if key >> 32 & flag]


def _claim(seconds: dict[str, float], name: str, loss: StragglerLoss, ranks: int) -> None:
    """Move the time that some ranks have cost into a class.

    The other ranks have spent this time in communication, and these ranks in a phase of their own.
    """
    waited_s = loss.seconds * max(0, ranks - loss.ranks) / ranks
    moved_s = _move(seconds, name, ("communication",), waited_s)
    own = ("data_stall", "productive") if loss.in_data else ("productive", "data_stall")
    _move(seconds, name, (*own, "communication"), loss.seconds - moved_s)


def _move(seconds: dict[str, float], into: str, sources: Sequence[str], wanted_s: float) -> float:
    """Move time from the first sources that have some. Return the moved time."""
    moved_s = 0.0
    for source in sources:
        taken_s = min(max(0.0, wanted_s - moved_s), max(0.0, seconds[source]))
        seconds[source] -= taken_s
        moved_s += taken_s
    seconds[into] += moved_s
    return moved_s


def _to_unix_ns(process: ProcessState, monotonic_ns: int | None) -> int | None:
    """Return UTC nanoseconds; None for 0 and None, which stand for an unknown time."""
    return monotonic_ns + process.anchor.offset_ns if monotonic_ns else None
