"""Types of the page's data: the contract between the Python code that gathers it and the scripts
that draw it.

A page file contains the data as JSON in `<script type="application/json" id="contents">`. The live
page serves the same JSON. Names end in their units, as in the report: `_s` seconds, `_bytes`. A
value that was not measured is None, never 0.
"""

from __future__ import annotations

from typing import TypedDict

from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.headline import Headline
from torchlens_perf.view.specs import Table

SCHEMA = 1


class Matrix(TypedDict):
    """Durations of shape [ranks, columns] as 16-bit codes: row by row, little-endian, deflated
    (zlib), in base64.

    Code 0 means "not measured" and code 1 means 0 s. A larger code means `smallest_s * exp((code -
    2) * log_step)` seconds, so the relative error is at most half of log_step.
    """

    smallest_s: float
    log_step: float
    codes: str


class Columns(TypedDict):
    """The columns of all matrices: windows of `width` steps, the same for all ranks."""

    width: int
    first_steps: list[int]
    started_s: list[float | None]
    """Start of the window in seconds since the run's first step; the median of the ranks."""
    flags: list[list[str]]
    """Other activity of any rank in the window: checkpoint, evaluation, compile,
    capture, garbage collection.
    """


class Place(TypedDict):
    """The location of a rank, by which ranks can be grouped."""

    rank: int
    host: str
    local_rank: int | None
    mesh: dict[str, int]
    """The rank's coordinates in the device mesh, as far as process groups reveal them: {"dp":
    1, "tp": 0}.
    """


class StepBands(TypedDict):
    """Quantiles of step durations for each column, over all steps of all ranks in the column."""

    p5_s: list[float | None]
    p50_s: list[float | None]
    p95_s: list[float | None]
    max_s: list[float | None]


class SlowTime(TypedDict):
    """Steps [since_step, until_step) in which a rank was reported as slow.

    until_step is None if it is still slow.
    """

    rank: int
    phase: str
    since_step: int
    until_step: int | None


class StepMatrices(TypedDict):
    """Each rank's step times: means over the steps of each window."""

    columns: Columns
    places: list[Place]
    """The rows, sorted by rank."""
    is_compared: bool
    """True if the work of any rank can be compared with that of others in its population."""
    step: Matrix
    bands: StepBands
    slow: list[SlowTime]
    work: Matrix
    """Own time without CPU contention, by which ranks are compared.

    Only comparable steps count: no warm-up steps, and no steps with evaluation, checkpoint,
    compilation, sampling or capture. So work may be "not measured" in a column that has a step
    time. Ranks that are judged by their device have device times here.
    """
    others: Matrix
    """Median work of the other ranks in the population. Excess is work / others - 1."""
    parts: dict[str, Matrix]
    """Time by part (run.records.PARTS), in stacking order.

    A part that occurs in no step is left out.
    """
    device_parts: dict[str, Matrix]
    """Time by part by the devices' clocks; empty without devices."""
    memory_bytes: list[list[int | None]] | None
    """Peak memory of shape [ranks, at most 256 columns].

    The columns divide the same steps into equal groups.
    """


class SpanRow(TypedDict):
    """One lane's spans as lists of equal length.

    Starts are microseconds since the step's start on that rank.
    """

    lane: str
    """One of: host, collectives, other threads, device, collectives on the device.

    Spans that do not nest with others have a lane of their own. The parts of a step are in `host`,
    where depth is the nesting level. In the other lanes depth separates overlapping spans.
    """
    kind: list[str]
    """Kinds of records: data, forward, backward, optimizer, wait, module, module_backward,
    section, collective, ...
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


class CollectiveJoined(TypedDict):
    """One collective of the step, joined over the ranks of its group: arrival and waiting time of
    each rank.
    """

    name: str
    """Operation and dtype: "allreduce float32"."""
    group: str
    """The group's description, such as "mesh_dp", or else its name."""
    group_name: str
    """The name of the collective's spans: "allreduce group=0 dtype=float32"."""
    number: int
    """The sequence number in the group.

    Group and number together are the id in PyTorch's flight recorder.
    """
    bytes: int | None
    asynchronous: bool
    """If true, `wait_us` is how much earlier a rank issued the collective, not time that
    it was blocked.
    """
    last_rank: int | None
    """The rank that arrived last; None if it is not known."""
    arrival_us: dict[str, float | None]
    """Arrival of each rank after the first one; None if their clocks cannot be compared."""
    wait_us: dict[str, float | None]


class RankTrace(TypedDict):
    """One rank's spans of one step."""

    rank: int
    offset_us: float | None
    """Start of the step relative to the first rank, by the wall clock; None if clocks
    cannot be compared.
    """
    duration_us: float
    rows: list[SpanRow]


class StepTraceRow(TypedDict):
    """One step with all of its ranks, or as many as fit."""

    step: int
    why: str
    """The reason why the page has this step: "slowest", "first slow step of rank
    3", "typical", ...
    """
    clock: str
    """A sentence on the alignment of the nodes' clocks and its accuracy; "" for one node."""
    ranks: list[RankTrace]
    ranks_left_out: int
    collectives: list[CollectiveJoined]


class StepTraces(TypedDict):
    """The steps that the page has span by span.

    names: each name once, since module names repeat in each step.
    """

    names: list[str]
    steps: list[StepTraceRow]


class Series(TypedDict):
    """One quantity of a GPU, link or process over time."""

    title: str
    unit: str
    """A UCUM unit: s, By, By/s, W, Cel, Hz, %, or 1 for a count."""
    where: str
    """The measured object: "rank 3", "node17 GPU 0", "node17 mlx5_0 port 1"."""
    rank: int | None
    time_s: list[float]
    """Seconds since the run's first step."""
    value: list[float | None]


class Thinned(TypedDict):
    """Sentences, shown in the page, on data that was left out to keep the page below its budget."""

    budget_bytes: int
    sentences: list[str]


class Contents(TypedDict):
    """All data of a page.

    The JSON also has `named_ranks` and `prominent_ranks`, see document.html.as_json().
    """

    schema: int
    report: Report
    """The report of `report --json`."""
    thinned_report: Report
    """The report in the page's JSON, thinned to fit.

    It has no heat map, since the matrices are more detailed.
    """
    steps: StepMatrices | None
    traces: StepTraces
    telemetry: list[Series]
    headlines: list[Headline]
    """The headline of each verdict, in the report's order.

    `headlines` and `tables` are not in the JSON.
    """
    tables: list[Table]
    thinned: Thinned
    written: str
    """Time of writing in UTC."""
    version: str
