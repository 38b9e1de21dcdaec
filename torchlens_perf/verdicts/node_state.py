"""The state of one node's sidecar, which is saved as a file.

Reports are built from these files, during the run or later.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.collectives.join import CollectiveJoin, JoinState
from torchlens_perf.analysis.statistics.hardware import HardwareTotals
from torchlens_perf.analysis.statistics.rank import (
    WARM_UP_STEPS,
    RankStatistics,
    WindowHistory,
    Windows,
)
from torchlens_perf.analysis.statistics.stack_samples import StackSample
from torchlens_perf.errors import DAMAGED_DATA, RunStoreError
from torchlens_perf.run import ownership
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.cpu_programs import CpuProgram
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.failure import Failure, ProcessActivity, ProcessEnd
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.loader_period import move_hidden_data_wait
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.records import StepTable, TracedStep
from torchlens_perf.run.ring import Flag
from torchlens_perf.run.sketch import Sketch
from torchlens_perf.run.undelivered import Undelivered
from torchlens_perf.verdicts.finding_log import FindingRecords
from torchlens_perf.verdicts.stragglers.detector import build_placement
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE, JudgedSteps
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.words.hang import HangEvidence

SCHEMA = 14

MAX_BYTES = 1 << 28
"""Size of the largest node state that is read. A rank needs 13 to 100 KB."""
MAX_TRAININGS = 6
"""Most trainings of a process whose statistics are kept: the newest one, and those with the most
steps."""
_T = TypeVar("_T")


@dataclasses.dataclass
class CpuUsage:
    """Usage of the CPUs of a process, as sampled by the sidecar."""

    cpus: int = 0
    """Number of CPUs that the process may use; 0 if not known."""
    workers: int = 0
    """Highest number of child processes at the same time."""
    others: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    """Two sums over the samples in which the process lacked a CPU: the share of its CPUs that was
    used by programs outside the job, and the number of samples."""
    programs: list[CpuProgram] = dataclasses.field(default_factory=list)
    """The busiest programs on these CPUs, the busiest first."""
    ranks: int = 0
    """Number of ranks that may use these CPUs; 0 if not known."""


@dataclasses.dataclass
class Training:
    """Consecutive steps of a process that train the same models."""

    first_step: int
    statistics: RankStatistics | None
    """None if they were dropped, because the process has had many longer trainings."""
    last_step: int = 0
    steps: int = 0
    total_ns: int = 0
    """Time from the start of the first step to the end of the last one."""

    def count(self) -> None:
        """Update the fields above after a change of the statistics."""
        if (found := self.statistics) is not None and found.last_step is not None:
            self.last_step, self.steps = found.last_step, found.counted_steps
            self.total_ns = (found.ended_ns or 0) - (found.started_ns or 0)


@dataclasses.dataclass
class ProcessState:
    """One process of one rank."""

    identity: Identity
    anchor: Anchor
    statistics: RankStatistics
    """Statistics of the whole run."""
    counted: int = -1
    """Sequence number of the last record that is included in the statistics."""
    ended: str = ""
    """"closed" by its watch, "failed" by an exception, "died", or "" while it runs."""
    facts: RankFacts = dataclasses.field(default_factory=RankFacts)
    """What the process has published about itself."""
    failure: Failure | None = None
    """The exception that ended the process; None if it did not fail, or died without one."""
    end: ProcessEnd | None = None
    """How the process ended, as the kernel shows it; None while it runs."""
    judged_by: str = ""
    """The clock by which its steps are judged, "host" or "device"; "" while undecided."""
    unbalanced: int = 0
    too_deep: int = 0
    names_lost: int = 0
    internal_errors: int = 0
    tool_ns: int = 0
    made_steps: int = 0
    """Number of finished steps, including those that were not recorded or were lost."""
    open_spans: list[str] = dataclasses.field(default_factory=list)
    """The spans that were open when the process died."""
    now: ProcessActivity | None = None
    """Activity of a running process when the state was saved; None if ended or simulated."""
    cpu_wait: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    """Two sums over the sidecar's samples: the share of time in which the main thread was runnable
    but had no CPU, and the number of samples."""
    cpu_users: CpuUsage = dataclasses.field(default_factory=CpuUsage)
    seen_ns: int = 0
    """Newest time at which the sidecar saw the process run, by the clock of its records; 0 if it did
    not, as in a simulation."""
    out_of_memory: OutOfMemory | None = None
    """The memory table of the newest failed allocation on its device, see
    cuda/out_of_memory.py."""
    by_training: list[Training] = dataclasses.field(default_factory=list)
    """Statistics of each training; [] if there is only one."""

    def add_records(
        self,
        records: npt.NDArray[np.void],
        steps: StepTable,
        names: list[str],
        lost: int,
        samples: Sequence[StackSample] = (),
    ) -> None:
        """Add the records of complete steps to the statistics of the run, and of each training.

        The arguments are those of RankStatistics.add_records().
        """
        begins = steps.step[(steps.flags & Flag.NEW_TRAINING) != 0].tolist()
        bounds = [-np.inf, *begins, np.inf]
        for first, end in itertools.pairwise(bounds):
            if first in begins:
                self._begin_training(int(first))
            part, of_part = records, steps
            if begins:
                part = records[(records["step"] >= first) & (records["step"] < end)]
                of_part = steps.select_rows((steps.step >= first) & (steps.step < end))
            self.statistics.add_records(part, of_part, names, lost, samples)
            if self.by_training and (training := self.by_training[-1]).statistics is not None:
                training.statistics.add_records(part, of_part, names, lost, samples)
                training.count()
            lost = 0

    def _begin_training(self, first_step: int) -> None:
        if not self.by_training and self.statistics.first_step is not None:
            earlier = Training(self.statistics.first_step, copy.deepcopy(self.statistics))
            earlier.count()
            self.by_training.append(earlier)
        kept = [each for each in self.by_training if each.statistics is not None]
        if len(kept) >= MAX_TRAININGS:
            min(kept, key=lambda each: each.steps).statistics = None
        self.by_training.append(Training(first_step, RankStatistics()))

    def add_judged_steps(
        self,
        judged: JudgedSteps,
        records: npt.NDArray[np.void] | None = None,
        steps: StepTable | None = None,
    ) -> StepTable | None:
        """Add steps, and return the steps that are newly ready to be judged; None without any.

        In the returned steps, waits for data are as long as they would be without waits for other
        ranks. Without arguments, return the steps that have not been returned so far.
        """
        if records is None or steps is None:
            newly = judged.decide_for_host()
        else:
            newly = judged.add_records(records, steps, on_device=self.facts.on_device)
        self.judged_by = judged.by
        if newly is not None and judged.by == DEVICE:
            _add_device_steps(self.statistics, newly)
            for training in self.by_training:
                if training.statistics is not None:
                    inside = (newly.step >= training.first_step) & (
                        newly.step <= training.last_step
                    )
                    _add_device_steps(training.statistics, newly.select_rows(inside))
        if newly is None or not self.facts.loader_period_ns:
            return newly
        parts_ns = move_hidden_data_wait(newly.parts_ns, self.facts.loader_period_ns)
        return dataclasses.replace(newly, parts_ns=parts_ns)

    def judged_windows(self) -> Windows:
        """Return the windows of the clock by which the rank is judged."""
        statistics = self.statistics
        return (
            statistics.device_history if self.judged_by == DEVICE else statistics.history
        ).to_windows()

    @property
    def placement(self) -> Placement:
        """The rank's placement, which determines the ranks with which it is compared."""
        return build_placement(self.identity, self.facts.model, self.facts.groups, self.judged_by)


