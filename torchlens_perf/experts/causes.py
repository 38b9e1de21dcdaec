"""Tell a rank that is slow because of its tokens from one with a slow machine. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from torchlens_perf.verdicts.causes.metrics import measured_signals
from torchlens_perf.verdicts.causes.rules import MAX_CAUSES, MIN_EXPLAINED
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import Cause, Diagnosis

_TOKENS, _SHARE = "expert_ktokens", "expert_share"
_SUBJECT = "tokens of its experts"
_Explanation = tuple[str, float, Mapping[str, str]]
"""Kind of a cause, the share of the excess that it explains, and Cause.about."""
_PHASES = ("forward", "backward", "compute", "recompute", "cpu")
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
    if _SHARE in loads[rank] and timed and usual:
        pace = float(np.median(timed)) / usual
        found = _find_timed_causes(episode, loads[rank], max(usual, past), pace)
    else:
        more = loads[rank][_TOKENS] / max(usual, past, 1e-6) - 1
        found = _find_untimed_causes(evidence["longer_share"], more)
    causes = [*diagnosis.causes]
    # What other causes explain is not explained by a slow machine once more.
    known = {"tokens": 0.0, "machine": sum(each.explains or 0.0 for each in causes)}
    for kind, explains, reason in found:
        if explains - known[kind] >= MIN_EXPLAINED:
            causes.append(Cause(kind, explains - known[kind], evidence, reason))
    causes.sort(key=lambda each: -(MIN_EXPLAINED if each.explains is None else each.explains))
    looked_at = (*diagnosis.looked_at, _SUBJECT)
    return dataclasses.replace(diagnosis, causes=tuple(causes[:MAX_CAUSES]), looked_at=looked_at)


def _find_timed_causes(
    episode: Episode, load: Mapping[str, float], usual: float, pace: float
) -> Iterator[_Explanation]:
    """Divide the excess in the experts' time: more tokens at the usual pace, and a slower pace.

    usual: thousands of tokens that do not make the rank slow. pace: share of the step that other
    ranks' experts take for a thousand tokens.
    """
    of_excess = episode.step_ns / max(1.0, episode.excess_ns)
    yield "tokens", (load[_TOKENS] - usual) * pace * of_excess, {}
    yield "machine", (load[_SHARE] - load[_TOKENS] * pace) * of_excess, {}


def _find_untimed_causes(longer: float, more: float) -> Iterator[_Explanation]:
    """Take all work of the rank to grow with its tokens, where the experts' time is not known.

    The share that the tokens explain is then an upper bound, and that of the machine a lower bound.
    longer, more: additional work and tokens of the rank, as shares of the usual.
    """
    at_most = max(0.0, more) / max(longer, 1e-6)
    yield "tokens", at_most, {"reason": "tokens_untimed"}
    yield "machine", 1 - at_most, {}
