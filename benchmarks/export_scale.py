"""Number of spans per second and of metric series that a large job sends from all its nodes.

    python -m benchmarks.export_scale [--ranks 64 512 4096] [--seconds 300]

The ranks are simulated, eight per node, with a slow rank, stalls, pauses and 200 spans per step and
rank. Each node has eight GPUs and eight ports that report everything. The code that makes decisions
is that of a real sidecar: each node's choice of steps, exported spans and metrics, windows and
tallies, and node 0's messages. The network between nodes is not simulated: a posted message arrives
at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from opentelemetry.sdk.resources import Resource

from benchmarks.measure import Table
from tests.support import simulations
from torchlens_perf.analysis.collectives.device_progress import RankProgress
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.exporters import Assessment, ExportBatch
from torchlens_perf.exporters.delivery.sender import metrics_of
from torchlens_perf.exporters.otlp_metrics import NodeMetrics
from torchlens_perf.exporters.otlp_spans import SpanBuilder
from torchlens_perf.exporters.series import ArrayMeter
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.hardware_samples import GPUS, LINKS, QUANTITIES, HardwareSamples, Sample
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.rank_facts import RankFacts, SidecarSettings
from torchlens_perf.run.records import StepTable
from torchlens_perf.run.ring import Kind, record_dtype
from torchlens_perf.sidecar.cluster import ClusterLink
from torchlens_perf.sidecar.export_role import ExportRole
from torchlens_perf.sidecar.job_generation import JobGeneration
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.messages import CollectedPosts, ReceivedPost
from torchlens_perf.simulate.faults import parse_fault
from torchlens_perf.simulate.simulation import SimulatedSteps, Simulation, Topology
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.stragglers.findings import NOTHING

NODE_SIZE, SPANS_A_STEP = 8, 200
BAR_SPANS_A_SECOND, BAR_SERIES = 200, 2000
FAULTS = (
    "constant:rank=5,share=0.3,since=200",
    "stalls:rank=6,share=2,every=70",
    "pauses:share=0.5,every=130",
)
_BEGIN_UNIX_NS = 1_700_000_000 * 10**9
_PLACES = Endpoints(("127.0.0.1", 1))


class Wire:
    """An exchange without a network: each message arrives at once."""

    def __init__(self) -> None:
        self.posted: list[ReceivedPost] = []
        self.reply = b""
        self.bytes = 0

    def open(self, places: Endpoints, key: str, node: str, merges: bool) -> Any:
        return _End(self, node)


class _End:
    def __init__(self, wire: Wire, node: str) -> None:
        self._wire, self._node = wire, node

    def post(self, payloads: Mapping[int, bytes]) -> None:
        self._wire.bytes += sum(map(len, payloads.values()))
        self._wire.posted += [ReceivedPost(self._node, 0.0, payloads)]

    def collect_posts(self) -> CollectedPosts:
        posted, self._wire.posted = self._wire.posted, []
        return CollectedPosts(posted, {})

    def set_instructions(self, reply: bytes) -> None:
        self._wire.reply = reply

    def instructions(self) -> bytes:
        return self._wire.reply

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Source:
    """The parts of a rank's ring that the choice of steps reads."""

    state: ProcessState
    generation: int = 0
    read_to_end: bool = False
    waiting: tuple[Any, ...] = ()


class Sources:
    """The parts of a node's rings that the choice of steps reads."""

    def __init__(self, sources: list[Source], settings: Mapping[str, int]) -> None:
        self._sources, self._settings = sources, settings

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources)

    def newest_rings(self) -> Iterator[Source]:
        return iter(self._sources)

    def is_newest(self, source: Source) -> bool:
        return True

    def unfinished_rings(self) -> list[Source]:
        return self._sources

    @property
    def settings(self) -> SidecarSettings:
        given = {name: value for name, value in self._settings.items() if name != "off"}
        return SidecarSettings(**given)


