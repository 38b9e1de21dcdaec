"""Read the changed files of a run directory again.

Nothing is written, and no process is contacted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torchlens_perf.errors import DAMAGED_DATA, RunStoreError
from torchlens_perf.report.run_report import report_from_states
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top.pace import RecentStepRate
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.latest_attempt import latest_processes
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.verdicts.words.run_state import SILENT_S, format_age
from torchlens_perf.view.headline import Headline, build_headlines

# Minimum idle time after a poll, relative to the duration of the poll. For large jobs, this limits
# the CPU use to a fifth of a core.
_IDLE_RATIO = 4.0
_Stamp = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class View:
    """The state of a run according to its files at one time."""

    run_id: str
    report: Report | None = None
    """The newest report; None until a report could be made."""
    headlines: tuple[Headline, ...] = ()
    """A headline for each of the report's verdicts, in the same order."""
    seen_s: float | None = None
    """The current step time, from SeenSteps."""
    trouble: str = ""
    """The reason why the view is not up to date; "" if it is."""
    populations: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """The population of each rank. Ranks of one population do the same work and are compared."""

    @property
    def has_ended(self) -> bool:
        """True if the run has ended."""
        return self.report is not None and not self.report["run"]["live"]


@dataclasses.dataclass
class _NodeFile:
    """One node's file. Times in seconds are by the monotonic clock."""

    stamp: _Stamp
    state: NodeState | None
    problem: str
    changed_s: float
    longest_s: float
    """The longest time between two changes."""


class RunReader:
    """Read one run. Not thread-safe."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._name = run, str(run.path)
        # A relative path makes the commands to copy shorter.
        with contextlib.suppress(OSError, ValueError):
            self._name = str(run.path.relative_to(Path.cwd()))
        self._monotonic, self._unix = monotonic, unix
        self._nodes: dict[Path, _NodeFile] = {}
        self._view = View(run.run_id)
        # True if the view includes all loaded files.
        self._is_made = False
        self._due_s = float("-inf")
        self._seen = RecentStepRate()

    def poll(self) -> View:
        """Return the current view.

        If no file has changed, return the same object, at the cost of a stat() per node.

        Problems of the run directory raise no exception. They are in the view's `trouble`.
        """
        began_s = self._monotonic()
        if began_s < self._due_s:
            return self._view
        made, trouble = self._view, ""
        try:
            self._load_changed(began_s)
            if not self._is_made:
                made = self._make_view()
            trouble = self._silent_nodes_warning(began_s) or self._unreadable_files_warning()
        except RunStoreError as error:
            trouble = str(error)
        except OSError as error:
            trouble = f"{self._run.path} cannot be read: {error.strerror or error}"
        # Each file can be valid, but files of several nodes may not fit together.
        except DAMAGED_DATA as error:
            trouble = f"no report can be made of {self._run.path}: {type(error).__name__}: {error}"
        if made is not self._view or trouble != made.trouble:
            self._view = dataclasses.replace(made, trouble=trouble)
        self._due_s = began_s + (self._monotonic() - began_s) * (1 + _IDLE_RATIO)
        return self._view

    def _load_changed(self, now_s: float) -> None:
        """Load changed files. Raise RunStoreError if there are no files."""
        stamps = self._file_stamps()
        if not stamps:
            self._nodes.clear()
            raise RunStoreError(self._describe_missing_files())
        for path in [path for path in self._nodes if path not in stamps]:
            del self._nodes[path]
            self._is_made = False
        for path, stamp in stamps.items():
            if path not in self._nodes or self._nodes[path].stamp != stamp:
                self._load(path, stamp, now_s)
                self._is_made = False

    def _make_view(self) -> View:
        states = [node.state for node in self._nodes.values() if node.state is not None]
        problems = [node.problem for node in self._nodes.values() if node.state is None]
        if not states:
            raise RunStoreError(problems[-1])
        report, states = report_from_states(self._run, states, problems)
        shown = {rank["rank"] for rank in report["ranks"]}
        processes = {rank: each for rank, each in latest_processes(states).items() if rank in shown}
        self._is_made = True
        return View(
            self._run.run_id,
            report,
            tuple(build_headlines(report, self._name)),
            self._current_step_time_s(processes),
            populations={rank: process.placement.population for rank, process in processes.items()},
        )

    def _current_step_time_s(self, processes: Mapping[int, ProcessState]) -> float | None:
        """Return the current step time of the first rank.

        Other ranks have about the same step time, since ranks step together.
        """
        process = processes[min(processes)] if processes else None
        if (
            process is None
            or process.statistics.last_step is None
            or process.statistics.ended_ns is None
        ):
            return None
        return self._seen.add(
            process.identity.key, process.statistics.last_step, process.statistics.ended_ns
        )

    def _file_stamps(self) -> dict[Path, _Stamp]:
        """Return a stamp for each node's file that changes when the file is replaced."""
        found = {}
        try:
            with os.scandir(self._run.nodes) as entries:
                for entry in entries:
                    if entry.name.endswith(".json"):
                        status = entry.stat(follow_symlinks=False)
                        found[Path(entry.path)] = (
                            status.st_ino,
                            status.st_mtime_ns,
                            status.st_size,
                        )
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return dict(sorted(found.items()))

    def _load(self, path: Path, stamp: _Stamp, now_s: float) -> None:
        before, state, problem = self._nodes.get(path), None, ""
        try:
            state = node_state.load(path)
        except RunStoreError as error:
            problem = str(error)
        changed_s, longest_s = now_s, 0.0
        if before is not None:
            longest_s = max(before.longest_s, now_s - before.changed_s)
        else:
            # The clock of another node may be ahead, which would make the age negative.
            saved_s = (
                state.saved_unix_ns / 1e9
                if state is not None and state.saved_unix_ns
                else stamp[1] / 1e9
            )
            changed_s -= max(0.0, self._unix() - saved_s)
        self._nodes[path] = _NodeFile(stamp, state, problem, changed_s, longest_s)

    def _silent_nodes_warning(self, now_s: float) -> str:
        """Return a warning about nodes with running ranks that have not written for a long time, or
        "".
        """
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
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        words = f"no new data from {longest}{more} for {format_age(silent[longest])} or more"
        return f"{words}: the sidecar has ended, or cannot write. The figures are old"

    def _unreadable_files_warning(self) -> str:
        """Return a warning about unusable files; "" if all files are usable."""
        problems = [node.problem for node in self._nodes.values() if node.problem]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"{problems[0]}{more}: the ranks of that node are missing" if problems else ""

    def _describe_missing_files(self) -> str:
        path = self._run.path
        if self._view.report is not None:
            return f"{path} or its files were removed. The figures are old"
        if not path.exists():
            return f"{path} does not exist yet"
        return f"{path} has no data yet: no sidecar has written to it"
