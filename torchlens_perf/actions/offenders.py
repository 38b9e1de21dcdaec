"""Nodes that many jobs name, with the chance that this is luck, and the rank hours lost by cause. Pure but
for reading the table."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from torchlens_perf.actions.fleet import NAME, run_sql, update_table
from torchlens_perf.run.installation import require_packages
from torchlens_perf.store.run_folders import NotFoundError
from torchlens_perf.view.specs import Column, Quantity, Table
from torchlens_perf.view.terminal import print_lines, table_lines

_MAX_CHANCE = 0.01
"""A node is an offender if luck would name any node of the fleet as often in one of 100 fleets."""
_MIN_NAMED = 3
_GROUPS = ("kind", "node", "user", "program", "framework")
_SHOWN = 10
# A job on one node cannot tell a slow node.
_NODES = (
    "SELECT node, count(DISTINCT run) AS runs,"
    " count(DISTINCT CASE WHEN kind <> '' THEN run END) AS named,"
    " sum(rank_hours) AS rank_hours, sum(lost_rank_hours) AS lost"
    " FROM fleet WHERE node <> '' AND nodes > 1 GROUP BY node ORDER BY node"
)
_LOST = (
    "SELECT coalesce({0}, 'not recorded'), count(DISTINCT run) AS runs, sum(lost_rank_hours) AS lost"
    " FROM fleet WHERE kind <> '' AND coalesce({0}, 'not recorded') <> ''"
    " GROUP BY 1 ORDER BY lost DESC, 1 LIMIT 10"
)


class NodeRow(Struct, frozen=True):
    """One node of the fleet."""

    node: str
    runs: int
    """Number of its runs on several nodes."""
    named: int
    """Number of these in which a verdict names it."""
    rank_hours: float
    lost_rank_hours: float


class Offender(NodeRow, frozen=True):
    """A node that was named in more jobs than luck explains."""

    expected: float
    """Number in which it would be named if it were like the other nodes."""
    chance: float
    """Chance that any node of the fleet is named so often by luck."""


class Loss(Struct, frozen=True):
    """Rank hours lost by one kind of verdicts, on one node, or by one user, program or framework."""

    by: str
    """One of kind, node, user, program and framework."""
    name: str
    runs: int
    lost_rank_hours: float


def find_offenders(nodes: Sequence[NodeRow], most_chance: float = _MAX_CHANCE) -> list[Offender]:
    """Return the offenders, the least likely by luck first.

    most_chance: largest chance that any node of the fleet is named as often by luck.
    """
    found: dict[str, Offender] = {}
    while True:
        usual = [each for each in nodes if each.node not in found]
        runs, named = sum(each.runs for each in usual), sum(each.named for each in usual)
        new = [
            offender
            for each in usual
            if each.named >= _MIN_NAMED
            and (offender := _judge(each, runs, named, len(nodes))).chance <= most_chance
        ]
        if not new:
            return sorted(found.values(), key=lambda each: (each.chance, -each.named, each.node))
        # Other nodes look better than they are while an offender is part of the usual rate.
        found |= {each.node: each for each in new}


def _judge(node: NodeRow, runs: int, named: int, nodes: int) -> Offender:
    # Half a case is added, so that a rate is never 0.
    rate = (named - node.named + 0.5) / (runs - node.runs + 1)
    chance = min(1.0, nodes * tail_chance(node.runs, node.named, min(1.0, rate)))
    return Offender(**asdict(node), expected=node.runs * rate, chance=chance)


def tail_chance(trials: int, least: int, rate: float) -> float:
    """Return the chance of at least so many successes in independent trials with this rate."""
    if least <= 0 or rate >= 1.0:
        return 1.0
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(count + 1)
        - math.lgamma(trials - count + 1)
        + count * math.log(rate)
        + (trials - count) * math.log1p(-rate)
        for count in range(least, trials + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))


def read_fleet(folder: Path, engine: str) -> tuple[list[Offender], list[Loss]]:
    """Return the offenders of a folder's table, and the largest losses in each way of grouping."""
    nodes, *losses = run_sql(folder, [_NODES, *map(_LOST.format, _GROUPS)], engine)
    return find_offenders([NodeRow(*row) for row in nodes.rows]), [
        Loss(by, *row) for by, rows in zip(_GROUPS, losses, strict=True) for row in rows.rows
    ]


def build_tables(offenders: Sequence[Offender], losses: Sequence[Loss]) -> Iterator[Table]:
    """Yield the tables for terminals and pages."""
    number, text = Quantity.NUMBER, Quantity.TEXT
    yield Table(
        "offenders",
        "Nodes that jobs name more often than luck explains"
        if offenders
        else "No node is named more often than luck explains",
        [
            Column("node", [each.node for each in offenders], text),
            Column("jobs", [each.runs for each in offenders], number),
            Column("named in", [each.named for each in offenders], number),
            Column("expected", [each.expected for each in offenders], number),
            Column("chance", [f"{each.chance:.1g}" for each in offenders], text),
            Column("lost rank hours", [each.lost_rank_hours for each in offenders], number),
        ],
    )
    for by in _GROUPS:
        rows = [each for each in losses if each.by == by]
        yield Table(
            f"lost-by-{by}",
            f"Rank hours lost by {by}",
            [
                Column(by, [each.name for each in rows], text),
                Column("jobs", [each.runs for each in rows], number),
                Column("lost rank hours", [each.lost_rank_hours for each in rows], number),
            ],
        )


def read_tables(folder: str) -> list[Table]:
    """Return the tables on a folder's offenders, and write nothing. Raise NotFoundError or ConfigError."""
    require_packages("this page", ["duckdb"], "query")
    if not Path(folder, NAME).exists():
        raise NotFoundError(
            f"There is no table of nodes yet: run `torchlens-perf offenders {folder}`."
        )
    return list(build_tables(*read_fleet(Path(folder), "duckdb")))


def print_offenders(folder: Path, options: argparse.Namespace) -> int:
    """Add new runs to the table, and print what it says. options: those of the command.

    Return 1 if there are offenders. Raise ConfigError, RunStoreError or OSError.
    """
    from torchlens_perf.errors import printable
    from torchlens_perf.report.report_json import to_json_types

    package = {"duckdb": "duckdb", "spark": "pyspark"}[options.engine]
    require_packages("offenders", [package], {"duckdb": "query"}.get(package, options.engine))
    for problem in update_table(folder):
        print(printable(problem), file=sys.stderr)
    if options.sql:
        print(run_sql(folder, [options.sql], options.engine)[0].to_json())
        return 0
    offenders, losses = read_fleet(folder, options.engine)
    if options.json:
        json.dump(
            {"offenders": to_json_types(offenders), "losses": to_json_types(losses)}, sys.stdout
        )
    else:
        for table in build_tables(offenders, losses):
            print_lines(functools.partial(table_lines, table, rows=_SHOWN), sys.stdout)
            print()
    return int(bool(offenders))