class Node:
    """A node's sidecar without ring files and without a sender."""

    def __init__(
        self, number: int, topology: Topology, wire: Wire, settings: Mapping[str, int], clock: Any
    ) -> None:
        self.topology, host = topology, f"node-{number:04d}"
        self.ranks = range(number * NODE_SIZE, min((number + 1) * NODE_SIZE, topology.rank_count))
        self.state = NodeState(host)
        self.cluster, self.job, self.role = (
            ClusterLink(host, open_exchange=wire.open),
            JobGeneration(0),
            ExportRole(),
        )
        sources = [
            Source(_process(rank, topology.rank_count, host, len(self.ranks)))
            for rank in self.ranks
        ]
        self.state.processes = {each.state.identity.key: each.state for each in sources}
        self.sources = Sources(sources, settings)
        self.cluster.add_generation(sources[0].state.identity, 0)
        self.spans_of = SpanBuilder({})
        self.metrics = NodeMetrics(ArrayMeter(), clock)
        self.clock = clock
        self.spans: Counter[int] = Counter()
        """Number of spans by the second of the job in which the step ended."""
        self.traced: list[ExportBatch] = []
        self.series: set[tuple[Any, ...]] = set()
        self.exported: list[Any] = []
        """Metrics of the newest export."""
        self.ids: dict[tuple[int, int], int] = {}
        """Duration in ns by the trace and span ids of a rank's step."""
        # Batches whose spans wait for the sampling decision.
        self._waiting: list[ExportBatch] = []
        self._is_off_the_exchange = "off" in settings

    def make(self, steps: SimulatedSteps, start_ns: int, records: Any) -> None:
        """Add the records of these steps to all ranks."""
        for source, rank in zip(self.sources, self.ranks, strict=True):
            identity, table = source.state.identity, table_of(steps, rank, start_ns)
            place = self.topology.placement(rank)
            self.job.add_steps(
                identity, place, table, None if self._is_off_the_exchange else _PLACES
            )
            self.job.set_progress(
                identity, place, _progress(rank, identity.host, int(table.step[-1])), RankFacts()
            )
            names = ["", "layer"]
            self.job.traces.add_steps(source, self.sources, records, names, table, self.clock())  # type: ignore[arg-type]
            self._waiting.append(ExportBatch(identity, source.state.anchor, table, ()))

    def judge(self) -> None:
        """Run one round of the sidecar."""
        self.cluster.exchange_data(self.job, self.clock())
        self.state.findings = self.job.add_groups_and_causes(self.job.judge_ranks() or NOTHING)
        self.role.add_slow_ranks(self.state.findings.slow_now)
        self.cluster.publish_slow_ranks(tuple(self.role.slow_ranks))
        self.role.slow_elsewhere = self.cluster.received_slow_ranks
        part = self.role.update_part(
            self.cluster.export_part(self.job), self.job.rank_rows, self.cluster.take_tallies(), self.sources,  # type: ignore[arg-type]
            self.clock(),
        )  # fmt: skip
        assert part is not None
        self.cluster.send_tally(self.metrics.update_role(part), self.job)
        while self._waiting:
            self._export(self._waiting.pop(0))
        running = frozenset(source.state.identity.rank for source in self.sources)
        attempt = self.cluster.membership.generation_number(0)
        slow: set[object] = {*self.role.slow_elsewhere & self.job.ranks.keys()}
        slow |= {each.key for each in self.state.findings.slow_now if each.rank in self.job.ranks}
        self.job.traces.react_to_slow_ranks(slow, self.clock())
        self.role.left_out = self.job.traces.left_out
        for traced in self.job.traces.choose_traces(self.state, attempt, running, self.clock()):
            self.traced.append(traced)
            self._export(traced)
        some = next(iter(self.sources)).state.identity
        self.metrics.on_assessment(
            Assessment(some, self.state.findings, None, (), self.cluster.judges_alone)
        )

    def measure(self) -> None:
        """Report every metric of GPUs and ports, including errors and throttling."""
        self.metrics.hardware.record_samples(_hardware(self.state.host))

    def collect(self) -> None:
        """Export the metrics."""
        data = self.metrics.collect(Resource({}))
        self.exported = [] if data is None else metrics_of(data)
        for metric in self.exported:
            for point in metric.data.data_points:
                attributes = tuple(
                    sorted((key, str(value)) for key, value in point.attributes.items())
                )
                self.series.add((self.state.host, metric.name, *attributes))

    def _export(self, batch: ExportBatch) -> None:
        """Export the batch in the same way as OtlpExporter."""
        found = self.spans_of.build_spans(batch)
        for trace in batch.traces:
            second = (trace.start_ns + trace.duration_ns) // 10**9
            self.spans[second] += len(found[trace.step][0])
            self.ids[found[trace.step][1:]] = trace.duration_ns
        sampled = {step: (in_trace, span) for step, (_, in_trace, span) in found.items()}
        self.metrics.export(batch, sampled)


@dataclasses.dataclass(frozen=True)
class Sent:
    """Counts of everything that a job sends."""

    nodes: list[Node]
    seconds: float
    posted_bytes: int

    @property
    def spans(self) -> Counter[int]:
        return sum((node.spans for node in self.nodes), Counter())

    @property
    def spans_a_second(self) -> float:
        return self.spans.total() / self.seconds

    @property
    def series(self) -> set[tuple[Any, ...]]:
        return set().union(*(node.series for node in self.nodes))

    def traces(self) -> dict[int, dict[int, ExportBatch]]:
        """Return the exported traces by step and rank."""
        found: dict[int, dict[int, ExportBatch]] = {}
        for node in self.nodes:
            for batch in node.traced:
                found.setdefault(batch.traces[0].step, {})[batch.identity.rank] = batch
        return found


