"""The fields of `report --json`, which sentences and tables are made of. Types only.

`torchlens-perf report --schema` prints them as a JSON schema. Names end in their units: `_s` seconds, `_ns`
nanoseconds, `_bytes`, `_hz`. A share is between 0 and 1. None, in JSON null, is what was not measured or is not known.
Keys of `by_rank` are ranks as text, as JSON wants them.
"""

from __future__ import annotations

from typing import TypedDict

from torchlens_perf.analysis.collectives.slow_link import LinkFindings
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.verdicts.words.evidence import Evidence, LongSteps
from torchlens_perf.verdicts.words.report_hardware import Gpu, Link
from torchlens_perf.verdicts.words.report_memory import Memory


class Distribution(TypedDict):
    """Of durations in seconds; None where there is no value. Quantiles are off by at most 1.1 %."""

    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    max_s: float | None
    mean_s: float | None


class Startup(TypedDict):
    """How long a process took until its first recorded step began, of the rank that took longest."""

    rank: int
    before_first_step_s: float
    warm_up_s: float
    """How long the warm-up steps took."""
    compile_s: float | None
    """How long torch.compile took in the process, in recorded steps too; None where it was not measured."""
    cpu_wait_s: float | None
    """How long the main thread was runnable without a CPU until training began; None where it was not measured."""
    interactive: bool
    """Whether a person types into the process, as in a notebook: the time before the first step may be idle."""


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
    """When the newest of the nodes' states that this was made from was written."""
    total_steps: int | None
    """How many steps it will make, where its ranks were told so, and the same."""
    live: bool
    state: str
    """running, ended, or died: ended, and a rank did not close its watch."""
    died: list[int]
    """Ranks whose process ended without closing its watch."""
    ranks_seen: int
    """How many of world_size ranks are in this report."""
    startup: Startup | None
    """None where no rank's is known: no step yet, a simulated run, or not the first watch of its process."""
    device: str | None
    judged_by: str | None
    """Whose clock the ranks are judged by: host, device, "host and device"; None while that is not decided."""
    """"GPU", or torch's name of another kind; None for a CPU."""
    deeper_modules: bool
    """There are modules below those that are timed."""


class Trend(TypedDict):
    """Step times of the run's first and last third."""

    first_third_p50_s: float
    last_third_p50_s: float
    change: float


class AlikeAndLong(TypedDict):
    """Classes of a rank's steps, on average over the ranks.

    Each step after the warm-up is in one class: the counts of `alike`, `long` and `short` add up to all of them, and
    their counts times their means to total_s.
    """

    total_s: float
    """Time of all steps after the warm-up."""
    warm_up: int
    """Steps of the warm-up, which are in no class."""
    alike: int
    """Steps of the typical step's class."""
    alike_mean_s: float | None
    """Their mean duration; None if there is no such step."""
    long: list[LongSteps]
    short: list[LongSteps]
    """Classes of shorter steps: more_s, total_s and share are negative."""


class Steps(Distribution, AlikeAndLong):
    """Steps of all ranks, without the warm-up. By the devices' clocks, where all ranks are judged by those."""

    count: int
    by: str
    """Whose clock all but the warm-up is by: "host" or "device"."""
    warm_up_max_s: float | None
    warm_up_parts: dict[str, float]
    """Each part's share of the warm-up steps' time."""
    made: int
    """Most steps that a rank has ended, those that were not recorded or were lost included."""
    trend: Trend | None
    inference: bool
    micro_steps: int
    sampled_lack_of_cpu: float | None
    own_time: OwnStep | None


class OwnStep(TypedDict):
    """A step of ranks that never wait for each other, by the lines of devices and hosts: means over the newest steps.

    None in Steps where it is not known.
    """

    parts: dict[str, float]
    """In seconds."""
    launch_share: float
    """Share of it in which devices wait for their hosts to issue work."""
    hidden_share: float
    """Share of it that devices do not show, as hosts go on while devices wait for other ranks."""
    is_hidden: bool
    """Whether that is so much that devices' own clocks do not tell what ranks do."""


class TypicalStep(TypedDict):
    """One rank's typical step; the parts add up to s."""

    s: float
    own_s: float
    work_s: float | None
    parts: dict[str, float]
    lack_of_cpu: dict[str, float] | None


class Phase(TypedDict):
    """One part of a step: typical_s and share of the typical step, the others of all steps."""

    typical_s: float
    share: float
    p50_s: float
    mean_s: float


class DevicePhase(TypedDict):
    """One phase by the device's clock."""

    p50_s: float
    s_per_step: float


class DeviceTimes(TypedDict):
    """What the device's clock shows of one rank."""

    clock: str | None
    error_s: float | None
    steps: int
    step_s: Distribution
    phases: dict[str, DevicePhase]
    work_s: Distribution | None
    """Of training steps: without what the compute stream waited for other ranks. None where not judged by device."""
    parts: dict[str, float]
    """What those steps are made of, in seconds a step; communication is that waiting, data and host what the device
    waited for without work. Empty where the rank is not judged by its device."""
    behind_s: Distribution
    caught_up: float | None


class ArrivedLast(TypedDict):
    """To how many collectives a rank came last, of those that it took part in and of which that is known: all ranks of
    the group are on one node, and all wait for all."""

    count: int
    joined: int
    share: float


