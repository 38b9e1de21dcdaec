"""Changes of the usual step time over the run: steps, drifts, warm-ups and periods. Pure.

The model is a level, changes of this level, and noise in which neighbouring windows may resemble
each other: an autoregressive process. Changes are added one by one, the most likely one first, while
the likelihood rises by more than noise alone would raise it. A change is sudden, or it is a slope
over the whole run, up to a window, or from a window on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.run_windows import TAG_NAMES
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.statistics.run_windows import Floats, RunWindows
    from torchlens_perf.verdicts.stragglers.findings import Findings
    from torchlens_perf.verdicts.words.evidence import LongSteps
    from torchlens_perf.verdicts.words.report import Regime

    Indexes = npt.NDArray[np.int64]


CHANGE, DRIFT, WARM_UP, PERIODIC = "change", "drift", "warm-up", "periodic"
MIN_WINDOWS = 12
_MIN_CHANGE = 0.02
"""Smaller changes of the step time are not reported."""
_MIN_GAIN = 20.0
"""Smallest decrease of the deviance by a change. It was chosen in simulations of stationary noise,
where the best of all changes exceeds it in less than 5 % of the runs."""
_MAX_CHANGES = 6
_CORRELATIONS = np.linspace(0.0, 0.95, 11)
_MIN_STEP_WINDOWS, _MIN_SLOPE_WINDOWS = 2, 4
_NEAR_WINDOWS = 2
"""Largest distance between a change and what coincides with it."""
_RARE = 0.25
"""A tag coincides with a change only if it is in at most this share of the windows."""


@dataclasses.dataclass(frozen=True)
class _Term:
    """A change of the level. It happens in the windows [begin, end]."""

    begin: int
    end: int

    @property
    def is_sudden(self) -> bool:
        return self.end - self.begin == 1

    def shape(self, count: int) -> Floats:
        """Return the share of the change that has happened in each of `count` windows."""
        return np.clip((np.arange(count) - self.begin) / (self.end - self.begin), 0.0, 1.0)


def find_regimes(
    windows: RunWindows | None, long: Sequence[LongSteps], findings: Findings
) -> list[Regime]:
    """Return changes of the usual step time in order of time, then periodic long steps.

    long: classes of long steps. Steps that compile until the end of the run are a warm-up that
    does not end.
    """
    periodic = [_build_long(PERIODIC, each) for each in long if each["period"]]
    if windows is not None and _keeps_compiling(windows):
        periodic += [
            _build_long(WARM_UP, each)
            for each in long
            if "compilation" in each["kinds"] and not each["period"]
        ]
    if windows is None or len(windows) < MIN_WINDOWS:
        return periodic
    # The first window includes steps of the warm-up of each run.
    known = np.flatnonzero(np.isfinite(windows.duration_ns).any(axis=0))[1:]
    if len(known) < MIN_WINDOWS:
        return periodic
    log_ns = np.log(np.nanmedian(windows.duration_ns[:, known], axis=0))
    terms = find_changes(log_ns)
    if not terms:
        return periodic
    shapes = _design(terms, len(log_ns))
    level, *sizes = np.linalg.lstsq(shapes, log_ns, rcond=None)[0]
    fitted = shapes @ [level, *sizes]
    settled = _find_settled(fitted, terms)
    groups = [
        (WARM_UP, [each for each in terms if each.end <= settled]),
        (DRIFT, [each for each in terms if each.end > settled and not each.is_sudden]),
        *((CHANGE, each) for each in _join_neighbors(terms) if each[0].end > settled),
    ]
    names, parts_ns = _split_parts(windows, known)
    changes_ns = np.linalg.lstsq(shapes, parts_ns, rcond=None)[0][1:]
    found: list[Regime] = []
    for kind, group in groups:
        chosen = [terms.index(each) for each in group]
        size = float(sum(sizes[each] for each in chosen))
        if not group or abs(np.expm1(size)) < _MIN_CHANGE:
            continue
        begin, end = min(each.begin for each in group), max(each.end for each in group)
        changed = begin + 1 if kind == CHANGE else begin
        before_s = float(np.exp(fitted[begin])) / 1e9
        of_parts = dict(zip(names, (changes_ns[chosen].sum(axis=0) / 1e9).tolist(), strict=True))
        since = int(windows.first_steps[known[changed]])
        first = int(windows.first_steps[0])
        lasts = kind == CHANGE or end == len(known) - 1
        found.append(
            {
                "kind": kind,
                "since_step": first if kind == WARM_UP or not begin else since,
                "until_step": None if lasts else int(windows.first_steps[known[end]]),
                "period": None,
                "before_s": before_s,
                "after_s": before_s * float(np.exp(size)),
                "part": max(of_parts, key=lambda part: of_parts[part] * np.sign(size)),
                "parts_s": of_parts,
                "coincides": (
                    _find_coincidences(windows, findings, int(known[changed]), rising=size > 0)
                    if kind == CHANGE
                    else []
                ),
            }
        )
    return sorted(found, key=lambda each: each["since_step"] or 0) + periodic


def find_changes(values: Floats) -> list[_Term]:
    """Return the changes of the level of a series in order of time."""
    count = len(values)
    candidates = [
        *(_Term(at - 1, at) for at in range(_MIN_STEP_WINDOWS, count - 1)),
        *(_Term(0, end) for end in (*range(_MIN_SLOPE_WINDOWS, count - 4), count - 1)),
        *(_Term(begin, count - 1) for begin in range(_MIN_SLOPE_WINDOWS, count - 4)),
    ]
    shapes = np.stack([each.shape(count) for each in candidates], axis=1)
    found: list[_Term] = []
    deviance = _deviances(values, _design([], count), np.zeros((count, 1)))[0]
    while len(found) < _MAX_CHANGES:
        each = _deviances(values, _design(found, count), shapes)
        best = int(np.argmin(each))
        if deviance - each[best] < _MIN_GAIN:
            break
        found.append(candidates[best])
        deviance = each[best]
        # Later changes may explain what an earlier one seemed to be.
        for term in found[:-1]:
            others = [other for other in found if other is not term]
            without = _deviances(values, _design(others, count), np.zeros((count, 1)))[0]
            if without - deviance < _MIN_GAIN:
                found, deviance = others, without
    return sorted(found, key=lambda each: (each.begin, each.end))


def _design(terms: Sequence[_Term], count: int) -> Floats:
    return np.stack([np.ones(count), *(each.shape(count) for each in terms)], axis=1)


def _deviances(values: Floats, design: Floats, candidates: Floats) -> Floats:
    """Return the deviance of the series with each candidate added to the design.

    values: [windows]. design: [windows, terms]. candidates: [windows, candidates].
    """
    count, found = len(values), np.full(candidates.shape[1], np.inf)
    for correlation in _CORRELATIONS:
        all_columns = np.column_stack([values, design, candidates])
        white = np.concatenate(
            [
                np.sqrt(1 - correlation**2) * all_columns[:1],
                all_columns[1:] - correlation * all_columns[:-1],
            ]
        )
        basis = np.linalg.qr(white[:, 1 : 1 + design.shape[1]])[0]
        white -= basis @ (basis.T @ white)
        left, added = white[:, 0], white[:, 1 + design.shape[1] :]
        size = np.square(added).sum(axis=0)
        fits = np.square(added.T @ left) / np.maximum(size, 1e-9) * (size > 1e-6)
        errors = np.maximum(left @ left - fits, 1e-12 * count)
        found = np.minimum(found, count * np.log(errors) - np.log(1 - correlation**2))
    return found


def _join_neighbors(terms: Sequence[_Term]) -> list[list[_Term]]:
    """Return the sudden changes. A change inside of a window appears as two changes in a row."""
    found: list[list[_Term]] = []
    for each in terms:
        if each.is_sudden and found and found[-1][-1].end == each.begin:
            found[-1].append(each)
        elif each.is_sudden:
            found.append([each])
    return found


def _find_settled(fitted: Floats, terms: Sequence[_Term]) -> int:
    """Return the window in the first half at which falling step times settle; -1 if none do."""
    changes = np.diff(fitted)
    rising = np.flatnonzero(changes > 1e-9)
    until = min(len(fitted) // 2, int(rising[0]) if len(rising) else len(fitted))
    falling = np.flatnonzero(changes[:until] < -1e-9)
    if not len(falling) or any(each.begin < until < each.end for each in terms):
        return -1
    return int(falling[-1]) + 1


def _split_parts(windows: RunWindows, known: Indexes) -> tuple[list[str], Floats]:
    """Return names of classes of time, and their means over the ranks: [windows, classes].

    CPU contention is a class if it was measured in all windows.
    """
    parts_ns = np.nanmean(windows.parts_ns[:, known], axis=0)
    lack_ns = windows.lack_ns[:, known]
    if not np.isfinite(lack_ns).any(axis=(0, 2)).all():
        return list(PARTS), parts_ns
    lack_ns = np.nanmean(lack_ns, axis=0)
    return [*PARTS, "cpu"], np.column_stack([parts_ns - lack_ns, lack_ns.sum(axis=1)])


def _find_coincidences(
    windows: RunWindows, findings: Findings, at: int, *, rising: bool
) -> list[str]:
    """Return what changed at the same time as the step time, within the error of its window."""
    found: list[str] = []
    for episode in findings.episodes:
        step = episode.since_step if rising else episode.until_step
        if step is None or abs(step - windows.first_steps[at]) > _NEAR_WINDOWS * windows.width:
            continue
        diagnosis = findings.diagnosis(episode.key)
        cause = diagnosis.causes[0].kind if diagnosis and diagnosis.causes else ""
        which = "became slow" if rising else "was no longer slow"
        found.append(f"rank {episode.rank} {which}{f' ({cause})' if cause else ''}")
    for name, flag in TAG_NAMES.items():
        tagged = np.array([bool(each & flag) for each in windows.tags])
        if tagged[max(0, at - 1) : at + 1].any() and tagged.mean() <= _RARE:
            found.append(name)
    return found


def _keeps_compiling(windows: RunWindows) -> bool:
    """Return True if steps still compile in most windows of the second half of the run."""
    later = windows.tags[len(windows) // 2 :]
    compiling = [each for each in later if each & Flag.COMPILED]
    return len(windows) >= MIN_WINDOWS and 2 * len(compiling) > len(later)


def _build_long(kind: str, long: LongSteps) -> Regime:
    waited_for = long["waited_for"]
    return {
        "kind": kind,
        "since_step": None,
        "until_step": None,
        "period": long["period"],
        "before_s": long["mean_s"] - long["more_s"],
        "after_s": long["mean_s"],
        "part": long["part"],
        "parts_s": {},
        "coincides": [
            *long["kinds"],
            *([] if waited_for is None else [f"others waited for rank {waited_for}"]),
        ],
    }
