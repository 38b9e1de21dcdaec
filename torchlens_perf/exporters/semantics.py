"""Names of all exported metrics, spans, attributes and events.

scripts/write_semantics.py generates docs/reference/telemetry.md from this module, and describes the
spans, attributes and events.

Names of OpenTelemetry are used where they exist (service, host, process, k8s, hw). OpenTelemetry
has no conventions for training. Units follow UCUM: seconds, bytes. Ranks are also sent under NeMo
Lens's names.
"""

from __future__ import annotations

from typing import NamedTuple

# Attributes of the resource that spans, points and events have too. Ranks and world size also have
# NeMo Lens's names, by which its backends group jobs.
from torchlens_perf.run.identity import LENS_LOCAL_RANK as LENS_LOCAL_RANK
from torchlens_perf.run.identity import LENS_RANK as LENS_RANK
from torchlens_perf.run.identity import LENS_WORLD_SIZE as LENS_WORLD_SIZE
from torchlens_perf.run.identity import LOCAL_RANK as LOCAL_RANK
from torchlens_perf.run.identity import RANK as RANK
from torchlens_perf.run.identity import RESTART_COUNT as RESTART_COUNT
from torchlens_perf.run.identity import RUN_ID as RUN_ID
from torchlens_perf.run.identity import WORLD_SIZE as WORLD_SIZE

SCOPE = "torchlens_perf"

# Spans. Each step has one trace. The trace's root covers rank 0's step and has one child per rank.
# The child's name ends in the rank, because user interfaces of backends show names. Queries should
# use the attribute SPAN_KIND = STEP_KIND instead of the name.
SPAN_STEP = "train step"
SPAN_INFERENCE_STEP = "inference step"
SPAN_RANK = "rank"
STEP_KIND = "step"
# The span of the whole run, a child of the span that started the job. RUN_STEPS is its attribute
# for the number of steps of rank 0.
SPAN_RUN = "training run"
RUN_STEPS = "torch.train.run.steps"
# Attributes of its event "exception" if the run failed, by OpenTelemetry's conventions for exceptions.
EXCEPTION_TYPE = "exception.type"
EXCEPTION_MESSAGE = "exception.message"

# Attributes of all spans. Spans and metric points also have the rank, because some backends drop
# resource attributes.
STEP = "torch.train.step"
# Attributes of a rank's step. Ranks that wait for each other have equal step times, so only their
# own times show which rank is slow.
OWN_SECONDS = "torch.train.step.own_time"
MICRO_STEPS = "torch.train.micro_steps"
MODULES_TIMED = "torchlens_perf.modules.timed"
# Attributes of all spans except the root. Only collectives have a size and a sequence number.
SPAN_KIND = "torchlens_perf.kind"
ON_DEVICE = "torchlens_perf.device"
BYTES = "torch.collective.size"
SEQUENCE = "torch.collective.sequence"
# Attributes of the root and of the ranks' steps that say why a step or rank is sent, and which
# ranks, steps or spans are left out.
SAMPLED_BECAUSE = "torchlens_perf.sampled_because"
STEPS_LEFT_OUT = "torchlens_perf.steps.left_out"

# Attributes of an alert, in addition to RUN_ID, RANK, PHASE, RESTART_COUNT, STRAGGLER_COST and
# HANG_DURATION.
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

# Metrics of steps, and their attributes.
STEP_DURATION = "torch.train.step.duration"
STEP_OWN_TIME = "torch.train.step.own_time"
PHASE_DURATION = "torch.train.phase.duration"
DEVICE_DURATION = "torch.train.device.duration"
STEPS = "torch.train.steps"
TOKENS = "torch.train.tokens"
MODEL_FLOPS = "torch.train.model_flops"
MFU = "torch.train.mfu"
MEMORY = "torch.train.memory.usage"
DEVICE_MEMORY = "torch.train.memory.device"
ALLOC_RETRIES = "torch.train.memory.alloc_retries"
OUT_OF_MEMORY = "torch.train.memory.out_of_memory"
MEMORY_STATE = "torch.train.memory.state"
PHASE = "torch.train.phase"
STEPS_NOT_TRACED = "torchlens_perf.traces.left_out"
# Quantiles over the ranks of a job.
RANKS_WORK = "torch.train.ranks.work"
RANKS_WAIT = "torch.train.ranks.wait"
OVER_RANKS = "torch.train.ranks.quantile"
# Gauges of current problems.
STRAGGLER_COST = "torch.train.straggler.cost"
STRAGGLERS = "torch.train.stragglers"
DETECTABLE = "torch.train.straggler.detectable"
HANG_DURATION = "torch.train.hang.duration"
# Time of the job since its start, by class of goodput.
GOODPUT = "torch.train.goodput.time"
GOODPUT_CLASS = "torch.train.goodput.class"
# Critical path of a mean step over all ranks, by class.
CRITICAL_PATH = "torch.train.critical_path.time"
CRITICAL_PATH_CLASS = "torch.train.critical_path.class"

# Attributes of the hardware metrics.
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

