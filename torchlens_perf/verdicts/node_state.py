"""What one node's sidecar knows, as a file: the report is made from these files, live or later."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from torchlens_perf.analysis.collectives.join import CollectiveJoin, JoinState
from torchlens_perf.analysis.statistics.hardware import Telemetry
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS, RankStatistics, WindowHistory, Windows
from torchlens_perf.errors import DAMAGED_DATA, RunStoreError
from torchlens_perf.run import ownership
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import DeviceClock, Gpu, Identity, ProcessGroup
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.run.records import TracedStep
from torchlens_perf.run.sketch import Sketch
from torchlens_perf.verdicts.stragglers.detector import place_of
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE, JudgedSteps
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.words.hang import OpenHang

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.records import StepTable
from torchlens_perf.verdicts.finding_log import FindingRecords

SCHEMA = 13

MAX_BYTES = 1 << 28
"""Of a node's state: 13 KB a rank of a plain loop, 100 KB of one with many modules and collectives."""
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """What a running process was doing at one instant: a snapshot, taken beside it. Seconds are by then."""

    step: int
    """In progress."""
    step_s: float
    """For so long."""
    inside: tuple[str, ...]
    """The spans that its training thread was inside of, outermost first, without the step."""
    inside_s: float | None
    """For how long it had been in the innermost; None where it was in none."""


@dataclasses.dataclass
class CpuUsers:
    """Who uses the CPUs of a process, as the sidecar sees it."""

    cpus: int = 0
    """How many it may use; 0: not known."""
    workers: int = 0
    """Its child processes, at most at once."""
    others: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    """Of the samples in which it lacked a CPU: the sum of the shares of its CPUs that programs outside of the job kept
    busy, and how many samples there are."""
    busiest_other: str = ""
    """The busiest of them, as "name (pid 7)"."""


@dataclasses.dataclass
class ProcessState:
    """One process of one rank."""

    identity: Identity
    anchor: Anchor
    statistics: RankStatistics
    counted: int = -1
    """Sequence number of the last record that the statistics hold."""
    ended: str = ""
    """"closed" by its watch, "died", or "" while it runs."""
    trace_every: int = 0
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    native: bool = True
    model: str = ""
    """What it computes, see identity.model_digest."""
    memory_source: str = ""
    compute_device: str = ""
    """What its models are on: "cpu", "cuda", ...; "" where that is not known."""
    deeper_modules: bool = False
    """Whether its models have modules below those that are timed."""
    root_modules: list[str] = dataclasses.field(default_factory=list)
    """The names of its whole models."""
    unopened_modules: list[str] = dataclasses.field(default_factory=list)
    """Timed modules with others inside that are not timed."""
    device: DeviceClock = dataclasses.field(default_factory=DeviceClock)
    judged_by: str = ""
    """Whose clock its steps are judged by, "host" or "device"; "" until that is decided, see judged_steps.py."""
    notes: list[str] = dataclasses.field(default_factory=list)
    unbalanced: int = 0
    too_deep: int = 0
    names_lost: int = 0
    internal_errors: int = 0
    tool_ns: int = 0
    made_steps: int = 0
    """How many steps have ended, those that were not recorded or were lost included."""
    process_began_ns: int = 0
    """When the process began, by its clock of marks; 0 where that is not known or tells nothing: see Startup."""
    compile_s: float | None = None
    """How long torch.compile took in this process so far; None where it was not measured."""
    start_cpu_wait_ns: int | None = None
    """How long the main thread was runnable without a CPU until training began; None where it was not measured."""
    interactive: bool = False
    """Whether a person types into the process, as in a notebook."""
    open_spans: list[str] = dataclasses.field(default_factory=list)
    """What a process that died was inside of."""
    now: Whereabouts | None = None
    """Of one that runs, when the state was saved; None of others, and of simulated ones."""
    total_steps: int = 0
    """How many steps it will make, as its watch was told; 0: not known."""
    groups: dict[str, ProcessGroup] = dataclasses.field(default_factory=dict)
    """Those that it has used, by name."""
    not_measured: list[str] = dataclasses.field(default_factory=list)
    """Parts of the step that exist, or may exist, and that nothing distinguishes from the others."""
    cpu_wait: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    """Of the sidecar's samples: the sum of the shares of time in which its main thread was ready and had no CPU, and
    how many samples there are."""
    threads: int = 0
    """Of torch, for one operation; 0: not known."""
    cpu_users: CpuUsers = dataclasses.field(default_factory=CpuUsers)
    missing_tap: str = ""
    """The file of the native tap on collectives that it has not found; "" if it had it, or had no other ranks."""
    out_of_memory: OutOfMemory | None = None
    """The newest table that it wrote when its device's memory ran out, see hooks/on_device/out_of_memory.py."""

    @property
    def on_device(self) -> bool | None:
        """Whether it computes on a device other than the CPU; None where that is not known."""
        if self.device:
            return True
        return None if not self.compute_device else self.compute_device != "cpu"

    def judge_by(
        self, judged: JudgedSteps, records: npt.NDArray[np.void] | None = None, steps: StepTable | None = None
    ) -> StepTable | None:
        """The steps to judge the rank by that are known with these records; without any, what was held back."""
        if records is None or steps is None:
            newly = judged.rest()
        else:
            newly = judged.add(records, steps, on_device=self.on_device)
        self.judged_by = judged.by
        if newly is not None and judged.by == DEVICE:
            warm = newly.where(newly.step >= (self.statistics.first_step or 0) + WARM_UP_STEPS)
            self.statistics.device.add_steps(warm)
            self.statistics.device_mix.add(warm)
            self.statistics.device_history.add(newly)
        return newly

    def judged_windows(self) -> Windows:
        """The history of the steps that it is judged by."""
        of = self.statistics
        return (of.device_history if self.judged_by == DEVICE else of.history).windows()

    @property
    def place(self) -> Placement:
        """Where the rank is, and whom it is compared with."""
        return place_of(self.identity, self.model, self.groups, self.judged_by)


