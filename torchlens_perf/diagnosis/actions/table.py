"""The table of actions, by the kind and the general advice of a verdict. Pure.

Each verdict comes with a general action. If a rule finds that a more precise one applies, the verdict
gets that action, with the figures of the run that justify it.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.diagnosis.actions import communication, computing, host, loading
from torchlens_perf.diagnosis.actions.job import Job, Rule
from torchlens_perf.diagnosis.what_if import MAX_DRIFT, MODEL_ERROR, parse_change
from torchlens_perf.errors import ConfigError
from torchlens_perf.verdicts.verdict import Verdict

COMPUTING = "computing"
_LAUNCHES = (computing.use_cuda_graphs, computing.enlarge_micro_batch)
ACTIONS: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("data_bound", "data"): (loading.add_workers, loading.keep_workers, loading.pin_memory),
    ("long_steps", "data"): (loading.keep_workers,),
    ("communication_bound", "communication"): (
        communication.resize_buckets, communication.do_not_search_unused, communication.declare_static_graph,
        communication.reduce_once_per_step, communication.accumulate_gradients,
    ),
    ("communication_bound", "ranks"): (communication.balance_lengths,),
    ("compute_bound", COMPUTING): (
        computing.fuse_optimizer, computing.group_tensors, computing.keep_activations,
    ),
    ("host_bound", "host"): (
        host.do_not_synchronize, host.set_gradients_to_none, loading.pin_memory,
    ),
    ("host_bound", "launches"): (computing.compile_model, *_LAUNCHES),
    ("host_bound", "compiled_launches"): _LAUNCHES,
}  # fmt: skip
"""Rules for precise actions, by the kind of a verdict and its `advice`."""
MIN_GAIN = 0.02
"""An action whose gain is certainly no larger share of a step is not given."""
_MIN_COMPUTING_GAIN = 0.1
"""The smallest gain for which a verdict on computing does not name the largest module instead."""


class Choice(NamedTuple):
    """A precise action on a verdict."""

    rule: Rule
    action: str
    because: str
    share: float | None
    """Share of the gain in a mean step; None if it is not known."""


def choose_actions(job: Job) -> None:
    """Give each verdict of the job's report the precise action with the largest gain, if any."""
    if job.report["lost_time"] is None:
        return
    rows = job.report["verdicts"]
    for place, row in enumerate(rows):
        found = [] if row.is_over else find_actions(job, row)
        if found:
            action, because = found[0].action, found[0].because
            rows[place] = structs.replace(row, action=action, because=because)


def find_actions(job: Job, row: Verdict) -> list[Choice]:
    """Return the precise actions on a verdict, the largest gain first, and unknown gains last."""
    least = _MIN_COMPUTING_GAIN if row.advice == COMPUTING else 0.0
    judged = filter(None, (_judge(job, rule) for rule in ACTIONS.get((row.kind, row.advice), ())))
    return sorted(
        (each for each in judged if each.share is None or each.share >= least),
        key=lambda each: -(each.share or 0.0),
    )


def _judge(job: Job, rule: Rule) -> Choice | None:
    """Return the action of a rule; None if its gain is too small or cannot be predicted."""
    proposal = rule.find(job)
    if proposal is None:
        return None
    action = proposal.action[0].lower() + proposal.action[1:]
    step_s = job.lost.step_s
    if proposal.change is None and proposal.gain_s is None:
        return Choice(rule, action, proposal.because, None)
    if proposal.change is None:
        gain_s = min(proposal.gain_s or 0.0, step_s)
        low_s = (1 - MODEL_ERROR) * gain_s
    elif job.replay is None or job.replay.drift_share > MAX_DRIFT:
        return None
    else:
        try:
            predicted = job.replay.predict([parse_change(proposal.change)])
        except ConfigError:  # The run does not have what the change names.
            return None
        if predicted is None:
            return Choice(rule, action, proposal.because, None)
        gain_s, low_s = predicted.gain_s, predicted.low_s
    if not low_s >= MIN_GAIN * step_s:
        return None
    gain = f"{format_duration(gain_s)} ({format_percent(gain_s / step_s)}) per step"
    return Choice(rule, action, f"{proposal.because} Predicted gain: {gain}.", gain_s / step_s)
