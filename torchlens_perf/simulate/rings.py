"""Ring files of simulated ranks, whose steps have the records of real ones.

The files and the sidecar are those of a real run. A rank's step consists of data,
forward, backward, the all-reduce of gradients, the optimizer, and host code. The optimizer begins
with an all-reduce of the gradient norm over all ranks. Tensor-parallel neighbours wait for each
other at the end of forward and of backward.

On a device, the host issues a step's work in little time. At the end of the step, the host waits
for the device, as in a loop that reads the loss. Device times are reported a few steps later. In a
launch-bound job, the device waits for its host (launch_bound.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torchlens_perf.config import Config
from torchlens_perf.recorder.rank_metadata import RankMetadata
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory, create_ring
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.run.rank_facts import DeviceClockQuality
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import WORKLOAD_SHIFT, Flag, Kind
from torchlens_perf.simulate.launch_bound import AHEAD, PHASES, LaunchBoundTimes
from torchlens_perf.simulate.recorder import SimulatedRecorder
from torchlens_perf.simulate.simulation import SimulatedSteps, Topology

MAX_RANKS = 1024
# Each rank needs an open file in its recorder and another one in the sidecar.
OPEN_FILES = 2
_WORLD = "0"
_LAYERS_PER_STAGE = 4
# Sizes of gradients (dp), activations (tp), and the gradient norm (world).
_BYTES = {"dp": 1 << 28, "tp": 1 << 25, "world": 4}
# A block of steps has at most about 1,000 records, and twice as many with device times.
_RING_RECORDS = 2048
# Time that the host needs to issue a phase, as a share of the phase's time on the device.
_ISSUING_SHARE = 0.05
_CLOCK: DeviceClockQuality = {
    "clock": "simulated events",
    "error_ns": 0,
    "captured": 0,
    "skipped": 0,
    "unread": 0,
}
_PHASES = {
    "data": (Kind.DATA, "data"),
    "forward": (Kind.FORWARD, "forward Transformer"),
    "recompute": (Kind.RECOMPUTE, "recompute"),
    "backward": (Kind.BACKWARD, "backward"),
    "optimizer": (Kind.OPTIMIZER, "optimizer AdamW"),
}


_Piece: TypeAlias = tuple["Kind | str", int]
"""Work of a kind, or a wait in the collectives of a group's dimension, and its duration in ns."""


@dataclasses.dataclass(frozen=True)
class SimulatedDevice:
    """Settings for the device times of all ranks."""

    late_steps: int = 1
    """Number of later steps after which the device times of a step are reported."""
    missing: float = 0.0
    """Share of the steps that have no device times, such as captured steps."""
    launch_bound: bool = False
    """True if the host needs longer to issue a step than the device needs to execute it."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The steps of a block for all ranks, with times as whole nanoseconds."""

    steps: SimulatedSteps
    duration_ns: npt.NDArray[np.int64]
    parts_ns: npt.NDArray[np.int64]
    tensor_wait_ns: npt.NDArray[np.int64]
    gradients_ns: npt.NDArray[np.int64]
    """Wait at the end of the backward pass, until the gradients are reduced: [ranks, steps]."""
    norm_ns: npt.NDArray[np.int64]
    """The rest of the step's wait, until the slowest rank has arrived: [ranks, steps]."""

    @classmethod
    def from_steps(cls, steps: SimulatedSteps) -> Timeline:
        """Divide each rank's wait between the all-reduces of gradients and of their norm."""
        topology = steps.topology
        parts, tensor = steps.parts_ns.astype(np.int64), steps.tensor_wait_ns.astype(np.int64)
        duration = np.round(steps.duration_ns).astype(np.int64)
        left = np.maximum(duration - parts.sum(axis=2) - tensor.sum(axis=2), 0)
        before = [OWN_PARTS.index(part) for part in ("data", "forward", "recompute", "backward")]
        arrived = parts[:, :, before].sum(axis=2) + tensor.sum(axis=2)
        grid = (topology.pp, topology.dp, topology.tp, len(steps))
        transfer = steps.transfer_ns.reshape(grid).max(axis=1, keepdims=True)
        reduced = np.broadcast_to(arrived.reshape(grid).max(axis=1, keepdims=True) + transfer, grid)
        gradients = reduced.reshape(arrived.shape).astype(np.int64) - arrived
        # Rounding can make the first wait a nanosecond longer than the whole wait.
        gradients = np.minimum(gradients, left) if topology.dp > 1 else np.zeros_like(left)
        return cls(steps, duration, parts, tensor, gradients, left - gradients)