@dataclasses.dataclass
class NodeState:
    """One node of the run."""

    host: str
    processes: dict[str, ProcessState] = dataclasses.field(default_factory=dict)
    dropped_segments: int = 0
    unwritten_records: int = 0
    """Let go while the run directory could not be written: the statistics hold them, no segment does."""
    notes: list[str] = dataclasses.field(default_factory=list)
    passing_notes: list[str] = dataclasses.field(default_factory=list)
    """What holds now, as that another node is not reached; a later sidecar says what holds then."""
    sidecar_cpu_s: float = 0.0
    saved_unix_ns: int = 0
    """When this was saved, by the node's clock; 0: not known."""
    join: CollectiveJoin = dataclasses.field(default_factory=CollectiveJoin)
    """The node's collectives, joined across its ranks."""
    hang: OpenHang | None = None
    findings: Findings = NOTHING
    """What this node's straggler detector found: in its own ranks, or on node 0 in those of all nodes."""
    records: FindingRecords = dataclasses.field(default_factory=FindingRecords)
    """What was found while the run went on, and when."""
    telemetry: Telemetry = dataclasses.field(default_factory=Telemetry)
    traced: list[TracedStep] = dataclasses.field(default_factory=list)
    """The newest steps that were sent as traces, and what of them."""
    tap_outlook: str = ""
    """What becomes of the native tap that its ranks have missed, see TapForNextRun.outlook()."""
    schema: int = SCHEMA

    def save(self, run: RunDirectory, *, durably: bool = False) -> None:
        """Replaces the node's file. durably: so that the machine may lose its power then. Raises OSError on a full
        disk."""
        path = run.node_state(self.host)
        partial = path.with_suffix(".partial")
        with open(ownership.create(partial), "wb", buffering=0) as file:
            ownership.write_all(file, encode(self))
            if durably:
                os.fsync(file.fileno())
        os.replace(partial, path)


@dataclasses.dataclass(frozen=True)
class _Schema:
    schema: int


class DamagedStateError(RunStoreError):
    """A file of a node's state that can be read and is none of this version's."""


def load(path: Path) -> NodeState:
    """The state that save() wrote. Raises RunStoreError if it cannot be read, DamagedStateError if it is none."""
    try:
        text = ownership.read_bytes(path, MAX_BYTES)
    except ownership.NotRegularFileError as error:
        raise DamagedStateError(str(error)) from None
    except ownership.TooLargeError as error:
        raise DamagedStateError(f"{path} cannot be read: {error.strerror}") from None
    except OSError as error:
        raise RunStoreError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        schema = decode(text, _Schema).schema
        if schema == SCHEMA:
            return decode(text, NodeState)
    except (msgspec.MsgspecError, *DAMAGED_DATA) as error:
        raise DamagedStateError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    raise DamagedStateError(f"{path} has schema {schema}, this version reads {SCHEMA}")


def load_or_new(run: RunDirectory, host: str) -> NodeState:
    """What the node's sidecar has saved, if anything. What is no state is set aside, which the new one notes.

    Raises RunStoreError where the disk does not let it be read: then it may be read later.
    """
    path = run.node_state(host)
    try:
        return load(path) if path.exists() else NodeState(host)
    except DamagedStateError as error:
        return NodeState(host, notes=[f"{error}. {_set_aside(path)}; what only that file had is missing here"])
    except OSError as error:
        raise RunStoreError(f"{path} cannot be read: {error.strerror or error}") from None


def _set_aside(path: Path) -> str:
    """Renames what cannot be used: it is neither lost nor in the way. Says where it is. Raises RunStoreError."""
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
    """All nodes of the run, by host. unusable: gets a line for each file that cannot be read; None: that is an error.

    advanced: called with the number of files that are looked at, and of all. Raises RunStoreError if there are none, or
    none can be read.
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


# -- as JSON and back, by the types: msgspec does it, but for the few types in here


def encode(value: object) -> bytes:
    """The value as JSON. What is infinite or not a number becomes null, and is refused where a number must be."""
    return msgspec.json.encode(value, enc_hook=_plain)


def decode(text: bytes, kind: type[_T]) -> _T:
    """What encode() was given. Raises msgspec.MsgspecError for what is no such value."""
    return msgspec.json.decode(text, type=kind, dec_hook=_of_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Sketch):
        return value.numbers()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, WindowHistory):
        return value.windows()
    if isinstance(value, CollectiveJoin):
        return value.state()
    raise NotImplementedError(type(value))


def _of_plain(kind: Any, value: Any) -> Any:
    if kind is Sketch:
        return Sketch.from_numbers(value)
    if get_origin(kind) is np.ndarray:
        (dtype,) = get_args(get_args(kind)[1])
        return np.array(value, dtype)
    if kind is WindowHistory:
        return WindowHistory(_converted(value, Windows))
    if kind is CollectiveJoin:
        return CollectiveJoin.going_on_from(_converted(value, JoinState))
    raise NotImplementedError(kind)


def _converted(value: Any, kind: type[_T]) -> _T:
    return msgspec.convert(value, kind, str_keys=True, dec_hook=_of_plain)
