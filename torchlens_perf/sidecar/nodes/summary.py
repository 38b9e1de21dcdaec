"""What a rank's sidecar tells node 0's about one window: at most 1024 bytes, the same size for every rank. Pure.

A window has up to ROWS rows (analysis/statistics/step_bins.py), the rank's place, how far it is in its groups, and the
mean times of up to 64 modules so far. Their names do not travel, only a digest of them (statistics/modules.py). Times
are 32-bit floats of ns; those of modules have 8 bits of mantissa.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.causes.metrics import METRICS, vector
from torchlens_perf.analysis.collectives.hang import Progress
from torchlens_perf.analysis.statistics.modules import MAX_MODULES, digest, reported_modules
from torchlens_perf.analysis.statistics.step_bins import StepBins
from torchlens_perf.analysis.stragglers.placement import Placement
from torchlens_perf.analysis.stragglers.window import BinBatch
from torchlens_perf.run.records import OWN_PARTS

if TYPE_CHECKING:
    import numpy.typing as npt

VERSION = 3
ROWS, GROUPS, DIMENSIONS, INSIDE = 11, 6, 6, 4
MAX_BYTES = 1024
NO_ROW = 0xFFFFFFFF
_PROGRESS = ("rank", "step", "since_step_s", "usual_step_s", "since_mark_s", "groups", "inside", "state", "all_groups")
_STATES = ("unknown", "running", "stopped", "traced", "uninterruptible", "dead", "closed")

LAYOUT = np.dtype(
    [
        ("version", "<u2"),
        ("attempt", "<u2"),
        ("rank", "<u4"),
        ("world_size", "<u4"),
        ("width", "<u4"),
        ("state", "u1"),
        ("ended", "u1"),
        ("all_groups", "u1"),
        ("reserved", "u1"),
        ("step", "<u8"),
        ("since_step_s", "<f4"),
        ("usual_step_s", "<f4"),
        ("since_mark_s", "<f4"),  # negative: not known
        ("pid", "<u4"),
        ("population", "S48"),
        ("dimensions", [("name", "S12"), ("coordinate", "<u2")], DIMENSIONS),
        ("groups", [("name", "S12"), ("issued", "<u4")], GROUPS),
        ("inside", "S16", INSIDE),
        ("row", "<u4", ROWS),  # step / width; NO_ROW: none
        ("flags", "<u2", ROWS),
        ("times", "<f4", (ROWS, 4)),  # duration, wait, ready, workload
        ("work", "<f4", (ROWS, len(OWN_PARTS))),
        ("modules", "<u4"),  # the digest of their names
        ("modules_ns", "<u2", MAX_MODULES),  # the upper halves of 32-bit floats
        ("signals", "<f2", len(METRICS)),
    ]
)
assert LAYOUT.itemsize <= MAX_BYTES


@dataclasses.dataclass(frozen=True)
class Summary:
    """One rank's window."""

    attempt: int
    world_size: int
    place: Placement
    progress: Progress
    pid: int
    rows: StepBins | None = None
    modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Mean own forward time a step of the rank's modules, over its run."""
    ended: bool = False
    signals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Of its last second, by name; without those that are not measured."""


def pack(summary: Summary) -> bytes:
    """The summary as it travels. Longer texts are cut, more groups and rows than fit are left out."""
    value = np.zeros((), LAYOUT)
    progress, place = summary.progress, summary.place
    value["version"], value["attempt"], value["rank"] = VERSION, summary.attempt, progress.rank
    value["world_size"], value["ended"], value["pid"] = summary.world_size, summary.ended, summary.pid
    value["state"] = _STATES.index(progress.state) if progress.state in _STATES else 0
    value["step"], value["since_step_s"] = max(0, progress.step), progress.since_step_s
    value["usual_step_s"] = progress.usual_step_s
    value["since_mark_s"] = -1.0 if progress.since_mark_s is None else progress.since_mark_s
    value["all_groups"] = progress.all_groups and len(progress.issued) <= GROUPS
    value["population"] = _cut(place.population, 48)
    for i, (name, coordinate) in enumerate(list(place.coordinates.items())[:DIMENSIONS]):
        value["dimensions"][i] = _cut(name, 12), coordinate
    last_issued = sorted(progress.issued.items(), key=lambda item: -item[1])[:GROUPS]
    for i, (name, sequence) in enumerate(last_issued):
        value["groups"][i] = _cut(name, 12), sequence + 1
    inside = progress.inside if len(progress.inside) <= INSIDE else (progress.inside[0], *progress.inside[1 - INSIDE :])
    for i, name in enumerate(inside):
        value["inside"][i] = _cut(name, 16)
    value["row"] = NO_ROW
    rows = summary.rows
    if rows is not None:
        count = min(len(rows), ROWS)
        value["width"] = rows.width
        value["row"][:count] = rows.step[-count:] // rows.width
        value["flags"][:count] = rows.flags[-count:]
        for i, name in enumerate(("duration_ns", "wait_ns", "ready_ns", "workload")):
            value["times"][:count, i] = getattr(rows, name)[-count:]
        value["work"][:count] = rows.work_ns[-count:]
    names = reported_modules(summary.modules_ns)
    times = np.array([summary.modules_ns[name] for name in names], "<f4")
    value["modules"] = digest(names)
    value["modules_ns"][: len(names)] = (times.view("<u4") + 0x8000) >> 16  # rounded
    value["signals"] = vector(summary.signals)
    return value.tobytes()


def _cut(text: str, max_bytes: int) -> bytes:
    """The text's first bytes, without a piece of a character at the end."""
    return text.encode()[:max_bytes].decode(errors="ignore").encode()


