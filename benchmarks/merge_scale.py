"""Measure the processor time of node 0's sidecar for a window of a large job: 16384 ranks of 64
modules.

The sidecar's own ClusterLink and JobGeneration process windows of 8 rows, with signals, from 2048
nodes of 8 ranks. The windows have the form in which the exchange delivers them. exchange_scale.py
measures the exchange itself. The measured work is placement, progress, module times, signals, rows,
judgement, the check for a hang, and causes of slow ranks. One rank is 8 % slower from the sixth
window on. The result is the processor time of the thread that does this work.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Table
from torchlens_perf.analysis.collectives.device_progress import RankProgress
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.sidecar.cluster import ClusterLink
from torchlens_perf.sidecar.job_generation import JobGeneration
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.messages import CollectedPosts, NodeContact, ReceivedPost
from torchlens_perf.verdicts.causes.metrics import METRICS
from torchlens_perf.verdicts.stragglers.findings import NOTHING
from torchlens_perf.verdicts.stragglers.placement import Placement

RANKS, NODE_SIZE, WINDOWS, SLOW, SLOW_FROM = 16384, 8, 24, 1234, 5
MODULES = {f"layers.{number}.mlp": 3e5 + number for number in range(64)}
WORK_NS = np.array(
    [
        {"data": 1e6, "forward": 2e7, "backward": 4e7, "optimizer": 5e6}.get(part, 1e6)
        for part in OWN_PARTS
    ]
)
SIGNALS_OF_A_RANK = dict.fromkeys(METRICS, 0.1)
MAX_S, MAX_MB = 1.0, 512


class Handed:
    """Replaces the exchange and returns prepared messages."""

    def __init__(self, *_: object) -> None:
        self.next: CollectedPosts = CollectedPosts((), {})

    def collect_posts(self) -> CollectedPosts:
        collected, self.next = self.next, CollectedPosts((), {})
        return collected

    def set_instructions(self, reply: bytes) -> None:
        pass

    def notes(self) -> list[str]:
        return []


def window(number: int, draw: np.random.Generator) -> CollectedPosts:
    """Return the summaries of all ranks.

    The sidecar's function packs one summary, and the other summaries differ only in numbers.

    The devices wait for their hosts in the backward pass.
    """
    place = Placement("node-0", "abcdef012345", {"dp": 0, "tp": 3, "cp": 1})
    groups = {"0": 40 * number, "dp": 20 * number, "tp": 400 * number}
    progress = RankProgress(
        0, "node-0", summary.ROWS * number, 0.1, 0.0, 0.07, groups, ("backward", "wait"), "running"
    )
    packed = summary.pack_summary(
        progress, place, RANKS, modules_ns=MODULES, signals=SIGNALS_OF_A_RANK
    )
    values = np.repeat(np.frombuffer(packed, summary.LAYOUT), RANKS)
    values["rank"], values["width"] = np.arange(RANKS), 1
    values["row"] = number * summary.ROWS + np.arange(summary.ROWS)
    work = WORK_NS * (1 + 0.02 * draw.standard_normal((RANKS, summary.ROWS, 1)))
    if number >= SLOW_FROM:
        work[SLOW] *= 1.08
    own = work.sum(axis=2)
    duration = 1.01 * own.max(axis=0)
    values["parts_ns"] = summary.times_to_shares(work, duration[:, None])
    values["issue_ns"] = summary.times_to_shares(
        work * (1 + 0.01 * draw.standard_normal(work.shape)), duration[:, None]
    )
    values["lag_ns"] = summary.times_to_shares(0.01 * work, duration[:, None])
    values["times"][..., 0], values["times"][..., 1], values["times"][..., 2:] = (
        duration,
        duration - own,
        np.nan,
    )
    nodes = [f"node-{rank // NODE_SIZE}/{rank // NODE_SIZE * NODE_SIZE}" for rank in range(RANKS)]
    payloads = {rank: values[rank].tobytes() for rank in range(RANKS)}
    posts = [
        ReceivedPost(
            nodes[first], 0.3, {rank: payloads[rank] for rank in range(first, first + NODE_SIZE)}
        )
        for first in range(0, RANKS, NODE_SIZE)
    ]
    return CollectedPosts(posts, {node: NodeContact(0.3, 0, False) for node in set(nodes)})


def memory_mb(field: str) -> float:
    """Return a field of /proc/self/status, because `ru_maxrss` begins with the parent's value."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measured() -> dict[str, Any]:
    """Measure in a process with only a sidecar's code, so its memory is comparable to a
    sidecar's."""
    import torch.distributed  # noqa: F401  the exchange's store

    import torchlens_perf.sidecar.node  # noqa: F401

    loaded_mb = memory_mb("VmRSS")
    handed = Handed()
    cluster = ClusterLink("node-0", open_exchange=lambda *_: handed)  # type: ignore[arg-type, return-value]
    job = JobGeneration(0)
    first = Identity(
        run_id="scale", rank=0, local_rank=0, world_size=RANKS, local_world_size=NODE_SIZE, attempt=0, host="node-0",
        pid=1, process_started=1, launcher_pid=1, elastic=False, program="", traceparent="", attributes={},
    )  # fmt: skip
    place = Placement("node-0", "abcdef012345", {})
    cluster.add_generation(first, 0)
    job.meeting_points[0] = Endpoints(("127.0.0.1", 1))
    job.set_progress(
        first, place, RankProgress(0, "node-0", 0, 0.0, 0.0, 0.07, {}, (), "running"), RankFacts()
    )
    draw, spent_s = np.random.default_rng(1), []
    for number in range(WINDOWS):
        handed.next = window(number, draw)
        begun_s = time.process_time()
        cluster.exchange_data(job, 5.0 * number)
        findings = job.judge_ranks() or NOTHING
        job.add_groups_and_causes(findings, details=lambda rank: {})
        spent_s.append(time.process_time() - begun_s)
    return {
        "named": [(episode.rank, episode.named_step) for episode in findings.episodes],
        "peak_mb": memory_mb("VmHWM"),
        "loaded_mb": loaded_mb,
        "spent_s": spent_s[WINDOWS // 2 :],
    }


def main() -> int:
    """Print the table. Return the number of missed bars."""
    command = [
        sys.executable,
        "-c",
        f"import json, {__name__} as it; print(json.dumps(it.measured()))",
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(told.stdout)
    ((rank, named_step),) = found["named"]
    assert rank == SLOW
    table = Table("node 0, 16384 ranks, 64 modules", "value", "bar", "")
    median_s, size = statistics.median(found["spent_s"]), summary.LAYOUT.itemsize
    table.row(
        "processor time of a window",
        f"{median_s:.2f} s",
        f"at most {MAX_S:.0f} s",
        table.bar(median_s <= MAX_S),
    )
    table.row("longest window", f"{max(found['spent_s']):.2f} s", "", "")
    merging_mb = found["peak_mb"] - found["loaded_mb"]
    table.row(
        "peak memory of it", f"{merging_mb:.0f} MB", f"at most {MAX_MB} MB", table.bar(merging_mb <= MAX_MB)
    )  # fmt: skip
    table.row("resident memory of the sidecar, torch with it", f"{found['peak_mb']:.0f} MB", "", "")
    table.row(
        "on the wire, a rank and window", f"{size} bytes", "at most 1024", table.bar(size <= 1024)
    )
    table.row("named", f"{named_step - summary.ROWS * SLOW_FROM} steps after it began", "", "")
    return table.missed
