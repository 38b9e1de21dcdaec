"""From steps to findings on one node: rank placements, bins for other nodes, and ends of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.findings import episode, findings
from tests.support.planted import Job
from tests.support.ranks import identity_of
from tests.support.tables import step_table
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import Identity, digest_module_names
from torchlens_perf.run.records import StepTable
from torchlens_perf.verdicts.stragglers.detector import (
    StragglerDetector,
    build_placement,
    mesh_dimension,
)
from torchlens_perf.verdicts.stragglers.findings import NOTHING
from torchlens_perf.verdicts.stragglers.placement import Placement

WORK = {"data": 1.0, "forward": 6.0, "backward": 11.0, "optimizer": 1.5, "host": 0.5}
HERE = Placement("node-0", "same")


def table(steps: range, rank: int = 0, communication: float = 1.0, **more_ms: float) -> StepTable:
    """Return steps of 20 ms of work with a little noise, plus additional time."""
    random = np.random.default_rng([rank, steps.start])
    rows = []
    for _ in steps:
        chance = 1 + 0.01 * random.standard_normal()
        rows.append({part: ms * chance + more_ms.get(part, 0.0) for part, ms in WORK.items()})
    return step_table([{**row, "communication": communication} for row in rows], steps.start)


class TestPlacement:
    @pytest.mark.parametrize(
        ("description", "name"),
        [
            ("mesh_tp", "tp"),
            ("mesh_dp_shard_cp", "dp_shard_cp"),
            ("default_pg", ""),
            ("undefined", ""),
            ("ep", "ep"),
        ],
    )
    def test_mesh_dimension_is_read_from_the_group_description(
        self, description: str, name: str
    ) -> None:
        assert mesh_dimension(description) == name

    def groups(self, **ranks: str) -> dict[str, Any]:
        return {
            str(i): {"description": f"mesh_{name}", "ranks": text}
            for i, (name, text) in enumerate(ranks.items())
        }

    def who(self, rank: int, host: str) -> Identity:
        return identity_of(RunDirectory(Path("run")), rank, host=host)

    def test_mesh_coordinates_are_positions_in_named_groups(self) -> None:
        """The default group is not a dimension."""
        groups = self.groups(dp="1-13/4", tp="8-9", cp="0-3")
        groups["9"] = {"description": "default_pg", "ranks": "0-15"}
        place = build_placement(self.who(9, host="node-1"), "net", groups)

        assert place.coordinates == {"dp": 2, "tp": 1}
        assert place.host == "node-1"

    def test_population_depends_on_modules_and_pipeline_stage_only(self) -> None:
        one = build_placement(
            self.who(0, host="node-0"), "one", self.groups(pp="0,8", tp="0-7")
        ).population

        assert (
            one
            == build_placement(
                self.who(1, host="node-1"), "one", self.groups(pp="1,9", tp="0-7")
            ).population
        )
        assert (
            one
            != build_placement(
                self.who(8, host="node-0"), "one", self.groups(pp="0,8", tp="8-15")
            ).population
        )
        assert (
            one
            != build_placement(
                self.who(0, host="node-0"), "other", self.groups(pp="0,8", tp="0-7")
            ).population
        )

    def test_model_digest_depends_on_module_names_and_not_on_their_order(self) -> None:
        assert digest_module_names(["a", "b"]) == digest_module_names(["b", "a"])
        assert (
            len({digest_module_names(names) for names in (["a", "b"], ["ab"], ["a", "c"], [])}) == 4
        )


class TestNodeJudge:
    def test_steps_of_a_slow_rank_lead_to_findings_and_bins(self) -> None:
        judge, sent = StragglerDetector(), []
        for first in range(0, 200, 25):
            for rank in range(4):
                steps = table(
                    range(first, first + 25), rank, backward=3.0 * (rank == 2 and first >= 100)
                )
                sent.append(judge.add_steps(rank, HERE, steps))
            judge.judge()
        (found,) = judge.judge(final=True).episodes

        assert (found.rank, found.phase) == (2, "backward")
        assert abs(found.since_step - 100) <= 4
        assert judge.places == dict.fromkeys(range(4), HERE)
        assert sum(len(rows) for rows in sent if rows is not None) == 4 * 200

    def test_short_steps_are_joined_to_wide_bins(self) -> None:
        """The remaining steps form a bin at the rank's end."""
        judge = StragglerDetector()
        rows = [
            judge.add_steps(rank, HERE, table(range(62), rank), min_row_ns=100e6)
            for rank in range(2)
        ]
        assert rows[0] is not None
        assert (rows[0].width, len(rows[0])) == (8, 7)
        last = judge.end_rank(0)

        assert last is not None
        assert (last.key[0] * last.width).tolist() == [56]
        assert judge.end_rank(0) is None
        assert judge.end_rank(7) is None

    def test_ended_rank_is_not_waited_for(self) -> None:
        judge = StragglerDetector()
        for rank in range(3):
            judge.add_steps(
                rank, HERE, table(range(80 if rank else 40), rank, forward=2.0 * (rank == 1))
            )
        assert judge.judge().last_step == 39
        judge.end_rank(0)

        assert judge.judge().last_step == 79
        assert [each.rank for each in judge.findings.episodes] == [1]

    def test_ranks_of_other_populations_are_not_compared(self) -> None:
        judge = StragglerDetector()
        for rank in range(4):
            stage = f"pp{rank // 2}"
            judge.add_steps(
                rank, Placement("", stage), table(range(100), rank, forward=9.0 * (rank >= 2))
            )
        found = judge.judge(final=True)

        assert found.episodes == ()
        assert [(each.population, each.ranks) for each in found.usual] == [
            ("pp0", "0-1"),
            ("pp1", "2-3"),
        ]

    @pytest.mark.parametrize("early", [0, 3])
    def test_rank_placement_is_final_after_the_first_bins(self, early: int) -> None:
        """Models and groups of all ranks may be unknown in the first steps."""
        judge = StragglerDetector()
        for rank in range(3):
            judge.set_placement(rank, Placement("", "not known yet"))
            if early:
                judge.add_steps(rank, Placement("", f"nor now {rank}"), table(range(early), rank))
            judge.add_steps(rank, HERE, table(range(early, 60), rank, forward=3.0 * (rank == 1)))
            judge.set_placement(rank, Placement("", "later"))

        assert judge.places == dict.fromkeys(range(3), HERE)
        assert [each.rank for each in judge.judge(final=True).episodes] == [1]
        assert judge.findings.compared == 3

    def test_bins_of_other_nodes_are_judged_together_with_own_ranks(self) -> None:
        job = Job.of(4, 80).slow(3, 20)
        judge = StragglerDetector()
        for rank in range(4):
            judge.set_placement(rank, dataclasses.replace(HERE, host=f"node-{rank // 2}"))
            judge.add_bin_batch("same", job.rows_of(rank))
        (found,) = judge.judge().episodes

        assert found.rank == 3
        assert {place.host for place in judge.places.values()} == {"node-0", "node-1"}

    def test_ended_episodes_of_an_earlier_sidecar_are_kept(self) -> None:
        over = episode(2, since=10, until=40)
        judge = StragglerDetector(findings(over))
        for rank in range(3):
            judge.add_steps(rank, HERE, table(range(60, 100), rank))
        assert judge.judge().episodes == (over,)

    def test_findings_stay_the_same_without_new_bins(self) -> None:
        judge = StragglerDetector()
        assert judge.judge() is NOTHING
        for rank in range(2):
            judge.add_steps(rank, HERE, table(range(41), rank))
        found = judge.judge()

        assert judge.judge() is found
        assert judge.judge(final=True).last_step == 40 > found.last_step
