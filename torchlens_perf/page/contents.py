"""Types of the page's data, which Python code gathers and the page's scripts draw.

A page file contains the data as JSON in `<script type="application/json" id="contents">`. The live
page serves the same JSON. Names of fields end in their units, as in the report: `_s` for seconds,
`_bytes`. A value that was not measured is None, never 0.
"""

from __future__ import annotations

from typing import TypedDict

from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.headline import Headline
from torchlens_perf.view.specs import Table


class EncodedMatrix(TypedDict):
    """Durations of shape [ranks, columns] as 16-bit codes: row by row, little-endian, deflated
    (zlib), in base64.

    Code 0 means "not measured" and code 1 means 0 s. A larger code means `smallest_s * exp((code -
    2) * log_step)` seconds, so the relative error is at most half of log_step.
    """

    smallest_s: float
    log_step: float
    codes: str


class MatrixColumns(TypedDict):
    """The columns of all matrices: windows of `width` steps, the same for all ranks."""

    width: int
    first_steps: list[int]
    started_s: list[float | None]
    """Start of the window in seconds since the run's first step; the median of the ranks."""
    flags: list[list[str]]
    """Other activity of any rank in the window: checkpoint, evaluation, compile, capture, garbage
    collection.
    """


class RankLocation(TypedDict):
    """The location of a rank: its host, and its coordinates in the device mesh."""

    rank: int
    host: str
    mesh: dict[str, int]
    """The rank's coordinates in the device mesh, as far as process groups reveal them: {"dp": 1,
    "tp": 0}.
    """


class SlowPeriod(TypedDict):
    """Steps [since_step, until_step) in which a rank was reported as slow.

    until_step is None if the rank is still slow.
    """

    rank: int
    label: str
    """The rank, or its slow node or position, in words; "" if that is in the label of another rank."""
    phase: str
    since_step: int
    until_step: int | None


class StepMatrices(TypedDict):
    """Mean step times of each rank in each window of steps."""

    columns: MatrixColumns
    places: list[RankLocation]
    """The rows, sorted by rank."""
    is_compared: bool
    """True if the work of any rank can be compared with that of others in its population."""
    step: EncodedMatrix
    bands: dict[str, list[float | None]]
    """Quantiles of step durations for each column, over all steps of all ranks in the column: p5_s,
    p50_s, p95_s and max_s.
    """
    slow: list[SlowPeriod]
    work: EncodedMatrix
    """Own time without CPU contention, by which ranks are compared.

    Only comparable steps count: no warm-up steps, and no steps with evaluation, checkpoint,
    compilation, sampling or capture. So work may be "not measured" in a column that has a step
    time. Ranks that are judged by their device have device times here.
    """
    others: EncodedMatrix
    """Median work of the other ranks in the population. Excess is work / others - 1."""
    parts: dict[str, EncodedMatrix]
    """Time by part (run.records.PARTS), in stacking order.

    A part that occurs in no step is left out.
    """
    device_parts: dict[str, EncodedMatrix]
    """Time by part by the devices' clocks; empty without devices."""
    memory_bytes: list[list[int | None]] | None
    """Peak memory of shape [ranks, at most 256 columns].

    The columns divide the same steps into equal groups.
    """


class SpanRow(TypedDict):
    """The spans in one lane of the timeline, as lists of equal length.

    Starts are microseconds since the step's start on that rank.
    """

    lane: str
    """One of: host, collectives, other threads, device, collectives on the device.

    Spans that do not nest with others have a lane of their own. The parts of a step are in `host`,
    where depth is the nesting level. In the other lanes depth separates overlapping spans.
    """
    kind: list[str]
    """Kinds of records: data, forward, backward, optimizer, wait, module, module_backward, section,
    collective, ...
    """
    name: list[int]
    """Indexes into StepTraces.names."""
    start_us: list[float]
    duration_us: list[float]
    depth: list[int]
    number: list[int] | None
    """Sequence numbers of collectives; 0 for other spans; None if the lane has no collectives.

    Together with the group in the name, a number identifies the CollectiveJoined.
    """


class JoinedCollective(TypedDict):
    """One collective with the arrival and the waiting time of each rank in its group."""

    name: str
    """Operation and dtype: "allreduce float32"."""
    group: str
    """The group's description, such as "mesh_dp", or else its name."""
    group_name: str
    """The name of the collective's spans: "allreduce group=0 dtype=float32"."""
    number: int
    """The sequence number in the group.

    PyTorch's Flight Recorder counts from 1: its number is larger by one.
    """
    bytes: int | None
    asynchronous: bool
    """If true, `wait_us` is how much earlier a rank issued the collective, not time that it was
    blocked.
    """
    last_rank: int | None
    """The rank that arrived last; None if it is not known."""
    arrival_us: dict[str, float | None]
    """Arrival of each rank after the first one; None if their clocks cannot be compared."""
    wait_us: dict[str, float | None]


class RankTrace(TypedDict):
    """The spans of one rank in one step."""

    rank: int
    offset_us: float | None
    """Start of the step relative to the first rank, by the wall clock; None if clocks cannot be
    compared.
    """
    duration_us: float
    rows: list[SpanRow]


class StepTrace(TypedDict):
    """The spans of one step on all ranks, or on as many ranks as fit."""

    step: int
    why: str
    """The reason why the page has this step: "slowest", "first slow step of rank 3", "typical", ...
    """
    clock: str
    """Sentences on the alignment of the nodes' clocks and its accuracy, for several nodes, and on
    what the step lacks."""
    ranks: list[RankTrace]
    ranks_left_out: int
    collectives: list[JoinedCollective]


class StepTraces(TypedDict):
    """The steps that the page shows span by span. names: the distinct names of all spans."""

    names: list[str]
    steps: list[StepTrace]


class TimeSeries(TypedDict):
    """One measured quantity of a GPU, link or process over time."""

    title: str
    unit: str
    """A UCUM unit: s, By, By/s, W, Cel, Hz, %, or 1 for a count."""
    where: str
    """The measured object: "rank 3", "node17 GPU 0", "node17 mlx5_0 port 1"."""
    rank: int | None
    time_s: list[float]
    """Seconds since the run's first step."""
    value: list[float | None]


class ThinningNotes(TypedDict):
    """The size limit of the page, and sentences on the data that was left out because of it."""

    budget_bytes: int
    sentences: list[str]


class PageContents(TypedDict):
    """All data of a page.

    The page's JSON also has `named_ranks` and `prominent_ranks`, see contents_as_json().
    """

    report: Report
    """The report of `report --json`."""
    thinned_report: Report
    """The report in the page's JSON, thinned to fit.

    It has no heat map, since the matrices are more detailed.
    """
    steps: StepMatrices | None
    traces: StepTraces
    telemetry: list[TimeSeries]
    headlines: list[Headline]
    """The headline of each verdict, in the report's order.

    `headlines` and `tables` are not in the JSON.
    """
    tables: list[Table]
    thinned: ThinningNotes
    written: str
    """Time of writing in UTC."""
    version: str
