"""Ring files of simulated ranks: what a recorder would have written of such steps, with a clock that is moved by hand.

Everything downstream is as in a real run: the same recorder, the same files, the ordinary sidecar. A rank's step is
data, forward, backward, the gradients' all-reduce, the optimizer with an all-reduce of the gradients' norm over all
ranks, and host code; tensor-parallel neighbours wait for each other at the end of forward and of backward.

On a device, the host issues a step's work in little time and waits for the device at the step's end, as for a loss;
what the device did is reported some steps later. Or the device waits for the host, which runs ahead (launch_bound.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.config import Config
from torchlens_perf.recorder.session import Session
from torchlens_perf.run.directory import create_ring
from torchlens_perf.run.identity import DeviceClock, Identity
from torchlens_perf.run.processes import process_started
from torchlens_perf.run.records import OWN_PARTS
from torchlens_perf.run.ring import WORKLOAD_SHIFT, Flag, Kind
from torchlens_perf.simulate.launch_bound import AHEAD, PHASES, HostsAhead

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.clock import Anchor
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.simulate.simulation import Steps, Topology

MAX_RANKS = 1024
OPEN_FILES = 2  # of each rank: its recorder's and the sidecar's
_WORLD = "0"
_LAYERS = 4  # of each pipeline stage
_BYTES = {"dp": 1 << 28, "tp": 1 << 25, "world": 4}  # gradients, activations, and their norm
_RING_RECORDS = 2048  # a block of steps has some 1,000 at most; with a device's late ones twice as many
_ISSUING = 0.05  # of a phase's time on the device: what issuing it takes the host
_CLOCK: DeviceClock = {"clock": "simulated events", "error_ns": 0, "captured": 0, "skipped": 0, "unread": 0}
_PHASES = {
    "data": (Kind.DATA, "data"),
    "forward": (Kind.FORWARD, "forward Transformer"),
    "recompute": (Kind.RECOMPUTE, "recompute"),
    "backward": (Kind.BACKWARD, "backward"),
    "optimizer": (Kind.OPTIMIZER, "optimizer AdamW"),
}


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


@dataclasses.dataclass(frozen=True)
class SimulatedDevice:
    """How the ranks' devices tell their times."""

    late_steps: int = 1
    """After how many steps a step's times are reported."""
    missing: float = 0.0
    """Share of the steps of which nothing is reported, as of captured ones."""
    launch_bound: bool = False
    """Whether the host needs longer to issue a step than the device to execute it."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A block's steps as integers, for all ranks. Times in ns."""

    steps: Steps
    duration_ns: npt.NDArray[np.int64]
    parts_ns: npt.NDArray[np.int64]
    tensor_wait_ns: npt.NDArray[np.int64]
    gradients_ns: npt.NDArray[np.int64]
    """Shape [ranks, steps]: waiting at the end of the backward pass, until the gradients have been reduced."""
    norm_ns: npt.NDArray[np.int64]
    """The rest of the step's waiting: until the slowest rank of all has come."""

    @classmethod
    def of(cls, steps: Steps) -> Timeline:
        """Divides each rank's waiting."""
        topology = steps.topology
        parts, tensor = steps.parts_ns.astype(np.int64), steps.tensor_wait_ns.astype(np.int64)
        duration = np.round(steps.duration_ns).astype(np.int64)
        left = np.maximum(duration - parts.sum(axis=2) - tensor.sum(axis=2), 0)
        before = [OWN_PARTS.index(part) for part in ("data", "forward", "recompute", "backward")]
        arrived = parts[:, :, before].sum(axis=2) + tensor.sum(axis=2)
        grid = (topology.pp, topology.dp, topology.tp, -1)
        reduced = (arrived.reshape(grid).max(axis=1) + steps.transfer_ns.reshape(grid).max(axis=1))[:, None]
        gradients = np.broadcast_to(reduced, (*grid[:3], len(steps))).reshape(arrived.shape).astype(np.int64) - arrived
        gradients = np.minimum(gradients, left) if topology.dp > 1 else np.zeros_like(left)  # by rounding, a nanosecond
        return cls(steps, duration, parts, tensor, gradients, left - gradients)


