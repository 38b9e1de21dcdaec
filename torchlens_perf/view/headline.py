"""A verdict as a headline: status, cost, facts, one sentence, an action, and a command to copy.
Pure.

The terminal report, `top`, pages, notebooks and the list of runs all show headlines.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
    format_run_duration,
    printable,
)
from torchlens_perf.run.rank_ranges import format_ranges, format_rank_list
from torchlens_perf.run.verdicts import format_step_range
from torchlens_perf.verdicts.kinds import BAD, GOOD, NEUTRAL, NOT_COMPUTING_KINDS, WARNING
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.past import format_time_of_day
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.verdicts.words.run_state import describe_failure_time
from torchlens_perf.view.rank_tables import find_largest_section
from torchlens_perf.view.theme import PARTS

_SCOPES = {"node": "SLOW NODE", "position": "IMBALANCE"}
_PHASES = {
    "compute": "forward and backward",
    "gap": "gaps between phases",
}
_PLACES = ("phase", "in", "bound by", "module", "modules")
"""Names of facts on the place of a verdict in the step."""
_BY_MEAN_STEP = ("straggler", "long_steps")
"""Kinds of verdicts whose cost is a share of a mean step."""
_STEP_WORDS = {"died": "after", "out_of_memory": "in"}
"""How the step of a single event is introduced."""


@dataclasses.dataclass(frozen=True)
class Headline:
    """A short form of one verdict: status, location, cost, sentence, cause and action."""

    kind: str
    status: str
    """A status in capitals, such as "SLOW RANK"."""
    severity: str
    """A key of theme.SEVERITIES."""
    facts: tuple[tuple[str, str], ...]
    """Name and text of each fact but the cost: rank, phase, module, together with, steps, seen.

    "together with" names the other slow ranks that have the same cost.
    """
    cost_s_per_step: float | None
    cost_share: float | None
    """The cost as a share of the step time.

    Both cost fields are None if the cost is zero or not known.
    """
    sentence: str
    """The finding in words. The cost is left out if the fields above have it."""
    cause: str
    """The cause, or the checks that found none; "" if no cause was looked for."""
    action: str
    """The recommended action as a sentence; "" if nothing is recommended."""
    command: str
    """A shell command to copy; "" if no command helps."""
    is_over: bool
    numbers: str = ""
    """The ranks without their host, such as "ranks 1,4-7"; "" if the verdict is on all ranks."""
    places: tuple[str, ...] = ()
    """Where groups of ranks are in a hang, as texts."""
    loss: str = ""
    """What a job lost that stopped: time of its ranks, and steps since its last checkpoint."""
    paid_once_s: float | None = None
    """The cost if it is paid once, as for a start; None for a cost per step."""
    whole: str = "step time"
    """The time of which the cost is a share."""
    first_sentence: str = ""
    """The first sentence of `sentence`; "" for headlines that are not of a report."""

    @property
    def ranks(self) -> str:
        """The ranks with their host, such as "13 (node-0001)"; "" if the verdict is on all ranks."""
        return next((text for name, text in self.facts if name in ("rank", "ranks")), "")

    @property
    def since(self) -> str:
        """The step since which the verdict is true, such as "step 40"; "" if that is not known."""
        return dict(self.facts).get("steps", "").removeprefix("since ")

    @property
    def cost_unit(self) -> str:
        """The label of the cost: "lost", "per step" for a bottleneck, or "lost per step"."""
        if self.paid_once_s is not None:
            return "lost"
        return "per step" if self.kind in NOT_COMPUTING_KINDS else "lost per step"

    @property
    def cost(self) -> str:
        """The cost as text with its share; "" if the verdict has no cost."""
        share = format_percent(self.cost_share or 0.0)
        return f"{self._amount} = {share} of {self.whole}" if self._amount else ""

    @property
    def short_cost(self) -> str:
        """The cost as text in few words; "" if the verdict has no cost."""
        share = format_percent(self.cost_share or 0.0)
        return f"{self._amount} ({share} of {self.whole})" if self._amount else ""

    @property
    def place(self) -> str:
        """The part of the step and the modules, such as "forward, blocks.2"; "" without any."""
        facts = dict(self.facts)
        return ", ".join(facts[name] for name in _PLACES if name in facts)

    @property
    def _amount(self) -> str:
        if not self.cost_s_per_step or self.cost_share is None:
            return ""
        if self.paid_once_s is not None:
            return format_duration(self.paid_once_s)
        return f"{format_duration(self.cost_s_per_step)} per step"


def build_headlines(report: Report, run_dir: str = "") -> list[Headline]:
    """Return a headline for each row of the report's `verdicts`, in the same order."""
    return [build_headline(row, report, run_dir) for row in report["verdicts"]]


