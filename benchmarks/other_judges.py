"""How other tools name slow ranks, by the rules that they publish, over simulated steps.

Each rule gets what it would have at best: own time, from which all waiting has been taken, of exactly the steps in
question. In life their timers also hold waiting inside a phase, and their intervals lie anyhow.
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
    """What a rule says of an interval."""

    named: frozenset[int]
    first: int
    """The rank that it holds to be the slowest, named or not."""


def relative_score(parts_ns: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """nvidia-resiliency-ext 0.4.1, straggler/reporting.py, ReportGenerator._compute_gpu_perf_score with the smallest
    median over ranks as reference: of each kernel that median by one's own, averaged by the time spent in it.

    parts_ns: [ranks, steps, own parts]; forward, backward and optimizer stand for kernels. Returns [ranks].
    """
    medians = np.median(parts_ns[:, :, KERNELS], axis=1)
    return _score(medians, medians.min(axis=0), parts_ns)


def individual_score(
    parts_ns: npt.NDArray[np.float32], best_before: npt.NDArray[np.float64] | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The same with one's own smallest median so far as reference. Returns the scores, and the smallest medians."""
    medians = np.median(parts_ns[:, :, KERNELS], axis=1).astype(np.float64)
    best = medians if best_before is None else np.minimum(best_before, medians)
    return _score(medians, best, parts_ns), best


def _score(
    medians: npt.NDArray[np.floating], reference: npt.NDArray[np.floating], parts_ns: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    weight = parts_ns[:, :, KERNELS].sum(axis=1, dtype=np.float64)
    score: npt.NDArray[np.float64] = (reference / medians * weight).sum(axis=1) / weight.sum(axis=1)
    return score


def below(score: npt.NDArray[np.float64], threshold: float) -> Answer:
    """Report.identify_stragglers(): all ranks whose score is below the threshold."""
    return Answer(frozenset(np.flatnonzero(score < threshold).tolist()), int(score.argmin()))


def slowest_forward(parts_ns: npt.NDArray[np.float32]) -> Answer:
    """Megatron-LM, megatron/core/utils.py, StragglerDetector.report(): the rank with the longest mean forward pass."""
    rank = int(parts_ns[:, :, FORWARD].mean(axis=1).argmax())
    return Answer(frozenset([rank]), rank)


def slowest_step(duration_ns: npt.NDArray[np.float64], ranks: int, random: np.random.Generator) -> Answer:
    """The rank with the longest mean step: a dashboard of step times.

    All ranks end a step together, so what differs is the reading of the clock; here 20 us.
    """
    means = duration_ns.mean() + random.normal(0, 20_000 / np.sqrt(len(duration_ns)), ranks)
    return Answer(frozenset([int(means.argmax())]), int(means.argmax()))
