"""The fields of `report --json`, which are also the input of sentences and tables. Types only.

`torchlens-perf report --schema` prints them as a JSON schema. Names end in their units: `_s`
seconds, `_ns` nanoseconds, `_bytes`, `_hz`. A share is between 0 and 1. None (null in JSON) means
not measured or not known. Keys of `by_rank` are ranks as strings, because JSON has no other keys.
"""

from __future__ import annotations

from typing import TypedDict

from torchlens_perf.analysis.collectives.slow_link import LinkFindings
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.verdicts.words.evidence import Evidence, LongSteps
from torchlens_perf.verdicts.words.report_hardware import Gpu, Link
from torchlens_perf.verdicts.words.report_memory import Memory


class Distribution(TypedDict):
    """Quantiles and mean of durations; None without any value.

    Quantiles have an error of at most 1.1 %.
    """

    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    max_s: float | None
    mean_s: float | None


class Startup(TypedDict):
    """Time from the start of the process to its first recorded step, of the slowest rank."""

    rank: int
    before_first_step_s: float
    warm_up_s: float
    """Time of the warm-up steps."""
    compile_s: float | None
    """Time spent in torch.compile by the process, also in recorded steps; None if unknown."""
    cpu_wait_s: float | None
    """Time for which the main thread was runnable without a CPU until training began; None if it
    was not measured."""
    interactive: bool
    """True if a person types into the process, as in a notebook. Its start may be idle."""


class Run(TypedDict):
    """The run as a whole."""

    id: str
    program: str | None
    world_size: int
    nodes: list[str]
    attempt: int
    started: str | None
    ended: str | None
    last_step_at: str | None
    as_of: str | None
    """Time at which the newest node state of this report was written."""
    total_steps: int | None
    """Total steps of the run, if all ranks were configured with the same number."""
    live: bool
    state: str
    """running, ended, or died (ended, and a rank did not close its watch)."""
    died: list[int]
    """Ranks whose process ended without closing its watch."""
    ranks_seen: int
    """Number of ranks in this report, of world_size ranks."""
    startup: Startup | None
    """None if not known for any rank: no step, a simulated run, or a second watch."""
    device: str | None
    """"GPU", or torch's name of another kind of device; None for a CPU."""
    judged_by: str | None
    """The clock that the ranks are judged by: host, device, "host and device"; None while that is
    not decided."""
    deeper_modules: bool
    """True if there are modules below those that are timed."""


class Trend(TypedDict):
    """Step times of the first and the last third of the run."""

    first_third_p50_s: float
    last_third_p50_s: float
    change: float


class AlikeAndLong(TypedDict):
    """Classes of a rank's steps, as means over the ranks.

    Each step after the warm-up is in one class. The counts of `alike`, `long` and `short` add up to
    the number of these steps. The sum of count times mean duration over all classes is total_s.
    """

    total_s: float
    """Time of all steps after the warm-up."""
    warm_up: int
    """Number of warm-up steps, which are in no class."""
    alike: int
    """Number of steps in the class of the typical step."""
    alike_mean_s: float | None
    """Mean duration of these steps; None if there is no such step."""
    long: list[LongSteps]
    short: list[LongSteps]
    """Classes of shorter steps. Their more_s, total_s and share are negative."""


class Steps(Distribution, AlikeAndLong):
    """Steps of all ranks, without the warm-up.

    Times are by the devices' clocks if all ranks are judged by those.
    """

    count: int
    by: str
    """The clock of all times except the warm-up: "host" or "device"."""
    warm_up_max_s: float | None
    warm_up_parts: dict[str, float]
    """Each part's share of the warm-up steps' time."""
    made: int
    """Highest number of finished steps of a rank, including unrecorded and lost ones."""
    trend: Trend | None
    inference: bool
    micro_steps: int
    sampled_lack_of_cpu: float | None
    own_time: OwnStep | None


class OwnStep(TypedDict):
    """Own time of a step, from the times of devices and hosts: means over the newest steps."""

    parts: dict[str, float]
    """Own time by part, in seconds."""
    launch_share: float
    """Share of own time in which devices wait for their hosts to issue work."""
    hidden_share: float
    """Share of own time that devices do not show, as hosts run ahead of waiting devices."""
    is_hidden: bool
    """True if so much is hidden that the devices' own clocks do not show where the time goes."""