def _add_device_steps(statistics: RankStatistics, steps: StepTable) -> None:
    warm = steps.select_rows(steps.step >= (statistics.first_step or 0) + WARM_UP_STEPS)
    statistics.device.add_steps(warm)
    statistics.device_mix.add_steps(warm)
    statistics.device_history.add_steps(steps)


@dataclasses.dataclass
class NodeState:
    """One node of the run."""

    host: str
    processes: dict[str, ProcessState] = dataclasses.field(default_factory=dict)
    dropped_segments: int = 0
    unwritten_records: int = 0
    """Number of records that could not be written to the run directory. They are included in the
    statistics only."""
    notes: list[str] = dataclasses.field(default_factory=list)
    passing_notes: list[str] = dataclasses.field(default_factory=list)
    """Notes on a temporary condition, such as an unreachable node. A restart clears them."""
    sidecar_cpu_s: float = 0.0
    saved_unix_ns: int = 0
    """Time of the last save, by the node's clock; 0 if not known."""
    join: CollectiveJoin = dataclasses.field(default_factory=CollectiveJoin)
    """The node's collectives, joined across its ranks."""
    hang: HangEvidence | None = None
    findings: Findings = NOTHING
    """Findings of this node's straggler detector. On node 0, they are about all ranks."""
    records: FindingRecords = dataclasses.field(default_factory=FindingRecords)
    """Findings made during the run, with their times."""
    telemetry: HardwareTotals = dataclasses.field(default_factory=HardwareTotals)
    traced: list[TracedStep] = dataclasses.field(default_factory=list)
    """The newest steps that were exported as traces, with their exported parts."""
    undelivered: Undelivered = dataclasses.field(default_factory=Undelivered)
    """Data that an OTLP endpoint has not accepted."""
    commit: str = ""
    """Git commit of the training program, with "-dirty" if files were changed; "" if not known."""
    schema: int = SCHEMA

    def save(
        self, run: RunDirectory, *, durably: bool = False, encoded: EncodedStatistics | None = None
    ) -> None:
        """Replace the node's file.

        durably: True to sync the file, so that its content survives a power failure. encoded: the
        object that earlier calls were given, to save time. Raises OSError, for example if the disk
        is full.
        """
        saved = self if encoded is None else encoded.copy_with_encoded(self)
        path = run.node_state_path(self.host)
        partial = path.with_suffix(".partial")
        with open(ownership.create_private_file(partial), "wb", buffering=0) as file:
            ownership.write_all(file, encode_json(saved))
            if durably:
                os.fsync(file.fileno())
        os.replace(partial, path)


