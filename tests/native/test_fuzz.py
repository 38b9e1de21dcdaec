"""Fuzz tests of the native recorder's calls and the ring reader's bytes.

Random calls and bytes may cause only expected errors.
"""

from __future__ import annotations

import os
import random
import resource
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.processes import ROOT
from torchlens_perf.errors import RingError
from torchlens_perf.run import ring
from torchlens_perf.run.ring import RingFile, RingReader

QUICK, LONG = 10_000, 1_000_000
INTERESTING = (
    0,
    1,
    2,
    63,
    64,
    65,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
CAPACITY = 64
MAX_GROWTH_MB = 64


@pytest.mark.parametrize(("seed", "calls"), [(1, QUICK), *long((2, LONG // 2), (3, LONG // 2))])
@pytest.mark.timeout(1200)
def test_recorder_does_not_crash_on_random_arguments(seed: int, calls: int) -> None:
    """The fuzzer (fuzz_recorder.py) runs in a separate process, which must end regularly."""
    program = [
        sys.executable,
        "-X",
        "faulthandler",
        "-W",
        "ignore",
        str(Path(__file__).with_name("fuzz_recorder.py")),
    ]
    finished = subprocess.run(
        [*program, str(seed), str(calls)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )

    assert finished.returncode == 0, finished.stderr
    made, closed = map(int, finished.stdout.split())
    assert made == calls
    assert closed > calls // 1000, "watches ended in the middle of it"


def hostile(chosen: random.Random, whole: bytes) -> bytes:
    """Return a ring file with foreign writes: words, runs of bytes, and nested or wrong texts."""
    damaged = bytearray(whole)
    for _ in range(chosen.randrange(1, 12)):
        kind = chosen.random()
        if kind < 0.5:
            word = chosen.randrange(8, ring.GROUPS + ring.GROUP_WORDS * ring.MAX_GROUPS)
            value = chosen.choice([*INTERESTING, chosen.getrandbits(64)])
            struct.pack_into("<Q", damaged, 8 * word, value)
        elif kind < 0.6:
            struct.pack_into(
                "<Q",
                damaged,
                8 * chosen.randrange(8),
                chosen.choice([*INTERESTING, chosen.getrandbits(64)]),
            )
        elif kind < 0.7:
            text = chosen.choice(
                [
                    b"[" * 8192,
                    b'{"a":' * 1500,
                    b"9" * 8000,
                    b'"\\ud800"',
                    b"\xff\xfe[\x00",
                    b"NaN",
                    b"[]",
                ]
            )
            damaged[ring.METADATA_OFFSET : ring.METADATA_OFFSET + len(text)] = text
            used = zlib.crc32(text) << 32 | len(text)
            struct.pack_into(
                "<QQ", damaged, 8 * ring.METADATA_REVISION, 2 * chosen.randrange(3), used
            )
        else:
            start = chosen.choice(
                [0, 64, 192, ring.METADATA_OFFSET, ring.NAMES_OFFSET, ring.RECORDS_OFFSET]
            )
            start = min(start + chosen.randrange(4096), len(damaged) - 64)
            damaged[start : start + 64] = chosen.randbytes(64)
    return bytes(damaged)


@pytest.mark.parametrize(("seed", "files"), [(1, QUICK // 10), *long((2, 50_000))])
@pytest.mark.timeout(1200)
def test_reader_of_random_bytes_returns_values_or_raises_ring_error(
    seed: int, files: int, tmp_path: Path
) -> None:
    """All values that the reader returns have the right type.

    The reader's time and memory are bounded. Ten queries are made on each random file.
    """
    made = RingFile(tmp_path / "whole", CAPACITY)
    for number in range(40):
        made.intern(f"name {number}")
    made.add_group_row("group")
    made.set_metadata({"rank": 1})
    made.close()
    whole, path, chosen = (
        (tmp_path / "whole").read_bytes(),
        tmp_path / "hostile",
        random.Random(seed),
    )
    before_kb, opened, longest_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, 0.0

    for _ in range(files):
        path.write_bytes(
            hostile(chosen, whole)[
                : None if chosen.random() < 0.95 else chosen.randrange(len(whole))
            ]
        )
        start_s = time.process_time()
        try:
            reader = RingReader(path)
        except RingError:
            continue
        opened += 1
        assert isinstance(reader.read_metadata(), dict)
        for _ in range(2):
            assert len(reader.names()) <= ring.NAMES_BYTES
            assert len(reader.read_open_spans()) <= ring.MAX_FRAMES
            assert len(reader.read_group_progress()) <= ring.MAX_GROUPS
            batch = reader.read_records(final=chosen.random() < 0.5)
            assert len(batch.records) == len(batch.sequences) <= CAPACITY
            assert batch.lost >= 0
        reader.close()
        longest_s = max(longest_s, time.process_time() - start_s)

    assert opened > files // 3
    assert longest_s < 5, "names of a whole table at the most"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < MAX_GROWTH_MB << 10


def test_fifo_in_place_of_a_ring_is_rejected_at_once(tmp_path: Path) -> None:
    """A FIFO without a writer would block the reader forever."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises((RingError, OSError)):
        RingReader(tmp_path / "fifo")