def send(
    ranks: int, steps: int, *, exchange: bool = True, hardware: bool = True, **settings: int
) -> Sent:
    """Simulate a job whose steps take 0.2 s, and export everything that it sends."""
    topology, wire, now_s = Topology(ranks, node_size=NODE_SIZE), Wire(), [1000.0]
    told = {**settings, **({} if exchange else {"off": 1})}
    nodes = [
        Node(number, topology, wire, told, lambda: now_s[0])
        for number in range(-(-ranks // NODE_SIZE))
    ]
    simulation = Simulation(topology, faults=[parse_fault(text) for text in FAULTS])
    start_ns = began_ns = 10**12
    for part in simulation.steps(steps):
        records = _records(part, start_ns)
        for node in nodes:
            node.make(part, start_ns, records)
        start_ns += int(np.round(part.duration_ns).sum())
        now_s[0] = 1000.0 + (start_ns - began_ns) / 1e9
        # Node 0 replies in the middle, which lets the nodes after it receive the reply in the same
        # round.
        for node in (*nodes[1:], nodes[0], *nodes[1:]):
            node.judge()
        for node in nodes * 2 if hardware else ():
            node.measure()
        if part.first_step % 256 == 0:
            for node in nodes:
                node.collect()
    for _ in range(4):
        now_s[0] += 10
        for node in nodes if hardware else ():
            node.measure()
        for node in (*nodes[1:], nodes[0]):
            node.judge()
    for node in nodes:
        node.collect()
    return Sent(nodes, (start_ns - began_ns) / 1e9, wire.bytes)


def table_of(steps: SimulatedSteps, rank: int, start_ns: int) -> StepTable:
    """Return a rank's steps as the sidecar reads them, with 16 GiB of memory."""
    return dataclasses.replace(
        simulations.table_of(steps, rank, start_ns), memory_bytes=np.full(len(steps), 1 << 34)
    )


def _records(steps: SimulatedSteps, start_ns: int) -> Any:
    """Return a rank's records of the steps.

    All ranks share one list of records, because only the number of records matters.
    """
    duration_ns = np.round(steps.duration_ns).astype(np.int64)
    per_step = SPANS_A_STEP + 1
    found = np.zeros(len(steps) * per_step, record_dtype())
    starts = start_ns + np.cumsum(duration_ns) - duration_ns
    found["step"] = np.repeat(np.arange(steps.first_step, steps.first_step + len(steps)), per_step)
    found["kind"], found["name_id"] = Kind.MODULE, 1
    inside = np.tile(np.arange(per_step), len(steps))
    found["start_ns"] = np.repeat(starts, per_step) + inside * 1000
    found["duration_ns"] = 900
    ends = inside == SPANS_A_STEP
    found["kind"][ends], found["start_ns"][ends], found["duration_ns"][ends] = (
        Kind.STEP,
        starts,
        duration_ns,
    )
    return found


def _process(rank: int, world_size: int, host: str, local_world_size: int) -> ProcessState:
    identity = Identity(
        run_id="simulated", rank=rank, local_rank=rank % NODE_SIZE, world_size=world_size,
        local_world_size=local_world_size, attempt=0, host=host, pid=1, process_started=1, launcher_pid=1,
        elastic=False, program="train.py", traceparent="", attributes={}, node=host,
    )  # fmt: skip
    return ProcessState(identity, Anchor(0, _BEGIN_UNIX_NS, 0), RankStatistics())


def _progress(rank: int, host: str, step: int) -> RankProgress:
    return RankProgress(rank, host, step, 0.0, 0.0, 0.2, {}, (), "running")


def _hardware(host: str) -> HardwareSamples:
    samples = [
        Sample(
            kind,
            name,
            0,
            0,
            dict.fromkeys(QUANTITIES[kind], 1),
            dict.fromkeys(QUANTITIES[kind], 1.0),
        )
        for index in range(NODE_SIZE)
        for kind, name in ((GPUS, f"GPU-{host}-{index}"), (LINKS, f"mlx5_{index}/1"))
    ]
    return HardwareSamples(tuple(samples), {})


def main() -> int:
    """Print the table. Return the number of missed bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 512, 4096])
    parser.add_argument("--seconds", type=int, default=300)
    options = parser.parse_args()
    table = Table(f"{options.seconds} s of a simulated job, all nodes together", "value", "bar", "")
    for ranks in options.ranks:
        began_s = time.process_time()
        sent = send(ranks, options.seconds * 5)
        traces = sent.traces()
        ranks_sent = sorted(len(of_step) for of_step in traces.values())
        why = Counter(
            next(iter(of_step.values())).chosen[step].because for step, of_step in traces.items()
        )
        reasons = ", ".join(f"{count} {each}" for each, count in why.items())
        for what, value, bar in (
            ("spans a second", sent.spans_a_second, BAR_SPANS_A_SECOND),
            ("series", len(sent.series), BAR_SERIES),
        ):
            table.row(
                f"{ranks} ranks: {what}", f"{value:.0f}", f"<= {bar}", table.bar(value <= bar)
            )
        table.row(f"{ranks} ranks: steps that are traced", f"{len(traces)}: {reasons}", "", "")
        table.row(
            f"{ranks} ranks: ranks in a trace", f"{ranks_sent[0]} to {ranks_sent[-1]}", "", ""
        )
        table.row(
            f"{ranks} ranks: this took",
            f"{time.process_time() - began_s:.0f} s of processor time",
            "",
            "",
        )
    return table.missed


if __name__ == "__main__":
    sys.exit(main())
