"""Fuzz tests of rings, messages between nodes, and summaries.

Changed bytes affect only their own ring or message, and readers raise only documented errors.

States of nodes are tested in test_damage.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.sidecar.test_job import MEETING, End, Wire, _identity, two_nodes
from tests.sidecar.test_node import WORK, dead_process, finish, report
from tests.support import progress
from tests.support.figures import note, share
from tests.support.long import long
from tests.support.node_view import NodeView
from tests.support.planted import places
from tests.support.ranks import Rank, run_without_traces
from tests.support.simulations import table_of
from torchlens_perf.errors import RingError
from torchlens_perf.run import ring
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.ring import RingReader
from torchlens_perf.sidecar.nodes import messages
from torchlens_perf.sidecar.nodes.membership import ControlMessage, ProcessGeneration
from torchlens_perf.simulate.simulation import Simulation, Topology

RINGS, MESSAGES, RUNS = 400_000, 500_000, 2_000
RECORDS = 1024  # The smallest size of a ring.
EDGES = (
    0,
    1,
    0x7F,
    0xFF,
    1 << 15,
    (1 << 16) - 1,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
REGIONS = (
    (0, 256),
    (0, ring.METADATA_OFFSET),
    (ring.METADATA_OFFSET, 2048),
    (ring.NAMES_OFFSET, 512),
)


def changed(data: bytes, draw: random.Random) -> bytes:
    """Return a copy of the bytes, cut off or with bytes changed, removed, inserted or repeated."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(made) or 1)
        match draw.randrange(6):
            case 0:
                made[at : at + 1] = draw.randbytes(1)
            case 1:
                made[at : at + draw.randint(0, 4)] = draw.randbytes(draw.randint(0, 4))
            case 2:
                made[at : at + 8] = struct.pack("<Q", draw.choice(EDGES))
            case 3:
                made[at:at] = made[max(0, at - draw.randint(1, 64)) : at]
            case 4 if draw.random() < 0.2:
                del made[at:]
            case _:
                if made:
                    made[at % len(made)] ^= 1 << draw.randrange(8)
    return bytes(made)


# -- rings


def ring_parts(draw: random.Random) -> Iterator[tuple[int, bytes]]:
    """Yield offsets and bytes to write into a ring file, mostly into its header."""
    for _ in range(draw.randint(1, 8)):
        begin, size = draw.choice([*REGIONS, (ring.RECORDS_OFFSET, RECORDS * ring.RECORD_BYTES)])
        at = begin + draw.randrange(size)
        if draw.random() < 0.5:
            yield at // 8 * 8, struct.pack("<Q", draw.choice(EDGES))
        else:
            yield at, draw.randbytes(draw.randint(1, 16))


def read_all(path: Path) -> str:
    """Read a ring as a sidecar does. Return the name of a documented error, or ""."""
    try:
        reader = RingReader(path)
    except RingError:
        return "refused"
    try:
        for final in (False, True):
            batch = reader.read_records(final=final)
            assert len(batch.records) == len(batch.sequences) <= reader.capacity
            assert (np.diff(batch.sequences) > 0).all()
            assert batch.lost >= 0
            for record in batch.records["name_id"].tolist():
                ring.lookup_name(reader.names(), record)
        assert isinstance(reader.read_metadata(), dict)
        reader.read_open_spans()
        reader.read_group_progress()
    except RingError:
        return "ended"
    finally:
        reader.close()
    return ""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [400, *long(RINGS)])
def test_reader_of_a_changed_ring_raises_only_ring_errors(
    number: int, run: RunDirectory, tmp_path: Path
) -> None:
    """The reader always ends, and returns no more records than the ring can contain."""
    began_s, count, draw = (
        time.monotonic(),
        number if number < RINGS else share(RINGS),
        random.Random(number),
    )
    rank = Rank(run, 0, 1, ring_records=RECORDS)
    rank.steps(RECORDS // 4, **WORK)
    whole = rank.ring_path.read_bytes()
    rank.close()
    copy, ends = (
        Path("/dev/shm") / f"{tmp_path.name}-{os.getpid()}.ring",
        dict.fromkeys(["", "refused", "ended"], 0),
    )
    try:
        copy.write_bytes(whole)
        with open(copy, "r+b", buffering=0) as file:
            for _ in range(count):
                parts = list(ring_parts(draw))
                for at, data in parts:
                    os.pwrite(file.fileno(), data, at)
                cut = draw.random() < 0.02
                if cut:
                    os.truncate(copy, draw.randrange(len(whole)))
                ends[read_all(copy)] += 1
                if cut or any(at + len(data) > len(whole) for at, data in parts):
                    copy.write_bytes(whole)
                for at, data in parts:
                    os.pwrite(file.fileno(), whole[at : at + len(data)], at)
    finally:
        copy.unlink()

    assert ends[""] > count / 4  # If too few rings were readable, the test would cover little.
    assert ends["refused"] > 0
    if count > 400:
        note(
            "rings of any bytes",
            count,
            RINGS,
            f"{ends['refused']:,} refused",
            time.monotonic() - began_s,
            number,
        )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [6, *long(RUNS)])
