"""Long tests with repeated kills of the sidecar, a full disk, and random bytes from other nodes."""

from __future__ import annotations

import errno
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.sidecar.nodes.test_summary import JOB, made_summary
from tests.sidecar.test_damage import failing, finished
from tests.sidecar.test_node import WORK, report
from tests.support.figures import note, share
from tests.support.leftovers import eventually
from tests.support.long import long
from tests.support.processes import ROOT, SCRIPTS, run_warm, wait_for_sidecar
from tests.support.ranks import HOST, Rank
from torchlens_perf.recorder import sidecar
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.processes import process_cpu_time_s
from torchlens_perf.run.sidecar_status import read_status
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.replay import replay
from torchlens_perf.store import segments

__all__ = ["failing"]
KILLS, KILLS_A_RUN = 1000, 50
SOAK_S, MAX_GROWTH_KB = 600, 64 << 10
SEGMENTS, PAYLOADS = 20_000, 800_000


@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [15, *long(KILLS)])
def test_repeated_kills_of_the_sidecar_lose_no_records(kills: int, tmp_path: Path) -> None:
    """A kill may interrupt the writing of a segment or the state.

    Each record is counted and saved once.
    """
    began_s, steps, partial = time.monotonic(), 0, 0
    number = kills if kills < KILLS else share(KILLS)
    kills_a_run = min(number, KILLS_A_RUN)
    runs = number // kills_a_run
    for seed in range(runs):
        command = [
            sys.executable,
            str(SCRIPTS / "sidecars_killed.py"),
            str(tmp_path),
            str(kills_a_run),
            str(seed),
        ]
        done = run_warm(command, tmp_path, timeout_s=300, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert (found["counted"], found["lost"], found["once"]) == (found["steps"], 0, True), found
        steps, partial = steps + found["steps"], partial + found["partial"]

    assert steps > runs * kills_a_run
    if kills == KILLS:
        assert partial > 0, "none was killed while it wrote"
        counted = f"0 of {steps:,} steps lost or counted twice"
        note(
            "SIGKILL of the sidecar",
            runs * KILLS_A_RUN,
            KILLS,
            counted,
            time.monotonic() - began_s,
            runs - 1,
        )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seconds", [8, *long(SOAK_S)])
def test_memory_and_cpu_time_of_the_sidecar_stay_bounded_on_a_full_disk(
    seconds: int, run: RunDirectory, failing
) -> None:
    """All unwritten records are counted."""
    began_s, full_s = time.monotonic(), seconds if seconds < SOAK_S else share(SOAK_S)
    flag = failing(errno.ENOSPC, run.spans, run.steps, run.node_state_path(HOST))
    rank = Rank(run, 0, 1)
    rank.steps(20, **WORK)
    sidecar.ensure_running(run, rank.identity)
    assert eventually(run.node_state_path(HOST).exists)
    pid, steps = read_status(str(run_lock(run)))[0], 20
    flag.touch()
    growth_kb, before_kb, cpu_s = 0, 0, process_cpu_time_s(pid)
    while time.monotonic() - began_s < full_s:
        rank.steps(10, **WORK)
        steps += 10
        time.sleep(0.05)
        if time.monotonic() - began_s > full_s / 2:  # All libraries are loaded by now.
            now_kb = resident_kb(pid)
            before_kb = before_kb or now_kb
            growth_kb = max(growth_kb, now_kb - before_kb)
    share_of_cpu = (process_cpu_time_s(pid) - cpu_s) / full_s
    flag.unlink()
    rank.close()
    wait_for_sidecar(run)
    value, kept = report(run), pd.read_parquet(run.spans)["sequence"]

    assert value["ranks"][0]["steps"] == steps
    assert kept.is_unique
    assert len(kept) + value["quality"]["lost"] >= 5 * steps
    assert growth_kb < MAX_GROWTH_KB
    if seconds == SOAK_S:
        counted = (
            f"{value['ranks'][0]['steps']:,} of {steps:,} steps counted, {len(kept):,} of"
            f" {5 * steps:,} records kept, {value['quality']['lost']:,} lost; the sidecar grew by"
            f" {growth_kb / 1024:.1f} MiB in the second half, {100 * share_of_cpu:.1f} % of a"
            " processor"
        )
        note("seconds of a full disk", full_s, SOAK_S, counted, time.monotonic() - began_s)


def run_lock(run: RunDirectory) -> Path:
    from torchlens_perf.run.directory import find_sidecar_lock

    found = find_sidecar_lock(run.run_id)
    assert found is not None
    return found


def resident_kb(pid: int) -> int:
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1])


def damaged(draw: random.Random, whole: bytes) -> bytes:
    """Return a copy of the bytes, cut off or with bytes changed, inserted or removed."""
    made = bytearray(whole)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(made))
        if draw.random() < 0.8:
            length = min(draw.randint(1, 4), len(made) - at)
            made[at : at + length] = draw.randbytes(length)
        else:
            made[at : at + draw.randint(0, 16)] = draw.randbytes(draw.randint(0, 16))
    return bytes(made[: None if draw.random() < 0.9 else draw.randrange(len(made))])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("files", [100, *long(SEGMENTS)])
def test_damaged_segments_are_left_out_with_a_note(files: int, run: RunDirectory) -> None:
    """A later sidecar and a replay continue without the file, and use no time from it."""
    began_s, number, seed = time.monotonic(), files if files < SEGMENTS else share(SEGMENTS), 5
    finished(run, 20)
    (path,) = run.spans.glob("*.parquet")
    whole, draw, refused = path.read_bytes(), random.Random(seed), 0
    for _ in range(number):
        path.write_bytes(damaged(draw, whole))
        notes: list[str] = []
        segments.read_last_sequences(run, HOST, notes)
        if draw.random() < 0.2:
            wrong = replay(run, None)
            assert wrong.notes or (wrong.steps, wrong.records) == (
                20,
                100,
            ), "neither refused nor whole"
        refused += bool(notes)

    assert refused > 0
    if files == SEGMENTS:
        note(
            "segments of any bytes",
            number,
            SEGMENTS,
            f"{refused:,} refused, 0 other ends",
            time.monotonic() - began_s,
            seed,
        )


def readings(payload: bytes) -> Iterator[object]:
    """Yield all values that node 0's sidecar reads from a payload."""
    values = summary.unpack_summaries([payload])
    yield summary.unpack_progress(values, ["host"], [0.0])
    yield summary.unpack_placement(values[0], "host")
    yield summary.unpack_module_times(values)
    yield from summary.iter_row_batches(values)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("payloads", [2000, *long(PAYLOADS)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_damaged_payloads_are_read_or_refused_with_a_note(payloads: int) -> None:
    """Node 0 continues, and a note reports that its comparison of ranks failed."""
    began_s, number, seed = (
        time.monotonic(),
        payloads if payloads < PAYLOADS else share(PAYLOADS),
        6,
    )
    whole, draw, refused, stopped = (
        made_summary(5, rows=JOB.rows_of(1)),
        random.Random(seed),
        0,
        0,
    )
    for _ in range(number):
        payload = damaged(draw, whole)
        if not summary.has_current_format(payload):
            refused += 1
            continue
        try:
            for _ in readings(payload):
                pass
        except (ValueError, IndexError):
            stopped += 1

    assert 0 < refused < number
    if payloads == PAYLOADS:
        counted = f"{refused:,} refused, {stopped:,} stopped a comparison, 0 other ends"
        note("summaries of any bytes", number, PAYLOADS, counted, time.monotonic() - began_s, seed)
