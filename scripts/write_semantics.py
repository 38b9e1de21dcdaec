"""Write docs/reference/telemetry.md from exporters/semantics.py and py.

    usage: python scripts/write_semantics.py

tests/exporters/test_semantics.py compares the page with what the exporters send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torchlens_perf.exporters import NodeRole, semantics
from torchlens_perf.exporters.semantics import (
    ALERT_ABOUT,
    ALERT_UID,
    BYTES,
    COST_SHARE,
    CRITICAL_PATH_CLASS,
    DIRECTION,
    ERROR_TYPE,
    EXCEPTION_MESSAGE,
    EXCEPTION_TYPE,
    GOODPUT_CLASS,
    GPU_CLOCK_OF,
    GPU_LINK,
    GPU_TASK,
    HANG_DURATION,
    HANG_KIND,
    HARDWARE_ID,
    HARDWARE_NAME,
    HARDWARE_TYPE,
    LENS_LOCAL_RANK,
    LENS_RANK,
    LENS_WORLD_SIZE,
    LOCAL_RANK,
    MEMORY_STATE,
    MICRO_STEPS,
    MODULES_TIMED,
    NEMO_LENS,
    ON_DEVICE,
    OPENTELEMETRY,
    OURS,
    OVER_COMPONENTS,
    OVER_RANKS,
    OWN_SECONDS,
    PHASE,
    RANK,
    RANKS,
    RESTART_COUNT,
    RUN_ID,
    RUN_STEPS,
    SAMPLED_BECAUSE,
    SENSOR,
    SEQUENCE,
    SINCE_STEP,
    SPAN_INFERENCE_STEP,
    SPAN_KIND,
    SPAN_RUN,
    SPAN_STEP,
    STEP,
    STEPS_LEFT_OUT,
    STRAGGLER_CAUSES,
    STRAGGLER_CLASS,
    STRAGGLER_COST,
    STRAGGLER_SCOPE,
    SUSPECT_HOST,
    THROTTLE_REASON,
    UNTIL_STEP,
    WORLD_SIZE,
)
from torchlens_perf.exporters.series_room import max_ranks_with_own_series
from torchlens_perf.roles.traces import BATCH, OUTPUT_TOKENS, PROCESS, SPAN_ITERATION
from torchlens_perf.verdicts.kinds import KINDS

PAGE = Path(__file__).parents[1] / "docs/reference/telemetry.md"

HEAD = """# Metrics, spans and events

