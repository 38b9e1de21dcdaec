"""Predict the mean step after a change, by replaying recorded steps with changed times. Pure.

The replay is that of a synchronous job: a step ends when the last rank has done its own work, plus
the communication that even this rank waits for. A gain is therefore no share of a sum: work that
other ranks wait for anyway gains nothing. If ranks wait for each other several times in a step, each
segment between two waits ends with its last rank.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.time_account import CPU, NO_PART, TimeAccount, find_cells
from torchlens_perf.diagnosis.lost_time import (
    find_own_costs,
    find_slow_ranks,
    mean_step_s,
    sum_transfers,
)
from torchlens_perf.diagnosis.step_times import StepTimes
from torchlens_perf.errors import ConfigError
from torchlens_perf.run.rank_ranges import format_ranges, parse_ranges
from torchlens_perf.run.records import PARTS, PASSES
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.modules import find_largest_on_device
from torchlens_perf.verdicts.words.report import PredictedChange, mean_per_step

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.diagnosis.step_times import Floats

    Segments = tuple[npt.NDArray[np.int64], ...]
    from torchlens_perf.verdicts.verdict import Verdict
    from torchlens_perf.verdicts.words.report import Facts, Module

MAX_CONTENTION = 0.2
"""No gain of less work is predicted if CPU contention takes a larger share of the changed step."""
_COMMUNICATION = ("bandwidth", "overlap", "bubble", "communication")
MAX_DRIFT = 0.05
"""Without a change, the replay may differ from the recorded steps by at most this share."""
_ALL_PASSES = ("data", "forward", "recompute", "backward", NO_PART, "tool")
_SEGMENTS = tuple(
    tuple(find_cells(parts, ()) for parts in segments)
    for segments in (
        ((*_ALL_PASSES, "optimizer", "host"),),
        (_ALL_PASSES, ("optimizer", "host")),
        (("host", *_ALL_PASSES), ("optimizer",)),
        (("data", "forward"), ("recompute", "backward", NO_PART, "tool", "optimizer", "host")),
        (("host", "data", "forward"), ("recompute", "backward", NO_PART, "tool", "optimizer")),
    )
)
"""Segments of a step at whose ends all ranks may wait for each other."""
_MIN_BETTER = 0.5
"""Several waits are assumed if the communication that is left varies at most by this factor of that
with one wait. Transfers take about the same time in each step, unlike waits for a late rank."""
# The gain of a change that was made may differ from the prediction by this share: other work then
# meets other caches, clocks and neighbours.
MODEL_ERROR = 0.15
# Two standard errors are an interval of 95 %.
_STANDARD_ERRORS = 2.0
_FEW = 4
"""Most ranks with one cost whose own gains are predicted."""
# A module that is called at most this often in a step is called once.
_ABOUT_ONCE = 1.1
_CONTENTION = "contention"
_IRREGULAR = {
    "evaluation": ("evaluation", "forward passes without gradients"),
    "saving": ("saving",),
    "gc": ("garbage collection",),
    "compilation": ("compilation",),
}
_FORMS = (
    'rank=3@median, rank=all@median, "module:NAME x0.5", section:NAME=0, overlap=all, bubble=0,'
    f' "bandwidth:GROUP x2", or PART=0 or "PART x0.5" with a PART of'
    f" {', '.join((*PARTS, _CONTENTION, *_IRREGULAR))}"
)
_AT_MEDIAN = re.compile(r"rank\s*=\s*([\d,/-]+|all)\s*@\s*median")
_FACTOR = re.compile(r"(.+?)(?:\s*=\s*|\s+x\s*|\s*=\s*x\s*)(\d+(?:\.\d+)?)")


@dataclasses.dataclass(frozen=True)
class Change:
    """A change whose gain is to be predicted."""

    text: str
    """The form in which it is written on the command line."""
    subject: str
    """One of PARTS, a key of _IRREGULAR, contention, rank, module, section, bandwidth or overlap."""
    name: str = ""
    """Name or pattern of a module, section or group; a rank, or "all"."""
    factor: float = 0.0
    """Factor of the time; for a bandwidth, of the speed."""


def parse_change(text: str) -> Change:
    """Return a change from its text. Raise ConfigError if it is not one of the forms."""
    text = " ".join(text.split())
    if found := _AT_MEDIAN.fullmatch(text):
        return Change(text, "rank", found[1])
    if text in ("overlap=all", "bubble=0"):
        return Change(text, text.partition("=")[0])
    found = _FACTOR.fullmatch(text)
    subject, _, name = found[1].strip().partition(":") if found else ("", "", "")
    known = ("module", "section", "bandwidth") if name else (*PARTS, _CONTENTION, *_IRREGULAR)
    if found is None or subject not in known:
        raise ConfigError(f"{text!r} is not a change. Changes: {_FORMS}")
    factor = float(found[2])
    if subject == "bandwidth" and factor <= 0:
        raise ConfigError(f"{text!r}: a bandwidth cannot become 0")
    return Change(text, subject, name, factor)


def _unknown_name_text(change: Change, what: str, known: Iterable[str]) -> str:
    """Return that the run lacks what a change names, and what the run has."""
    names = textwrap.shorten(", ".join(dict.fromkeys(known)) or "none", 200, placeholder=" ...")
    return f"{change.text!r}: the run has no {f'{what} {change.name}'.strip()}. Known: {names}"


class Replay:
    """Recorded steps that can be replayed with changes."""

    def __init__(self, times: StepTimes, facts: Facts, verdicts: Sequence[Verdict] = ()) -> None:
        """verdicts: the cost of a current one is the gain of repairing its ranks."""
        self._times = times
        self._facts = facts
        self._slow = [*find_slow_ranks(verdicts), *find_own_costs(verdicts)]
        self._critical = times.account.select(times.critical)
        self._segments, self._rest_ns = _SEGMENTS[0], self._critical.sum_ns(["communication"])
        if not times.pipelined:
            self._segments, self._rest_ns = _find_segments(times.account, self._rest_ns)
        self._path_ns = _sum_segments(times.account.cells_ns, self._segments)
        self._end_ns = self._path_ns + self._rest_ns
        self.step_s = mean_step_s(times, facts["steps"])

    @property
    def drift_share(self) -> float:
        """Difference between the replay without a change and the recorded steps, as a share."""
        recorded = float(self._times.account.wall_ns.mean())
        return abs(float(self._end_ns.mean()) / recorded - 1)

    def predict(self, changes: Sequence[Change]) -> PredictedChange | None:
        """Return the gain of several changes together. Raise ConfigError if one names nothing.

        Return None if CPU contention takes much of the changed step: less work makes it shorter, by
        how much is not known. A verdict has judged what its ranks cost.
        """
        cells_ns, rest_ns = self._change_cells(changes), self._rest_ns
        repaired = {rank for change in changes for rank in self._ranks_of(change)}
        slow = max(
            (each for each in self._slow if repaired.issuperset(each.ranks)),
            key=lambda each: (repaired == set(each.ranks), each.cost_s),
            default=None,
        )
        is_judged = slow is not None and repaired == set(slow.ranks) and len(changes) == 1
        contention = self._contention_left(cells_ns)
        is_less_work = (cells_ns != self._times.account.cells_ns).any()
        if contention > MAX_CONTENTION and is_less_work and not is_judged:
            return None
        irregular_s = 0.0
        for change in changes:
            if change.subject in _IRREGULAR:
                irregular_s += (1 - change.factor) * self._irregular_s(change)
            elif change.subject in _COMMUNICATION:
                rest_ns = self._change_communication(change, rest_ns)
        path_ns = _sum_segments(cells_ns, self._segments)
        if self._times.pipelined:
            # The bubble of a pipeline is as long as the slowest stage's micro-batches.
            rest_ns = rest_ns * path_ns / self._path_ns
        gain_ns = self._end_ns - (path_ns + rest_ns)
        usual_s, error_s = float(gain_ns.mean()) / 1e9, _standard_error(gain_ns) / 1e9
        gain_s = min(usual_s + irregular_s, self.step_s)
        model_error = MODEL_ERROR + max(map(self._module_error, changes), default=0.0)
        around_s = _STANDARD_ERRORS * error_s + model_error * abs(gain_s)
        low_s = gain_s - around_s
        high_s = min(self.step_s, gain_s + around_s + contention * abs(usual_s))
        share = gain_s / self.step_s
        if slow is not None and (is_judged or slow.cost_s > gain_s):
            # One question has one answer: that of the verdict.
            gain_s, share = slow.cost_s, slow.share
            low_s, high_s = min(low_s, gain_s), max(high_s, gain_s)
        text = ", ".join(change.text for change in changes)
        return PredictedChange(text, gain_s, low_s, high_s, share)

    def _contention_left(self, cells_ns: Floats) -> float:
        """Return the share of waits for a CPU in a step of the critical ranks after a change.

        Where they were not measured, the share in one-second samples counts.
        """
        waits_ns = cells_ns[self._times.critical][..., find_cells((), (CPU,))].sum()
        sampled = self._facts["steps"]["sampled_lack_of_cpu"] or 0.0
        unmeasured = 1 - float(self._critical.is_measured.mean())
        return float(waits_ns / self._critical.wall_ns.sum()) + unmeasured * sampled

    def _ranks_of(self, change: Change) -> Collection[int]:
        """Return the ranks that a change repairs."""
        if change.subject != "rank":
            return ()
        return self._times.ranks if change.name == "all" else parse_ranges(change.name)

    def _module_error(self, change: Change) -> float:
        """Return the relative error of the device time of modules, of which there are few samples."""
        if change.subject != "module" or not _is_on_device(self._facts):
            return 0.0
        rows = _find_modules(self._facts, change)
        widths = [(r["device_own_high_s"] or 0.0) - (r["device_own_low_s"] or 0.0) for r in rows]
        whole_s = sum(r["device_own_s_per_step"] or 0.0 for r in rows)
        return 0.5 * sum(widths) / whole_s if whole_s else 0.0

    def _irregular_s(self, change: Change) -> float:
        """Return the mean time per step that steps of these kinds take longer."""
        steps, kinds = self._facts["steps"], _IRREGULAR[change.subject]
        total_s = sum(each["total_s"] for each in steps["long"] if set(each["kinds"]) & set(kinds))
        return mean_per_step(total_s, steps)

    def _change_communication(self, change: Change, rest_ns: Floats) -> Floats:
        if change.subject == "bubble" and not self._times.pipelined:
            raise ConfigError(f"{change.text!r}: the job is no pipeline")
        if change.subject == "communication":
            return np.multiply(rest_ns, change.factor, dtype=np.float64)
        if change.subject == "overlap":
            computing_ns: Floats = self._critical.sum_ns(["forward", "backward"])
            return np.maximum(rest_ns - computing_ns, 0)
        rows = [
            row
            for row in self._facts["collectives"]
            if (change.name or "all") in (row["group"], row["description"], row["operation"], "all")
        ]
        transfer_s = sum_transfers(self._facts, rows)
        if transfer_s is None:
            raise ConfigError(
                _unknown_name_text(
                    change,
                    "measured transfers",
                    (
                        row[key]
                        for key in ("group", "operation")
                        for row in self._facts["collectives"]
                    ),
                )
            )
        transfer_ns = 1e9 * transfer_s
        if change.subject == "bubble":
            return np.minimum(rest_ns, transfer_ns)
        return np.maximum(rest_ns - (1 - 1 / change.factor) * transfer_ns, 0)

    def _change_cells(self, changes: Sequence[Change]) -> Floats:
        """Return the cells of all ranks and rows after changes of the ranks' own work."""
        times, cells_ns = self._times, self._times.account.cells_ns.copy()
        for change in changes:
            if change.subject == "rank":
                _set_to_median(change, times, cells_ns, self._segments)
            elif change.subject == "module":
                for part, part_s in _module_times(self._facts, change).items():
                    _shorten(cells_ns, part, times.ranks, part_s, 1 - change.factor)
            elif change.subject == "section":
                row = next((r for r in self._facts["sections"] if r["name"] == change.name), None)
                if row is None or row["host_s_per_typical_step"] is None:
                    raise ConfigError(
                        _unknown_name_text(
                            change, "section", (each["name"] for each in self._facts["sections"])
                        )
                    )
                part_s = {str(rank): row["host_s_per_typical_step"] for rank in times.ranks}
                _shorten(cells_ns, "host", times.ranks, part_s, 1 - change.factor)
            elif change.subject == _CONTENTION:
                cells_ns[..., find_cells((), (CPU,))] *= change.factor
            elif change.subject in PARTS and change.subject not in _COMMUNICATION:
                cells_ns[..., find_cells((change.subject,), ())] *= change.factor
        return cells_ns