# Histogram bounds from launch-bound steps of 0.1 ms to a minute. OpenTelemetry's default bounds (0
# to 10000) are meant for milliseconds.
DURATION_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0,
)  # fmt: skip
# Attribute, with the value "sum" or "max", of points that combine several components of a node to
# limit the number of series.
OVER_COMPONENTS = "torchlens_perf.over"


def name_of_alert_event(kind: str, change: str) -> str:
    """Return the name of an alert's event, such as "torch.train.straggler.started"."""
    return f"torch.train.{kind}.{change}"


OPENTELEMETRY, NEMO_LENS, OURS = "OpenTelemetry", "NeMo Lens", "ours"


class Metric(NamedTuple):
    """Description of an exported metric."""

    name: str
    instrument: str
    unit: str
    attributes: tuple[str, ...]
    meaning: str
    source: str = OURS
    when: str = ""
    """Condition under which the metric is sent; "" if it is always sent."""
    fields: tuple[tuple[str, ...], ...] = ()
    """For metrics of hardware: each quantity of a sample (run/hardware_samples.py) that is a
    point, and the values of the point's last attributes."""
    is_mean: bool = False
    """True for fast-changing gauges of hardware, which are sent as means since the last export."""
    scale: float = 1
    """Factor from the fields' unit to the metric's unit."""


_EACH_RANK = (RANK,)
_LARGE = "a large job"
_COUNTED = "counted operators"
_ROWS = "8 judged rows"
_DEVICE, _GPU, _PORT = "a device", "GPU", "port"
_OF_GPU = (HARDWARE_ID, HARDWARE_NAME, HARDWARE_TYPE)
_OF_PART = (HARDWARE_ID, HARDWARE_TYPE)

