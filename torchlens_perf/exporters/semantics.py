"""Every name that leaves the sidecar, once. docs/opentelemetry.md describes them.

OpenTelemetry has no conventions for training; where it has a name we use it (service, host, process, k8s), and units
follow UCUM: seconds, bytes.
"""

from __future__ import annotations

SCOPE = "torchlens_perf"

# Spans. One trace per step; its root covers rank 0's step, below it lies one span per rank. Its name ends in the rank:
# pages of backends show names, and a job has no more of these than ranks. Queries go by its SPAN_KIND, STEP_KIND.
SPAN_STEP = "train step"
SPAN_INFERENCE_STEP = "inference step"
SPAN_RANK = "rank"
STEP_KIND = "step"

# Attributes of every span. Some backends drop resource attributes, so the rank is here too, and on metric points.
RUN_ID = "torch.run.id"
STEP = "torch.train.step"
RANK = "torch.distributed.rank"
# Attributes of a rank's step. Steps last equally long on all ranks that wait for each other; own time tells them apart.
OWN_SECONDS = "torch.train.step.own_time"
MICRO_STEPS = "torch.train.micro_steps"
# Attributes of all spans but the root; size and sequence are a collective's.
SPAN_KIND = "torchlens_perf.kind"
ON_DEVICE = "torchlens_perf.device"
BYTES = "torch.collective.size"
SEQUENCE = "torch.collective.sequence"
# Attributes of a step's root, and of ranks' steps in it: why they are sent, and what is not.
SAMPLED_BECAUSE = "torchlens_perf.sampled_because"
RANKS_SENT = "torchlens_perf.ranks.sent"
RANKS_LEFT_OUT = "torchlens_perf.ranks.left_out"
STEPS_LEFT_OUT = "torchlens_perf.steps.left_out"
SPANS_LEFT_OUT = "torchlens_perf.spans.left_out"
RANK_BECAUSE = "torchlens_perf.rank.sent_because"

# Attributes of an alert, besides RUN_ID, RANK, PHASE, RESTART_COUNT, STRAGGLER_COST and HANG_DURATION.
ALERT_UID = "log.record.uid"
ALERT_ABOUT = "torch.train.alert.id"
RANKS = "torch.distributed.ranks"
SUSPECT_HOST = "torch.train.alert.host"
SINCE_STEP = "torch.train.since_step"
UNTIL_STEP = "torch.train.until_step"
COST_SHARE = "torch.train.straggler.cost_share"
STRAGGLER_CLASS = "torch.train.straggler.class"
STRAGGLER_CAUSES = "torch.train.straggler.causes"
STRAGGLER_SCOPE = "torch.train.straggler.scope"
HANG_KIND = "torch.train.hang.kind"

# Resource attributes of a rank, besides service.*, host.name, process.pid and the scheduler's (run/identity.py).
LOCAL_RANK = "torch.distributed.local_rank"
WORLD_SIZE = "torch.distributed.world_size"
RESTART_COUNT = "torch.elastic.restart_count"

# Metrics, and the attribute that tells a phase's points apart.
STEP_DURATION = "torch.train.step.duration"
STEP_OWN_TIME = "torch.train.step.own_time"
PHASE_DURATION = "torch.train.phase.duration"
DEVICE_DURATION = "torch.train.device.duration"
STEPS = "torch.train.steps"
MEMORY = "torch.train.memory.usage"
DEVICE_MEMORY = "torch.train.memory.device"
ALLOC_RETRIES = "torch.train.memory.alloc_retries"
OUT_OF_MEMORY = "torch.train.memory.out_of_memory"
MEMORY_STATE = "torch.train.memory.state"
PHASE = "torch.train.phase"
STEPS_NOT_TRACED = "torchlens_perf.traces.left_out"
# How the ranks of a job differ now.
RANKS_WORK = "torch.train.ranks.work"
RANKS_WAIT = "torch.train.ranks.wait"
OVER_RANKS = "torch.train.ranks.quantile"
# Gauges of what is wrong now.
STRAGGLER_COST = "torch.train.straggler.cost"
STRAGGLERS = "torch.train.stragglers"
DETECTABLE = "torch.train.straggler.detectable"
HANG_DURATION = "torch.train.hang.duration"

# Of a node, by what its sidecar has counted; see node_figures.py.
RANKS_RUNNING = "torch.train.ranks"
LAST_STEP = "torch.train.step.last"
OWN_TIME_SLOWEST = "torch.train.step.own_time.slowest"
OWN_TIME_FASTEST = "torch.train.step.own_time.fastest"
PROCESSES_ENDED = "torch.train.processes.ended"
PROCESS_END = "torch.train.process.end"
PROCESSES_OUT_OF_MEMORY = "torch.train.processes.out_of_memory"
RECORDS_LOST = "torchlens_perf.records.lost"
COLLECTIVES = "torch.collective.operations"
COLLECTIVE_IO = "torch.collective.io"
COLLECTIVE_COMPARED = "torch.collective.compared"
COLLECTIVE_ARRIVED_LAST = "torch.collective.arrived_last"
COLLECTIVE_LAG = "torch.collective.lag"
COLLECTIVE_WAIT = "torch.collective.wait"
COLLECTIVE_OPERATION = "torch.collective.operation"
# Who is alerted about now, and its attributes besides those of an alert.
OPEN_ALERT = "torch.train.alert"
ALERT_KIND = "torch.train.alert.kind"

# The node's hardware, by OpenTelemetry's conventions; below them what these have no name for.
GPU_BUSY = "hw.gpu.utilization"
GPU_MEMORY = "hw.gpu.memory.usage"
GPU_MEMORY_LIMIT = "hw.gpu.memory.limit"
GPU_IO = "hw.gpu.io"
POWER = "hw.power"
ENERGY = "hw.energy"
TEMPERATURE = "hw.temperature"
ERRORS = "hw.errors"
NETWORK_IO = "hw.network.io"
NETWORK_PACKETS = "hw.network.packets"
NETWORK_UP = "hw.network.up"
NETWORK_LIMIT = "hw.network.bandwidth.limit"
GPU_CLOCK = "hw.gpu.clock.frequency"
GPU_CLOCK_LIMIT = "hw.gpu.clock.limit"
GPU_THROTTLED = "hw.gpu.throttle.duration"
GPU_SM_ACTIVE = "hw.gpu.sm.utilization"
GPU_SM_OCCUPANCY = "hw.gpu.sm.occupancy"
GPU_TENSOR_ACTIVE = "hw.gpu.tensor.utilization"
GPU_DRAM_ACTIVE = "hw.gpu.dram.utilization"
POWER_LIMIT = "hw.power.limit"
# Attributes of their points.
HARDWARE_ID = "hw.id"
HARDWARE_NAME = "hw.name"
HARDWARE_TYPE = "hw.type"
SENSOR = "hw.sensor_location"
GPU_TASK = "hw.gpu.task"
ERROR_TYPE = "error.type"
DIRECTION = "network.io.direction"
GPU_LINK = "hw.gpu.link"
GPU_CLOCK_OF = "hw.gpu.clock"
THROTTLE_REASON = "hw.gpu.throttle.reason"

# Seconds: from launch-bound steps of 0.1 ms to a minute; OpenTelemetry's default bounds (0 to 10000) are for ms.
DURATION_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0,
)  # fmt: skip
# Of a point that stands for several components of a node, for want of room: how they were put together.
OVER_COMPONENTS = "torchlens_perf.over"


def event_name(kind: str, change: str) -> str:
    """An alert is an event: a log record with a name, as "torch.train.straggler.started"."""
    return f"torch.train.{kind}.{change}"
