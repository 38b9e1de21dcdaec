"""Run a check in the processes of a launcher: measure, judge, report."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence

import msgspec
import torch

from torchlens_perf.check.figures import RankFigures
from torchlens_perf.check.judge import NO_ANSWER, build_verdict, judge_machines
from torchlens_perf.check.machine import (
    Measure,
    describe_machine,
    list_node_measures,
    list_rank_measures,
    read_sizes,
)
from torchlens_perf.check.ranks import Ranks
from torchlens_perf.check.words import describe_extent, format_report
from torchlens_perf.errors import require
from torchlens_perf.run.identity import collect_job_attributes
from torchlens_perf.run.place.launcher import detect_place
from torchlens_perf.run.processes import read_command_line
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.verdicts.verdict import Verdict

FOUND, UNKNOWN = 1, 3
"""Exit codes, as of other commands: something is slow; too little was measured to tell."""
_ROUNDS = 3
_MACHINE_SHARE = 0.4
"""Share of the time for the measures of ranks and nodes."""


def run_check(options: argparse.Namespace) -> int:
    """Run the check and return its exit code. Raise ConfigError for the user's mistakes."""
    require(options.seconds >= 2, f"--seconds {options.seconds:g}: must be at least 2")
    warnings.simplefilter("ignore", FutureWarning)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    place = detect_place(os.environ, None, read_command_line(os.getppid()))
    ranks = Ranks(place, 2 * options.seconds + 60, functools.partial(_report_missing, options))
    try:
        first = RankFigures(
            rank=place.rank,
            local_rank=place.local_rank or 0,
            host=socket.gethostname(),
            device=torch.cuda.get_device_name() if ranks.device.type == "cuda" else "CPU",
            machine=describe_machine(),
            switch=collect_job_attributes(os.environ).get("network.switch", ""),
        )
        everyone = ranks.gather(first, RankFigures)
        measure_machine(ranks, first, everyone, options.seconds * _MACHINE_SHARE)
        everyone = ranks.gather(first, RankFigures)
        verdicts = judge_machines(everyone) if ranks.rank == 0 else []
        code = ranks.share(report(options, everyone, verdicts) if ranks.rank == 0 else None, int)
        ranks.leave()
    except RuntimeError as error:
        return ranks.fail(error)
    return code


def report(
    options: argparse.Namespace, everyone: Sequence[RankFigures], verdicts: Sequence[Verdict]
) -> int:
    """Print or write the result, and return the exit code."""
    is_compared, extent = len(everyone) > 1, describe_extent(everyone)
    code = FOUND if verdicts else 0 if is_compared else UNKNOWN
    if options.json:
        result = {"exit_code": code, "verdicts": verdicts, "ranks": everyone}
        with contextlib.ExitStack() as opened:
            file = (
                sys.stdout if options.json == "-" else opened.enter_context(open(options.json, "w"))
            )
            json.dump(msgspec.to_builtins(result, str_keys=True), file, indent=1)
            file.write("\n")
    if options.json != "-":
        text = f"OK  {extent}: nothing is slow" if is_compared else f"NOT COMPARED  {extent}"
        print("\n".join(format_report(everyone, verdicts, text)))
    return code


def _report_missing(options: argparse.Namespace, missing: Sequence[int], reason: str) -> int:
    subject = format_rank_list(missing) if missing else "all ranks"
    return report(options, [], [build_verdict(NO_ANSWER, subject, (), missing, reason)])


def measure_machine(
    ranks: Ranks, own: RankFigures, everyone: list[RankFigures], seconds: float
) -> None:
    """Measure this rank and, if it is the first of its node, the node. Repeats each measure."""
    is_first = own.rank == min(each.rank for each in everyone if each.host == own.host)
    of_rank, of_node = list_rank_measures(ranks.device), list_node_measures()
    budget_s = seconds / _ROUNDS / (len(of_rank) + len(of_node))
    if is_first:
        own.of_node.update({name: [value] for name, value in read_sizes().items()})
    for _ in range(_ROUNDS):
        _measure(ranks, of_rank, own.of_rank, own.not_measured, budget_s)
        _measure(
            ranks,
            of_node if is_first else dict.fromkeys(of_node),
            own.of_node,
            own.not_measured,
            budget_s,
        )


def _measure(
    ranks: Ranks, measures: Mapping[str, Measure | None], values: dict[str, list[float]],
    failed: dict[str, str], budget_s: float,
) -> None:  # fmt: skip
    for name, measure in measures.items():
        ranks.meet(name)
        if measure is not None:
            try:
                values.setdefault(name, []).append(measure(budget_s))
            except (OSError, RuntimeError, ArithmeticError, ValueError) as error:
                failed[name] = str(error)
