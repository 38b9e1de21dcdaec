"""Reads a run directory again and again: what has changed, and no more. Writes nothing, and asks nobody."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.errors import DAMAGED_DATA, RunStoreError
from torchlens_perf.report.run_report import report_of
from torchlens_perf.top.pace import Pace, SeenSteps, pace
from torchlens_perf.verdicts import node_state

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.verdicts.node_state import NodeState, ProcessState
    from torchlens_perf.verdicts.words.report import Report, VerdictRow

SILENT_S = 60.0  # a live sidecar writes every few seconds; of many ranks, more rarely
_RESTS = 4.0  # times what the last look has taken: of large jobs, a fifth of a processor at most
_Stamp = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class View:
    """A run as its files show it at one look."""

    run_id: str
    path: str
    report: Report | None
    """The newest that could be made; None while there is none."""
    pace: Pace | None
    trouble: str
    """Why this is not the newest there could be; "" where nothing is wrong."""
    populations: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """By rank: those with the same text do the same work, and can be compared."""

    @property
    def has_ended(self) -> bool:
        return self.report is not None and not self.report["run"]["live"]

    @property
    def verdicts(self) -> list[VerdictRow]:
        """Those of the report; none without one."""
        return [] if self.report is None else self.report["verdicts"]


@dataclasses.dataclass
class _Node:
    """One node's file."""

    stamp: _Stamp
    state: NodeState | None
    problem: str
    changed_s: float
    """When it was last seen to change, by the monotonic clock."""
    longest_s: float = 0.0
    """Between two changes."""


class RunReader:
    """One thread at a time."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._run = run
        self._monotonic, self._unix = monotonic, unix
        self._nodes: dict[Path, _Node] = {}
        self._view = View(run.run_id, str(run.path), None, None, "")
        self._is_made = False  # the report, of what the nodes' files hold
        self._due_s = float("-inf")
        self._seen = SeenSteps()

    def look(self) -> View:
        """The run as it is now. The same object as before where nothing has changed, which takes one stat() a node.

        Raises nothing that a run directory can cause: trouble is in the view.
        """
        began_s = self._monotonic()
        if began_s >= self._due_s:
            before, trouble = self._view, ""
            report, found, populations = before.report, before.pace, before.populations
            try:
                if self._load_changed(began_s) or report is None:
                    report, found, populations = self._made()
                trouble = self._silent(began_s) or self._unreadable()
            except RunStoreError as error:
                trouble = str(error)
            except OSError as error:
                trouble = f"{self._run.path} cannot be read: {error.strerror or error}"
            except DAMAGED_DATA as error:  # of several nodes, whose files do not fit together
                trouble = f"no report can be made of {self._run.path}: {type(error).__name__}: {error}"
            if report is not before.report or trouble != before.trouble:
                self._view = View(self._run.run_id, str(self._run.path), report, found, trouble, populations)
            self._due_s = began_s + (self._monotonic() - began_s) * (1 + _RESTS)
        return self._view

    def _load_changed(self, now_s: float) -> bool:
        """Whether anything has changed since a report was made. Raises RunStoreError where there is nothing to read."""
        stamps = self._stamps()
        if not stamps:
            self._nodes.clear()
            raise RunStoreError(self._nothing_there())
        for path in [path for path in self._nodes if path not in stamps]:
            del self._nodes[path]
            self._is_made = False
        for path, stamp in stamps.items():
            if path not in self._nodes or self._nodes[path].stamp != stamp:
                self._load(path, stamp, now_s)
                self._is_made = False
        return not self._is_made

    def _made(self) -> tuple[Report, Pace, dict[int, str]]:
        states = [node.state for node in self._nodes.values() if node.state is not None]
        problems = [node.problem for node in self._nodes.values() if node.state is None]
        if not states:
            raise RunStoreError(problems[-1])
        report = report_of(self._run, states, problems)
        of = {(rank["rank"], rank["attempt"], rank["pid"]) for rank in report["ranks"]}
        everybody = [process for state in states for process in state.processes.values()]
        processes = {
            who.rank: process for process in everybody if ((who := process.identity).rank, who.attempt, who.pid) in of
        }
        populations = {rank: process.place.population for rank, process in processes.items()}
        self._is_made = True
        return report, pace(report, self._seen_s(processes)), populations

    def _seen_s(self, processes: Mapping[int, ProcessState]) -> float | None:
        """What a step has taken lately, on the first rank: they go in step with one another."""
        process = processes[min(processes)] if processes else None
        if process is None or process.statistics.last_step is None or process.statistics.ended_ns is None:
            return None
        return self._seen.add(process.identity.key, process.statistics.last_step, process.statistics.ended_ns)

    def _stamps(self) -> dict[Path, _Stamp]:
        """Of each node's file: what changes when it is replaced."""
        found = {}
        try:
            with os.scandir(self._run.nodes) as entries:
                for entry in entries:
                    if entry.name.endswith(".json"):
                        status = entry.stat(follow_symlinks=False)
                        found[Path(entry.path)] = (status.st_ino, status.st_mtime_ns, status.st_size)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return dict(sorted(found.items()))

    def _load(self, path: Path, stamp: _Stamp, now_s: float) -> None:
        before = self._nodes.get(path)
        state, problem = None, ""
        try:
            state = node_state.load(path)
        except RunStoreError as error:
            problem = str(error)
        if before is not None:
            longest_s = max(before.longest_s, now_s - before.changed_s)
            self._nodes[path] = _Node(stamp, state, problem, now_s, longest_s)
            return
        # How old it was when it was first seen. Clocks of nodes may differ: that does not make it younger than now.
        saved_s = state.saved_unix_ns / 1e9 if state is not None and state.saved_unix_ns else stamp[1] / 1e9
        self._nodes[path] = _Node(stamp, state, problem, now_s - max(0.0, self._unix() - saved_s))

    def _silent(self, now_s: float) -> str:
        """Nodes with running ranks of which nothing new has come for long."""
        silent = {
            node.state.host: now_s - node.changed_s
            for node in self._nodes.values()
            if node.state is not None
            and any(not process.ended for process in node.state.processes.values())
            and now_s - node.changed_s > max(SILENT_S, 3 * node.longest_s)
        }
        if not silent:
            return ""
        longest = max(silent, key=lambda host: silent[host])
        others = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        # Said by the minute: what is shown does not change with each second.
        return (
            f"nothing new from {longest}{others} for {silent[longest] // 60:.0f} min or more: the sidecar there has "
            "ended, or cannot write; what is shown is old"
        )

    def _unreadable(self) -> str:
        """Nodes whose files cannot be used, where others can."""
        problems = [node.problem for node in self._nodes.values() if node.problem]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"{problems[0]}{more}: the ranks of that node are missing here" if problems else ""

    def _nothing_there(self) -> str:
        path = self._run.path
        if self._view.report is not None:
            return f"{path} is gone, or the files of its nodes are: what is shown was read before"
        if not path.exists():
            return f"{path} is not there yet"
        return f"{path}: nothing in it yet that a sidecar has written"