def windows(rows: StepBins) -> Iterator[StepBins]:
    """Rows in pieces that fit into a summary each."""
    for first in range(0, len(rows), ROWS):
        chosen = slice(first, first + ROWS)
        fields = {field.name: getattr(rows, field.name) for field in dataclasses.fields(StepBins)}
        yield StepBins(**{name: value if name == "width" else value[chosen] for name, value in fields.items()})


def is_readable(payload: bytes) -> bool:
    """Whether it is of this version."""
    return len(payload) == LAYOUT.itemsize and int.from_bytes(payload[:2], "little") == VERSION


def unpack(payloads: Sequence[bytes]) -> npt.NDArray[np.void]:
    """Many ranks' summaries as one array. Raises ValueError for a payload of another version or size."""
    joined = b"".join(payloads)
    if len(joined) != LAYOUT.itemsize * len(payloads):
        raise ValueError("a summary has another size")
    values = np.frombuffer(joined, LAYOUT)
    if len(values) and (values["version"] != VERSION).any():
        raise ValueError("a summary is of another version")
    return values


def blocks(values: npt.NDArray[np.void]) -> Iterator[tuple[str, BinBatch]]:
    """The summaries' rows, by population and width."""
    has_rows = (values["row"] != NO_ROW).any(axis=1)
    for width in np.unique(values["width"][has_rows]).tolist():
        of_width = has_rows & (values["width"] == width)
        for population in np.unique(values["population"][of_width]).tolist():
            which = of_width & (values["population"] == population)
            chosen = values if which.all() else values[which]  # of a large job, not all of it once more
            row = chosen["row"].astype(np.int64)
            times = chosen["times"]
            yield (
                population.decode(),
                BinBatch(
                    width=width,
                    ranks=chosen["rank"].astype(np.int64),
                    key=np.where(row == NO_ROW, -1, row),
                    flags=chosen["flags"].astype(np.int64),
                    duration_ns=times[..., 0],
                    wait_ns=times[..., 1],
                    ready_ns=times[..., 2],
                    workload=times[..., 3],
                    parts_ns=chosen["work"],
                ),
            )


def modules_ns(values: npt.NDArray[np.void]) -> npt.NDArray[np.float32]:
    """[summaries, MAX_MODULES]: mean own forward time a step of each module; beyond the last one, 0."""
    return (values["modules_ns"].astype("<u4") << 16).view("<f4")


def place(value: np.void, host: str, location: str = "") -> Placement:
    """Where the rank of one summary is. The node says for all its ranks what its host is called and where it is."""
    coordinates = {entry["name"].decode(): int(entry["coordinate"]) for entry in value["dimensions"] if entry["name"]}
    return Placement(host, value["population"].decode(), coordinates, location)


def progress(values: npt.NDArray[np.void], hosts: Sequence[str], report_age_s: Sequence[float]) -> list[Progress]:
    """How far the rank of each summary is. report_age_s: how old the summaries are."""
    # Column by column: a field of a single summary takes as long as a whole column of few.
    columns = {name: values[name].tolist() for name in _PROGRESS}
    text = {name: name.decode() for name in np.unique(values["groups"]["name"]).tolist()}
    rows = zip(*columns.values(), hosts, report_age_s, strict=True)
    return [
        Progress(
            rank=rank,
            host=host,
            step=step,
            since_step_s=since_step_s + age_s,
            report_age_s=age_s,
            usual_step_s=usual_step_s,
            issued={text[name]: issued - 1 for name, issued in groups if name},
            inside=tuple(name.decode() for name in inside if name),
            state=_STATES[state],
            since_mark_s=None if since_mark_s < 0 else since_mark_s,
            all_groups=bool(all_groups),
        )
        for rank, step, since_step_s, usual_step_s, since_mark_s, groups, inside, state, all_groups, host, age_s in rows
    ]
