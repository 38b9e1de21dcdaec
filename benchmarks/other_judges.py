"""Published rules by which other tools detect slow ranks, for simulated steps.

Each rule receives ideal input: step times without any waiting, for exactly the evaluated steps. In
practice the tools' timers include waits inside a phase, and their intervals are not aligned with
the fault.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.records import OWN_PARTS

KERNELS = tuple(OWN_PARTS.index(part) for part in ("forward", "backward", "optimizer"))
FORWARD = OWN_PARTS.index("forward")


@dataclasses.dataclass(frozen=True)
class Answer:
    """Result of a rule for one interval."""

    named: frozenset[int]
    first: int
    """The slowest rank according to the rule, named or not."""


def relative_score(parts_ns: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the relative score of nvidia-resiliency-ext 0.4.1 for each rank.

    Follows ReportGenerator._compute_gpu_perf_score in straggler/reporting.py, with the smallest
    median over ranks as reference. The score of a kernel is this reference divided by the rank's
    own median. The rank's score is the average of its kernels, weighted by time.

    `parts_ns` has the shape [ranks, steps, parts]. Forward, backward and optimizer stand for
    kernels.
    """
    medians = np.median(parts_ns[:, :, KERNELS], axis=1)
    return _score(medians, medians.min(axis=0), parts_ns)


def individual_score(
    parts_ns: npt.NDArray[np.float32], best_before: npt.NDArray[np.float64] | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the score of each rank relative to its own smallest medians so far, and these medians."""
    medians = np.median(parts_ns[:, :, KERNELS], axis=1).astype(np.float64)
    best = medians if best_before is None else np.minimum(best_before, medians)
    return _score(medians, best, parts_ns), best


def _score(
    medians: npt.NDArray[np.floating],
    reference: npt.NDArray[np.floating],
    parts_ns: npt.NDArray[np.float32],
) -> npt.NDArray[np.float64]:
    weight = parts_ns[:, :, KERNELS].sum(axis=1, dtype=np.float64)
    score: npt.NDArray[np.float64] = (reference / medians * weight).sum(axis=1) / weight.sum(axis=1)
    return score


def below(score: npt.NDArray[np.float64], threshold: float) -> Answer:
    """Return all ranks whose score is below the threshold, as Report.identify_stragglers() does."""
    return Answer(frozenset(np.flatnonzero(score < threshold).tolist()), int(score.argmin()))


def slowest_forward(parts_ns: npt.NDArray[np.float32]) -> Answer:
    """Return the rank with the longest mean forward pass.

    Follows StragglerDetector.report() in Megatron-LM, megatron/core/utils.py.
    """
    rank = int(parts_ns[:, :, FORWARD].mean(axis=1).argmax())
    return Answer(frozenset([rank]), rank)


def slowest_step(
    duration_ns: npt.NDArray[np.float64], ranks: int, random: np.random.Generator
) -> Answer:
    """Return the rank with the longest mean step, as on a dashboard of step times.

    All ranks end a step together, so their step times differ only by clock readings, here by 20 us.
    """
    means = duration_ns.mean() + random.normal(0, 20_000 / np.sqrt(len(duration_ns)), ranks)
    return Answer(frozenset([int(means.argmax())]), int(means.argmax()))
