"""Processor time and memory of a node's sidecar while its ranks write records.

Threads of this process take the place of the ranks: each writes the records of whole steps into a
real ring, with real sessions and a clock that it sets itself. The sidecar is a real process.

An idle sidecar reads ranks that record nothing.

`python -m benchmarks.sidecar_load 1x3200 64x2000` measures so many ranks with so many records a
second each.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import Table
from torchlens_perf.recorder.sidecar import ensure_running
from torchlens_perf.run import sidecar_status
from torchlens_perf.run.directory import RunDirectory, find_sidecar_lock
from torchlens_perf.run.mailbox import ANSWER, RESULTS, Mailbox
from torchlens_perf.run.processes import process_cpu_time_s
from torchlens_perf.run.ring import Kind

RANKS, RATE = 64, 2000
SETTLE_S, MEASURED_S = 15.0, 60.0
MODULES = 42
RECORDS_PER_STEP = MODULES + 8
# Largest share of a CPU, and largest memory.
BAR_SHARE, BAR_IDLE_SHARE, BAR_MB = 0.20, 0.005, 150


class Writer:
    """The recorder of one rank, whose steps take as long as they should, without waiting."""

    def __init__(self, run: RunDirectory, rank: int, ranks: int) -> None:
        from tests.support.ranks import Rank

        self.rank = Rank(run, rank, ranks, ring_records=1 << 16)
        self.rank.clock.now_ns = time.monotonic_ns()
        intern = self.rank.session.intern
        self._modules = [intern(f"blocks.{index}.mlp") for index in range(MODULES)]
        self._names = {
            name: intern(name)
            for name in ("data", "forward GPT", "backward", "optimizer AdamW", "wait")
        }

    def write_step(self, duration_ns: int) -> None:
        recorder, clock = self.rank.session.recorder, self.rank.clock
        part_ns = duration_ns // 50

        def span(kind: Kind, name: int, parts: int) -> None:
            recorder.begin(kind, name)
            clock.advance(parts * part_ns)
            recorder.end(kind, name)

        names = self._names
        span(Kind.DATA, names["data"], 1)
        recorder.begin(Kind.FORWARD, names["forward GPT"])
        for module in self._modules:
            recorder.begin(Kind.MODULE, module)
            clock.advance(part_ns // 3)
            recorder.end(Kind.MODULE, module)
        recorder.end(Kind.FORWARD, names["forward GPT"])
        span(Kind.BACKWARD, names["backward"], 20)
        for _ in range(3):
            span(Kind.WAIT, names["wait"], 1)
        span(Kind.OPTIMIZER, names["optimizer AdamW"], 5)
        clock.now_ns = max(clock.now_ns, time.monotonic_ns())
        recorder.next_step(0, 123_000_000, 1)


def measure(ranks: int, steps_per_s: float, measured_s: float) -> tuple[float, float, int]:
    """Return the sidecar's share of a CPU, its largest memory in MB, and the lost records."""
    from tests.support.processes import report, wait_for_sidecar

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        from tests.support.ranks import make_run

        run = make_run(Path(folder))
        writers = [Writer(run, rank, ranks) for rank in range(ranks)]
        assert ensure_running(run, writers[0].rank.identity)
        for writer in writers:
            writer.write_step(1_000_000)
        asked = Mailbox(writers[0].rank.ring_path, ANSWER, RESULTS)
        assert asked.wait_for_message(60.0) is not None
        asked.close()
        pid = sidecar_status.read_status(str(find_sidecar_lock(run.run_id)))[0]
        began_s, steps, before = time.monotonic(), 0, None
        while (now_s := time.monotonic()) < began_s + SETTLE_S + measured_s:
            if before is None and now_s > began_s + SETTLE_S:
                before = now_s, process_cpu_time_s(pid)
            due = int((now_s - began_s) * steps_per_s)
            for _ in range(due - steps):
                for writer in writers:
                    writer.write_step(round(1e9 / steps_per_s))
            steps = due
            time.sleep(0.02)
        assert before is not None
        share = (process_cpu_time_s(pid) - before[1]) / (time.monotonic() - before[0])
        status = Path(f"/proc/{pid}/status").read_text()
        peak_kb = int(status.partition("VmHWM:")[2].split()[0])
        for writer in writers:
            writer.rank.close()
        wait_for_sidecar(run)
        return share, peak_kb / 1000, report(run)["quality"]["lost"]


def main(loads: list[tuple[int, int]] | None = None) -> int:
    """Print the table. Return the number of missed bars."""
    table = Table(
        "ranks",
        "records/s of each",
        "share of a CPU",
        "bar",
        "",
        "memory, MB",
        "bar",
        "",
        "lost records",
    )
    for ranks, rate in loads or [(RANKS, RATE), (RANKS, 0), (1, 3200)]:
        steps_per_s = rate / RECORDS_PER_STEP
        share, peak_mb, lost = measure(ranks, steps_per_s, MEASURED_S)
        bar = BAR_SHARE if rate else BAR_IDLE_SHARE
        table.row(
            ranks, rate, f"{share:.2%}", f"at most {bar:.1%}", table.bar(share <= bar),
            f"{peak_mb:.0f}", f"at most {BAR_MB}", table.bar(peak_mb <= BAR_MB), lost,
        )  # fmt: skip
    return table.missed


if __name__ == "__main__":
    sys.exit(main([tuple(map(int, each.split("x"))) for each in sys.argv[1:] if "x" in each]))