METRICS = (
    Metric(STEP_DURATION, "histogram", "s", _EACH_RANK, "time from one step's end to the next"),
    Metric(STEP_OWN_TIME, "histogram", "s", _EACH_RANK, "step duration without comm wait and this tool"),
    Metric(PHASE_DURATION, "histogram", "s", (RANK, PHASE), "time of a phase in one step, without nested phases"),
    Metric(DEVICE_DURATION, "histogram", "s", (RANK, PHASE), "device time of a phase, or of a whole `step`",
        when=_DEVICE),
    Metric(STEPS, "counter", "{step}", _EACH_RANK, "steps finished"),
    Metric(TOKENS, "counter", "{token}", _EACH_RANK, "tokens in batches, or given to `w.step()`", when="tokens"),
    Metric(MODEL_FLOPS, "counter", "{FLOP}", _EACH_RANK, "operations of forward and backward pass, from counted steps",
        when=_COUNTED),
    Metric(MFU, "gauge", "1", _EACH_RANK, "share of the device's dense peak that model operations reach",
        when=f"{_COUNTED}, a listed device"),
    Metric(MEMORY, "gauge", "By", _EACH_RANK, "memory at the last step's end: on a device the peak allocation, else"
        " resident memory"),
    Metric(DEVICE_MEMORY, "gauge", "By", (RANK, MEMORY_STATE), "memory that torch's allocator reports", when=_DEVICE),
    Metric(ALLOC_RETRIES, "counter", "{retry}", _EACH_RANK, "allocations that first had to free cached memory",
        when=_DEVICE),
    Metric(OUT_OF_MEMORY, "counter", "{error}", _EACH_RANK, "out-of-memory errors", when=_DEVICE),
    Metric(STRAGGLER_COST, "gauge", "s", (RANK, PHASE), "time by which a step would be shorter"
        " without all ranks that are slow together",
        when="a slow rank"),
    Metric(STRAGGLERS, "gauge", "{rank}", (STRAGGLER_CLASS,), "ranks that are slow now", when="ranks compared"),
    Metric(DETECTABLE, "gauge", "s", (), "smallest slowdown per step that would be reported by now",
        when="ranks compared"),
    Metric(RANKS_WORK, "gauge", "s", (OVER_RANKS,), "work of a step: quantiles over ranks", when=_LARGE),
    Metric(RANKS_WAIT, "gauge", "s", (OVER_RANKS,), "comm wait of a step: quantiles over ranks", when=_LARGE),
    Metric(STEPS_NOT_TRACED, "counter", "{step}", (), "steps selected for a trace, but left out to keep the budget",
        when="an exceeded budget"),
    Metric(HANG_DURATION, "gauge", "s", (HANG_KIND,), "time since the last step", when="a hang"),
    Metric(GOODPUT, "gauge", "s", (GOODPUT_CLASS,), "time of the job by class, as a mean over the ranks of node 0"),
    Metric(CRITICAL_PATH, "gauge", "s", (CRITICAL_PATH_CLASS,), "critical path of a mean step by class",
        when=_ROWS),
    # Hardware: names of OpenTelemetry's conventions, and our names for metrics that these lack.
    Metric("hw.gpu.utilization", "gauge", "1", (*_OF_GPU, GPU_TASK), "share of time with a running kernel",
        OPENTELEMETRY, _GPU, (("busy", "general"),), is_mean=True),
    Metric("hw.gpu.memory.usage", "up-down counter", "By", _OF_GPU, "memory in use by all processes", OPENTELEMETRY,
        _GPU, (("memory_used_bytes",),)),
    Metric("hw.gpu.memory.limit", "up-down counter", "By", _OF_GPU, "total memory", OPENTELEMETRY, _GPU,
        (("memory_total_bytes",),)),
    Metric("hw.gpu.io", "counter", "By", (*_OF_GPU, DIRECTION, GPU_LINK), "bytes over PCIe or NVLink", OPENTELEMETRY,
        _GPU, (
            ("pcie_transmitted_bytes", "transmit", "pcie"), ("pcie_received_bytes", "receive", "pcie"),
            ("nvlink_transmitted_bytes", "transmit", "nvlink"), ("nvlink_received_bytes", "receive", "nvlink"),
        )),
    Metric("hw.power", "gauge", "W", _OF_GPU, "power draw", OPENTELEMETRY, _GPU, (("power_w",),), is_mean=True),
    Metric("hw.power.limit", "gauge", "W", _OF_GPU, "enforced power limit", when=_GPU, fields=(("power_limit_w",),)),
    Metric("hw.energy", "counter", "J", _OF_GPU, "energy", OPENTELEMETRY, _GPU, (("energy_j",),)),
    Metric("hw.temperature", "gauge", "Cel", (*_OF_GPU, SENSOR), "temperature", OPENTELEMETRY, _GPU,
        (("temperature_c", "gpu"), ("memory_temperature_c", "memory"))),
    Metric("hw.errors", "counter", "{error}", (*_OF_GPU, ERROR_TYPE), "errors by type", OPENTELEMETRY,
        f"{_GPU}, or {_PORT}", (
            ("xids", "xid"), ("ecc_corrected", "ecc_corrected"), ("ecc_uncorrected", "ecc_uncorrected"),
            ("remapped_rows", "remapped_row"), ("pcie_replays", "pcie_replay"), ("nvlink_replays", "nvlink_replay"),
            ("nvlink_recoveries", "nvlink_recovery"), ("nvlink_errors", "nvlink_error"),
            ("symbol_errors", "symbol_error"), ("link_recoveries", "link_recovery"), ("link_downs", "link_down"),
            ("receive_errors", "receive_error"), ("transmit_discards", "transmit_discard"),
            ("integrity_errors", "link_integrity"), ("out_of_sequence", "out_of_sequence"),
            ("sequence_errors", "packet_sequence"), ("ack_timeouts", "ack_timeout"),
            ("rnr_retries", "receiver_not_ready"), ("retries_exceeded", "retries_exceeded"),
        )),
    Metric("hw.gpu.clock.frequency", "gauge", "Hz", (*_OF_GPU, GPU_CLOCK_OF), "clock frequency", when=_GPU,
        fields=(("sm_clock_hz", "sm"), ("memory_clock_hz", "memory")), is_mean=True),
    Metric("hw.gpu.clock.limit", "gauge", "Hz", (*_OF_GPU, GPU_CLOCK_OF), "highest clock", when=_GPU,
        fields=(("sm_clock_max_hz", "sm"),)),
    Metric("hw.gpu.throttle.duration", "counter", "s", (*_OF_GPU, THROTTLE_REASON),
        "time with reduced clocks; reasons may overlap", when=_GPU, scale=1e-9, fields=tuple(
            (f"throttle_{reason}_ns", reason)
            for reason in ("power", "thermal", "sync_boost", "board_limit", "reliability", "sw_thermal", "hw_thermal",
                "hw_power_brake")
        )),
    Metric("hw.gpu.sm.utilization", "gauge", "1", _OF_GPU, "share of SM time with work", when=_GPU,
        fields=(("sm_active",),), is_mean=True),
    Metric("hw.gpu.sm.occupancy", "gauge", "1", _OF_GPU, "resident warps as a share of the maximum", when=_GPU,
        fields=(("sm_occupancy",),), is_mean=True),
    Metric("hw.gpu.tensor.utilization", "gauge", "1", _OF_GPU, "share of time with tensor core work", when=_GPU,
        fields=(("tensor_active",),), is_mean=True),
    Metric("hw.gpu.dram.utilization", "gauge", "1", _OF_GPU, "share of memory bandwidth in use", when=_GPU,
        fields=(("dram_active",),), is_mean=True),
    Metric("hw.network.io", "counter", "By", (*_OF_PART, DIRECTION), "bytes sent and received", OPENTELEMETRY, _PORT,
        (("transmitted_bytes", "transmit"), ("received_bytes", "receive"))),
    Metric("hw.network.packets", "counter", "{packet}", (*_OF_PART, DIRECTION), "packets", OPENTELEMETRY, _PORT,
        (("transmitted_packets", "transmit"), ("received_packets", "receive"))),
    Metric("hw.network.up", "up-down counter", "1", _OF_PART, "1 if the port is up, else 0", OPENTELEMETRY, _PORT,
        (("active",),)),
    Metric("hw.network.bandwidth.limit", "up-down counter", "By/s", _OF_PART, "link bandwidth", OPENTELEMETRY, _PORT,
        (("rate_bits",),), scale=1 / 8),
)  # fmt: skip
