"""Move the events of a node's processes into the run directory, as the table `events`."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from torchlens_perf.errors import RunStoreError
from torchlens_perf.exporters import Receiver
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.roles.event_file import (
    EVENTS,
    FOLDER,
    LOCK,
    NOT_GIVEN,
    UNTIL,
    NewEvents,
    read_new_events,
)
from torchlens_perf.roles.iterations import Event
from torchlens_perf.run import ownership
from torchlens_perf.run.clock import HostClock
from torchlens_perf.run.directory import (
    RunDirectory,
    find_sidecar_lock,
    is_writer_running,
    modified_ns,
)
from torchlens_perf.run.mailbox import EVENTS as SUFFIX
from torchlens_perf.run.place.node import host_of_node
from torchlens_perf.run.rings import memory
from torchlens_perf.store.reader import ParquetFolder
from torchlens_perf.store.writer import EncodedFile, TableWriter

_COLUMNS = (
    "host", "process", "role", "name", "event", "id", "batch", "tokens_in", "tokens_out", "monotonic_ns", "sequence",
)  # fmt: skip
_DISK_DIVISOR = 16
_MAX_UNWRITTEN = 1 << 20
_MIN_PERIOD_S, _MAX_PERIOD_S = 10.0, 120.0
_OTHER_NODES_TIMEOUT_S, _POLL_INTERVAL_S = 2.0, 0.05
_REQUEST = "request"
"""File with which a sidecar asks the readers of other nodes to write all events."""


class EventReader:
    """Reader of all event files of a node, for its sidecar. One thread."""

    def __init__(self, run: RunDirectory, node: str) -> None:
        self._run, self._node = run, node
        self._writer = TableWriter([run.path / FOLDER], node)
        self.rows: list[tuple[Any, ...]] = []
        self._anchor = HostClock().anchor()
        self._folder = run.path / FOLDER
        self._until = self._folder / f"{node}{UNTIL}"
        # A killed reader has left it.
        self._until.unlink(missing_ok=True)
        self._read_ns, self._asked_ns = 0, modified_ns(self._folder / _REQUEST)
        self._is_complete, self.ended_rings = True, 0
        self._began_s = self._written_s = time.monotonic()
        # The footer of the next file: last sequence number and lost events by process. An earlier
        # sidecar may have written files.
        self._read: dict[str, dict[str, int]] = {}
        for footer in ParquetFolder(run.path / FOLDER, [node], logger.warning).read_each(
            lambda file: file.footer
        ):
            self._read.update(footer)

    def read(self) -> None:
        """Read the new events of all files."""
        self._read_ns = time.monotonic_ns() + self._anchor.offset_ns
        for path in self._run.find_local_mailboxes(SUFFIX):
            known = self._read.setdefault(path.stem, {"last_sequence": 0, "lost": 0})
            ended = not is_writer_running(path)
            try:
                found = read_new_events(path, known["last_sequence"], ended=ended)
            except (OSError, RunStoreError) as error:
                logger.warning("events of %s cannot be read: %s", path.name, error)
                continue
            if len(self.rows) + len(found.events) > _MAX_UNWRITTEN:
                # The run directory cannot be written. Events stay in their file, or are lost there.
                continue
            self._add(path.stem, found)
            if found.detected:
                known["detected"] = 1
            known["lost"] += found.lost
            known["last_sequence"] += found.lost + len(found.events)

    def _add(self, process: str, found: NewEvents) -> None:
        host = host_of_node(self._node)
        others = [(f"{name}@{role}", role, name) for role, name in found.others]
        self._is_complete &= not len(found.events)
        who = dict(enumerate([(process, found.role, found.name), *others]))
        # Others are not known while the description is being written.
        for each in found.events:
            self.rows.append(
                (
                    host, *who.get(int(each["other"]), (process, "other", "")), EVENTS[each["code"]],
                    *(each[name].decode(errors="replace") for name in ("id", "batch")),
                    *(
                        None if each[name] == NOT_GIVEN else int(each[name])
                        for name in ("tokens_in", "tokens_out")
                    ),
                    int(each["time_ns"]), int(each["sequence"]),
                )
            )  # fmt: skip

    @property
    def has_other_nodes(self) -> bool:
        """True if other nodes have events."""
        return any(
            not path.name.startswith((f"{self._node}-", f"{self._node}."))
            for path in self._folder.glob("*.*")
        )

    @property
    def is_asked(self) -> bool:
        """True if a sidecar has asked for all events since the last call."""
        before, self._asked_ns = self._asked_ns, modified_ns(self._folder / _REQUEST)
        return before != self._asked_ns

    def ask_other_nodes(self) -> None:
        """Let the readers of other nodes write all events, and wait for them a short time."""
        if self._is_complete or not list(self._folder.glob(f"*{UNTIL}")):
            return
        self._is_complete, request = True, self._folder / _REQUEST
        request.write_bytes(b"")
        asked_ns, until_s = modified_ns(request), time.monotonic() + _OTHER_NODES_TIMEOUT_S
        while time.monotonic() < until_s and any(
            modified_ns(each) < asked_ns for each in self._folder.glob(f"*{UNTIL}")
        ):
            time.sleep(_POLL_INTERVAL_S)

    @property
    def is_file_due(self) -> bool:
        """True if the last file is old enough. Files of long runs are rarer."""
        now_s = time.monotonic()
        period_s = min(_MAX_PERIOD_S, max(_MIN_PERIOD_S, (now_s - self._began_s) / 20))
        return now_s - self._written_s >= period_s

    def write(self, disk_bytes: int, *, ended: bool = False) -> None:
        """Write the events that were read, and until when these are all. Raise OSError.

        ended: no event will follow.
        """
        self._written_s = time.monotonic()
        if self.rows:
            self._write_rows(disk_bytes)
        if ended:
            self._until.unlink(missing_ok=True)
        else:
            self._folder.mkdir(exist_ok=True)
            ownership.replace_private_file(self._until, str(self._read_ns))

    def _write_rows(self, disk_bytes: int) -> None:
        columns = dict(zip(_COLUMNS, zip(*self.rows, strict=True), strict=True))
        offset_ns = self._anchor.offset_ns
        encoded = EncodedFile()
        arrays = {
            name: pa.array(values, pa.string() if isinstance(values[0], str) else pa.int64())
            for name, values in columns.items()
        }
        unix_ns = [each + offset_ns for each in columns["monotonic_ns"]]
        arrays["time"] = pa.array(unix_ns, pa.timestamp("ns", tz="UTC"))
        encoded.add_rows(pa.table(arrays))
        self._writer.write_files(
            {self._run.path / FOLDER: encoded}, disk_bytes // _DISK_DIVISOR, self._read
        )
        self.rows.clear()


def read_events(
    run: RunDirectory,
    node: str,
    reader: EventReader | None,
    receivers: list[Receiver] | None = None,
    *,
    disk_bytes: int,
    ended: bool,
    ended_rings: int = 0,
) -> EventReader | None:
    """Read the new events of a node, and write them if it is time. Return the reader, if there is one.

    reader: None at the first call. receivers: get the traces of iterations; None without an exporter.
    ended: True if all ranks have ended. ended_rings: number of ranks that have, whose reports need all
    events.
    """
    lock, until_s = find_sidecar_lock(run.run_id), time.monotonic() + ended * _OTHER_NODES_TIMEOUT_S
    # A reader that was started before this sidecar ends as soon as it notices the sidecar.
    while not reader and lock and memory.is_held(lock.with_name(LOCK), fcntl.LOCK_SH):
        if time.monotonic() >= until_s:
            return None
        time.sleep(_POLL_INTERVAL_S)
    reader = reader or EventReader(run, node)
    before = len(reader.rows)
    reader.read()
    if receivers is not None and not reader.has_other_nodes:
        _send_traces(reader.rows[before:], receivers)
    reports, reader.ended_rings = ended or ended_rings > reader.ended_rings, ended_rings
    if reports or reader.is_file_due or reader.is_asked:
        reader.write(disk_bytes, ended=ended)
    if reports:
        reader.ask_other_nodes()
    return reader


def _send_traces(rows: Sequence[tuple[Any, ...]], receivers: list[Receiver]) -> None:
    from torchlens_perf.roles.traces import IterationTraces

    traces = next((each for each in receivers if isinstance(each, IterationTraces)), None)
    if traces is None:
        receivers.append(traces := IterationTraces(receivers))
    named = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
    traces.labels.update({each["process"]: each["name"] or each["role"] for each in named})
    events = [
        Event(
            each["monotonic_ns"] / 1e9,
            each["process"],
            each["event"],
            each["id"],
            each["batch"],
            each["tokens_out"],
        )
        for each in named
    ]
    traces.add(events)
