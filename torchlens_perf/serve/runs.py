"""The runs under a folder, and a line on each: what the list shows. In a reader."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence

from torchlens_perf.errors import DAMAGED_DATA, RunStoreError, TorchlensPerfError, printable
from torchlens_perf.report.run_report import run_report
from torchlens_perf.run.verdicts import sentence_and_action
from torchlens_perf.serve.readers import NoSuchError
from torchlens_perf.serve.run_names import is_run, opened, run_directory
from torchlens_perf.verdicts.words.run_state import state_of

BEGINS, UNREADABLE = "begins", "unreadable"
_MAX_PROBLEM = 300


@dataclasses.dataclass(frozen=True)
class Found:
    """A run directory, by what is cheap to know of it."""

    name: str
    changed_ns: int
    """When a node's state was last written, UNIX time by the disk's clock; 0 where that is not known."""
    problem: str = ""
    """Why it cannot be looked at."""


@dataclasses.dataclass(frozen=True)
class RunLine:
    """What the list says of a run."""

    name: str
    changed_ns: int
    """As it was when this was read: with another one, it is read anew."""
    state: str
    """As in the report, or BEGINS, or UNREADABLE."""
    words: str = ""
    """The state in words."""
    program: str = ""
    ranks: int = 0
    seen: int = 0
    """How many of those ranks are in the report."""
    nodes: int = 0
    started: str = ""
    ended: str = ""
    verdict: str = ""
    """The first one's sentence, without what to do next."""
    problem: str = ""


def find_runs(folder: str, advanced: Callable[[int, int | None], object] = lambda done, total: None) -> list[Found]:
    """Those directly in the folder, what changed last first; the folder itself where it is a run.

    Follows no links. Raises RunStoreError for a folder that cannot be read.
    """
    try:
        if is_run(folder):
            return [Found(os.path.basename(folder), changed_ns(folder))]
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise RunStoreError(f"{folder} cannot be read: {error.strerror or error}") from None
    found = []
    for done, name in enumerate(names):
        advanced(done, len(names))
        try:
            found.append(Found(name, changed_ns(os.path.join(folder, name))))
        except NoSuchError:
            continue
        except OSError as error:
            found.append(Found(name, 0, printable(error.strerror or str(error))))
    return sorted(found, key=lambda run: (-run.changed_ns, run.name))


def changed_ns(path: str) -> int:
    """When a node of the run last wrote its state: that is renamed into place, which the folder shows.

    Raises NoSuchError, OSError.
    """
    descriptor = opened(path)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def lines_of(folder: str, found: Sequence[Found], budget_s: float) -> list[RunLine]:
    """Lines on these runs in their order, on as many as there is time for, and on one at least.

    folder: as find_runs() was given it.
    """
    began_s, lines = time.monotonic(), list[RunLine]()
    is_one = is_run(folder)
    for each in found:
        if lines and time.monotonic() - began_s > budget_s:
            break
        lines.append(_line(folder if is_one else os.path.join(folder, each.name), each))
    return lines


def _line(path: str, found: Found) -> RunLine:
    if found.problem:
        return RunLine(found.name, found.changed_ns, UNREADABLE, problem=found.problem)
    try:
        run = run_directory(path)
        if not any(run.nodes.glob("*.json")):
            return RunLine(found.name, found.changed_ns, BEGINS)
        report = run_report(run)
    except (TorchlensPerfError, OSError) as error:
        return RunLine(found.name, found.changed_ns, UNREADABLE, problem=printable(str(error))[:_MAX_PROBLEM])
    except DAMAGED_DATA as error:  # the other lines are shown
        problem = printable(f"{type(error).__name__}: {error}")[:_MAX_PROBLEM]
        return RunLine(found.name, found.changed_ns, UNREADABLE, problem=problem)
    about = report["run"]
    return RunLine(
        found.name,
        found.changed_ns,
        about["state"],
        words=state_of(about["live"], about["died"], about["ranks_seen"]),
        program=about["program"] or "",
        ranks=about["world_size"],
        seen=about["ranks_seen"],
        nodes=len(about["nodes"]),
        started=about["started"] or "",
        ended=about["ended"] or about["last_step_at"] or "",
        verdict=sentence_and_action(report["verdicts"][0]["text"])[0] if report["verdicts"] else "",
    )