def predict_standard_changes(
    times: StepTimes, facts: Facts, verdicts: Sequence[Verdict], most: int = 5
) -> tuple[list[PredictedChange], float]:
    """Return the most valuable single changes, and the drift of the replay.

    Work itself cannot be removed, so changes of computing are only predicted for its largest module
    at half its time. Return no changes if the replay does not reproduce the recorded steps.
    """
    replay = Replay(times, facts, verdicts)
    drift = replay.drift_share
    if drift > MAX_DRIFT:
        return [], drift
    texts = ["data=0", "host=0", "contention=0", "recompute=0", "optimizer x0.5"]
    texts += [f"{name}=0" for name in _IRREGULAR]
    if len(times.ranks) > 1:
        texts += ["overlap=all", "rank=all@median"]
    if times.pipelined and sum_transfers(facts, facts["collectives"]) is not None:
        texts.append("bubble=0")
    largest = _find_largest_module(facts)
    texts += [f"module:{largest} x0.5"] if largest else []
    # A node without a shared disk has the steps of its own ranks only.
    slow = [each for each in find_slow_ranks(verdicts) if {*each.ranks} <= {*times.ranks}]
    texts += [f"rank={format_ranges(each.ranks)}@median" for each in slow]
    # Ranks that share a cost also have their own ones.
    texts += [
        f"rank={rank}@median" for each in slow for rank in each.ranks if 1 < len(each.ranks) <= _FEW
    ]
    predicted = [replay.predict([parse_change(text)]) for text in texts]
    found = [each for each in predicted if each is not None and each.low_s > 0]
    return sorted(found, key=lambda each: -each.gain_s)[:most], drift