def list_current(found: Sequence[Headline]) -> list[Headline]:
    """Return the current problems in their order; without any, the first verdict that is OK.

    Return the first verdict if none is OK, and [] if the report has no current verdict.
    """
    now = [each for each in found if not each.is_over]
    wrong = [each for each in now if each.severity in (BAD, WARNING)]
    return wrong or [each for each in now if each.severity == GOOD][:1] or now[:1]


def choose_headline(found: Sequence[Headline]) -> Headline | None:
    """Return the headline that sets the run's status: the first of list_current(), or None."""
    return next(iter(list_current(found)), None)


def describe_status(found: Sequence[Headline], room: int = 0) -> str:
    """Return status and ranks of the current problems: "BOTTLENECK + SLOW RANK 1".

    They have their place and cost if all fit into `room` characters: "SLOW RANK 1: forward, 12%".
    """
    now, whole = list_current(found), []
    for each in now:
        share = format_percent(each.cost_share) if each.cost_share else ""
        what = ", ".join(filter(None, (each.place, share)))
        whole.append(f"{_describe_subject(each)}: {what}" if what else _describe_subject(each))
    text = " + ".join(whole)
    return text if len(text) <= room else " + ".join(dict.fromkeys(map(_describe_subject, now)))


def _describe_subject(head: Headline) -> str:
    return f"{head.status} {head.numbers}".replace(" RANK rank ", " RANK ").rstrip()


def build_headline(row: Verdict, report: Report, run_dir: str = "") -> Headline:
    """Return the headline of one verdict. run_dir: the path for the command to copy."""
    status, severity = _status_and_severity(row)
    return Headline(
        kind=row.kind,
        status=status,
        severity=NEUTRAL if row.is_over else severity,
        facts=tuple((name, printable(text)) for name, text in _verdict_facts(row, report) if text),
        cost_s_per_step=row.cost_s_per_step or None,
        cost_share=row.cost_share or None,
        sentence=printable(row.explanation),
        cause=printable(row.cause),
        action=printable(f"{row.action} {row.because}".rstrip()),
        command=_suggested_command(row, report, run_dir),
        is_over=row.is_over,
        numbers=format_rank_list(row.ranks) if row.ranks else "",
        places=tuple(map(printable, row.evidence.places)),
        loss=_describe_loss(row, report),
        paid_once_s=row.lost_s if row.evidence.paid_once_of else None,
        whole=row.evidence.paid_once_of or _describe_step(row),
        first_sentence=printable(
            next(iter(row.evidence.explain(row) or row.evidence.describe(row)), "")
        ),
    )


def _describe_loss(row: Verdict, report: Report) -> str:
    """Return what the ranks lost because the job stopped; "" for other verdicts."""
    if not (row.traits.stops_job or row.evidence.stops_run):
        return ""
    ranks, texts = report["run"]["world_size"], list[str]()
    if row.lost_s:
        hours = f" on {ranks} ranks ({format_run_duration(row.lost_s * ranks)} of rank time)"
        texts.append(f"{format_run_duration(row.lost_s)}{hours * (ranks > 1)}")
    attempt = None if report["goodput"] is None else report["goodput"].attempts[-1]
    if attempt is not None and attempt.saved_step is not None:
        steps = max(0, attempt.steps - attempt.saved_step)
        took = format_run_duration(steps * (report["steps"]["mean_s"] or 0.0))
        count = format_count(steps, "step")
        texts.append(f"{count} ({took}) since the last recorded checkpoint")
    return ", ".join(texts)