class RankNow(TypedDict):
    """What a running rank was doing when its node's state was written."""

    step: int
    """In progress, for step_s."""
    step_s: float
    inside: list[str]
    """The spans that its training thread was inside of, outermost first; for inside_s in the innermost."""
    inside_s: float | None


class CpuFacts(TypedDict):
    """Who uses the CPUs of a rank."""

    cpus: int | None
    """How many it may use; None: the sidecar has not sampled the rank."""
    threads: int | None
    """Of torch, for one operation."""
    workers: int | None
    """Child processes, such as a loader's, at most at once; None as of `cpus`."""
    others_share: float | None
    """Share of its CPUs that programs outside of the job kept busy. None: not looked for, as it did not wait."""
    busiest_other: str
    """The busiest of them that can be seen, as "name (pid 7)"; "" where none can."""


class Rank(TypedDict):
    """One rank."""

    rank: int
    host: str
    local_rank: int | None
    """None: its launcher does not say it."""
    pid: int
    attempt: int
    state: str
    """running, closed or died."""
    inside: list[str]
    """The spans that a process was inside of when it died."""
    now: RankNow | None
    """None of a process that has ended."""
    steps: int
    first_step: int | None
    last_step: int | None
    step_s: Distribution
    own_s: Distribution
    work_s: Distribution | None
    typical: TypicalStep | None
    phases: dict[str, Phase]
    other_threads: dict[str, float]
    """Seconds per step of phases that ran on threads other than the recorded one: no part of the step's time."""
    not_measured: list[str]
    """What is missing."""
    memory: Memory
    out_of_memory: OutOfMemory | None
    device: DeviceTimes | None
    arrived_last: ArrivedLast | None
    """None where that is known of no collective."""
    wait_s_per_step: float | None
    """How long a typical step is blocked in communication, by the clock that the rank is judged by; None where it is in
    none, or that is not measured."""
    cpu: CpuFacts | None
    """None where nothing is known of them."""
    coverage: float
    lost: int


class HeatRank(TypedDict):
    """A row of the heat map; slow: [since, until] step, None for still."""

    rank: int
    excess: list[float | None]
    slow: list[list[int | None]]


class Heat(TypedDict):
    """How much more work each rank had than the others, in windows of `width` steps."""

    width: int
    first_steps: list[int]
    tags: list[list[str]]
    ranks: list[HeatRank]


class StepHistory(TypedDict):
    """How long steps took, in windows of `width` steps, without the warm-up and steps with other work: of the ranks'
    usual steps in each window, the median and the extremes."""

    width: int
    first_steps: list[int]
    median_s: list[float]
    fastest_s: list[float]
    slowest_s: list[float]


class Module(TypedDict):
    """One timed module."""

    name: str
    is_root: bool
    """It is a whole model. Its own time is that of its forward() outside of the timed modules."""
    has_untimed: bool
    """There are modules inside that are not timed."""
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
    """One section of the user's."""

    name: str
    calls: int
    total_s: Distribution
    s_per_step: float
    by_rank: dict[str, float]
    host_s_per_typical_step: float | None
    """Its time outside of all phases: the median over the usual steps, and the mean over the ranks. None without any
    such step."""
    device_s: Distribution | None


class DeviceSection(TypedDict):
    """One device section; over_all_ranks: its last window, where ranks were merged on the device."""

    name: str
    calls: int
    device_s: Distribution
    by_rank: dict[str, float]
    over_all_ranks: dict[str, float] | None


class Collective(TypedDict):
    """One operation, of one type on one group or pair of ranks."""

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
    """A file of a capture; path inside the run directory."""

    path: str
    bytes: int


class Capture(TypedDict):
    """What came of a capture of one rank."""

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


class Held(TypedDict):
    """Since when a verdict has held. Of a slow rank, that is its episode."""

    since_step: int | None
    until_step: int | None
    """The step from which on it no longer held; None while it holds."""
    windows_held: int | None
    """In how many windows, from the one step to the other."""
    windows_judged: int | None
    """Of how many that show whether it held, over the whole run; None: it is not judged by windows."""
    window_steps: int | None
    """How many steps a window has."""
    since: str | None
    """When that step began, in UTC; within the window, by a usual step's duration."""
    until: str | None


class VerdictFacts(TypedDict):
    """A verdict without its evidence."""

    kind: str
    rank: int | None
    phase: str | None
    cost_s_per_step: float | None
    cost_share: float | None
    lost_s: float | None
    """Seconds of job time that it has cost so far, by which verdicts are ordered; None where that is not known."""
    since_step: int | None
    confidence: float
    text: str
    explanation: str
    """What was measured, for a headline that shows place, cost, time, cause and what to do apart from it."""
    cause: str
    """Why a rank is slow, or what was checked in vain; "" where no cause was looked for."""
    where: dict[str, str] | None
    """Who knows the rank by which name: host, scheduler, container, cloud."""
    held: Held | None
    """None where it cannot be known."""
    is_over: bool
    """Whether it is about an earlier part of the run only."""


class VerdictRow(VerdictFacts):
    """A verdict; evidence has the numbers behind its sentence, by kind."""

    evidence: Evidence


class Quality(TypedDict):
    """What the records are worth, and what recording cost."""

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