class EncodedStatistics:
    """The statistics of idle and ended processes as JSON, which need not be encoded again."""

    def __init__(self) -> None:
        # For each process, the version of its statistics at the last save, and the JSON. The JSON
        # is only kept if the version has lasted for two saves.
        self._known: dict[str, tuple[tuple[object, ...], msgspec.Raw | None]] = {}

    def copy_with_encoded(self, state: NodeState) -> NodeState:
        """Return a copy of the state, with JSON instead of statistics that have not changed."""
        before, self._known = self._known, {}
        processes = {}
        for key, process in state.processes.items():
            version = process.counted, process.ended, process.statistics.lost
            last, text = before.get(key, (None, None))
            if version == last:
                text = text or msgspec.Raw(encode_json(process.statistics))
                process = copy.copy(process)
                process.statistics = cast("Any", text)
            self._known[key] = version, text if version == last else None
            processes[key] = process
        return dataclasses.replace(state, processes=processes)


@dataclasses.dataclass(frozen=True)
class _SchemaVersion:
    schema: int


class DamagedStateError(RunStoreError):
    """A file can be read, but is not a node state of this version."""


def load(path: Path) -> NodeState:
    """Return the node state in a file that NodeState.save() wrote.

    Raises RunStoreError if the file cannot be read, DamagedStateError if it is not a valid state.
    """
    try:
        text = ownership.read_regular_file(path, MAX_BYTES)
    except ownership.NotRegularFileError as error:
        raise DamagedStateError(str(error)) from None
    except ownership.TooLargeError as error:
        raise DamagedStateError(f"{path} cannot be read: {error.strerror}") from None
    except OSError as error:
        raise RunStoreError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        schema = decode_json(text, _SchemaVersion).schema
        if schema == SCHEMA:
            return decode_json(text, NodeState)
    except (msgspec.MsgspecError, *DAMAGED_DATA) as error:
        raise DamagedStateError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    raise DamagedStateError(f"{path} has schema {schema}, this version reads {SCHEMA}")