def _describe_step(row: Verdict) -> str:
    """Return the step of which a cost per step is a share. Verdicts rest on different steps."""
    if not row.cost_s_per_step or not row.cost_share:
        return "step time"
    which = "typical " if row.evidence.is_of_run else "mean " * (row.traits.name in _BY_MEAN_STEP)
    return f"a {which}step of {format_duration(row.cost_s_per_step / row.cost_share)}"


def _status_and_severity(row: Verdict) -> tuple[str, str]:
    traits, scope = row.traits, row.evidence.scope
    if scope in _SCOPES:
        return _SCOPES[scope], traits.severity
    if row.kind == "long_steps" and row.rank is not None:
        return "STALLS", traits.severity
    return ("NOT COMPARED", NEUTRAL) if row.is_undecided else (traits.status, traits.severity)


def _verdict_facts(row: Verdict, report: Report) -> list[tuple[str, str]]:
    """Return pairs of name and text for the facts of a verdict, such as rank and phase."""
    traits, evidence, ranks, held = row.traits, row.evidence, row.ranks, row.held
    found: list[tuple[str, str]] = []
    if ranks:
        host = (row.where or {}).get("host.name")
        of_one_host = len(ranks) == 1 or evidence.scope == "node"
        at = f" ({host})" if host and of_one_host else ""
        found.append(("rank" if len(ranks) == 1 else "ranks", f"{format_ranges(ranks)}{at}"))
    if traits.limit:
        is_host = traits.name == "host_bound"
        section = find_largest_section(report, row.cost_s_per_step or 0.0) if is_host else ""
        where = f"section {section}" if section else traits.limit
        found.append(("bound by" if traits.name == "lack_of_cpu" else "in", where))
    elif row.phase is not None and traits.name != "long_steps":
        found.append(("phase", phase_name(row.phase)))
    elif evidence.long is not None and row.rank is not None:
        found.append(("phase", phase_name(evidence.long["part"])))
    if traits.is_summary:
        return []
    modules = evidence.modules
    if modules:
        found.append(("module" if len(modules) == 1 else "modules", ", ".join(modules)))
    if evidence.slow_too:
        found.append(("together with", format_rank_list(evidence.slow_too)))
    if evidence.failure is not None:
        found.append(("steps", describe_failure_time(evidence.failure)))
    elif held is not None and held.since_step is not None and row.kind not in _STEP_WORDS:
        found.append(("steps", format_step_range(held.since_step, held.until_step)))
        if row.kind == "straggler" and evidence.share_of_steps is not None:
            found.append(
                (
                    "seen",
                    f"slow in {format_percent(evidence.share_of_steps)} of the steps since then",
                )
            )
        elif held.windows_judged:
            found.append(
                (
                    "seen",
                    f"in {held.windows_held} of {held.windows_judged} windows"
                    f" of {held.window_steps} steps",
                )
            )
    elif row.since_step is not None:
        found.append(("steps", f"{_STEP_WORDS.get(row.kind, 'since')} step {row.since_step}"))
    if held is not None and held.since and (traits.stops_job or evidence.stops_run):
        found.append(("at", format_time_of_day(held.since, report["run"]["started"])))
    return found


def fact_text(name: str, text: str) -> str:
    """Return a fact as text: "rank 13", "since step 40", "seen slow in 97% of the steps since then"."""
    return text if name == "steps" else f"{name} {text}"


def phase_name(phase: str) -> str:
    """Return the name of a step part on screens, such as "forward", "data" or "CPU contention"."""
    return _PHASES.get(phase) or (PARTS[phase].name if phase in PARTS else phase)


def _suggested_command(row: Verdict, report: Report, run_dir: str) -> str:
    """Return the command that profiles the rank of a verdict, now or in the next run."""
    if row.is_over or not row.traits.is_captured:
        return ""
    rank = row.rank
    if rank is None:
        rank = min((each["rank"] for each in report["ranks"]), default=0)
    if report["run"]["live"]:
        return f"torchlens-perf capture {shlex.quote(run_dir)} --rank {rank}" if run_dir else ""
    if row.kind != "straggler" or any(each["rank"] == rank for each in report["captures"]):
        return ""
    return (
        "export TORCHLENS_PERF_CAPTURE=verdict  # then rerun the job: the slow rank is profiled"
        " automatically"
    )
