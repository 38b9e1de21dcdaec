"""Pack the newest data of a rank into a summary of fixed size for node 0's sidecar.

A summary has at most 1024 bytes and contains:

- up to ROWS rows of step times (analysis/statistics/step_bins.py),
- the rank's placement, and its progress in its groups and on its device,
- the mean times of up to 64 modules, with a digest of their names (statistics/modules.py).

Times are in nanoseconds as 32-bit floats. Times of modules have 8 bits of mantissa. The parts of a
row's compute, issue and lag times are 16-bit shares of the row's duration. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.collectives.device_progress import LastDeviceMark, RankProgress
from torchlens_perf.analysis.collectives.hang import MIN_S
from torchlens_perf.analysis.collectives.semantics import SEMANTICS
from torchlens_perf.analysis.statistics.modules import (
    MAX_MODULES,
    digest_names,
    select_reported_modules,
)
from torchlens_perf.analysis.statistics.step_bins import BinBatch
from torchlens_perf.run.clock import DeviceMark
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.verdicts.causes.metrics import METRICS, encode_signals
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.stragglers.window import LATE_ROWS
from torchlens_perf.verdicts.words.hang import device_place_from_mark

VERSION = 9
ROWS, GROUPS, DIMENSIONS, INSIDE, LAST_OPERATIONS = 8, 6, 6, 4, 4
MAX_BYTES = 1024
NO_ROW = 0xFFFFFFFF
_PROGRESS = (
    "rank", "step", "since_step_s", "usual_step_s", "since_mark_s", "groups", "inside", "state", "all_groups", "begun",
    "operations", "device",
)  # fmt: skip
# The first name stands for an operation that is not known.
_OPERATIONS = ("", *SEMANTICS)
_CODES = {name: code for code, name in enumerate(_OPERATIONS)}
_MAX_U2 = (1 << 16) - 1
# Larger shares of a row's duration are reduced to this value. A lag of more than four durations has
# the same effect as a lag of four.
_MAX_SHARE, _NOT_MEASURED = 4, _MAX_U2
_SHARES = ("parts_ns", "issue_ns", "lag_ns")
_MAX_FLOAT16 = 65504.0
_IS_END = 128
_STATES = ("unknown", "running", "stopped", "traced", "uninterruptible", "dead", "closed")

LAYOUT = np.dtype(
    [
        ("version", "u1"),
        ("rank", "<u4"),
        ("width", "<u4"),
        ("world_size", "<u4"),
        ("set", "u1"),  # number of the node's set of processes, modulo 256
        ("age_s", "<f4"),  # age of that set
        ("step", "<u4"),
        ("since_step_s", "<f2"),
        ("usual_step_s", "<f2"),
        ("since_mark_s", "<f2"),  # negative if not known
        ("population", "S44"),
        ("dimensions", [("name", "S12"), ("coordinate", "<u2")], DIMENSIONS),
        ("groups", [("name", "S12"), ("issued", "<u4")], GROUPS),
        ("inside", "S16", INSIDE),
        ("row", "<u4", ROWS),  # step / width, or NO_ROW
        ("flags", "<u2", ROWS),
        ("times", "<f4", (ROWS, 4)),  # duration, wait, ready, workload
        ("parts_ns", "<u2", (ROWS, len(OWN_PARTS))),
        ("issue_ns", "<u2", (ROWS, len(OWN_PARTS))),
        ("lag_ns", "<u2", (ROWS, len(OWN_PARTS))),
        ("issue_ready_ns", "<u2", ROWS),
        ("modules", "<u4"),  # digest of the modules' names
        ("modules_ns", "<u2", MAX_MODULES),  # upper halves of 32-bit floats
        ("signals", "<f2", len(METRICS)),
        ("state", "u1"),
        ("ended", "u1"),
        ("all_groups", "u1"),
        # 1 + the distance from `issued` to the last kernel that began, or 0 if not known.
        ("begun", "u1", GROUPS),
        # The group's last operations, newest first: positions in _OPERATIONS.
        ("operations", "u1", (GROUPS, LAST_OPERATIONS)),
        # behind: 1 + the number of steps behind the one in progress, or 0 if not known.
        # mark: the kind of the mark's span, plus 128 if the mark is the span's end.
        ("device", [("behind", "<u2"), ("place", "<u2"), ("stood_s", "<f2"), ("mark", "u1")]),
    ]
)
assert LAYOUT.itemsize <= MAX_BYTES


def pack_summary(
    progress: RankProgress,
    place: Placement,
    world_size: int,
    *,
    set: int = 0,
    age_s: float = 0.0,
    rows: BinBatch | None = None,
    modules_ns: Mapping[str, float] | None = None,
    ended: bool = False,
    signals: Mapping[str, float] | None = None,
) -> bytes:
    """Return one rank's newest data as bytes.

    Long texts are cut. Surplus groups and rows are left out.

    - set: number of the rank's set of processes on its node, see membership.py. age_s: its age.
    - modules_ns: mean forward time per step of each module, without its children, since the rank's
      start.
    - signals: signals measured in the last second, by name.
    """
    value = np.zeros((), LAYOUT)
    value["version"], value["rank"], value["ended"] = VERSION, progress.rank, ended
    value["set"], value["age_s"], value["world_size"] = set & 0xFF, age_s, world_size
    value["state"] = _STATES.index(progress.state) if progress.state in _STATES else 0
    value["step"] = min(max(0, progress.step), (1 << 32) - 1)
    value["since_step_s"] = min(progress.since_step_s, _MAX_FLOAT16)
    value["usual_step_s"] = min(progress.usual_step_s, _MAX_FLOAT16)
    value["since_mark_s"] = (
        -1.0 if progress.since_mark_s is None else min(progress.since_mark_s, _MAX_FLOAT16)
    )
    value["all_groups"] = progress.all_groups and len(progress.issued) <= GROUPS
    value["population"] = _cut_text(place.population, 44)
    for i, (name, coordinate) in enumerate(list(place.coordinates.items())[:DIMENSIONS]):
        value["dimensions"][i] = _cut_text(name, 12), coordinate
    last_issued = sorted(progress.issued.items(), key=lambda item: -item[1])[:GROUPS]
    for i, (name, sequence) in enumerate(last_issued):
        value["groups"][i] = _cut_text(name, 12), sequence + 1
        if name in progress.began:
            value["begun"][i] = min(max(0, sequence - progress.began[name]) + 1, 255)
        known = progress.operations.get(name, {})
        value["operations"][i] = [
            _CODES.get(known.get(sequence - k, ""), 0) for k in range(LAST_OPERATIONS)
        ]
    value["device"] = _pack_device_place(progress)
    inside = (
        progress.inside
        if len(progress.inside) <= INSIDE
        else (progress.inside[0], *progress.inside[1 - INSIDE :])
    )
    for i, name in enumerate(inside):
        value["inside"][i] = _cut_text(name, 16)
    value["row"] = NO_ROW
    if rows is not None:
        count = min(len(rows), ROWS)
        value["width"] = rows.width
        value["row"][:count] = rows.key[0, -count:]
        value["flags"][:count] = rows.flags[0, -count:]
        for i, name in enumerate(("duration_ns", "wait_ns", "ready_ns", "workload")):
            value["times"][:count, i] = getattr(rows, name)[0, -count:]
        duration_ns = rows.duration_ns[0, -count:]
        for name in (*_SHARES, "issue_ready_ns"):
            times_ns = getattr(rows, name)[0, -count:]
            of_ns = duration_ns[:, None] if times_ns.ndim > 1 else duration_ns
            value[name][:count] = times_to_shares(times_ns, of_ns)
    modules_ns = modules_ns or {}
    names = select_reported_modules(modules_ns)
    times = np.array([modules_ns[name] for name in names], "<f4")
    value["modules"] = digest_names(names)
    value["modules_ns"][: len(names)] = (times.view("<u4") + 0x8000) >> 16  # rounded
    value["signals"] = encode_signals(signals or {})
    return value.tobytes()


def times_to_shares(
    times_ns: npt.NDArray[np.floating[Any]], of_ns: npt.NDArray[np.floating[Any]]
) -> npt.NDArray[np.floating[Any]]:
    """Convert times to scaled shares of the rows' durations, as in a packed summary."""
    shares = times_ns / np.maximum(of_ns, 1.0) * ((_MAX_U2 - 1) / _MAX_SHARE)
    return np.where(np.isnan(shares), _NOT_MEASURED, np.clip(np.round(shares), 0, _MAX_U2 - 1))


