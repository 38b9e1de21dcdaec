"""`report --fail-on`: an exit code that depends on verdicts and on the available data."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.commands.command import FOUND, UNKNOWN
from torchlens_perf.errors import unknown_word_text
from torchlens_perf.verdicts.kinds import KINDS as VERDICT_KINDS

if TYPE_CHECKING:
    from torchlens_perf.verdicts.node_state import NodeState
    from torchlens_perf.verdicts.stragglers.findings import Findings
    from torchlens_perf.verdicts.verdict import Verdict
    from torchlens_perf.verdicts.words.report import Report

KINDS = {each.fail_on: each for each in VERDICT_KINDS.values() if each.fail_on and not each.is_past}
"""Kinds of verdicts in the report, by their names on the command line."""


def parse_verdict_names(text: str) -> list[str]:
    """Return the names in a comma-separated list. Raise ArgumentTypeError for an unknown name."""
    found = [each.strip() for each in text.split(",")]
    for name in found:
        if name not in KINDS:
            raise argparse.ArgumentTypeError(
                f"{unknown_word_text('verdict', name, KINDS)} Verdicts: {', '.join(KINDS)}"
            )
    return found


def choose_exit_code(
    asked: Iterable[str], report: Report, states: Sequence[NodeState]
) -> tuple[int, str]:
    """Return 0, FOUND or UNKNOWN, and a line with the reason.

    states: states of the report's nodes.
    """
    asked = list(dict.fromkeys(asked))
    findings = max((state.findings for state in states), key=lambda each: each.compared)
    found = [
        name for name in asked if any(_is_current_verdict(row, name) for row in report["verdicts"])
    ]
    if found:
        return FOUND, f"--fail-on: found {', '.join(found)}"
    reasons = [f"{name}: {why}" for name in asked if (why := _why_unknown(name, report, findings))]
    return (UNKNOWN, f"--fail-on: not enough data for {'; '.join(reasons)}") if reasons else (0, "")


def _is_current_verdict(row: Verdict, name: str) -> bool:
    """Return True if a row is a current verdict of the kind with this name.

    A hang that has ended stays current while it costs enough for the report (order.py). A verdict
    on CPU contention of one rank replaces the verdict on that slow rank.
    """
    slow = name == "slow-rank" and row.kind == "lack_of_cpu" and row.rank is not None
    return not row.is_over and (slow or row.traits.fail_on == name)


def _why_unknown(name: str, report: Report, findings: Findings) -> str:
    """Return why the absence of a verdict proves nothing, or "" if the verdict could be judged."""
    steps, rows = report["steps"], report["verdicts"]
    if not steps["count"]:
        return "no step was recorded"
    if KINDS[name].stops_job:
        return ""
    if any(row.kind == "hang" for row in rows):
        return "the job hangs, so this was not judged"
    if steps["p50_s"] is None:
        return "all steps are warm-up steps"
    is_undecided = any(row.is_undecided for row in rows) or findings.detectable_ns is None
    if name == "slow-rank" and (is_undecided or findings.compared < 2):
        return "only one rank" if report["run"]["world_size"] < 2 else "the ranks were not compared"
    if name == "slow-link" and not report["slow_links"].compared:
        return "no links were compared"
    if name == "growing-steps" and steps["trend"] is None:
        return "too few steps"
    if name == "cpu-contention" and steps["sampled_lack_of_cpu"] is None:
        typical = [rank["typical"] for rank in report["ranks"] if rank["typical"] is not None]
        if all(each["lack_of_cpu"] is None for each in typical):
            return "CPU contention was not measured"
    if KINDS[name].limit and any(row.kind == "not_known" for row in rows):
        return "the parts of the step's time are unknown"
    return ""
