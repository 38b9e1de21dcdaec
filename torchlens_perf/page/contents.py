"""What a page holds, as JSON: the contract between what gathers it and the scripts that draw it. Types only.

The page's file holds it as inert JSON in `<script type="application/json" id="contents">`; the live page serves the
same.
Names end in their units, as in the report: `_s` seconds, `_bytes`. None is what was not measured, never 0.
"""

from __future__ import annotations

from typing import TypedDict

from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.headline import Headline
from torchlens_perf.view.specs import Table

SCHEMA = 1


class Matrix(TypedDict):
    """Durations of [ranks, columns] as codes of 16 bits: row by row, little-endian, deflated (zlib), in base64.

    Code 0 is "not measured", 1 is 0 s, and a larger one is `smallest_s * exp((code - 2) * log_step)` seconds. So a
    value is off by at most half of log_step, whatever its size.
    """

    smallest_s: float
    log_step: float
    codes: str


class Columns(TypedDict):
    """The columns of all matrices: windows of `width` steps, the same for all ranks. Width 1: each step is one."""

    width: int
    first_steps: list[int]
    started_s: list[float | None]
    """When the window began, in seconds since the run's first step; the median of the ranks."""
    flags: list[list[str]]
    """What any rank did in it: checkpoint, evaluation, compile, capture, garbage collection."""


class Place(TypedDict):
    """Where a rank is: to group ranks by."""

    rank: int
    host: str
    local_rank: int | None
    mesh: dict[str, int]
    """Its coordinate in each dimension of the device mesh, where process groups tell it: {"dp": 1, "tp": 0}."""


class StepBands(TypedDict):
    """Of each column, quantiles of the durations of all single steps of all ranks in it, in seconds."""

    p5_s: list[float | None]
    p50_s: list[float | None]
    p95_s: list[float | None]
    max_s: list[float | None]


class SlowTime(TypedDict):
    """A time in which a rank was named as slow: steps [since_step, until_step); None for still."""

    rank: int
    phase: str
    since_step: int
    until_step: int | None


class StepMatrices(TypedDict):
    """Each rank's steps. Means over a window's steps, where it has several; excess is of work."""

    columns: Columns
    places: list[Place]
    """The rows, sorted by rank."""
    is_compared: bool
    """Whether any rank has an excess of work over others that do the same."""
    step: Matrix
    bands: StepBands
    slow: list[SlowTime]
    work: Matrix
    """Own time without lack of CPU; what ranks are compared by. Of steps that are compared: without the warm-up, and
    without steps that evaluate, save, compile, are sampled or captured; so it may be "not measured" where step is not.
    By the device's clock for ranks that are judged by it."""
    others: Matrix
    """What work is compared with: the median of the other ranks of the population. Excess is work / others - 1."""
    parts: dict[str, Matrix]
    """By part (run.records.PARTS), in the order to stack them in. A part that no step has is left out."""
    device_parts: dict[str, Matrix]
    """The same by the devices' clocks; empty without devices."""
    memory_bytes: list[list[int | None]] | None
    """[ranks, at most 256 columns], over the same steps in equal groups."""


class SpanRow(TypedDict):
    """One lane's spans as columns of equal length; lengths in microseconds from the step's start on that rank."""

    lane: str
    """host, collectives, other threads, device, collectives on the device: what does not nest with the others has a
    lane of its own. Only in `host` are spans of a step's parts; spans inside of others have a larger depth there. In
    the other lanes depth keeps apart what overlaps."""
    kind: list[str]
    """Of records: data, forward, backward, optimizer, wait, module, module_backward, section, collective, ..."""
    name: list[int]
    """Index into StepTraces.names."""
    start_us: list[float]
    duration_us: list[float]
    depth: list[int]
    number: list[int] | None
    """Of collectives, their sequence numbers: with the group in the name, what ties them to CollectiveJoined. 0 for
    other spans; None where all are others."""


class CollectiveJoined(TypedDict):
    """One collective of the step, joined over the ranks of its group: who came when, and who waited how long."""

    name: str
    """Operation and dtype: "allreduce float32"."""
    group: str
    """The group's description, as "mesh_dp", or else its name."""
    group_name: str
    """As spans of collectives have it: "allreduce group=0 dtype=float32"."""
    number: int
    """Its sequence number in the group: with the group, the flight recorder's id."""
    bytes: int | None
    asynchronous: bool
    """Then a wait is how much earlier a rank has issued it, not time that it was blocked."""
    last_rank: int | None
    """Who arrived last; None where that cannot be known."""
    arrival_us: dict[str, float | None]
    """By rank: how long after the first rank each arrived; None where no clock compares them."""
    wait_us: dict[str, float | None]


class RankTrace(TypedDict):
    """One rank's spans of one step."""

    rank: int
    offset_us: float | None
    """Its start after that of the first rank, by the wall clock; None where that cannot be compared."""
    duration_us: float
    rows: list[SpanRow]


class StepTraceRow(TypedDict):
    """One step with all of its ranks, or with those that fit."""

    step: int
    why: str
    """Why this step is in the page: "slowest", "first slow step of rank 3", "typical", "evaluation", ..."""
    clock: str
    """A sentence: how the clocks of several nodes were aligned, and how exactly; "" for one node."""
    ranks: list[RankTrace]
    ranks_left_out: int
    collectives: list[CollectiveJoined]


class StepTraces(TypedDict):
    """The steps that the page holds whole. names: each name once, as the names of modules repeat in each step."""

    names: list[str]
    steps: list[StepTraceRow]


class Series(TypedDict):
    """One quantity over time: of a GPU, a link, a process."""

    title: str
    unit: str
    """A unit as UCUM writes it: s, By, By/s, W, Cel, Hz, %, and 1 for a count."""
    where: str
    """Whose: "rank 3", "node17 GPU 0", "node17 mlx5_0 port 1"."""
    rank: int | None
    time_s: list[float]
    """Seconds since the run's first step."""
    value: list[float | None]


class Thinned(TypedDict):
    """What was left out to keep the page below its budget, each in a sentence that the page shows."""

    budget_bytes: int
    sentences: list[str]


class Contents(TypedDict):
    """All that a page shows. The JSON also has `named_ranks` and `prominent_ranks`, see document.html.as_json()."""

    schema: int
    report: Report
    """As `report --json`."""
    thinned_report: Report
    """The report that the JSON has: without its heat map, as the matrices have more, and as small as it must be."""
    steps: StepMatrices | None
    traces: StepTraces
    telemetry: list[Series]
    headlines: list[Headline]
    """Of each of the report's verdicts, in the same order. Not in the JSON, nor are `tables`."""
    tables: list[Table]
    thinned: Thinned
    written: str
    """When, UTC."""
    version: str