def shares_to_times_ns(
    shares: npt.NDArray[np.uint16], of_ns: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Convert packed shares to times. Times that were not measured are NaN."""
    times = shares * (of_ns * np.float32(_MAX_SHARE / (_MAX_U2 - 1)))
    return np.where(shares == _NOT_MEASURED, np.float32(np.nan), times)


def _pack_device_place(progress: RankProgress) -> tuple[int, int, float, int]:
    place = progress.device
    behind = 0 if place is None else progress.step - place.step + 1
    if place is None or not 0 < behind <= _MAX_U2 or place.place > _MAX_U2:
        return 0, 0, 0.0, 0
    return (
        behind,
        place.place,
        min(place.stood_s, _MAX_FLOAT16),
        place.kind | (_IS_END if place.is_end else 0),
    )


def _unpack_device_place(
    step: int, behind: int, place: int, stood_s: float, mark: int
) -> LastDeviceMark:
    """Return the device's place, without the span's name, which a summary does not contain."""
    stood_ns = round(stood_s * 1e9)
    return device_place_from_mark(
        DeviceMark(step - behind + 1, place, mark & ~_IS_END, 0, bool(mark & _IS_END), 0, stood_ns),
        "",
    )


def _cut_text(text: str, max_bytes: int) -> bytes:
    """Return the text's first bytes. An incomplete character at the end is removed."""
    return text.encode()[:max_bytes].decode(errors="ignore").encode()


def split_rows(rows: BinBatch) -> Iterator[BinBatch]:
    """Split rows into pieces that fit into one summary each."""
    for first in range(0, len(rows), ROWS):
        yield rows.select_rows(slice(first, first + ROWS))


def has_current_format(payload: bytes) -> bool:
    """Return True if a payload has the version and size of this module's format."""
    return len(payload) == LAYOUT.itemsize and payload[0] == VERSION


def unpack_summaries(payloads: Sequence[bytes]) -> npt.NDArray[np.void]:
    """Return many ranks' summaries of the current format as one array."""
    return np.frombuffer(b"".join(payloads), LAYOUT)


def find_valid_summaries(values: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return a mask of the valid summaries, which pack_summary() can produce."""
    good = (values["state"] < len(_STATES)) & (values["rank"] < values["world_size"])
    good &= (values["operations"] < len(_OPERATIONS)).all(axis=(1, 2))
    has_row = values["row"] != NO_ROW
    good &= (values["width"] > 0) | ~has_row.any(axis=1)
    # If a row were far ahead of its rank's step, the detector would wait for this step of all
    # ranks.
    width, step = values["width"].astype(float)[:, None], values["step"].astype(float)[:, None]
    good &= (~has_row | (values["row"] * width <= step + LATE_ROWS * width)).all(axis=1)
    for name in ("age_s", "since_step_s", "usual_step_s", "since_mark_s"):
        good &= np.isfinite(values[name])
    good &= np.isfinite(values["device"]["stood_s"])
    # NaN is valid: it represents a time that was not measured.
    good &= (~np.isinf(values["times"]).any(axis=2) | ~has_row).all(axis=1)
    good &= np.isfinite(unpack_module_times(values)).all(axis=1)
    texts = [
        values["population"][:, None],
        values["dimensions"]["name"],
        values["groups"]["name"],
        values["inside"],
    ]
    for column in texts:
        ascii_only = (np.ascontiguousarray(column).view("u1").reshape(len(values), -1) < 0x80).all(
            axis=1
        )
        for index in np.flatnonzero(~ascii_only & good).tolist():
            good[index] = all(map(_is_utf8, column[index].tolist()))
    return good


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def iter_row_batches(values: npt.NDArray[np.void]) -> Iterator[tuple[str, BinBatch]]:
    """Yield the rows of all summaries, in one batch per row width and population."""
    has_rows = (values["row"] != NO_ROW).any(axis=1)
    for width in np.unique(values["width"][has_rows]).tolist():
        of_width = has_rows & (values["width"] == width)
        for population in np.unique(values["population"][of_width]).tolist():
            which = of_width & (values["population"] == population)
            # If all summaries match, avoid a copy.
            chosen = values if which.all() else values[which]
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
                    issue_ready_ns=shares_to_times_ns(chosen["issue_ready_ns"], times[..., 0]),
                    **{name: shares_to_times_ns(chosen[name], times[..., :1]) for name in _SHARES},
                ),
            )


def unpack_module_times(values: npt.NDArray[np.void]) -> npt.NDArray[np.float32]:
    """Return mean forward times per step and module as an array of [summaries, MAX_MODULES].

    Columns beyond the last module are 0.
    """
    return (values["modules_ns"].astype("<u4") << 16).view("<f4")


def unpack_placement(value: np.void, host: str, location: str = "") -> Placement:
    """Return the placement of a summary's rank. host, location: those of its node."""
    coordinates = {
        entry["name"].decode(): int(entry["coordinate"])
        for entry in value["dimensions"]
        if entry["name"]
    }
    return Placement(host, value["population"].decode(), coordinates, location)


def unpack_progress(
    values: npt.NDArray[np.void], hosts: Sequence[str], report_age_s: Sequence[float]
) -> list[RankProgress]:
    """Return the progress of the rank of each summary. report_age_s: ages of the summaries."""
    # Convert whole columns, because reading single fields is slow.
    columns = {name: values[name].tolist() for name in _PROGRESS}
    text = {name: name.decode() for name in np.unique(values["groups"]["name"]).tolist()}
    rows = zip(*columns.values(), hosts, report_age_s, strict=True)
    return [
        RankProgress(
            rank=rank,
            host=host,
            step=step,
            since_step_s=since_step_s + age_s,
            report_age_s=age_s,
            usual_step_s=usual_step_s,
            issued={text[name]: issued - 1 for name, issued in groups if name},
            inside=tuple(name.decode() for name in inside if name),
            state=_STATES[state],
            # Only hangs need the operations, and unpacking all ranks takes long.
            operations=(
                {
                    text[name]: {
                        issued - 1 - k: _OPERATIONS[code] for k, code in enumerate(codes) if code
                    }
                    for (name, issued), codes in zip(groups, operations, strict=True)
                    if any(codes)
                }
                if since_step_s > MIN_S / 2
                else {}
            ),
            since_mark_s=None if since_mark_s < 0 else since_mark_s,
            all_groups=bool(all_groups),
            began={
                text[name]: issued - behind
                for (name, issued), behind in zip(groups, begun, strict=True)
                if behind
            },
            device=_unpack_device_place(step, *device) if device[0] else None,
        )
        for (
            rank, step, since_step_s, usual_step_s, since_mark_s, groups, inside, state, all_groups, begun, operations,
            device, host, age_s,
        ) in rows
    ]  # fmt: skip
