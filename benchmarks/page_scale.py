"""Cost and size of a large job's page, for run directories that are written directly, without
rings.

    python -m benchmarks.page_scale [RANKSxSTEPS ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.measure import Table
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS, RankStatistics
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import WORKLOAD_SHIFT, Flag, Kind, record_dtype
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.rings import Timeline, simulated_groups, simulated_identity
from torchlens_perf.simulate.simulation import Simulation, Topology
from torchlens_perf.store.segments import RecordChunk, RecordOrigin, SegmentWriter
from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.judged_steps import HOST

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.rank_facts import ProcessGroup

SIZES = ("64x1000", "1024x1000")
# Modules that are timed in each forward pass.
MODULES = 24
SLOW_RANK, FAULT = 3, "constant:rank=3,share=0.25,phase=forward,since=400"
# Limits by size: seconds, resident megabytes, megabytes of the file.
BARS = {"64x1000": (20.0, 1000.0, 3.0), "1024x1000": (60.0, 2000.0, 3.0)}
_BEGIN_NS, _MEMORY_BYTES = 10**12, 8 << 30
_PHASES = ("data", "forward", "backward", "optimizer")
_NAMES = [
    "(other)",
    "data",
    "forward Transformer",
    "backward",
    "optimizer AdamW",
    "wait",
    "allreduce group=0 dtype=bfloat16",
]
_WAIT, _ALLREDUCE, _FIRST_MODULE = 5, 6, 7


def main() -> int:
    """Print the table. Return the number of missed bars."""
    table = Table(
        "ranks x steps", "records", "run directory", "what", "time", "resident", "result", "bar", ""
    )
    for size in sys.argv[1:] or SIZES:
        ranks, steps = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            run = RunDirectory(Path(folder) / "run")
            records = write_run(
                run,
                Topology(ranks // 8, 8, node_size=8) if ranks % 8 == 0 else Topology(ranks),
                steps,
            )
            on_disk = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
            page = Path(folder) / "page.html"
            seconds, megabytes, file_megabytes = BARS.get(size, (float("inf"),) * 3)
            for what, arguments in (("report", []), ("page", ["--html", str(page)])):
                took_s, resident_mb = measured([str(run.path), *arguments])
                result = f"{page.stat().st_size / 1e6:.2f} MB" if what == "page" else "-"
                met = took_s <= seconds and resident_mb <= megabytes
                met &= what == "report" or page.stat().st_size / 1e6 <= file_megabytes
                table.row(
                    size, records, f"{on_disk / 1e6:.0f} MB", what, f"{took_s:.1f} s", f"{resident_mb:.0f} MB", result,
                    f"<= {seconds:.0f} s, {megabytes:.0f} MB, {file_megabytes:.0f} MB", table.bar(met),
                )  # fmt: skip
    return table.missed


def measured(arguments: list[str]) -> tuple[float, float]:
    """Return the seconds and megabytes of `torchlens-perf report ARGUMENTS`."""
    # Read VmHWM, because the maximum of getrusage() includes the memory of the parent process.
    code = (
        "import sys; from torchlens_perf.commands.cli import main; status = main(['report',"
        " *sys.argv[1:]]); print(next(line.split()[1] for line in open('/proc/self/status') if"
        " line.startswith('VmHWM')), file=sys.stderr); sys.exit(status)"
    )
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    )
    return time.monotonic() - began_s, int(done.stderr.split()[-1]) / 1e3


def write_run(
    run: RunDirectory, topology: Topology, steps: int, segments: int = 4, fault: str = FAULT
) -> int:
    """Write a job's run directory as its sidecars leave it, one node after the other.

    Return the number of records.
    """
    run.create()
    simulation = Simulation(topology, faults=[parse_fault(fault)] if fault else [])
    blocks = [Timeline.from_steps(part) for part in simulation.steps(steps)]
    judge, states, written = StragglerDetector(), list[NodeState](), 0
    for first in range(0, topology.rank_count, topology.node_size):
        node = topology.host_name(first)
        state, writer = NodeState(node), SegmentWriter(run, node, 1 << 40)
        members = range(first, min(first + topology.node_size, topology.rank_count))
        state.join.set_ranks(members)
        chunks: list[list[RecordChunk]] = [[] for _ in range(segments)]
        for rank in members:
            process, records = _process(run, topology, rank, blocks)
            state.processes[process.identity.key] = process
            written += len(records)
            table = assemble_steps(records)
            judge.add_steps(rank, process.placement, table)
            warm = records[records["step"] >= WARM_UP_STEPS]
            state.join.add_records(
                rank, warm, _names(), process.facts.groups, 0, process.identity.key
            )
            for at, part in enumerate(_segments(records, steps, segments)):
                origin = RecordOrigin(
                    process.identity.key, rank, 0, process.identity.host, process.anchor
                )
                sequences = np.flatnonzero(np.isin(records["step"], np.unique(part["step"])))
                chunks[at].append(
                    RecordChunk(origin, part, sequences, _names(), assemble_steps(part))
                )
        state.join.join()
        for each in chunks:
            writer.add_chunks(each)
            writer.write_added()
        states.append(state)
    states[0].findings = add_straggler_groups(judge.judge(final=True), judge.places)
    for state in states:
        state.save(run)
    return written


def _names() -> list[str]:
    return [*_NAMES, *(f"layers.{index}" for index in range(MODULES))]


def _segments(
    records: npt.NDArray[np.void], steps: int, count: int
) -> Iterator[npt.NDArray[np.void]]:
    bounds = np.searchsorted(records["step"], np.linspace(0, steps, count + 1).astype(np.int64))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield records[begin:end]


def _process(
    run: RunDirectory, topology: Topology, rank: int, blocks: list[Timeline]
) -> tuple[ProcessState, npt.NDArray[np.void]]:
    records = np.concatenate([_records(block, rank) for block in blocks])
    starts = np.cumsum(np.concatenate([block.duration_ns for block in blocks]))
    starts = _BEGIN_NS + np.concatenate([[0], starts[:-1]])
    records["start_ns"] += starts[records["step"].astype(np.int64)]
    groups: dict[str, ProcessGroup] = {
        "0": {"ranks": f"0-{topology.rank_count - 1}", "description": "default_pg"}
    }
    for group_name, (_, members, description) in simulated_groups(topology, rank).items():
        if group_name != "0":
            groups[group_name] = {"ranks": format_ranges(members), "description": description}
    process = ProcessState(
        simulated_identity(run, topology, rank), Anchor(_BEGIN_NS, 1_790_000_000 * 10**9, 0), RankStatistics(),
        counted=len(records) - 1, ended="closed", judged_by=HOST,
        facts=RankFacts(model=f"pp{topology.coordinates(rank)['pp']}", compute_device="cpu", groups=groups),
    )  # fmt: skip
    process.statistics.add_records(records, assemble_steps(records), _names(), 0)
    return process, records


def _records(block: Timeline, rank: int) -> npt.NDArray[np.void]:
    """Return one rank's records of a block's steps, ordered by end.

    Starts are relative to the step.
    """
    count, own = len(block.steps), block.parts_ns[rank]
    at = {part: own[:, OWN_PARTS.index(part)] for part in OWN_PARTS}
    wait_ns = (block.duration_ns - own.sum(axis=1)).clip(min=0)
    module_ns = at["forward"] // MODULES
    zero = np.zeros(count, np.int64)
    forward_ns, backward_ns = at["data"], at["data"] + at["forward"]
    arrives_ns = backward_ns + at["recompute"] + at["backward"]
    optimizer_ns = arrives_ns + wait_ns
    rows = [(Kind.DATA, 1, 1, zero, at["data"], zero)]
    rows += [
        (Kind.MODULE, _FIRST_MODULE + index, 2, forward_ns + index * module_ns, module_ns, zero)
        for index in range(MODULES)
    ]
    rows += [
        (Kind.FORWARD, 2, 1, forward_ns, at["forward"], zero),
        (Kind.WAIT, _WAIT, 2, arrives_ns, wait_ns, zero),
        (Kind.COLLECTIVE, _ALLREDUCE, 0, arrives_ns, wait_ns, zero),
        (Kind.BACKWARD, 3, 1, backward_ns, optimizer_ns - backward_ns, wait_ns),
        (Kind.OPTIMIZER, 4, 1, optimizer_ns, at["optimizer"], zero),
        (Kind.STEP, 0, 0, zero, block.duration_ns, block.duration_ns - at["host"]),
    ]
    records = np.zeros((count, len(rows)), record_dtype())
    records["step"] = (block.steps.first_step + np.arange(count))[:, None]
    for index, (kind, name_id, depth, start_ns, duration_ns, phase_ns) in enumerate(rows):
        row = records[:, index]
        row["kind"], row["name_id"], row["depth"] = int(kind), name_id, depth
        row["start_ns"], row["duration_ns"], row["phase_ns"] = start_ns, duration_ns, phase_ns
        if kind == Kind.COLLECTIVE:
            row["flags"], row["value0"], row["value1"] = int(Flag.COMPLETED), 1 << 28, row["step"]
        if kind == Kind.STEP:
            row["value0"], row["value1"] = _MEMORY_BYTES, 1 | 1 << WORKLOAD_SHIFT
    return records.reshape(-1)


if __name__ == "__main__":
    sys.exit(main())
