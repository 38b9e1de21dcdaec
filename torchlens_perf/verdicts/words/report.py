"""Types of `report --json`, from which sentences and tables are built as well.

`torchlens-perf report --schema` prints these types as a JSON schema. Names end in their units: `_s`
seconds, `_ns` nanoseconds, `_bytes`, `_hz`. A share is between 0 and 1. None (null in JSON) means
not measured or not known. The keys of `by_rank` are ranks as strings, because JSON keys are
strings.
"""

from __future__ import annotations

from typing import TypedDict

from msgspec import Struct

from torchlens_perf.analysis.collectives.slow_link import LinkFindings
from torchlens_perf.run.cpu_programs import CpuProgram
from torchlens_perf.run.failure import Failure, ProcessActivity, ProcessEnd
from torchlens_perf.run.oom_table import OutOfMemory
from torchlens_perf.verdicts.long_steps import LongSteps
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.report_goodput import Goodput
from torchlens_perf.verdicts.words.report_hardware import Gpu, Link
from torchlens_perf.verdicts.words.report_memory import Memory
from torchlens_perf.verdicts.words.report_utilization import Utilization


class Distribution(TypedDict):
    """Quantiles and mean of durations. All fields are None without durations.

    Quantiles have an error of at most 1.1 %.
    """

    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    max_s: float | None
    mean_s: float | None


class Startup(TypedDict):
    """Startup of the rank whose first recorded step began last."""

    rank: int
    before_first_step_s: float
    warm_up_s: float
    """Total time of the warm-up steps."""
    compile_s: float | None
    """Time spent in torch.compile, also in recorded steps; None if not known."""
    cpu_wait_s: float | None
    """Time until training began in which the main thread was runnable but had no CPU; None if not
    measured."""
    interactive: bool
    """True if a person types code into the process, as in a notebook. Startup may then be idle."""


class Run(TypedDict):
    """Properties and state of the whole run."""

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
    """Total number of steps, if all ranks were configured with the same number."""
    live: bool
    state: str
    """running, ended, failed (an exception ended a rank), or died (ended, but a rank died)."""
    died: list[int]
    """Ranks whose process ended before watch() was closed."""
    failed: list[int]
    """Ranks that an exception has ended."""
    ranks_seen: int
    """Number of ranks in this report. It may be less than world_size."""
    startup: Startup | None
    """None if not known, for example for a simulated run or a second watch()."""
    device: str | None
    """"GPU", or torch's name of another kind of device; None for a CPU."""
    judged_by: str | None
    """The clock by which the ranks are judged: "host", "device", or "host and device"; None while
    undecided."""
    deeper_modules: bool
    """True if timed modules have submodules that are not timed."""
    settings: dict[str, str]
    """Git commit ("-dirty" if files were changed), launcher, versions, loaded frameworks ("none"
    without one), settings of watch() that are not the default, and variables that change the speed.
    What is not known is missing."""


class Trend(TypedDict):
    """Step times of the first and of the last third of the run, without waits for a CPU."""

    first_third_p50_s: float
    last_third_p50_s: float
    change: float
    is_gradual: bool
    """True if the step time changed gradually up to the last third, and by more than it wanders."""
    more_s: float
    """Time by which steps are longer than in the first third, as a mean over the run."""


class StepClasses(TypedDict):
    """Classes of steps with a similar duration, as means over the ranks.

    Each step after the warm-up is in one class: `alike`, or one of `long` and `short`. The counts
    of all classes add up to the number of steps after the warm-up, and their times to total_s.
    """

    total_s: float
    """Time of all steps after the warm-up."""
    warm_up: int
    """Number of warm-up steps. They are not in a class."""
    alike: int
    """Number of typical steps."""
    alike_mean_s: float | None
    """Mean duration of typical steps; None without typical steps."""
    long: list[LongSteps]
    short: list[LongSteps]
    """Classes of shorter steps. Their more_s, total_s and share are negative."""


