"""Run a check in the processes of a launcher: measure, judge, report."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from torchlens_perf.check.baseline import build_baseline, exchange_baseline, judge_change
from torchlens_perf.check.communication import measure_groups, measure_links, parse_mesh
from torchlens_perf.check.figures import CPU_TIME, RankFigures
from torchlens_perf.check.judge import NO_ANSWER, build_verdict, judge_machines
from torchlens_perf.check.links import judge_links, list_nodes
from torchlens_perf.check.loader import check_data
from torchlens_perf.check.machine import (
    ROUNDS,
    describe_machine,
    list_node_measures,
    list_rank_measures,
    read_sizes,
)
from torchlens_perf.check.ranks import FOUND, UNKNOWN, Ranks
from torchlens_perf.check.tournament import Transfer
from torchlens_perf.check.words import format_report
from torchlens_perf.errors import require
from torchlens_perf.run.identity import collect_job_attributes
from torchlens_perf.run.place.launcher import detect_place
from torchlens_perf.run.processes import read_command_line
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.verdicts.verdict import Verdict

_MACHINE_SHARE, _GROUPS_SHARE, _LINKS_SHARE = 0.4, 0.2, 0.4
"""Shares of the time for ranks and nodes, for collectives, and for pairs of ranks."""


def run_check(options: argparse.Namespace) -> int:
    """Run the check and return its exit code. Raise ConfigError for the user's mistakes."""
    if options.data:
        return check_data(options)
    require(options.seconds >= 2, f"--seconds {options.seconds:g}: must be at least 2")
    warnings.simplefilter("ignore", FutureWarning)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    place = detect_place(os.environ, None, read_command_line(os.getppid()))
    mesh = parse_mesh(options.mesh or f"world={place.world_size}", place.world_size)
    ranks = Ranks(place, 3 * options.seconds + 90, functools.partial(_report_missing, options))
    try:
        first = RankFigures(
            rank=place.rank,
            place=f"{socket.gethostname()}/{place.local_rank or 0}",
            host=socket.gethostname(),
            device=ranks.device_name,
            machine=describe_machine(),
            switch=collect_job_attributes(os.environ).get("network.switch", ""),
        )
        everyone = ranks.gather(first, RankFigures)
        measure_machine(ranks, first, everyone, options.seconds * _MACHINE_SHARE)
        # What stands out is measured again. All ranks judge the same values.
        if judge_machines(ranks.gather(first, RankFigures)):
            measure_machine(ranks, first, everyone, options.seconds * _MACHINE_SHARE)
        for name, members, rates in measure_groups(ranks, mesh, options.seconds * _GROUPS_SHARE):
            first.values[name] = {" ".join(everyone[rank].place for rank in members): rates}
        transfers = measure_links(ranks, list_nodes(everyone), options.seconds * _LINKS_SHARE)
        everyone = ranks.gather(first, RankFigures)
        code = ranks.gather(conclude(options, everyone, transfers) if ranks.rank == 0 else UNKNOWN)[
            0
        ]
        ranks.close()
    except (RuntimeError, OSError) as error:
        ranks.fail(error)
    return code


def conclude(
    options: argparse.Namespace, everyone: Sequence[RankFigures], transfers: Sequence[Transfer]
) -> int:
    """Judge, keep the values for later, print or write the result, and return the exit code."""
    verdicts = judge_machines(everyone)
    # A rank without CPU time transfers slowly, too.
    slow = {
        rank for each in verdicts if each.evidence.cause.startswith(CPU_TIME) for rank in each.ranks
    }
    verdicts += [each for each in judge_links(transfers, everyone) if not slow & {*each.ranks}]
    new = build_baseline(everyone, transfers, time.strftime("%Y-%m-%d"), passed=not verdicts)
    old = exchange_baseline(new, [each.host for each in everyone])
    verdicts += judge_change(old, new, everyone) if old else []
    return _report(
        options, everyone, verdicts, new.values, is_compared=len(everyone) > 1 or bool(old)
    )


def _report(
    options: argparse.Namespace, everyone: Sequence[RankFigures], verdicts: Sequence[Verdict],
    values: Mapping[str, Mapping[str, float]], *, is_compared: bool,
) -> int:  # fmt: skip
    code = FOUND if verdicts else 0 if is_compared else UNKNOWN
    if options.json:
        path = Path("/dev/stdout" if options.json == "-" else options.json)
        result = {"exit_code": code, "verdicts": verdicts, "values": values, "ranks": everyone}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    if options.json != "-":
        print(
            *format_report(everyone, verdicts, values, is_compared=is_compared),
            sep="\n",
            flush=True,
        )
    return code


def _report_missing(options: argparse.Namespace, missing: Sequence[int], reason: str) -> int:
    verdict = build_verdict(
        NO_ANSWER, format_rank_list(missing) if missing else "all ranks", missing, reason=reason
    )
    return _report(options, [], [verdict], {}, is_compared=False)


def measure_machine(
    ranks: Ranks, own: RankFigures, everyone: list[RankFigures], seconds: float
) -> None:
    """Measure this rank and, if it is the first of its node, the node. Repeats each measure."""
    is_first = own.rank == min(each.rank for each in everyone if each.host == own.host)
    own.values.update(
        {name: {own.host: [value]} for name, value in read_sizes().items() if is_first}
    )
    rows = [(own.place, *row) for row in list_rank_measures(ranks.device).items()]
    rows += [(own.host, *row) for row in list_node_measures().items()]
    for place, name, measure in rows * ROUNDS:
        ranks.meet(name)
        if place == own.place or is_first:
            try:
                value = measure(seconds / ROUNDS / len(rows))
                own.values.setdefault(name, {}).setdefault(place, []).append(value)
            except (OSError, RuntimeError, ArithmeticError, ValueError) as error:
                own.not_measured[name] = str(error)
