"""Report the nodes that a run's verdicts name: each finding once to each target, if the rules allow it."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torchlens_perf.actions import ledger
from torchlens_perf.actions.kubernetes import Kubernetes
from torchlens_perf.actions.ledger import Ledger
from torchlens_perf.actions.nodes import (
    NamedNode,
    Rules,
    find_nodes,
    find_objection,
)
from torchlens_perf.actions.nvrx import FaultTolerantLauncher
from torchlens_perf.actions.nvsentinel import NVSentinel
from torchlens_perf.actions.otlp import export_outcome
from torchlens_perf.actions.targets import ExclusionList, NotSentError, Slurm, Target, Webhook
from torchlens_perf.errors import printable, require, unknown_word_text
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts.words.report import Report

_TARGETS: Mapping[str, Callable[[str], Target]] = {
    "slurm": lambda _: Slurm(drains=False),
    "slurm-drain": lambda _: Slurm(drains=True),
    "kubernetes": lambda _: Kubernetes(),
    "nvsentinel": lambda socket: NVSentinel(socket, drains=False),
    "nvsentinel-drain": lambda socket: NVSentinel(socket, drains=True),
    "nvrx": FaultTolerantLauncher,
    "exclude": lambda path: ExclusionList(Path(path)),
    "webhook": Webhook,
}
WOULD_SEND, REFUSED, KNOWN = "would send", "not sent", "sent before"
_FOLLOW_INTERVAL_S = 30.0


class Outcome(NamedTuple):
    """The outcome of one finding on one node at one target."""

    node: NamedNode
    target: str
    state: str
    """One of WOULD_SEND, REFUSED, KNOWN, SENT and FAILED."""
    text: str


def follow_run(run: Path, options: argparse.Namespace) -> int:
    """Report the nodes of a run, and print each outcome; with `follow`, until the job ends.

    options: those of the command `act`. Return 1 if something could not be sent. Raise ConfigError,
    RunStoreError or OSError.
    """
    targets = {text: parse_target(text) for text in options.to}
    rules = Rules(tuple(options.allow), options.min_cost, options.min_windows, options.most_nodes)
    printed: set[str] = set()
    while True:
        report = load_report(RunDirectory(run), lost_time=False)
        outcomes = list(report_nodes(report, run, targets, rules, send=options.send))
        for line in itertools.chain.from_iterable(map(describe_outcome, outcomes)):
            if line not in printed:
                printed.add(line)
                print(line)
        if not (options.follow and report["run"]["live"]):
            break
        time.sleep(_FOLLOW_INTERVAL_S)
    if not printed:
        print("No verdict names a node.")
    elif any(each.state == WOULD_SEND for each in outcomes):
        print("Nothing was sent: add --send.")
    return int(any(each.state == ledger.FAILED for each in outcomes))


def parse_target(text: str) -> Target:
    """Return the target of --to NAME or --to NAME=VALUE. Raise ConfigError."""
    name, _, value = text.partition("=")
    names = ", ".join(_TARGETS)
    require(
        name in _TARGETS, f"--to: {unknown_word_text('target', name, _TARGETS)} Targets: {names}"
    )
    return _TARGETS[name](value)


def report_nodes(
    report: Report, run: Path, targets: Mapping[str, Target], rules: Rules, *, send: bool
) -> Iterator[Outcome]:
    """Yield the outcome for each node that the run's verdicts name, at each target.

    targets: by the text of --to. send: False to send nothing. Raise RunStoreError if the ledger
    cannot be written.
    """
    record = Ledger(run)
    for node in find_nodes(report):
        for name, target in targets.items():
            with record.locked():
                outcome = _report_node(node, name, target, rules, record, send=send)
            if outcome.state in (ledger.SENT, ledger.FAILED):
                export_outcome(node, name, outcome.state, outcome.text)
            yield outcome


def _report_node(
    node: NamedNode, name: str, target: Target, rules: Rules, record: Ledger, *, send: bool
) -> Outcome:
    if record.is_sent(node, name):
        return Outcome(node, name, KNOWN, "")
    sent_name, recent = node.name_for(target.attribute), record.find_recent_nodes()
    objection = find_objection(
        node,
        rules,
        recent,
        drains=target.drains,
        sent_name=sent_name,
        while_live=target.while_live,
    )
    if objection:
        return Outcome(node, name, REFUSED, objection)
    try:
        what = target.describe(node)
    except NotSentError as error:
        return Outcome(node, name, REFUSED, str(error))
    if not send:
        return Outcome(node, name, WOULD_SEND, what)
    record.write(node, name, ledger.SENDING, what)
    try:
        state, answer = ledger.SENT, target.send(node)
    except (NotSentError, OSError, subprocess.SubprocessError) as error:
        state, answer = ledger.FAILED, str(error)
    record.write(node, name, state, answer)
    return Outcome(node, name, state, answer)


def describe_outcome(outcome: Outcome) -> Iterator[str]:
    """Yield a line on the node, and one on what was done."""
    node = outcome.node
    yield printable(f"{node.host}: {node.text}")
    yield printable(f"  {outcome.target}: {outcome.state}{outcome.text and f': {outcome.text}'}")