def test_changed_ring_does_not_affect_the_other_rank(number: int, tmp_path: Path) -> None:
    """The report contains all steps of the other rank."""
    began_s, count, draw = (
        time.monotonic(),
        number if number < RUNS else share(RUNS),
        random.Random(number),
    )
    # If the ring is not closed, the sidecar waits for live processes or a live launcher.
    dead = dead_process()
    dead["launcher_pid"] = dead["pid"]
    for each in range(count):
        folder = tmp_path / str(each)
        folder.mkdir()
        with run_without_traces(folder) as run:
            ranks = [Rank(run, rank, ring_records=RECORDS, identity=dead) for rank in range(2)]
            for rank in ranks:
                rank.steps(12, **WORK)
                rank.close()
            with open(ranks[1].ring_path, "r+b", buffering=0) as file:
                for at, data in ring_parts(draw):
                    os.pwrite(file.fileno(), data, at)
            finish(run)
            steps = {rank["rank"]: rank["steps"] for rank in report(run)["ranks"]}

            assert steps[0] == 12, (each, steps)
    if count > 6:
        note(
            "runs with a ring of any bytes",
            count,
            RUNS,
            "0 lost the other rank",
            time.monotonic() - began_s,
            number,
        )


# -- messages from other nodes


class Collecting(End):
    """Node 0's side of a fake exchange, with a real inbox."""

    inbox = messages.Inbox("node-0")

    def collect_posts(self) -> messages.CollectedPosts:
        return self.inbox.collect_posts(2.0)


def node_zero(tmp_path: Path, wire: Wire) -> NodeView:
    """Return a sidecar that judges its two ranks and the posts in Collecting.inbox."""
    run, at, steps = (
        RunDirectory(tmp_path),
        places(4, node_size=2),
        next(Simulation(Topology(4)).steps(20)),
    )
    view = NodeView("node-0", lambda where, key, node, merges: Collecting(wire, node))
    for rank in range(2):
        identity = _identity(run, rank)
        if rank == 0:
            view.begin(0, identity)
        view.job.add_steps(identity, at[rank], table_of(steps, rank), MEETING)
        view.job.set_progress(identity, at[rank], progress.rank(rank, state="running"), RankFacts())
    return view


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [1_000, *long(MESSAGES)])
def test_changed_messages_are_read_or_raise_value_error(number: int, tmp_path: Path) -> None:
    """Judging a readable message raises no error."""
    began_s, count, draw = (
        time.monotonic(),
        number if number < MESSAGES else share(MESSAGES),
        random.Random(number),
    )
    sent, _ = two_nodes(tmp_path)
    payloads = {rank: payload for each in sent.sent for rank, payload in each.payloads.items()}
    control = ControlMessage("a-run", (ProcessGeneration(0, -5.0, 4),))
    reply = messages.encode(messages.ReportReply(0.5, control.encode()))
    view, taken, other_ranks = node_zero(tmp_path, Wire()), 0, 0
    for sequence in range(count):
        if sequence % 250 == 249:
            other_ranks += len(view.job.places) - 2
            view = node_zero(tmp_path, Wire())
        Collecting.inbox = messages.Inbox("node-0")
        Collecting.inbox.add_sender("a", "node-1", 0.0)
        whole = messages.NodeReport(1.5, 0, False, [messages.Post(0.5, payloads)])
        with contextlib.suppress(ValueError):
            Collecting.inbox.receive_report("a", changed(messages.encode(whole), draw), 1.0)
            taken += 1
        view.update(2.0 + sequence)
        with contextlib.suppress(ValueError):
            ControlMessage.decode(messages.decode_reply(changed(reply, draw)).instructions)

    assert taken > count / 10
    assert other_ranks > 0
    if count > 1_000:
        note(
            "messages of any bytes",
            count,
            MESSAGES,
            f"{taken:,} taken",
            time.monotonic() - began_s,
            number,
        )