class SimulatedRank:
    """One rank: its ring file and its recorder. One thread; close() ends both."""

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
        """sidecar_host: the host whose sidecar reads it. begin: when its first step begins, by its host's clock.

        device: that its work is on; None: it computes on the CPU. total_steps: that it says it will make.
        """
        self.rank = rank
        self._device = device
        self._unreported: deque[tuple[int, ...]] = deque()  # DEVICE records of steps that are reported later
        self._random = np.random.default_rng(rank)
        self._begin_ns = begin.monotonic_ns
        self._device_step: tuple[int, bool] | None = None  # when the one in progress began, and whether it is reported
        self.clock = HandClock(begin.monotonic_ns)
        self.identity = identity_of(run, topology, rank)
        config = Config(
            ring_records=_RING_RECORDS << (device is not None), telemetry=False, capture="off", _build_tap=False,
            exchange="off", report="off", _total_steps=total_steps,
        )  # fmt: skip
        # In the run directory: a simulation that is interrupted leaves nothing in shared memory.
        ring = create_ring(run, self.identity, config.ring_capacity, keep=True)
        self._session = Session(config, self.identity, ring, self.clock, begin)
        self._recorder, self._intern = self._session.recorder, self._session.intern
        self._ids = {part: (kind, self._intern(name)) for part, (kind, name) in _PHASES.items()}
        self._wait_id = self._intern("wait")
        stage = topology.coordinates(rank)["pp"]
        modules = [f"layers.{stage * _LAYERS + i}" for i in range(_LAYERS)]
        if stage == 0:
            modules.insert(0, "embedding")
        if stage == topology.pp - 1:
            modules.append("head")
        self._modules = [self._intern(name) for name in modules]
        self._sequences: dict[str, int] = {}
        groups = groups_of(topology, rank)
        self._group_of = {group.dimension: name for name, group in groups.items()}
        for name, group in groups.items():
            self._session.metadata.add_group(name, group.members, group.description)
        self._session.metadata.add_modules(
            dict.fromkeys(modules, False), device="cpu" if device is None else "cuda", all_levels=True, unopened=[]
        )
        if device is not None:
            self._session.publish(device=_CLOCK)
        self._session.note(note)
        run.register_ring(sidecar_host, ring.path)

    def record(self, timeline: Timeline | HostsAhead) -> None:
        """Writes a block of steps. The sidecar has read what was written before, or it is lost."""
        for index in range(len(timeline.steps)):
            if isinstance(timeline, HostsAhead):
                self._step_ahead(timeline, index)
            elif self._device is None:
                self._step(timeline, index)
            else:
                self._step_on_device(timeline, index)

    def close(self) -> None:
        self._end_device_step(self.clock.now_ns)
        self._report_device_times(self._recorder.step)
        self._session.close({})

    def _step(self, timeline: Timeline, index: int) -> None:
        end_ns = self.clock.now_ns + int(timeline.duration_ns[index])
        own = dict(zip(OWN_PARTS, timeline.parts_ns[self.rank, index].tolist(), strict=True))
        in_forward_ns, in_backward_ns = timeline.tensor_wait_ns[self.rank, index].tolist()
        with self._phase("data"):
            self.clock.now_ns += own["data"]
        with self._phase("forward"):
            self._modules_take(own["forward"])
            self._wait("tp", in_forward_ns)
        if own["recompute"]:
            with self._phase("recompute"):
                self.clock.now_ns += own["recompute"]
        with self._phase("backward"):
            self.clock.now_ns += own["backward"]
            self._wait("tp", in_backward_ns)
            self._wait("dp", int(timeline.gradients_ns[self.rank, index]))
        with self._phase("optimizer"):
            self._wait("world", int(timeline.norm_ns[self.rank, index]))
            self.clock.now_ns += own["optimizer"]
        self._end_step(timeline, index, end_ns)

    def _step_on_device(self, timeline: Timeline, index: int) -> None:
        begin_ns, end_ns = self.clock.now_ns, self.clock.now_ns + int(timeline.duration_ns[index])
        own = dict(zip(OWN_PARTS, timeline.parts_ns[self.rank, index].tolist(), strict=True))
        in_forward_ns, in_backward_ns = timeline.tensor_wait_ns[self.rank, index].tolist()
        gradients_ns, norm_ns = (int(each[self.rank, index]) for each in (timeline.gradients_ns, timeline.norm_ns))
        # By phase, in the device's order: work, what the stream waits for, and then work again.
        phases = {
            "forward": [(Kind.FORWARD, own["forward"]), ("tp", in_forward_ns)],
            "backward": [
                (Kind.RECOMPUTE, own["recompute"]), (Kind.BACKWARD, own["backward"]), ("tp", in_backward_ns),
                ("dp", gradients_ns),
            ],
            "optimizer": [("world", norm_ns), (Kind.OPTIMIZER, own["optimizer"])],
        }  # fmt: skip
        reported = self._device is not None and self._random.random() >= self._device.missing
        with self._phase("data"):
            self.clock.now_ns += own["data"]
        at_ns = self.clock.now_ns  # the device had no work until here
        for part, pieces in phases.items():
            phase_ns = at_ns
            with self._phase(part):
                self.clock.now_ns += round(_ISSUING * sum(duration_ns for _, duration_ns in pieces))
            for what, duration_ns in pieces:
                if isinstance(what, Kind):
                    if what == Kind.RECOMPUTE and duration_ns:
                        self._on_device(Kind.RECOMPUTE, at_ns, duration_ns, reported=reported)
                elif what in self._group_of:
                    self._collective(what, at_ns, duration_ns, Flag.COMPLETED | Flag.DEVICE)
                    self._on_device(Kind.WAIT, at_ns, duration_ns, reported=reported)
                at_ns += duration_ns
            self._on_device(_PHASES[part][0], phase_ns, at_ns - phase_ns, reported=reported)
        self._on_device(Kind.STEP, begin_ns, end_ns - begin_ns, reported=reported)
        step = self._recorder.step
        self._end_step(timeline, index, end_ns)
        self._report_device_times(step - (self._device.late_steps if self._device else 0))

    def _step_ahead(self, timeline: HostsAhead, index: int) -> None:
        assert self._device is not None
        own = dict(zip(OWN_PARTS, timeline.steps.parts_ns[self.rank, index].astype(np.int64).tolist(), strict=True))
        own["forward"] += int(timeline.full_ns[self.rank, index])
        own["backward"] += own["recompute"]
        reported = self._random.random() >= self._device.missing
        began_ns, arrived_ns = (
            self._begin_ns + int(each[self.rank, index]) for each in (timeline.began_ns, timeline.arrived_ns)
        )
        self._end_device_step(began_ns)
        self._device_step = (began_ns, reported)
        with self._phase("data"):
            self.clock.now_ns += own["data"]
        for part, (start_ns, end_ns) in zip(PHASES, timeline.phases_ns[self.rank, index].tolist(), strict=True):
            with self._phase(part):
                self.clock.now_ns += own[part]
            start_ns, end_ns = self._begin_ns + start_ns, self._begin_ns + end_ns
            if part == "backward" and "dp" in self._group_of:
                self._collective("dp", arrived_ns, end_ns - arrived_ns, Flag.COMPLETED | Flag.DEVICE)
                self._on_device(Kind.WAIT, arrived_ns, end_ns - arrived_ns, reported=reported)
            self._on_device(_PHASES[part][0], start_ns, end_ns - start_ns, reported=reported)
        step = self._recorder.step
        self._end_step(timeline, index, self.clock.now_ns + own["host"])
        self._report_device_times(step - self._device.late_steps - AHEAD)

    def _end_device_step(self, end_ns: int) -> None:
        """Of a device that is behind, a step ends where the next one begins."""
        if self._device_step is not None:
            begin_ns, reported = self._device_step
            self._on_device(Kind.STEP, begin_ns, end_ns - begin_ns, reported=reported, step=self._recorder.step - 1)

    def _on_device(
        self, kind: Kind, start_ns: int, duration_ns: int, *, reported: bool, step: int | None = None
    ) -> None:
        """A span by the device's clock, which is reported later, or never."""
        behind_ns = max(0, start_ns + duration_ns - self.clock.now_ns)
        if reported:
            step = self._recorder.step if step is None else step
            row = (int(Kind.DEVICE), self._wait_id, step, start_ns, duration_ns, 0, int(kind), behind_ns)
            self._unreported.append(row)

    def _report_device_times(self, until_step: int) -> None:
        while self._unreported and self._unreported[0][2] <= until_step:
            self._recorder.record_completed(*self._unreported.popleft())

    def _end_step(self, timeline: Timeline | HostsAhead, index: int, end_ns: int) -> None:
        self.clock.now_ns = end_ns  # the rest is the host's
        workload, flags = int(timeline.steps.workload[self.rank, index]), int(timeline.steps.flags[self.rank, index])
        self._recorder.next_step(flags, 0, 1 | (workload + 1) << WORKLOAD_SHIFT)

    @contextmanager
    def _phase(self, part: str) -> Iterator[None]:
        self._recorder.begin(*self._ids[part])
        yield
        self._recorder.end(*self._ids[part])

    def _modules_take(self, own_ns: int) -> None:
        for module in self._modules:
            self._recorder.begin(Kind.MODULE, module)
            self.clock.now_ns += own_ns // len(self._modules)
            self._recorder.end(Kind.MODULE, module)
        self.clock.now_ns += own_ns % len(self._modules)

    def _wait(self, dimension: str, wait_ns: int) -> None:
        """A collective over a group, and the waiting for it."""
        if dimension not in self._group_of:
            return
        start_ns = self.clock.now_ns
        self._recorder.begin(Kind.WAIT, self._wait_id)
        self.clock.now_ns += wait_ns
        self._recorder.end(Kind.WAIT, self._wait_id)
        self._collective(dimension, start_ns, wait_ns, Flag.COMPLETED)

    def _collective(self, dimension: str, start_ns: int, duration_ns: int, flags: Flag) -> None:
        group, size = self._group_of[dimension], _BYTES[dimension]
        name_id = self._intern(f"allreduce group={group} dtype=bfloat16")
        sequence = self._sequences[group] = self._sequences.get(group, -1) + 1
        self._recorder.record_span(Kind.COLLECTIVE, name_id, start_ns, duration_ns, int(flags), size, sequence)


def identity_of(run: RunDirectory, topology: Topology, rank: int) -> Identity:
    """A rank of the job; its process is this one."""
    return Identity(
        run_id=run.run_id, rank=rank, local_rank=rank % topology.node_size, world_size=topology.ranks,
        local_world_size=min(topology.node_size, topology.ranks), attempt=0, host=topology.host(rank), pid=os.getpid(),
        process_started=process_started(os.getpid()) or 0, launcher_pid=os.getppid(), elastic=False,
        program="simulation", traceparent="", attributes={}, node=topology.host(rank),
    )  # fmt: skip


class _Group(NamedTuple):
    dimension: str
    members: list[int]
    description: str


def groups_of(topology: Topology, rank: int) -> dict[str, _Group]:
    """The process groups that the rank uses, by name: those of the mesh's dimensions, and that of all ranks."""
    groups = {_WORLD: _Group("world", list(range(topology.ranks)), "default_pg")}
    for dimension in ("tp", "dp", "pp"):
        members = topology.group(dimension, rank)
        if len(members) > 1:
            name = f"{dimension}-{members[0]}"
            groups[name] = _Group(dimension, list(members), f"mesh_{dimension}")
    return groups