class Steps(Distribution, StepClasses):
    """Steps of all ranks, without the warm-up.

    Times are by the devices' clocks if all ranks are judged by their devices.
    """

    count: int
    by: str
    """The clock of all times except those of the warm-up: "host" or "device"."""
    warm_up_max_s: float | None
    warm_up_parts: dict[str, float]
    """Share of each part in the time of the warm-up steps."""
    made: int
    """Highest number of steps that a rank has finished, including steps without records."""
    trend: Trend | None
    inference: bool
    micro_steps: int
    sampled_lack_of_cpu: float | None
    own_time: OwnStepTime | None
    host_gaps: dict[str, float]
    """Time of the typical step between two phases by the hosts' clocks, such as
    "backward>optimizer", as a mean over the ranks. It includes this tool's time. Empty if it was
    not measured."""


def mean_per_step(total_s: float, steps: Steps) -> float:
    """Return a total time as a mean over all steps after the warm-up."""
    return total_s / max(1, steps["count"] - steps["warm_up"])


class OwnStepTime(TypedDict):
    """Mean time that the newest steps would take if ranks never waited for other ranks."""

    parts: dict[str, float]
    """Own time by part, in seconds."""
    hidden_share: float
    """Share of own time that the devices' clocks do not show. Host code is hidden while a device
    waits for other ranks."""
    is_hidden: bool
    """True if devices' clocks hide too much to show how a step spends its time."""


class TypicalStep(TypedDict):
    """The typical step of one rank. Its parts add up to s."""

    s: float
    own_s: float
    work_s: float | None
    parts: dict[str, float]
    lack_of_cpu: dict[str, float] | None


class StepAccount(TypedDict):
    """Time of a rank's recorded steps after the warm-up, by part and state.

    cells_ns: for each part of the step, the time by state: running, cpu (runnable without a CPU), data
    or ranks (waiting for them). All cells add up to wall_ns, the time of these steps.
    """

    first_step: int
    last_step: int
    steps: int
    wall_ns: int
    cells_ns: dict[str, dict[str, int]]
    cpu_measured_steps: int
    """Number of steps in which waits for a CPU were measured. In the other steps, they are in the other
    state of their part."""


class Phase(TypedDict):
    """One part of a step. typical_s and share are from typical steps, p50_s and mean_s from all."""

    typical_s: float
    share: float
    p50_s: float
    mean_s: float


class DevicePhase(TypedDict):
    """Time of one phase by the device's clock."""

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
    """Training steps without the time in which the compute stream waits for other ranks; None if
    the rank is not judged by its device."""
    parts: dict[str, float]
    """Parts of training steps, in seconds per step. communication is waiting for other ranks. data
    and host are times in which the device had no work. Empty if the rank is not judged by its
    device."""
    behind_s: Distribution
    caught_up: float | None
    captured: int
    """Number of marks that were left out while a CUDA graph was captured."""


class LastArrivals(TypedDict):
    """Number and share of collectives in which a rank arrived last.

    Only collectives of groups on one node are counted, and only if they synchronize all ranks.
    """

    count: int
    joined: int
    share: float


class CpuUse(TypedDict):
    """Usage of the CPUs of one rank."""

    cpus: int | None
    """Number of CPUs that the rank may use; None if the sidecar has not sampled the rank."""
    threads: int | None
    """Number of threads that torch uses for one operation."""
    workers: int | None
    """Highest number of child processes at the same time; None if not sampled."""
    others_share: float | None
    """Share of the rank's CPUs that was used by programs outside the job while the rank waited for
    a CPU; None if it never waited."""
    programs: list[CpuProgram]
    """The visible programs that used these CPUs most meanwhile, at most three."""
    ranks: int | None
    """Number of ranks of the job that may use these CPUs; None if not sampled."""