def _sum_segments(cells_ns: Floats, segments: Segments) -> Floats:
    """Return the sum over the segments of the longest own time of all ranks: [rows]."""
    longest = [cells_ns[..., segment].sum(axis=2).max(axis=0) for segment in segments]
    return np.sum(longest, axis=0)


def _find_segments(account: TimeAccount, wait_ns: Floats) -> tuple[Segments, Floats]:
    """Return the segments of a step, and the communication for which even the last ranks wait.

    wait_ns: the communication of the critical ranks, which is what is left with one segment.
    """
    found, rest_ns, least = _SEGMENTS[0], wait_ns, _MIN_BETTER * wait_ns.std()
    recorded_ns = account.wall_ns.mean(axis=0)
    for segments in _SEGMENTS[1:]:
        left_ns = recorded_ns - _sum_segments(account.cells_ns, segments)
        if left_ns.std() < least and left_ns.mean() > 0:
            found, rest_ns, least = segments, np.maximum(left_ns, 0), left_ns.std()
    return found, rest_ns


def _set_to_median(change: Change, times: StepTimes, cells_ns: Floats, segments: Segments) -> None:
    """Give ranks the median work of their population, where that is less than their own."""
    wanted = times.ranks if change.name == "all" else parse_ranges(change.name)
    if not set(wanted) <= set(times.ranks):
        raise ConfigError(_unknown_name_text(change, "rank", [format_ranges(times.ranks)]))
    populations, rows = np.array(times.populations), np.arange(cells_ns.shape[1])
    for population in set(times.populations):
        members = np.flatnonzero(populations == population)
        chosen = [at for at in members if times.ranks[at] in wanted]
        if not chosen or len(members) < 2:
            continue
        for segment in segments:
            own = cells_ns[np.ix_(members, rows, segment)].sum(axis=2)
            # Which rank is at the median differs from row to row, and with it what it does.
            middle = np.argsort(own, axis=0)[(len(members) - 1) // 2]
            median, median_ns = cells_ns[members[middle], rows][:, segment], own[middle, rows]
            for at in chosen:
                slower = np.flatnonzero(cells_ns[at][:, segment].sum(axis=1) > median_ns)
                cells_ns[at][np.ix_(slower, segment)] = median[slower]


def _find_matching_part(name: str, pattern: str) -> str:
    """Return the shortest part of a module's path that matches; "" without one."""
    paths = itertools.accumulate(name.split("."), lambda outer, inner: f"{outer}.{inner}")
    return next((path for path in paths if fnmatch.fnmatchcase(path, pattern)), "")


def _is_on_device(facts: Facts) -> bool:
    return facts["run"]["judged_by"] == DEVICE


def _find_largest_module(facts: Facts) -> str:
    """Return the name or the pattern of the modules that take most of a step; "" if unknown."""
    if not _is_on_device(facts):
        return next((each["name"] for each in facts["modules"] if not each["is_root"]), "")
    found = find_largest_on_device(facts)
    inside = [] if found is None else _match_modules(facts, found.name)
    has_times = all(row["device_own_s_per_step"] is not None for row in inside)
    return found.name if found is not None and has_times else ""


def _match_modules(facts: Facts, pattern: str) -> list[Module]:
    return [each for each in facts["modules"] if _find_matching_part(each["name"], pattern)]


def _find_modules(facts: Facts, change: Change) -> list[Module]:
    """Return the modules of a change. Raise ConfigError without any, or without their times."""
    rows = _match_modules(facts, change.name)
    if not rows:
        raise ConfigError(
            _unknown_name_text(change, "timed module", (each["name"] for each in facts["modules"]))
        )
    for row in rows if _is_on_device(facts) else ():
        if row["device_own_s_per_step"] is None:
            raise ConfigError(
                f"{change.text!r}: the device time of {row['name']!r} is not known: the run has"
                f" {row['device_samples']} samples"
            )
    return rows


def _module_times(facts: Facts, change: Change) -> Mapping[str, Mapping[str, float]]:
    """Return each rank's forward and backward time per step of the modules and all modules inside,
    in seconds.

    Without samples, or with several passes in a step, the backward pass of a module is assumed to
    take the share of the backward pass that its forward time has of the forward pass. Passes without
    gradients have no backward pass.
    """
    rows, on_device = _find_modules(facts, change), _is_on_device(facts)
    untrained = next((row["by_rank"] for row in facts["modules"] if row["name"] == PASSES), {})
    forward: dict[str, float] = {}
    for row in rows:
        for rank, seconds in row["device_own_by_rank" if on_device else "by_rank"].items():
            forward[rank] = forward.get(rank, 0.0) + seconds
    backward: dict[str, float] = {}
    outermost = [
        row
        for row in rows
        if _find_matching_part(row["name"], change.name) == row["name"] != PASSES
    ]
    # Samples are times of single backward passes.
    sampled = [
        row["backward_by_rank"]
        for row in outermost
        if not on_device and row["calls_per_step"] <= _ABOUT_ONCE
    ]
    for each in facts["ranks"]:
        typical, rank = each["typical"], str(each["rank"])
        if len(sampled) == len(outermost) and all(rank in times for times in sampled):
            backward[rank] = sum(times[rank] for times in sampled)
            continue
        parts = typical["parts"] if typical is not None else {}
        whole_s = parts.get("forward", 0.0) - untrained.get(rank, 0.0)
        if whole_s > 0 and rank in forward:
            backward[rank] = parts.get("backward", 0.0) * forward[rank] / whole_s
    return {"forward": forward, "backward": backward}


def _shorten(
    cells_ns: Floats,
    part: str,
    ranks: Sequence[int],
    seconds: Mapping[str, float],
    share: float,
) -> None:
    """Subtract a share of these seconds from a part on each rank, at most what is there.

    The seconds are wall time, and contain as large a share of waits for a CPU as the part.
    """
    cells = find_cells((part,), ())
    whole_ns = cells_ns[..., cells].sum(axis=-1)
    less_ns = np.array([1e9 * share * seconds.get(str(rank), 0.0) for rank in ranks])[:, None]
    left = 1 - np.divide(
        np.minimum(less_ns, whole_ns), whole_ns, where=whole_ns > 0, out=np.zeros_like(whole_ns)
    )
    cells_ns[..., cells] *= left[..., None]


def _standard_error(values: Floats) -> float:
    """Return the standard error of the mean of a series whose neighbours may be alike.

    Means of blocks of consecutive values are nearly independent.
    """
    blocks = max(2, int(len(values) ** 0.5))
    if len(values) < 2 * blocks:
        return float("nan") if len(values) < 2 else float(values.std(ddof=1) / len(values) ** 0.5)
    means = np.array([each.mean() for each in np.array_split(values, blocks)])
    return float(means.std(ddof=1) / blocks**0.5)