class TypicalStep(TypedDict):
    """One rank's typical step. The parts add up to s."""

    s: float
    own_s: float
    work_s: float | None
    parts: dict[str, float]
    lack_of_cpu: dict[str, float] | None


class Phase(TypedDict):
    """One part of a step. typical_s and share are of the typical step, the others of all steps."""

    typical_s: float
    share: float
    p50_s: float
    mean_s: float


class DevicePhase(TypedDict):
    """One phase by the device's clock."""

    p50_s: float
    s_per_step: float


class DeviceTimes(TypedDict):
    """Times of one rank by its device's clock."""

    clock: str | None
    error_s: float | None
    steps: int
    step_s: Distribution
    phases: dict[str, DevicePhase]
    work_s: Distribution | None
    """Training steps without the waits of the compute stream for other ranks; None if not judged by
    the device."""
    parts: dict[str, float]
    """Parts of these steps, in seconds per step. communication is the waiting for other ranks; data
    and host are the
    times in which the device waited without work. Empty if the rank is not judged by its device."""
    behind_s: Distribution
    caught_up: float | None


class ArrivedLast(TypedDict):
    """Number and share of collectives to which a rank came last.

    Only collectives are counted whose group is on one node, and in which all ranks wait for all.
    """

    count: int
    joined: int
    share: float


class RankNow(TypedDict):
    """Activity of a running rank when its node's state was written."""

    step: int
    """The step in progress."""
    step_s: float
    """Time since that step began."""
    inside: list[str]
    """The spans that its training thread was inside of, outermost first."""
    inside_s: float | None
    """Time since the innermost span began."""


class CpuFacts(TypedDict):
    """Use of a rank's CPUs."""

    cpus: int | None
    """Number of CPUs that the rank may use; None if the sidecar has not sampled the rank."""
    threads: int | None
    """Number of threads that torch uses for one operation."""
    workers: int | None
    """Highest number of child processes at one time, such as loader workers; None like `cpus`."""
    others_share: float | None
    """Share of its CPUs that programs outside of the job kept busy; None if it did not wait."""
    busiest_other: str
    """The busiest of these programs that is visible, as "name (pid 7)"; "" if none is."""


class Rank(TypedDict):
    """One rank."""

    rank: int
    host: str
    local_rank: int | None
    """None if the launcher does not set it."""
    pid: int
    attempt: int
    state: str
    """running, closed or died."""
    inside: list[str]
    """The spans that a process was inside of when it died."""
    now: RankNow | None
    """None for a process that has ended."""
    steps: int
    first_step: int | None
    last_step: int | None
    step_s: Distribution
    own_s: Distribution
    work_s: Distribution | None
    typical: TypicalStep | None
    phases: dict[str, Phase]
    other_threads: dict[str, float]
    """Seconds per step of phases on threads other than the recorded one. They are not part of the
    step's time."""
    not_measured: list[str]
    """Measurements that are missing."""
    memory: Memory
    out_of_memory: OutOfMemory | None
    device: DeviceTimes | None
    arrived_last: ArrivedLast | None
    """None if it is not known for any collective."""
    wait_s_per_step: float | None
    """Time that a typical step is blocked in communication, by the clock that the rank is judged
    by; None without communication, or if it is not measured."""
    cpu: CpuFacts | None
    """None if nothing is known."""
    coverage: float
    lost: int


class HeatRank(TypedDict):
    """A row of the heat map.

    slow: pairs of first slow step and first healthy step, None while it is slow.
    """

    rank: int
    excess: list[float | None]
    slow: list[list[int | None]]


class Heat(TypedDict):
    """Relative excess of each rank, in windows of `width` steps."""

    width: int
    first_steps: list[int]
    tags: list[list[str]]
    ranks: list[HeatRank]


class StepHistory(TypedDict):
    """Step times in windows of `width` steps, without the warm-up and steps with other work.

    Median and extremes are over the ranks' usual steps in each window.
    """

    width: int
    first_steps: list[int]
    median_s: list[float]
    fastest_s: list[float]
    slowest_s: list[float]


class Module(TypedDict):
    """One timed module."""

    name: str
    is_root: bool
    """True for a whole model. Its own time is that of its forward() outside of timed modules."""
    has_untimed: bool
    """True if there are modules inside that are not timed."""
    calls: int
    own_s: Distribution
    own_s_per_step: float
    by_rank: dict[str, float]
    backward_s: Distribution | None
    backward_by_rank: dict[str, float]
    device_own_by_rank: dict[str, float]
    device_s: Distribution | None
    device_own_s_per_step: float | None