class Rank(TypedDict):
    """State and measurements of one rank."""

    rank: int
    host: str
    local_rank: int | None
    """None if the launcher does not set the local rank."""
    pid: int
    attempt: int
    state: str
    """running, closed, failed (by an exception) or died."""
    inside: list[str]
    """The spans that were open when the process died."""
    failure: Failure | None
    """The exception that ended the rank; None if it did not fail."""
    end: ProcessEnd | None
    """How its process ended, as the kernel shows it; None while it runs."""
    now: ProcessActivity | None
    """None if the process has ended."""
    steps: int
    first_step: int | None
    last_step: int | None
    step_s: Distribution
    own_s: Distribution
    work_s: Distribution | None
    typical: TypicalStep | None
    account: StepAccount | None
    """None until there is a step after the warm-up."""
    lines: dict[str, int]
    """Number of stack samples in parts and lines of typical steps, such as "host at train.py:65 in
    main". Other parts are "data", and sections in host code, such as \'section "log"\'."""
    host_gaps: dict[str, float]
    """See Steps.host_gaps."""
    loader_period_s: float | None
    """Time in which the workers of its DataLoader make a batch; None if not measured."""
    phases: dict[str, Phase]
    other_threads: dict[str, float]
    """Seconds per step of phases on other threads than the recorded thread. They are not part of
    the step's time."""
    not_measured: list[str]
    """Names of missing measurements."""
    memory: Memory
    out_of_memory: OutOfMemory | None
    device: DeviceTimes | None
    arrived_last: LastArrivals | None
    """None if the last rank is not known for any collective."""
    cpu: CpuUse | None
    """None if not known."""
    coverage: float
    lost: int


class HeatMapRow(TypedDict):
    """The row of one rank in the heat map.

    slow: ranges of slow steps: the first slow step, and the first healthy step after it or None.
    """

    rank: int
    excess: list[float | None]
    slow: list[list[int | None]]


class Heat(TypedDict):
    """Relative excess of each rank, in windows of `width` steps."""

    width: int
    first_steps: list[int]
    tags: list[list[str]]
    ranks: list[HeatMapRow]


class StepHistory(TypedDict):
    """Step times in windows of `width` steps. Only usual steps are included.

    Median, fastest and slowest are over the usual steps of all ranks in each window.
    """

    width: int
    first_steps: list[int]
    median_s: list[float]
    fastest_s: list[float]
    slowest_s: list[float]


class DeviceModuleTime(TypedDict):
    """Device time of one module in a typical step, as the mean over the ranks.

    The times are None with too few samples. The interval is one of about 95 %.
    """

    device_own_s_per_step: float | None
    device_own_low_s: float | None
    device_own_high_s: float | None
    device_samples: int
    """Smallest number of samples of a rank, one for each step and module."""
    device_equal: str
    """Pattern of the names of equal modules that share the samples; "" without any."""


class Module(DeviceModuleTime):
    """Times of one module."""

    name: str
    is_root: bool
    """True for a whole model. Its own time is the time of its forward() outside timed modules."""
    has_untimed: bool
    """True if the module has submodules that are not timed."""
    calls: int
    """Number of timed calls after the warm-up on all ranks."""
    calls_per_step: float
    """Mean number of calls in a step of a rank that calls the module."""
    own_s: Distribution
    own_s_per_step: float
    by_rank: dict[str, float]
    backward_s: Distribution | None
    backward_by_rank: dict[str, float]
    device_own_by_rank: dict[str, float]
    device_s: Distribution | None
    """Times of single calls with inner modules, including waits of the device for its host."""


class Section(TypedDict):
    """Times of one section that the script has defined."""

    name: str
    calls: int
    total_s: Distribution
    s_per_step: float
    by_rank: dict[str, float]
    host_s_per_typical_step: float | None
    """Time of the section outside all phases, as the median over usual steps and the mean over
    ranks; None without usual steps."""
    device_s: Distribution | None


class DeviceSection(TypedDict):
    """Times of one device section.

    over_all_ranks: times of the last window that devices have merged over all ranks, or None.
    """

    name: str
    calls: int
    device_s: Distribution
    by_rank: dict[str, float]
    over_all_ranks: dict[str, float] | None