class SimulatedRank:
    """One rank with its ring file and its recorder. close() closes both. Not thread-safe."""

    def __init__(
        self,
        run: RunDirectory,
        sidecar_host: str,
        topology: Topology,
        rank: int,
        begin: Anchor,
        note: str,
        device: SimulatedDevice | None = None,
        *,
        total_steps: int = 0,
    ) -> None:
        """Create the ring file and the recorder.

        sidecar_host: the host whose sidecar reads the file. begin: start of the first step by the
        host's clock. device: settings of its device; None for a rank on the CPU. total_steps:
        the total number of steps that the rank reports for the run.
        """
        self.rank = rank
        self._device = device
        # Arguments of record_device_span(), which is called a few steps later.
        self._unreported: deque[tuple[int, ...]] = deque()
        self._random = np.random.default_rng(rank)
        self._begin_ns = begin.monotonic_ns
        # The device's step in progress: the time at which it began, and whether it is reported.
        self._device_step: tuple[int, bool] | None = None
        self.identity = simulated_identity(run, topology, rank)
        config = Config(
            ring_records=_RING_RECORDS << (device is not None), telemetry=False, capture="off",
            exchange="off", report="off", _total_steps=total_steps,
        )  # fmt: skip
        # The ring file is in the run directory, because an interrupted simulation must leave
        # nothing in shared memory.
        self._ring = create_ring(run, self.identity, config.ring_capacity, keep=True)
        self._recorder = SimulatedRecorder(self._ring, begin.monotonic_ns)
        self._metadata = RankMetadata(
            config, self.identity, self._ring, self._recorder, begin, simulated=True
        )
        self._ids = {
            part: (kind, self._ring.intern(name)) for part, (kind, name) in _PHASES.items()
        }
        self._wait_id = self._ring.intern("wait")
        stage = topology.coordinates(rank)["pp"]
        modules = [f"layers.{stage * _LAYERS_PER_STAGE + i}" for i in range(_LAYERS_PER_STAGE)]
        if stage == 0:
            modules.insert(0, "embedding")
        if stage == topology.pp - 1:
            modules.append("head")
        self._modules = [self._ring.intern(name) for name in modules]
        self._sequences: dict[str, int] = {}
        groups = simulated_groups(topology, rank)
        self._group_of = {dimension: name for name, (dimension, _, _) in groups.items()}
        for name, (_, members, description) in groups.items():
            self._metadata.add_group(name, members, description)
        self._metadata.add_modules(
            dict.fromkeys(modules, False),
            device="cpu" if device is None else "cuda",
            all_levels=True,
            unopened=[],
        )
        if device is not None:
            self._metadata.facts.device = _CLOCK
        self._metadata.note(note)
        run.register_ring(sidecar_host, self._ring.path)

    def write_steps(self, timeline: Timeline | LaunchBoundTimes) -> None:
        """Write a block of steps to the ring file.

        The block may overwrite earlier records that the sidecar has not read.
        """
        for index in range(len(timeline.steps)):
            if isinstance(timeline, LaunchBoundTimes):
                self._record_launch_bound_step(timeline, index)
            elif self._device is None:
                self._record_host_step(timeline, index)
            else:
                self._record_device_step(timeline, index)
        self._recorder.flush()

    def close(self) -> None:
        self._end_device_step(self._recorder.now_ns)
        self._report_device_times(self._recorder.step + 1)
        self._recorder.flush()
        self._metadata.publish_end(None, None)
        self._ring.close()

    def _divide_step(self, timeline: Timeline, index: int) -> dict[str, list[_Piece]]:
        """Return the pieces of each phase in order: work, or waits in a group's collectives."""
        own = dict(zip(OWN_PARTS, timeline.parts_ns[self.rank, index].tolist(), strict=True))
        in_forward_ns, in_backward_ns = timeline.tensor_wait_ns[self.rank, index].tolist()
        return {
            "data": [(Kind.DATA, own["data"])],
            "forward": [(Kind.FORWARD, own["forward"]), ("tp", in_forward_ns)],
            "recompute": [(Kind.RECOMPUTE, own["recompute"])] if own["recompute"] else [],
            "backward": [
                (Kind.BACKWARD, own["backward"]),
                ("tp", in_backward_ns),
                ("dp", int(timeline.gradients_ns[self.rank, index])),
            ],
            "optimizer": [
                ("world", int(timeline.norm_ns[self.rank, index])),
                (Kind.OPTIMIZER, own["optimizer"]),
            ],
        }

    def _record_host_step(self, timeline: Timeline, index: int) -> None:
        end_ns = self._recorder.now_ns + int(timeline.duration_ns[index])
        for part, pieces in self._divide_step(timeline, index).items():
            if pieces:
                with self._record_phase(part):
                    for piece in pieces:
                        self._record_piece(*piece)
        self._end_step(timeline, index, end_ns)

    def _record_piece(self, what: Kind | str, duration_ns: int) -> None:
        if isinstance(what, str):
            self._record_wait(what, duration_ns)
        elif what == Kind.FORWARD:
            self._record_modules(duration_ns)
        else:
            self._recorder.now_ns += duration_ns

    def _record_device_step(self, timeline: Timeline, index: int) -> None:
        begin_ns = self._recorder.now_ns
        duration_ns = int(timeline.duration_ns[index])
        phases = self._divide_step(timeline, index)
        # The device recomputes within the backward pass.
        phases["backward"][:0] = phases.pop("recompute")
        reported = self._device is not None and self._random.random() >= self._device.missing
        with self._record_phase("data"):
            self._recorder.now_ns += sum(ns for _, ns in phases.pop("data"))
        # The device has no work before the forward pass.
        at_ns = self._recorder.now_ns
        for part, pieces in phases.items():
            phase_ns = at_ns
            with self._record_phase(part):
                self._recorder.now_ns += round(_ISSUING_SHARE * sum(ns for _, ns in pieces))
            for what, piece_ns in pieces:
                if what == Kind.RECOMPUTE:
                    self._queue_span(Kind.RECOMPUTE, at_ns, piece_ns, reported=reported)
                elif isinstance(what, str) and what in self._group_of:
                    self._record_collective(what, at_ns, piece_ns, Flag.COMPLETED | Flag.DEVICE)
                    self._queue_span(Kind.WAIT, at_ns, piece_ns, reported=reported)
                at_ns += piece_ns
            self._queue_span(_PHASES[part][0], phase_ns, at_ns - phase_ns, reported=reported)
        self._queue_span(Kind.STEP, begin_ns, duration_ns, reported=reported)
        self._end_step(timeline, index, begin_ns + duration_ns)
        late_steps = self._device.late_steps if self._device else 0
        self._report_device_times(self._recorder.step - late_steps)

    def _record_launch_bound_step(self, timeline: LaunchBoundTimes, index: int) -> None:
        assert self._device is not None
        parts_ns = timeline.steps.parts_ns[self.rank, index].astype(np.int64).tolist()
        own = dict(zip(OWN_PARTS, parts_ns, strict=True))
        own["forward"] += int(timeline.queue_wait_ns[self.rank, index])
        own["backward"] += own["recompute"]
        reported = self._random.random() >= self._device.missing
        began_ns, arrived_ns = (
            self._begin_ns + int(each[self.rank, index])
            for each in (timeline.began_ns, timeline.arrived_ns)
        )
        self._end_device_step(began_ns)
        self._device_step = (began_ns, reported)
        with self._record_phase("data"):
            self._recorder.now_ns += own["data"]
        for part, (start_ns, end_ns) in zip(
            PHASES, timeline.phases_ns[self.rank, index].tolist(), strict=True
        ):
            with self._record_phase(part):
                self._recorder.now_ns += own[part]
            start_ns, end_ns = self._begin_ns + start_ns, self._begin_ns + end_ns
            if part == "backward" and "dp" in self._group_of:
                self._record_collective(
                    "dp", arrived_ns, end_ns - arrived_ns, Flag.COMPLETED | Flag.DEVICE
                )
                self._queue_span(Kind.WAIT, arrived_ns, end_ns - arrived_ns, reported=reported)
            self._queue_span(_PHASES[part][0], start_ns, end_ns - start_ns, reported=reported)
        self._end_step(timeline, index, self._recorder.now_ns + own["host"])
        self._report_device_times(self._recorder.step - self._device.late_steps - AHEAD)

    def _end_device_step(self, end_ns: int) -> None:
        """Record the device's step in progress, which ends where the next step begins."""
        if self._device_step is not None:
            begin_ns, reported = self._device_step
            self._queue_span(
                Kind.STEP,
                begin_ns,
                end_ns - begin_ns,
                reported=reported,
                step=self._recorder.step - 1,
            )

    def _queue_span(
        self,
        kind: Kind,
        start_ns: int,
        duration_ns: int,
        *,
        reported: bool,
        step: int | None = None,
    ) -> None:
        """Queue a span by the device's clock to be written later, or drop it if not `reported`."""
        behind_ns = max(0, start_ns + duration_ns - self._recorder.now_ns)
        if reported:
            step = self._recorder.step if step is None else step
            self._unreported.append((self._wait_id, step, start_ns, duration_ns, kind, behind_ns))

    def _report_device_times(self, before_step: int) -> None:
        while self._unreported and self._unreported[0][1] < before_step:
            self._recorder.record_device_span(*self._unreported.popleft())

    def _end_step(self, timeline: Timeline | LaunchBoundTimes, index: int, end_ns: int) -> None:
        # The remaining time of the step is host code.
        self._recorder.now_ns = end_ns
        workload = int(timeline.steps.workload[self.rank, index])
        flags = int(timeline.steps.flags[self.rank, index])
        self._recorder.end_step(flags, 0, 1 | (workload + 1) << WORKLOAD_SHIFT)

    @contextmanager
    def _record_phase(self, part: str) -> Iterator[None]:
        self._recorder.begin(*self._ids[part])
        yield
        self._recorder.end()

    def _record_modules(self, own_ns: int) -> None:
        for module in self._modules:
            self._recorder.begin(Kind.MODULE, module)
            self._recorder.now_ns += own_ns // len(self._modules)
            self._recorder.end()
        self._recorder.now_ns += own_ns % len(self._modules)

    def _record_wait(self, dimension: str, wait_ns: int) -> None:
        """Record a collective over a group, and the wait in it."""
        if dimension not in self._group_of:
            return
        start_ns = self._recorder.now_ns
        self._recorder.begin(Kind.WAIT, self._wait_id)
        self._recorder.now_ns += wait_ns
        self._recorder.end()
        self._record_collective(dimension, start_ns, wait_ns, Flag.COMPLETED)

    def _record_collective(
        self, dimension: str, start_ns: int, duration_ns: int, flags: Flag
    ) -> None:
        group, size = self._group_of[dimension], _BYTES[dimension]
        name_id = self._ring.intern(f"allreduce group={group} dtype=bfloat16")
        sequence = self._sequences[group] = self._sequences.get(group, -1) + 1
        self._recorder.record_collective(name_id, start_ns, duration_ns, flags, size, sequence)


def simulated_identity(run: RunDirectory, topology: Topology, rank: int) -> Identity:
    """Return the identity of a rank. Its process id is that of the current process."""
    return Identity(
        run_id=run.run_id, rank=rank, local_rank=rank % topology.node_size, world_size=topology.rank_count,
        local_world_size=min(topology.node_size, topology.rank_count), attempt=0, host=topology.host_name(rank),
        pid=os.getpid(), process_started=process_start_ticks(os.getpid()) or 0, launcher_pid=os.getppid(),
        elastic=False, program="simulation", traceparent="", attributes={}, node=topology.host_name(rank),
    )  # fmt: skip


def simulated_groups(topology: Topology, rank: int) -> dict[str, tuple[str, list[int], str]]:
    """Return dimension, members and description of the rank's process groups by name: one of all
    ranks, and one for each mesh dimension with several ranks."""
    groups = {_WORLD: ("world", list(range(topology.rank_count)), "default_pg")}
    for dimension in ("tp", "dp", "pp"):
        members = topology.group_ranks(dimension, rank)
        if len(members) > 1:
            name = f"{dimension}-{members[0]}"
            groups[name] = dimension, list(members), f"mesh_{dimension}"
    return groups