def load_or_new(run: RunDirectory, host: str) -> NodeState:
    """Return the saved state of a node, or a new state if no state was saved.

    A damaged file is renamed, and the new state has a note on it. Raises RunStoreError on a disk
    error, after which the file may be readable again.
    """
    path = run.node_state_path(host)
    try:
        return load(path) if path.exists() else NodeState(host)
    except DamagedStateError as error:
        return NodeState(
            host, notes=[f"{error}. {_rename_file(path)}; data only in that file is missing here"]
        )
    except OSError as error:
        raise RunStoreError(f"{path} cannot be read: {error.strerror or error}") from None


def _rename_file(path: Path) -> str:
    """Rename a damaged file to an unused name, and return a sentence with the new name.

    Raises RunStoreError.
    """
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}.damaged-{number}")
        if not aside.exists():
            break
    try:
        os.replace(path, aside)
    except OSError as error:
        raise RunStoreError(f"{path} cannot be set aside: {error.strerror or error}") from None
    return f"It is kept as {aside.name}"


def load_all(
    run: RunDirectory,
    unusable: list[str] | None = None,
    advanced: Callable[[int, int], object] = lambda done, total: None,
) -> list[NodeState]:
    """Return the states of all nodes of the run, sorted by host.

    unusable: a list to which a line is appended for each file that cannot be read. If `unusable` is
    None, such a file raises RunStoreError.
    advanced: called with the number of the file that is read next, and the number of all files.
    Raises RunStoreError if no file can be read.
    """
    paths = sorted(run.nodes.glob("*.json"))
    if not paths:
        raise RunStoreError(run.why_unreadable())
    states = []
    for done, path in enumerate(paths, 1):
        advanced(done, len(paths))
        try:
            states.append(load(path))
        except RunStoreError as error:
            if unusable is None or (path is paths[-1] and not states):
                raise
            unusable.append(str(error))
    return states


# -- JSON: msgspec encodes most types. The functions below convert the other types.


def encode_json(value: object) -> bytes:
    """Return the value as JSON.

    Infinity and NaN become null. decode_json() rejects null in fields that must be numbers.
    """
    return msgspec.json.encode(value, enc_hook=_encode_special_type)


def decode_json(text: bytes, kind: type[_T]) -> _T:
    """Return the value that encode_json() has encoded.

    Raises msgspec.MsgspecError for invalid text.
    """
    return msgspec.json.decode(text, type=kind, dec_hook=_decode_special_type)


def _encode_special_type(value: Any) -> Any:
    if isinstance(value, Sketch):
        return value.to_numbers()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, WindowHistory):
        return value.to_windows()
    if isinstance(value, CollectiveJoin):
        return value.to_state()
    raise NotImplementedError(type(value))


def _decode_special_type(kind: Any, value: Any) -> Any:
    if kind is Sketch:
        return Sketch.from_numbers(value)
    if get_origin(kind) is np.ndarray:
        (dtype,) = get_args(get_args(kind)[1])
        return np.array(value, dtype)
    if kind is WindowHistory:
        return WindowHistory(_convert(value, Windows))
    if kind is CollectiveJoin:
        return CollectiveJoin.from_state(_convert(value, JoinState))
    raise NotImplementedError(kind)


def _convert(value: Any, kind: type[_T]) -> _T:
    return msgspec.convert(value, kind, str_keys=True, dec_hook=_decode_special_type)