class Section(TypedDict):
    """One section that the user has defined."""

    name: str
    calls: int
    total_s: Distribution
    s_per_step: float
    by_rank: dict[str, float]
    host_s_per_typical_step: float | None
    """Its time outside of all phases: the median over the usual steps, as mean over the ranks; None
    without usual
    steps."""
    device_s: Distribution | None


class DeviceSection(TypedDict):
    """One device section.

    over_all_ranks: its last window, if windows of all ranks were merged on the devices.
    """

    name: str
    calls: int
    device_s: Distribution
    by_rank: dict[str, float]
    over_all_ranks: dict[str, float] | None


class Collective(TypedDict):
    """One kind of collective operation, with one data type and one group or pair of ranks."""

    operation: str
    group: str
    dtype: str | None
    description: str
    pair: list[int] | None
    ranks: str | None
    ranks_seen: str
    count: int
    ended: int
    asynchronous: int
    by_device: int
    bytes: int
    joined: int
    joined_whole: bool
    issue_s: Distribution
    duration_s: Distribution
    wait_s: Distribution
    wait_upper_bound_s: Distribution
    transfer_s: Distribution
    bandwidth_at_bytes: float | None
    algbw: float | None
    busbw: float | None
    slowest_rank: int | None
    by_rank: dict[str, dict[str, float]]
    groups_operations: dict[str, int]
    cannot_tell: list[str]


class CapturedFile(TypedDict):
    """A file of a capture. The path is relative to the run directory."""

    path: str
    bytes: int


class Capture(TypedDict):
    """The result of a capture of one rank."""

    id: str
    asked_by: str
    attempt: int
    rank: int
    first_step: int | None
    last_step: int | None
    ended: str
    paused_s: float
    files: dict[str, CapturedFile]
    left_out: dict[str, str]


class Period(TypedDict):
    """The period for which a verdict has held. For a slow rank, that is its episode."""

    since_step: int | None
    until_step: int | None
    """The first step in which it no longer held; None while it holds."""
    windows_held: int | None
    """Number of windows between these steps in which it held."""
    windows_judged: int | None
    """Number of windows of the whole run that show whether it held; None without windows."""
    window_steps: int | None
    """Number of steps in a window."""
    since: str | None
    """Time at which that step began, in UTC. Inside a window it is interpolated by the duration of
    a usual step."""
    until: str | None


class VerdictFacts(TypedDict):
    """A verdict without its evidence."""

    kind: str
    rank: int | None
    phase: str | None
    cost_s_per_step: float | None
    cost_share: float | None
    lost_s: float | None
    """Seconds of job time that it has cost so far, which orders verdicts; None if unknown."""
    since_step: int | None
    confidence: float
    text: str
    explanation: str
    """The measurement. Place, cost, time, cause and action are in other fields, for screens that
    show them apart."""
    cause: str
    """The cause of a rank's slowness, or the causes ruled out; "" without a diagnosis."""
    where: dict[str, str] | None
    """Names of the rank's location: host, scheduler, container, cloud."""
    held: Period | None
    """None if the period is not known."""
    is_over: bool
    """True if it is about an earlier part of the run only."""


class VerdictRow(VerdictFacts):
    """A verdict with its evidence. The type of evidence depends on the kind."""

    evidence: Evidence


class Quality(TypedDict):
    """Completeness of the records, and the overhead of recording."""

    records: int
    lost: int
    too_deep: int
    """Spans that were nested too deep to be recorded."""
    coverage: float
    overhead_share: float | None
    sidecar_cpu_s: float
    notes: list[str]


class Facts(TypedDict):
    """The report before its verdicts."""

    schema: int
    run: Run
    steps: Steps
    ranks: list[Rank]
    heat: Heat | None
    history: StepHistory | None
    modules: list[Module]
    sections: list[Section]
    device_sections: list[DeviceSection]
    gpus: list[Gpu]
    links: list[Link]
    collectives: list[Collective]
    slow_links: LinkFindings
    captures: list[Capture]
    quality: Quality


class Report(Facts):
    """The report on a run."""

    verdicts: list[VerdictRow]