class Collective(TypedDict):
    """Times of one collective operation with one data type in one group, or between two ranks."""

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
    duration_s: Distribution
    wait_s: Distribution
    wait_upper_bound_s: Distribution
    transfer_s: Distribution
    bandwidth_at_bytes: float | None
    busbw: float | None
    slowest_rank: int | None
    by_rank: dict[str, dict[str, float]]
    groups_operations: dict[str, int]
    cannot_tell: list[str]


class CapturedFile(TypedDict):
    """A file of a capture. Its path is relative to the run directory."""

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


class PathClass(Struct, frozen=True):
    """A class of time on the critical path, such as "forward", "slow rank" or "evaluation"."""

    name: str
    s_per_step: float
    share: float
    """Share of `LostTime.step_s`."""
    kinds: tuple[str, ...] = ()
    """The kinds of longer steps that the name lists, or "section"; () for other classes."""
    ranks: list[int] = []
    """The ranks of the class "slow rank"; [] for other classes."""


class PredictedChange(Struct, frozen=True):
    """The predicted gain of a change, see `torchlens-perf what-if`."""

    change: str
    gain_s: float
    """Seconds by which a mean step would be shorter."""
    low_s: float
    high_s: float
    """Bounds of the gain."""
    share: float
    """Share of the gain in a mean step."""


class LostTime(Struct, frozen=True):
    """The critical path of recorded steps over all ranks.

    The classes add up to step_s: a mean of the usual steps from first_step to last_step, with what
    irregular steps add per step of the run. Ranks that are slow now are slow in all of these steps,
    if there are enough.
    """

    first_step: int
    last_step: int
    rows: int
    """Number of usual steps that all ranks have made."""
    step_s: float
    classes: list[PathClass]
    changes: list[PredictedChange]
    """The most valuable single changes, the largest gain first."""
    drift_share: float
    """Difference between the replay without a change and the recorded steps. No gain is predicted
    above 0.05."""


class Training(TypedDict):
    """One of several trainings that the processes make one after the other."""

    number: int
    """From 1."""
    model: str | None
    first_step: int
    last_step: int
    steps: int
    total_s: float
    """From the start of the first step, which contains what precedes it, to the end of the last."""
    typical_s: float | None
    """The typical step, as a mean over the ranks; None if the statistics were not kept."""
    verdict: Verdict | None
    """Its first verdict; None if its statistics were not kept."""
    is_shown: bool
    """True for the training that the rest of the report covers."""


class Quality(TypedDict):
    """Completeness of the records, and the overhead of recording."""

    records: int
    lost: int
    too_deep: int
    """Number of spans that were nested too deep to be recorded."""
    coverage: float
    overhead_share: float | None
    """Time of this tool on the training thread, as a fraction of the step time."""
    overhead_low: float | None
    """Lower end of the interval of 95 % of `overhead_share`."""
    overhead_high: float | None
    module_period: int
    """Calls of modules are timed in one of this many steps; the largest value of all ranks."""
    phase_period: int
    """The same for phases on a device."""
    sidecar_cpu_s: float
    notes: list[str]


class StepFacts(TypedDict):
    """The facts from which the classes of a step's time are computed."""

    steps: Steps
    ranks: list[Rank]
    sections: list[Section]
    collectives: list[Collective]


class Facts(StepFacts):
    """A report without its verdicts."""

    schema: int
    run: Run
    heat: Heat | None
    history: StepHistory | None
    modules: list[Module]
    device_sections: list[DeviceSection]
    gpus: list[Gpu]
    links: list[Link]
    slow_links: LinkFindings
    captures: list[Capture]
    goodput: Goodput | None
    """None for a run without steps whose processes' start is not known."""
    lost_time: LostTime | None
    """None without enough usual steps that all ranks have made, or if their times are not known."""
    utilization: Utilization
    quality: Quality


class Report(Facts):
    """The report on a run.

    If its processes make several trainings, all but `run`, `collectives`, `goodput`, `quality` and
    `trainings` covers the training that takes the most time.
    """

    verdicts: list[Verdict]
    trainings: list[Training]
    """Empty if the processes make only one training."""
