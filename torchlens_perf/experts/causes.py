"""Tell a rank that is slow because of its tokens from one with a slow machine. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from torchlens_perf.verdicts.causes.metrics import measured_signals
from torchlens_perf.verdicts.causes.rules import MAX_CAUSES, MIN_EXPLAINED
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import MORE_WORK, Cause, Diagnosis

_TOKENS, _SHARE = "expert_ktokens", "expert_share"
_SUBJECT = "tokens of its experts"
_PHASES = ("forward", "backward", "compute", "recompute")
"""Phases in which experts compute."""


def add_token_causes(
    diagnosis: Diagnosis,
    episode: Episode,
    during: Mapping[int, npt.NDArray[np.float32]],
    before: npt.NDArray[np.float32] | None,
    together: Collection[int] = (),
) -> Diagnosis:
    """Return the diagnosis with the rank's tokens, or its machine, among its causes.

    The other arguments are those of rules.diagnose(). Without the tokens of the rank and of other
    ranks, the diagnosis is not changed.

    More tokens explain as much time as they take on other ranks. If the time of the experts is not
    known, all work is taken to grow with the tokens, so that this share is an upper bound. Computation
    that neither tokens nor other causes explain is longer because of the machine.
    """
    loads = {rank: measured_signals(values) for rank, values in during.items()}
    loads = {rank: load for rank, load in loads.items() if _TOKENS in load}
    rank = episode.rank
    others = [load for each, load in loads.items() if each != rank and each not in together]
    if rank not in loads or not others or episode.phase not in _PHASES:
        return diagnosis
    usual = float(np.median([load[_TOKENS] for load in others]))
    evidence = {
        "tokens": 1e3 * loads[rank][_TOKENS],
        "mean_tokens": 1e3 * float(np.mean([load[_TOKENS] for load in loads.values()])),
        "others_tokens": 1e3 * usual,
        "longer_share": episode.excess_ns / max(1.0, episode.others_work_ns),
    }
    evidence["of_mean_times"] = evidence["tokens"] / max(1.0, evidence["mean_tokens"])
    past = measured_signals(before).get(_TOKENS, 0.0) if before is not None else 0.0
    timed = [load[_SHARE] for load in others if _SHARE in load]
    more = loads[rank][_TOKENS] / max(usual, past, 1e-6) - 1
    # Time that the experts of other ranks take for their tokens.
    usual_ns, reason = episode.others_work_ns, "tokens_untimed"
    if timed:
        usual_ns, reason = float(np.median(timed)) * episode.step_ns, "tokens"
    explained = max(0.0, more) * usual_ns / max(1.0, episode.excess_ns)
    causes = [*diagnosis.causes]
    left = 1 - explained - sum(each.explains or 0.0 for each in causes)
    if explained >= MIN_EXPLAINED:
        causes.append(Cause("tokens", explained, evidence, {"reason": reason}))
    if left >= MIN_EXPLAINED and episode.more_workload <= MORE_WORK:
        causes.append(Cause("machine", left, evidence, {}))
    causes.sort(key=lambda each: -(MIN_EXPLAINED if each.explains is None else each.explains))
    looked_at = (*diagnosis.looked_at, _SUBJECT)
    return dataclasses.replace(diagnosis, causes=tuple(causes[:MAX_CAUSES]), looked_at=looked_at)
