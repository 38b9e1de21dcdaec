"""Facts that a training process publishes about itself, in addition to its records.

The process writes one RankFacts as JSON into its ring file. The sidecar reads the JSON into a
RankFacts again and stores it unchanged in the node's state. A new fact is a field here and the hook
that sets it. Each field of RankFacts has a default, so that files of other versions can be read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, TypedDict

from torchlens_perf.config import Config
from torchlens_perf.errors import RingError
from torchlens_perf.run.failure import Failure
from torchlens_perf.run.training_settings import TrainingSettings


def encode_path(path: str) -> str:
    """Return the path as text that UTF-8 has: one character for each byte."""
    return os.fsencode(path).decode("latin-1")


def decode_path(text: str) -> str:
    """Return the path that encode_path() has encoded."""
    return os.fsdecode(text.encode("latin-1"))


class ProcessGroup(TypedDict):
    """A process group that a rank has used."""

    ranks: str
    """Member ranks, such as "0-7"."""
    description: str


class Gpu(TypedDict):
    """A GPU that a process computes on."""

    uuid: str
    """UUID in NVML's format."""
    name: str
    index: int
    """torch's device index in the process."""


class DeviceClockQuality(TypedDict, total=False):
    """Accuracy of the device's times, and the number of missing times by reason.

    The dictionary is empty if no device is used.
    """

    clock: str
    error_ns: int | None
    captured: int
    skipped: int
    crowded: int
    aside: int
    open_ended: int
    unread: int


class RecordingCost(TypedDict, total=False):
    """Cost of recording on a rank, and how often the rank times calls of modules."""

    mark_ns: float | None
    """Measured cost of timing the call of a module; None without a measurement."""
    module_period: int
    """Modules are timed in one step of this many."""
    phase_period: int
    """Phases are timed on the device in one step of this many."""


@dataclasses.dataclass(frozen=True)
class SidecarSettings:
    """Settings of watch() that the sidecar follows."""

    disk_bytes: int = Config.disk_bytes
    trace_every: int = Config.trace_every
    trace_slow: bool = Config._trace_slow
    export_limit: int = Config.export_limit
    telemetry: bool = Config.telemetry
    capture: str = Config.capture
    exchange: str = Config.exchange
    prometheus: str = Config.prometheus
    writes_page: bool = True

    @classmethod
    def from_config(cls, config: Config) -> SidecarSettings:
        return cls(
            disk_bytes=config.disk_bytes,
            trace_every=config.trace_every,
            trace_slow=config._trace_slow,
            export_limit=config.export_limit,
            telemetry=config.telemetry,
            capture=config.capture,
            exchange=config.exchange,
            prometheus=config.prometheus,
            writes_page=config.writes_page,
        )


@dataclasses.dataclass(frozen=True)
class ReportRequest:
    """Format of the report that rank 0 waits for at the end of the run."""

    mailbox: str = ""
    """File that receives the short report, see encode_path(); "" if rank 0 does not wait."""
    columns: int = 0
    """Width of the terminal; 0 without a terminal."""
    color: bool = False
    in_cell: bool = False
    """True if a notebook's cell shows the report."""


@dataclasses.dataclass(kw_only=True)
class RankFacts:
    """Facts about one process of one rank."""

    settings: SidecarSettings = SidecarSettings()
    simulated: bool = False
    """True if a simulation writes the ring. The kernel's data then describes the simulation, not a
    rank."""
    run_settings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Versions, loaded frameworks, settings of watch() and variables that change the speed, as text
    by name."""
    total_steps: int = 0
    """Total number of steps of the run, as configured in watch(); 0 if not known."""
    folder: str = ""
    """Folder of the program, see encode_path(); "" if not known."""
    error_file: str = ""
    """File in which torchrun's @record describes an exception, see encode_path(); "" without one."""
    stack_file: str = ""
    """File into which the process writes its stack on a signal, see encode_path(); "" without
    one."""
    dump_prefix: str = ""
    """Path of the dumps of PyTorch's Flight Recorder without the rank, see encode_path(); "" if the
    process has no other ranks."""
    nccl_ras_port: int = 0
    """Port of NCCL's RAS service; 0 without NCCL."""
    job_store: tuple[str, int] | None = None
    """Host and port of the job's TCPStore; None if they are not set."""
    interactive: bool = False
    """True if a person types code into the process, as in a notebook."""
    process_began_ns: int = 0
    """Start of the process by the clock of its records; 0 if not known, or if it is not the start
    of the run, as in a notebook."""
    start_cpu_wait_ns: int | None = None
    """Time until training began in which the main thread was runnable but had no CPU; None if not
    measured."""
    compile_s: float | None = None
    """Time spent in torch.compile so far; None if not measured."""
    thread_id: int = 0
    """The kernel's id of the recorded thread; 0 if not known, or if several threads run models."""
    threads: int = 0
    """Number of threads that torch uses for one operation; 0 if not known."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Notes on data quality."""
    not_measured: list[str] = dataclasses.field(default_factory=list)
    """Parts of the step that cannot be measured separately."""
    model: str = ""
    """Digest of the model's structure, see identity.digest_module_names()."""
    compute_device: str = ""
    """The device of its models: "cpu", "cuda", ...; "" if not known."""
    deeper_modules: bool = False
    """True if timed modules of its models have submodules that are not timed."""
    root_modules: list[str] = dataclasses.field(default_factory=list)
    """The names of its models themselves."""
    unopened_modules: list[str] = dataclasses.field(default_factory=list)
    """Timed modules whose submodules are not timed."""
    groups: dict[str, ProcessGroup] = dataclasses.field(default_factory=dict)
    """The process groups that the process has used, by name."""
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    """GPUs that the process computes on."""
    device: DeviceClockQuality = dataclasses.field(default_factory=DeviceClockQuality)
    memory_source: str = ""
    """Source of the memory readings, such as the device's allocator."""
    recording: RecordingCost = dataclasses.field(default_factory=RecordingCost)
    missing_tap: str = ""
    """Why the native tap is missing, and how to build it; "" if it is loaded or not needed."""
    operators_missing: str = ""
    """Reason why operators are not counted; "" if they are."""
    loader_period_ns: int = 0
    """Time in which the workers of its DataLoader make a batch; 0 if not measured."""
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)
    step_offset: int | None = None
    """Steps that the model had made before step 0 of this process, by the step counter of its
    framework or optimizer; None if not known."""
    trainings: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    """First step and model of each training, if the process trains several models one after the
    other."""
    failure: Failure | None = None
    """The exception that ended the watch; None if it ended well."""
    report: ReportRequest = dataclasses.field(default_factory=ReportRequest)
    """The report that rank 0 waits for, once its watch has ended."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> RankFacts:
        """Return the facts in the metadata of a ring file. Unknown fields are ignored.

        Raise RingError if a field has another type, as in a file of another version.
        """
        # Only readers import msgspec. The training process does not need it.
        import msgspec

        try:
            return msgspec.convert(metadata, cls)
        except msgspec.ValidationError as error:
            raise RingError(f"its metadata are of another version: {error}") from None

    @property
    def on_device(self) -> bool | None:
        """True if the process computes on a device other than the CPU; None if unknown."""
        if self.device:
            return True
        return None if not self.compute_device else self.compute_device != "cpu"