This page lists every name that is sent over OTLP. `scripts/write_semantics.py` generates it from
`torchlens_perf/exporters/semantics.py`. How to send a run: [opentelemetry.md](../guides/opentelemetry.md). Names that
exist only on `/metrics`: [prometheus.md](../guides/prometheus.md#metrics).

- Names that begin with `torch` are defined by this package. `nv.dl.*` and `slurm.job.*` are names of NeMo Lens. All
  others are OpenTelemetry's semantic conventions, except those with \\*.
- **Condition**: what a run must have for the name to be sent. Event attributes come with the events that have them.
- **Large job**: a job of more than {most_ranks} ranks with the default `export_limit`.
"""


_LARGE = "a large job"
_ROWS = "8 judged rows"
_DEVICE, _GPU, _PORT = "a device", "GPU", "port"


class Attribute(NamedTuple):
    """Description of an attribute of spans, points, events or the resource."""

    name: str
    kind: str
    on: str
    meaning: str
    source: str = OURS
    when: str = ""


class SpanName(NamedTuple):
    """Description of a span with a fixed name. Spans in a rank's step are named by their work."""

    name: str
    parent: str
    meaning: str
    when: str = ""


SPANS = (
    SpanName(
        SPAN_RUN,
        "the caller's span",
        "one attempt of the run, on rank 0",
        "a sampled caller",
    ),
    SpanName(SPAN_STEP, "", "root of a training step's trace; as long as rank 0's step"),
    SpanName(SPAN_INFERENCE_STEP, "", "root if the step is a forward pass", "inference"),
    SpanName(
        SPAN_ITERATION,
        "",
        "root of an iteration's trace, linked to its steps; children are the parts of its critical path",
        "roles",
    ),
)

_SPAN, _EVENT, _POINT, _RESOURCE = "spans", "events", "points", "resource"
_ROOT, _STEP_SPAN, _BELOW = "root", "rank's step", "all but root"

ATTRIBUTES = (
    Attribute(RUN_ID, "string", f"{_SPAN}, {_EVENT}, {_RESOURCE}", "name of the run directory"),
    Attribute(STEP, "int", f"{_SPAN}, links", "step number, from 0"),
    Attribute(RANK, "int", f"{_SPAN}, {_POINT}, {_EVENT}, {_RESOURCE}",
        "rank; on a root 0; in events the first suspect"),
    Attribute(RUN_STEPS, "int", SPAN_RUN, "steps of rank 0"),
    Attribute(EXCEPTION_TYPE, "string", "event `exception`", "type of the exception that ended the run", OPENTELEMETRY,
        "a failed run"),
    Attribute(EXCEPTION_MESSAGE, "string", "event `exception`", "its message, at most 300 characters", OPENTELEMETRY,
        "a failed run"),
    Attribute(OWN_SECONDS, "double", _STEP_SPAN, "step duration in seconds, without comm wait and this tool"),
    Attribute(MICRO_STEPS, "int", _STEP_SPAN, "accumulated backward passes; at least 1"),
    Attribute(MODULES_TIMED, "boolean", _STEP_SPAN, "false: modules inside the model were not timed in this step",
        when="such a step"),
    Attribute(SPAN_KIND, "string", _BELOW, "step, data, forward, recompute, backward, optimizer, wait, closure,"
        " module, module_backward, section, collective"),
    Attribute(ON_DEVICE, "boolean", _BELOW, "true: the times are the device's", when=_DEVICE),
    Attribute(BYTES, "int", "collectives", "bytes of its tensors"),
    Attribute(SEQUENCE, "int", "collectives", "earlier collectives of this group on this rank"),
    Attribute(BATCH, "string", "iteration", "id of the batch", when="roles"),
    Attribute(PROCESS, "string", "iteration's parts", "the process", when="roles"),
    Attribute(OUTPUT_TOKENS, "int", f"{SPAN_ITERATION}, generation", "generated tokens", OPENTELEMETRY, "roles"),
    Attribute(SAMPLED_BECAUSE, "string", _ROOT, "first, number, slow or verdict"),
    Attribute(STEPS_LEFT_OUT, "int", _ROOT, "steps left out since the previous trace"),
    Attribute(OVER_RANKS, "string", _POINT, "min, median, p99 or max", when=_LARGE),
    Attribute(OVER_COMPONENTS, "string", _POINT, "max or sum, if one point covers several components",
        when="an exceeded limit"),
    Attribute(PHASE, "string", f"{_POINT}, {_EVENT}", "data, forward, recompute, backward, optimizer, communication,"
        " host or tool; of stragglers also compute (forward and backward), cpu (CPU contention) or gap (device"
        " waits for host)"),
    Attribute(MEMORY_STATE, "string", _POINT, "allocated, reserved, inactive, peak or limit", when=_DEVICE),
    Attribute(ALERT_UID, "string", _EVENT, "id of the event, the same in a replay", OPENTELEMETRY),
    Attribute(ALERT_ABOUT, "string", _EVENT, "id of the problem, the same from start to end"),
    Attribute(RESTART_COUNT, "int", f"{_EVENT}, {_RESOURCE}", "attempt of the run, from 0"),
    Attribute(RANKS, "string", _EVENT, "all suspects, such as 0-7"),
    Attribute(SUSPECT_HOST, "string", _EVENT, "host of the first suspect"),
    Attribute(SINCE_STEP, "int", _EVENT, "first slow step; of a hang, the step in progress"),
    Attribute(UNTIL_STEP, "int", _EVENT, "first step after the slow ones"),
    Attribute(STRAGGLER_COST, "double", _EVENT, "seconds by which each step would be shorter without the suspects"),
    Attribute(COST_SHARE, "double", _EVENT, "cost as a share of the step"),
    Attribute(STRAGGLER_CLASS, "string", f"{_POINT}, {_EVENT}", "slow_compute, slow_data, slow_host, more_work; in"
        " events also imbalance, slow_communication"),
    Attribute(STRAGGLER_CAUSES, "string", _EVENT, "likely causes, the likeliest first", when="known causes"),
    Attribute(STRAGGLER_SCOPE, "string", _EVENT, "rank, node, position (in the mesh) or stage"),
    Attribute(HANG_KIND, "string", f"{_POINT}, {_EVENT}", "dead, stopped, silent, missing, uneven, device, mismatch,"
        " together, blocked, unheard, apart or alone"),
    Attribute(GOODPUT_CLASS, "string", _POINT, "productive, startup, data_stall, straggler, communication,"
        " checkpoint, evaluation, restart, lost_work, hang, idle or other"),
    Attribute(CRITICAL_PATH_CLASS, "string", _POINT, "a phase, cpu (CPU contention), imbalance, slow rank, pipeline"
        " bubble, a kind of long steps such as evaluation, section and its name for at most 4 sections, or other"
        " sections", when=_ROWS),
    Attribute(HANG_DURATION, "double", _EVENT, "seconds since the last step"),
    Attribute(HARDWARE_ID, "string", _POINT, "UUID of a GPU, or a port such as mlx5_0/1", OPENTELEMETRY,
        f"{_GPU}, or {_PORT}"),
    Attribute(HARDWARE_NAME, "string", _POINT, "product name", OPENTELEMETRY, _GPU),
    Attribute(HARDWARE_TYPE, "string", _POINT, "gpu or network", OPENTELEMETRY, f"{_GPU}, or {_PORT}"),
    Attribute(SENSOR, "string", _POINT, "gpu or memory", OPENTELEMETRY, _GPU),
    Attribute(GPU_TASK, "string", _POINT, "general", OPENTELEMETRY, _GPU),
    Attribute(ERROR_TYPE, "string", f"{_POINT}, {SPAN_RUN}", "failed run: exception or verdict; GPU:"
        " xid, ecc_corrected, ecc_uncorrected, remapped_row, pcie_replay,"
        " nvlink_replay, nvlink_recovery, nvlink_error; port: symbol_error, link_recovery, link_down, receive_error,"
        " transmit_discard, link_integrity, out_of_sequence, packet_sequence, ack_timeout, receiver_not_ready,"
        " retries_exceeded", OPENTELEMETRY, f"{_GPU}, or {_PORT}"),
    Attribute(DIRECTION, "string", _POINT, "transmit or receive", OPENTELEMETRY, f"{_GPU}, or {_PORT}"),
    Attribute(GPU_LINK, "string", _POINT, "pcie or nvlink", when=_GPU),
    Attribute(GPU_CLOCK_OF, "string", _POINT, "sm or memory", when=_GPU),
    Attribute(THROTTLE_REASON, "string", _POINT, "power, thermal, sync_boost, board_limit, reliability, sw_thermal,"
        " hw_thermal, hw_power_brake", when=_GPU),
    Attribute("service.name", "string", _RESOURCE, "`OTEL_SERVICE_NAME`, else the Slurm job, else the script",
        OPENTELEMETRY),
    Attribute("service.instance.id", "string", _RESOURCE, "process of a rank, or node", OPENTELEMETRY),
    Attribute("host.name", "string", _RESOURCE, "host name", OPENTELEMETRY),
    Attribute("process.pid", "int", _RESOURCE, "process id; of ranks only", OPENTELEMETRY),
    Attribute("telemetry.sdk.language", "string", _RESOURCE, "python", OPENTELEMETRY),
    Attribute("telemetry.sdk.name", "string", _RESOURCE, "opentelemetry", OPENTELEMETRY),
    Attribute("telemetry.sdk.version", "string", _RESOURCE, "version of OpenTelemetry's SDK", OPENTELEMETRY),
    Attribute(LOCAL_RANK, "int", _RESOURCE, "rank on its node; of ranks only"),
    Attribute(WORLD_SIZE, "int", _RESOURCE, "number of ranks"),
    Attribute(LENS_RANK, "int", _RESOURCE, f"as {RANK}", NEMO_LENS),
    Attribute(LENS_LOCAL_RANK, "int", _RESOURCE, f"as {LOCAL_RANK}", NEMO_LENS),
    Attribute(LENS_WORLD_SIZE, "int", _RESOURCE, f"as {WORLD_SIZE}", NEMO_LENS),
    *(
        Attribute(name, "string", _RESOURCE, "", source, when)
        for name, source, when in (
            ("torch.elastic.run_id", OURS, "torchrun"),
            ("torch.elastic.max_restarts", OURS, "torchrun"),
            ("slurm.job.id", NEMO_LENS, "Slurm"),
            ("slurm.job.name", NEMO_LENS, "Slurm"),
            ("slurm.step.id", OURS, "Slurm"),
            ("slurm.node.name", OURS, "Slurm"),
            ("slurm.cluster.name", OURS, "Slurm"),
            ("slurm.job.partition", OURS, "Slurm"),
            ("network.switch", OURS, "Slurm with a topology"),
            ("host.rack", OURS, "OTEL_RESOURCE_ATTRIBUTES"),
            ("host.id", OPENTELEMETRY, "a cloud"),
            ("host.type", OPENTELEMETRY, "a cloud"),
            ("cloud.provider", OPENTELEMETRY, "a cloud"),
            ("cloud.availability_zone", OPENTELEMETRY, "OTEL_RESOURCE_ATTRIBUTES"),
            ("container.id", OPENTELEMETRY, "a container"),
            ("k8s.pod.name", OPENTELEMETRY, "Kubernetes"),
            ("k8s.pod.uid", OPENTELEMETRY, "Kubernetes"),
            ("k8s.namespace.name", OPENTELEMETRY, "Kubernetes"),
            ("k8s.node.name", OPENTELEMETRY, "Kubernetes"),
            ("k8s.job.name", OPENTELEMETRY, "Kubernetes"),
        )
    ),
)  # fmt: skip

EVENTS = {each.name: each.changes for each in KINDS.values() if each.changes}


def page() -> str:
    """Return the text of the page."""
    names = [
        f"`{semantics.name_of_alert_event(kind, each)}`"
        for kind, changes in EVENTS.items()
        for each in changes
    ]
    ends = [name for name in names if name.endswith(".ended`")]
    hardware = [each for each in semantics.METRICS if each.name.startswith("hw.")]
    explained = [each for each in ATTRIBUTES if each.meaning]
    bounds = ", ".join(f"{bound:g}" for bound in semantics.DURATION_BOUNDS_S)
    parts = [
        HEAD.format(most_ranks=max_ranks_with_own_series(NodeRole().max_series)),
        "## Spans\n",
        _table(
            ("span", "parent", "meaning", "condition"),
            ((f"`{each.name}`", each.parent, each.meaning, each.when) for each in SPANS),
        ),
        (
            "Below the root, each rank has a span `rank N`: its step. Spans below that are named"
            " after their phase, module, section or collective.\n"
        ),
        "## Metrics\n",
        _metrics(each for each in semantics.METRICS if each not in hardware),
        (
            "In a large job, points have a rank only where it stands out. Bucket bounds of"
            f" explicit histograms, in seconds: {bounds}.\n"
        ),
        "### Hardware\n",
        (
            "Each point has `hw.id` and `hw.type`, and each point of a GPU also `hw.name`. A port"
            " is an InfiniBand or RoCE port.\n"
        ),
        _metrics(
            hardware,
            leave_out=(semantics.HARDWARE_ID, semantics.HARDWARE_TYPE, semantics.HARDWARE_NAME),
        ),
        "## Attributes\n",
        "Attributes without a type are strings.\n",
        _table(
            ("attribute", "on", "meaning (condition)"),
            (
                (_typed(a), a.on, _meaning(a.meaning, a.when))
                for a in explained
                if a.on != "resource"
            ),
        ),
        "### Resource\n",
        _table(
            ("attribute", "meaning"),
            ((_typed(a), a.meaning) for a in explained if a.on == "resource"),
        ),
        "The resource also has these strings, where they are known:\n",
        "\n".join(_unexplained()),
        "",
        "## Events\n",
        f"- WARN: {', '.join(name for name in names if name not in ends)}",
        f"- INFO: {', '.join(ends)}",
        "",
    ]
    return "\n".join(parts)


def _metrics(metrics: Iterable[semantics.Metric], leave_out: Sequence[str] = ()) -> str:
    return _table(
        ("metric", "type, unit", "attributes", "meaning (condition)"),
        (
            (
                _name(m),
                f"{m.instrument}, `{m.unit}`",
                ", ".join(f"`{name}`" for name in m.attributes if name not in leave_out),
                _meaning(m.meaning, m.when),
            )
            for m in metrics
        ),
    )


def _unexplained() -> Iterator[str]:
    """Lists the attributes whose names say it all, by what must be there."""
    rest = [each for each in ATTRIBUTES if not each.meaning]
    for when in dict.fromkeys(each.when for each in rest):
        yield f"- {when}: {', '.join(_name(each) for each in rest if each.when == when)}"


def _meaning(meaning: str, condition: str) -> str:
    return f"{meaning} ({condition})" if condition else meaning


def _typed(each: Attribute) -> str:
    return _name(each) + ("" if each.kind == "string" else f", {each.kind}")


def _name(each: semantics.Metric | Attribute) -> str:
    is_marked = each.source == semantics.OURS and not each.name.startswith("torch")
    return f"`{each.name}`" + (r"\*" if is_marked else "")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        f"| {' | '.join(line)} |\n".replace("|  |", "| |").replace("|  |", "| |") for line in lines
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
