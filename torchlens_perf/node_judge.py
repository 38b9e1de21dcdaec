"""Feeds the judge with the ranks of this node, and with what the sidecars of other nodes send. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchlens_perf.grouping import STAGES
from torchlens_perf.rank_ranges import parse_ranges
from torchlens_perf.step_rows import LEAST_ROW_NS, RowMaker, Rows
from torchlens_perf.straggler import NOTHING, Findings, Judge, Place

if TYPE_CHECKING:
    from torchlens_perf.board import Block
    from torchlens_perf.records import StepTable

_NOT_DIMENSIONS = ("", "undefined", "default_pg")


def dimension(description: str) -> str:
    """The mesh dimension that a process group's description names: "mesh_tp" is "tp"; "" if it names none."""
    return "" if description in _NOT_DIMENSIONS else description.removeprefix("mesh_")


def place_of(rank: int, host: str, model: str, groups: Mapping[str, Mapping[str, Any]], site: str = "") -> Place:
    """Where a rank is: its host, what it computes (identity.model_digest), its position in the groups that it uses.

    site: where the host is.
    """
    coordinates = {}
    for group in groups.values():
        name, members = dimension(group["description"]), parse_ranges(group["ranks"])
        if name and rank in members:
            coordinates[name] = members.index(rank)
    stage = "".join(f"/{name}{coordinates[name]}" for name in STAGES if name in coordinates)
    return Place(host, model + stage, coordinates, site)


class NodeJudge:
    """Judges one attempt of a job after the other: a restart may have other ranks."""

    def __init__(self) -> None:
        self.attempt = -1
        self.places: dict[int, Place] = {}
        self.findings: Findings = NOTHING
        self._judge = Judge()
        self._makers: dict[int, RowMaker] = {}
        self._has_rows: set[int] = set()
        self._changed = False

    def add_steps(
        self, attempt: int, rank: int, place: Place, table: StepTable, least_row_ns: float = LEAST_ROW_NS
    ) -> Rows | None:
        """Finished steps of a rank of this node. Returns the rows that they complete, for the other nodes."""
        if not self.know(attempt, rank, place):
            return None
        rows = self._makers.setdefault(rank, RowMaker(least_row_ns=least_row_ns)).add(table)
        return self._add(rank, rows)

    def add_block(self, population: str, block: Block) -> None:
        """Rows of ranks of other nodes, which know() has told of."""
        self._judge.add_block(population, block)
        self._has_rows.update(block.ranks.tolist())
        self._changed = True

    def end(self, attempt: int, rank: int) -> Rows | None:
        """The rank's process has ended. Returns its last rows."""
        if attempt != self.attempt:
            return None
        rows = self._makers[rank].rest() if rank in self._makers else None
        self._add(rank, rows)
        self._judge.end(rank)
        self._changed = True
        return rows

    def judge(self, *, final: bool = False) -> Findings:
        """Judges what has come."""
        if final:
            for rank, maker in self._makers.items():
                self._add(rank, maker.rest())
        if self._changed or final:
            self._changed = False
            self.findings = self._judge.judge(final=final)
        return self.findings

    def has_rows(self, rank: int) -> bool:
        """Whether rows of a rank have come: its place is settled."""
        return rank in self._has_rows

    def know(self, attempt: int, rank: int, place: Place) -> bool:
        """A rank's place: what is known of it when its first rows come, for then it is compared with others.

        Models and groups are known within the first steps. Returns whether it belongs to the attempt that is judged.
        """
        if attempt < self.attempt:
            return False
        if attempt > self.attempt:
            self.__init__()  # type: ignore[misc]
            self.attempt = attempt
        if rank not in self._has_rows and self.places.get(rank) != place:
            self.places[rank] = place
            self._judge.know(rank, place)
        return True

    def _add(self, rank: int, rows: Rows | None) -> Rows | None:
        if rows is not None and len(rows):
            self._judge.add(rank, rows)
            self._has_rows.add(rank)
            self._changed = True
        return rows
