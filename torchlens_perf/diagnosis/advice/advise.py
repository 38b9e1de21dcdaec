"""The registry of rules, and the advice that they give on a job. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.diagnosis.advice import balance, communication, computing, host, loading
from torchlens_perf.diagnosis.what_if import MAX_DRIFT, MODEL_ERROR, parse_change
from torchlens_perf.errors import ConfigError
from torchlens_perf.run.verdicts import join_sentence_and_action, remove_action
from torchlens_perf.verdicts.words.bottleneck import (
    COMMUNICATION_ACTION,
    COMPILED_LAUNCH_ACTION,
    DATA_ACTION,
    HOST_ACTION,
    LAUNCH_ACTION,
    RANKS_ACTION,
)
from torchlens_perf.verdicts.words.modules import computing_action

if TYPE_CHECKING:
    from torchlens_perf.diagnosis.advice.rule import Job, Proposal, Rule
    from torchlens_perf.verdicts.words.report import Advice, Report

RULES: tuple[Rule, ...] = (
    *loading.RULES, *communication.RULES, *computing.RULES, *host.RULES, *balance.RULES,
)  # fmt: skip
MIN_GAIN = 0.02
"""Advice whose gain is certainly no larger share of a step is not given."""


# The smallest share of a step for which advice replaces the action of a verdict on computing.
_WORTH_DOING_FIRST = 0.1
# General actions of verdicts, and the rules whose advice is more precise.
_PRECISE = {
    DATA_ACTION: loading.RULES,
    COMMUNICATION_ACTION: communication.RULES,
    RANKS_ACTION: balance.RULES,
    HOST_ACTION: (host.do_not_synchronize,),
    COMPILED_LAUNCH_ACTION: (computing.use_cuda_graphs,),
    LAUNCH_ACTION: (computing.compile_model, computing.use_cuda_graphs),
}


def add_advice(job: Job) -> None:
    """Add advice to the job's report, and let verdicts name the same actions."""
    report: Report = job.report
    report["advice"] = find_advice(job)
    for general, rules in {**_PRECISE, computing_action(report): computing.RULES}.items():
        keys = {rule.key for rule in rules}
        least = _WORTH_DOING_FIRST if rules is computing.RULES else 0.0
        found = [each for each in report["advice"] if (each["share"] or 0.0) >= least]
        precise = next((each["action"] for each in found if each["key"] in keys), "")
        for row in report["verdicts"]:
            if precise and row["action"] == general:
                finding = remove_action(row["text"], general)
                row["action"] = precise[0].lower() + precise[1:]
                row["text"] = join_sentence_and_action(finding, row["action"])


def find_advice(job: Job) -> list[Advice]:
    """Return the advice on a job, the largest gain first, and unknown gains last."""
    if job.report["lost_time"] is None:
        return []
    proposals = [(rule, rule.find(job)) for rule in RULES]
    found = [_build_advice(job, rule, each) for rule, each in proposals if each is not None]
    return sorted(filter(None, found), key=lambda each: -(each["gain_s"] or 0.0))


def _build_advice(job: Job, rule: Rule, proposal: Proposal) -> Advice | None:
    """Return the advice of a rule; None if its gain is too small or cannot be predicted."""
    gain_s = low_s = high_s = None
    step_s = job.lost["step_s"]
    if proposal.change is not None:
        if job.replay is None or job.replay.drift_share > MAX_DRIFT:
            return None
        try:
            predicted = job.replay.predict([parse_change(proposal.change)])
        except ConfigError:  # The run does not have what the change names.
            return None
        gain_s, low_s, high_s = predicted["gain_s"], predicted["low_s"], predicted["high_s"]
    elif proposal.gain_s is not None:
        gain_s = min(proposal.gain_s, step_s)
        low_s, high_s = (1 - MODEL_ERROR) * gain_s, min(step_s, (1 + MODEL_ERROR) * gain_s)
    if low_s is not None and not low_s >= MIN_GAIN * step_s:
        return None
    return {
        "key": rule.key,
        "finding": proposal.finding,
        "action": proposal.action,
        "change": proposal.change,
        "gain_s": gain_s,
        "low_s": low_s,
        "high_s": high_s,
        "share": None if gain_s is None else gain_s / step_s,
        "link": rule.link,
    }
